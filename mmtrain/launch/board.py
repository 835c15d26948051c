"""The board on which the ranks of one node leave notes for each other: the node's own store, or files of a folder.
Pure."""

import os
import threading
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol


class Board(Protocol):
    """The methods of `torch.distributed.Store` that notes need; nothing of an earlier start of the ranks is in it."""

    def set(self, key: str, value: str) -> None:
        """Writes or replaces a value."""

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""


class FolderBoard:
    """A board of files. It has no locks, which a stopped process would keep: torch's FileStore has one."""

    def __init__(self, folder: Path) -> None:
        """Args: folder: made if it is absent."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def set(self, key: str, value: str | bytes) -> None:
        """Writes or replaces a value as a whole."""
        path = self._path(key)
        part = path.with_name(f"part-{os.getpid()}-{threading.get_ident()}")
        part.write_bytes(value.encode() if isinstance(value, str) else value)
        os.replace(part, path)

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""
        return self._path(key).read_bytes()

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return all(self._path(key).exists() for key in keys)

    def _path(self, key: str) -> Path:
        return self._folder / f"key-{urllib.parse.quote(key, safe='')}"
