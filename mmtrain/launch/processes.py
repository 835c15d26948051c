"""Start and end of the processes of a job on one machine, and cleaning up after them."""

import ctypes
import multiprocessing.util
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import NoReturn

from mmtrain.errors import ConfigError

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Variables that hide the sockets of process groups from other machines."""

STOPS = (signal.SIGINT, signal.SIGTERM)
"""Signals that end a job."""

_QUIET_TRACKER = "ignore:resource_tracker:UserWarning"
"""The value of PYTHONWARNINGS without a warning about the semaphores of a killed process, which are removed anyway."""

_PR_SET_PDEATHSIG = 1

_LONGEST_SOCKET = 107 if sys.platform == "linux" else 103
"""Bytes of the path of a UNIX socket, at most: `sun_path` in sys/un.h, less the zero at its end."""
_OWN_FOLDER, _SOCKET = "/pymp-12345678", "/listener-12345678"
"""How long the names are that `multiprocessing` gives to its temporary folder, and to sockets in there."""


def check_temporary_folder(num_workers: int) -> None:
    """Refuses a temporary folder whose name leaves no room for the sockets of data workers.

    Raises: ConfigError: with what is too long, and by how much.
    """
    if not num_workers:
        return
    length = len(os.fsencode(multiprocessing.util.get_temp_dir()))
    if length + len(_SOCKET) > _LONGEST_SOCKET:
        given, most = length - len(_OWN_FOLDER), _LONGEST_SOCKET - len(_OWN_FOLDER + _SOCKET)
        raise ConfigError(
            f"TMPDIR: {tempfile.gettempdir()!r} has {given} bytes, but at most {most} leave room for the sockets of "
            f"data workers below it (paths of UNIX sockets have at most {_LONGEST_SOCKET}); set TMPDIR to a shorter "
            "folder, as /tmp, or data.num_workers = 0"
        )


def end_with_parent(parent: int | None = None) -> None:
    """Makes the kernel kill this process when its parent ends, for whatever reason (Linux).

    Args: parent: its id, if known: it may have ended already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


@contextmanager
def stops_held() -> Iterator[None]:
    """A context that blocks `STOPS`; processes that are started within it block them until they call `take_stops`."""
    resource_tracker.ensure_running()  # its start would unblock them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def take_stops() -> None:
    """Lets `STOPS` end this process silently, also those received since its start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """A context in which new processes have these variables and do not warn about semaphores of killed processes."""
    given = os.environ.get("PYTHONWARNINGS")
    wanted = {**variables, "PYTHONWARNINGS": f"{given},{_QUIET_TRACKER}" if given else _QUIET_TRACKER}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def leave(status: int) -> NoReturn:
    """Ends a process that trained, without Python's own finalisation.

    A thread of the process groups may still free its last tensor, which needs the interpreter. If the interpreter is
    being finalised then, the process aborts after all its work is done (seen once in some thirty jobs). Only the
    temporary folder and the semaphores of `multiprocessing` are removed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if "torch" in sys.modules:
        multiprocessing.util._run_finalizers()  # type: ignore[attr-defined]
        os._exit(status)
    sys.exit(status)
