"""Stores in which the ranks of a generation meet: that of a node's launcher, or a folder of this machine."""

import time
import urllib.parse
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from mmtrain.errors import RankLostError
from mmtrain.launch.board import FolderBoard
from mmtrain.parallel import leave

_PAUSE_S = 0.002


class FolderStore(dist.Store):  # type: ignore[misc] # torch is not followed by the type checker
    """A store of files without a lock, which a stopped process would keep: that of torch's FileStore hangs all others.

    torch calls it as long as Python refers to it.
    """

    def __init__(self, folder: Path) -> None:
        """Args: folder: made if it is absent."""
        super().__init__()
        self._board = FolderBoard(folder)

    def set(self, key: str, value: str | bytes) -> None:
        """Writes or replaces a value."""
        self._board.set(key, value)

    def get(self, key: str) -> bytes:
        """The value of a key, once it is there. Raises: DistStoreError: it does not come."""
        self.wait([key])
        return self._board.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return self._board.check(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Returns once all keys are there. Raises: DistStoreError: they do not come in time."""
        deadline = time.monotonic() + (timeout or self.timeout).total_seconds()
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise dist.DistStoreError(f"wait timeout for {', '.join(keys)}")
            time.sleep(_PAUSE_S)

    def set_timeout(self, timeout: timedelta) -> None:
        """How long `get` and `wait` wait."""
        with suppress(RuntimeError):
            super().set_timeout(timeout)


def open_store(address: str, timeout_s: float, silent_s: float) -> dist.Store:
    """The store of an address, as nodes tell it: `tcp://host:port`, or `file:///folder`.

    Args: timeout_s: of waits for keys. silent_s: after which another machine counts as lost.
    Raises: RankLostError: it does not answer.
    """
    parts = urllib.parse.urlsplit(address)
    if parts.scheme == "file":
        return FolderStore(Path(parts.path))
    assert parts.hostname is not None and parts.port is not None, address
    before, patience = leave.connections(), timedelta(seconds=leave.meeting_s(silent_s))
    try:
        store = dist.TCPStore(parts.hostname, parts.port, is_master=False, timeout=patience)
    except RuntimeError as error:
        raise RankLostError(f"the store {address} does not answer: {str(error).splitlines()[0]}") from error
    leave.bound_answers(before, silent_s)
    store.set_timeout(timedelta(seconds=timeout_s))
    return store
