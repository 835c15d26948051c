"""The log of a rank: on standard output, and in the run folder."""

import logging
import sys
from contextlib import suppress
from logging.handlers import MemoryHandler
from pathlib import Path

from mmtrain.errors import for_terminal

logger = logging.getLogger("mmtrain")

_MOST_WAITING = 10_000
"""Log records that wait for their file."""


class _Formatter(logging.Formatter):
    """Lines that a terminal may show, whatever names of files and texts of records are in them."""

    def format(self, record: logging.LogRecord) -> str:
        return for_terminal(super().format(record))


class _WithoutTracebacks(logging.StreamHandler):  # type: ignore[type-arg]
    """Prints no traceback for each line that a full disk, or a pipe such as that of `head`, does not take.

    On a full disk the metrics end the job, in one line; without a screen it goes on.
    """

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # logging's name
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class _File(_WithoutTracebacks, logging.FileHandler):
    """A log file, without tracebacks of a full disk."""


def setup_logging(rank: int) -> None:
    """Rank 0 logs information, the others warnings, to standard output; a file takes the same once there is one."""
    handler = _WithoutTracebacks(sys.stdout)
    prefix = "" if rank == 0 else f"[rank {rank}] "
    handler.setFormatter(_Formatter(f"%(asctime)s {prefix}%(message)s", "%H:%M:%S"))
    logger.handlers = [handler, MemoryHandler(_MOST_WAITING, flushLevel=logging.CRITICAL + 1)]
    logger.propagate = False
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)


class LogFile:
    """The file of a rank in the run folder that takes what it has logged and logs: `log.txt`, or `log-rank-R.txt`.

    A resumed run adds to it. Nothing is written for a rank that logs nothing.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        name = "log.txt" if rank == 0 else f"log-rank-{rank}.txt"
        self._file = _File(folder / name, encoding="utf-8", delay=True)
        self._file.setFormatter(_Formatter("%(asctime)s %(message)s"))
        for handler in list(logger.handlers):
            if isinstance(handler, MemoryHandler):
                handler.setTarget(self._file)
                handler.close()  # hands over what it has
                logger.removeHandler(handler)
        logger.addHandler(self._file)

    def write(self, message: str) -> None:
        """Adds a line that is not shown on the screen, which has it from elsewhere."""
        self._file.handle(logger.makeRecord(logger.name, logging.ERROR, "", 0, message, (), None))

    def close(self) -> None:
        """Closes the file."""
        logger.removeHandler(self._file)
        with suppress(OSError):  # as in `_WithoutTracebacks`
            self._file.close()
