"""Files and folders that are either absent or complete, even if the process is killed while it writes them."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mmtrain.errors import ConfigError


def write_whole(path: Path, text: str) -> None:
    """Writes or replaces a file; makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + ".tmp")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A temporary folder next to `out`, renamed to `out` at the end, and removed after an error.

    Raises: ConfigError: `out` exists and is not an empty folder, or cannot be made.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists already; remove it or name another folder")
    aside = out.with_name(out.name + ".tmp")
    shutil.rmtree(aside, ignore_errors=True)  # of a command that was killed
    try:
        aside.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"{out} cannot be made: {error.strerror}; name another folder") from None
    try:
        yield aside
        os.replace(aside, out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
