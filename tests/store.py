"""Values and folders that are made once in a run of the tests, by whichever process asks first."""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def stored(key: str, make: Callable[[], Any]) -> Any:
    """What `make()` gave, as `torch.save` keeps it. Args: key: says all that the value depends on."""
    import torch

    with _locked(key) as path:
        if not path.exists():
            torch.save(make(), path.with_suffix(".part"))
            os.replace(path.with_suffix(".part"), path)
    return torch.load(path)


def stored_folder(key: str, make: Callable[[Path], None]) -> Path:
    """The folder that `make(folder)` filled, to be read. Args: key: says all that its content depends on."""
    with _locked(key) as path:
        if not (path / "made").exists():
            shutil.rmtree(path, ignore_errors=True)  # what a test that failed left behind
            path.mkdir()
            make(path)
            (path / "made").touch()
    return path


@contextmanager
def _locked(key: str) -> Iterator[Path]:
    path = Path(os.environ["MMTRAIN_TEST_STORE"]) / hashlib.sha256(key.encode()).hexdigest()[:24]
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield path
