"""Functions for processes of tests that must start at once: nothing here loads torch."""

import os
import signal
import time
from pathlib import Path

from mmtrain.launch.processes import STOPS, take_stops


def ends(status: int, seconds: float = 0.0) -> None:
    """Ends with an exit status; a negative one is a signal."""
    take_stops()
    time.sleep(seconds)
    if status < 0:
        os.kill(os.getpid(), -status)
    os._exit(status)


def stops(folder: Path, name: str) -> None:
    """Notes SIGINT and SIGTERM, the first of which it takes for the wish to end, as a trainer does."""
    came: list[int] = []
    for number in STOPS:
        signal.signal(number, lambda number, frame: came.append(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    (folder / f"{name}-up").touch()
    while not came:
        time.sleep(0.01)
    (folder / f"{name}-{signal.Signals(came[0]).name}").touch()
    os._exit(0)


def hangs(folder: Path, name: str) -> None:
    """Hears nothing."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (folder / f"{name}-up").touch()
    time.sleep(600)


def lasts(folder: Path) -> None:
    """Says its process, and stays."""
    (folder / "pid.part").write_text(str(os.getpid()))
    (folder / "pid.part").rename(folder / "pid")
    time.sleep(600)
