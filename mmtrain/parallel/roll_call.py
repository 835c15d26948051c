"""The reason for a failed collective, shared over the store of the rendezvous, which answers when collectives do not.

A rank that fails leaves its reason in the store, so that all ranks end with the same one. A rank whose collective fails
asks for such a reason; where there is none, the ranks that do not answer are to blame: stopped, killed, or cut off.
"""

import json
import os
import re
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from mmtrain import errors
from mmtrain.errors import MMTrainError, RankLostError
from mmtrain.parallel.meeting import Patience

_LEAST_PATIENCE_S = 5.0
"""Ranks that wait for each other find out within about a step."""

_LOST = re.compile(
    r"gloo|pair closure|by peer|socket closed|socket timeout|wait timeout|timed out waiting", re.IGNORECASE
)
"""What gloo and the stores say, not all of them in exceptions of their own."""


class RollCall:
    """This rank's part in finding out which ranks are there. Every rank of the job makes one at the same time."""

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self.rank, self._world_size = rank, world_size
        shared = dist.PrefixStore("roll call", store)
        turn = shared.add(f"turn {rank}", 1)  # a process may run several trainers one after another
        self._store = dist.PrefixStore(f"roll call {turn}", store)
        self._store.set(f"name {rank}", f"rank {rank} (process {os.getpid()} on {socket.gethostname()})")

    def tell(self, error: BaseException) -> None:
        """Leaves for the other ranks why this one ends, unless one has done so before."""
        if isinstance(error, MMTrainError):
            reason = error
        else:
            description = traceback.format_exception_only(error)[0].strip()
            reason = RankLostError(f"rank {self.rank} failed: {description}; see its traceback")
        _within(_LEAST_PATIENCE_S, lambda: self._first_reason(reason))

    def reason(self, activity: str, patience_s: float = 0.0) -> MMTrainError:
        """Why a collective of this rank failed, the same on all ranks.

        Args:
            activity: what this rank did, as the beginning of a sentence.
            patience_s: how much later other ranks may find out, if more than a few seconds.
        """
        reasons: list[MMTrainError] = []
        patience_s = max(_LEAST_PATIENCE_S, patience_s)
        _within(patience_s + _LEAST_PATIENCE_S, lambda: reasons.append(self._ask(activity, patience_s)))
        return reasons[0] if reasons else RankLostError(f"{activity}; the job's store does not answer either")

    def _ask(self, activity: str, patience_s: float) -> MMTrainError:
        self._store.set(f"here {self.rank}", "")
        asking = self._store.add("asking", 1)
        deadline = time.monotonic() + patience_s
        while not self._store.check(["reason"]) and asking < self._world_size and time.monotonic() < deadline:
            time.sleep(0.2)
            asking = self._store.add("asking", 0)
        silent = [rank for rank in range(self._world_size) if not self._store.check([f"here {rank}"])]
        if not silent:
            return self._first_reason(
                RankLostError(
                    f"{activity}; all ranks answer: one was slower than that, or they wait for each other. Raise "
                    "comm.timeout_seconds, or look at the processes while they hang (py-spy dump)"
                )
            )
        names = [self._store.get(f"name {rank}").decode() for rank in silent]
        does_not, it_is = ("does not", "it is") if len(silent) == 1 else ("do not", "they are")
        return self._first_reason(
            RankLostError(
                f"{activity}; {', '.join(names)} {does_not} answer: {it_is} stopped, dead or busy for longer than "
                "comm.timeout_seconds, or the network is down"
            )
        )

    def _first_reason(self, own_error: MMTrainError) -> MMTrainError:
        """The reason of the rank that came first, perhaps this one's."""
        if self._store.add("reasons", 1) == 1:
            self._store.set("reason", json.dumps([type(own_error).__name__, str(own_error)]))
        kind, text = json.loads(self._store.get("reason"))
        return getattr(errors, kind, MMTrainError)(text)  # type: ignore[no-any-return]


@contextmanager
def common_reason(
    roll_call: RollCall, patience: Callable[[], Patience], locate: Callable[[str], str]
) -> Iterator[None]:
    """What ends one rank is raised on all of them, and ranks that do not answer are named.

    Args:
        patience: of collectives, now.
        locate: where this rank is, from the function of mmtrain that it is in.
    Raises: MMTrainError: instead of an exception of communication, or of the operating system.
    """
    try:
        yield
    except (Exception, CheckpointException) as error:
        where = locate(_innermost(error))
        if is_communication(error):
            if _is_timeout(error):  # a rank that waits for one that waits finds out up to a step later
                wait = patience()
                activity = f"rank {roll_call.rank} waited {wait.seconds:g} s ({wait.rule}) {where}"
                raise roll_call.reason(activity, wait.seconds / 10) from error
            raise roll_call.reason(f"rank {roll_call.rank} lost a connection {where}") from error
        if isinstance(error, OSError):
            reason = MMTrainError(f"rank {roll_call.rank} {where}: {error}")
            roll_call.tell(reason)
            raise reason from error
        roll_call.tell(error)
        raise


def is_communication(error: BaseException | None) -> bool:
    """Whether an exception is that of a process group or store whose other side is gone or late."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and bool(_LOST.search(str(error))))


def _is_timeout(error: BaseException) -> bool:
    text = str(error).lower()
    return "timed out" in text or "timeout" in text


def _innermost(error: BaseException) -> str:
    package = Path(errors.__file__).parent
    frames = [f for f in traceback.extract_tb(error.__traceback__) if package in Path(f.filename).parents]
    return f"in {Path(frames[-1].filename).relative_to(package)}, {frames[-1].name}" if frames else ""


def _within(seconds: float, ask: Callable[[], object]) -> None:
    """Calls a function that may hang, like a store whose server is stopped; returns after `seconds` at the latest."""

    def run() -> None:
        with suppress(RuntimeError, OSError):  # the store is gone as well
            ask()

    thread = threading.Thread(target=run, name="roll-call", daemon=True)
    thread.start()
    thread.join(seconds)
