"""One job at a time writes into a run folder: the owner of the lock on its `owner.json`, which identifies the owner.

The kernel releases the lock of a process that ends, for whatever reason, also over NFS with its lock service. A mount
without that service locks each machine separately. Therefore the owner also touches the file every few seconds. A new
owner that gets the lock while another machine is recorded watches the file first: if it changes, its owner is alive.
"""

import errno
import fcntl
import json
import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from mmtrain.errors import ConfigError

logger = logging.getLogger("mmtrain")

FILE = "owner.json"

PATIENCE_S = 10.0
"""How long a job that was just killed may take to end."""

LEAST_ROOM = 2**18
"""Bytes that a job writes at its start, at most."""

BEAT_S = 3.0
"""Seconds between two touches; an owner on another machine is considered dead after three without one."""


@dataclass(slots=True)
class Ownership:
    """What becomes of the folder at the end."""

    stays: bool = False
    """Whether it stays the job's, of which another process takes it over: a job whose ranks change has no one owner."""


@contextmanager
def owned(
    folder: Path,
    patience_s: float = PATIENCE_S,
    beat_s: float = BEAT_S,
    *,
    job: str = "",
    ownership: Ownership | None = None,
) -> Iterator[None]:
    """A context in which only this process writes into the folder, which is created if it is absent.

    Args:
        patience_s: how long to wait for the end of another owner.
        job: a name; an owner with the same one is replaced, also if it still runs: it may be stopped. Empty: none.
        ownership: what becomes of the folder at the end.
    Raises: ConfigError: the folder cannot be made or written, or another process owns it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _check_room(folder)
        file = _locked(folder / FILE, patience_s, beat_s, job)
        _write(file, job)
    except OSError as error:
        raise ConfigError(
            f"job.dump_folder = {str(folder)!r} cannot be written: {error.strerror or error} "
            f"({error.filename or folder}); name another folder, make room, or correct its permissions"
        ) from None
    ended = threading.Event()
    beat = threading.Thread(target=_touch, args=(file, ended, beat_s), name="owner", daemon=True)
    with file:
        beat.start()
        try:
            yield
        finally:
            ended.set()
            beat.join()
            if not (ownership and ownership.stays) and _is_at(file, folder / FILE):
                with suppress(OSError):
                    os.unlink(folder / FILE)  # before the lock is released: a process that waits for it sees a new file


def _check_room(folder: Path) -> None:
    """Raises: OSError: a job could not even begin its log and metrics."""
    room = os.statvfs(folder)
    if room.f_blocks and room.f_bavail * room.f_frsize < LEAST_ROOM:  # some network file systems do not say it
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


def _write(file: TextIO, job: str) -> None:
    """Writes who owns the folder. Raises: OSError: there is no room; the file is removed."""
    file.truncate(0)
    try:
        os.write(file.fileno(), (json.dumps(_record() | {"job": job}) + "\n").encode())
    except OSError:
        os.unlink(file.name)
        file.close()
        raise


def _locked(path: Path, patience_s: float, beat_s: float, job: str = "") -> TextIO:
    """The file, locked. Raises: ConfigError: another process owns it. OSError: it cannot be opened."""
    deadline, waits = time.monotonic() + patience_s, False
    while True:
        file = open(path, "a+", encoding="utf-8")  # noqa: SIM115  # it stays open
        if job and _read(file).get("job") == job:
            file.close()
            return _replaced(path)
        if _lock(file):
            if _is_at(file, path) and not _is_alive(_read(file), path, 3 * beat_s):
                return file
        elif not waits:
            waits = True
            logger.warning("%s: waits for the end of %s", path.parent, _describe(_read(file)))
        owner = _read(file)
        file.close()
        if time.monotonic() > deadline:
            raise ConfigError(
                f"job.dump_folder = {str(path.parent)!r} belongs to {_describe(owner)}; wait for its end, end it, or "
                f"name another folder. If no such process runs on any machine, remove {path}"
            )
        time.sleep(0.2)


def _replaced(path: Path) -> TextIO:
    """A new file in place of the one that another process of the job has, locked."""
    with tempfile.NamedTemporaryFile("a+", dir=path.parent, prefix=f".{FILE}-", delete=False) as made:
        os.replace(made.name, path)
    file = open(path, "a+", encoding="utf-8")  # noqa: SIM115  # it stays open
    _lock(file)
    return file


def _lock(file: TextIO) -> bool:
    """Whether the lock is free. Also True without locks: then only the record counts."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _is_at(file: TextIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _is_alive(owner: dict[str, Any], path: Path, watch_s: float) -> bool:
    """Whether the process of an unlocked record still runs: one on a machine whose locks are not visible here."""
    if not owner:
        return False
    if owner.get("boot") == _boot():
        return owner.get("pid") != os.getpid() and owner.get("start") == _start_of(owner.get("pid"))
    before, deadline = _time_of(path), time.monotonic() + watch_s
    while time.monotonic() < deadline:
        time.sleep(watch_s / 20)
        if _time_of(path) != before:
            return True
    return False


def _record() -> dict[str, Any]:
    """An identifier of this process that no other one has."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
        "start": _start_of(os.getpid()),
        "boot": _boot(),
    }


def _read(file: TextIO) -> dict[str, Any]:
    """The record in the file; empty if it is absent or incomplete."""
    file.seek(0)
    try:
        record = json.loads(file.read())
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _describe(owner: dict[str, Any]) -> str:
    if not owner:
        return "another job"
    return f"process {owner.get('pid')} on {owner.get('host')}, which has written into it since {owner.get('since')}"


def _start_of(pid: Any) -> int:
    """Start time of a process of this machine in ticks since its boot; 0: it does not exist, or is a zombie."""
    try:
        state, *numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return 0 if state in "ZX" else int(numbers[18])
    except (OSError, ValueError, IndexError):
        return 0


def _boot() -> str:
    """Identifies this boot of this machine, and the processes that are visible here."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return socket.gethostname()


def _time_of(path: Path) -> int:
    """The time at which the file was touched, by the clock of the file server. Opening it makes NFS ask the server."""
    try:
        with open(path, "rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return 0


def _touch(file: TextIO, ended: threading.Event, beat_s: float) -> None:
    while not ended.wait(beat_s):
        with suppress(OSError):  # a file system that is temporarily unavailable
            os.utime(file.fileno())
