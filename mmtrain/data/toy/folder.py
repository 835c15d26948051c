"""What the built-in data sets have in common: colours, splits, and a folder that is either absent or whole."""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from mmtrain.errors import ConfigError, DataError

T = TypeVar("T")

Progress = Callable[[int, int], None]
"""Called with (samples made, samples in all)."""


COLOURS = {
    "red": (220, 20, 30),
    "blue": (20, 70, 230),
    "green": (10, 150, 40),
    "yellow": (250, 205, 0),
    "purple": (150, 30, 190),
    "orange": (255, 125, 0),
}
"""Name -> red, green, blue of what is drawn."""


def split_sizes(kind: str, num_samples: int, seed: int, validation_fraction: float) -> dict[str, int]:
    """Samples of the splits `train` and `validation`.

    Raises: ConfigError: num_samples too small, a negative seed, or the fraction outside of (0, 1).
    """
    if not 0 < validation_fraction < 1:
        raise ConfigError(f"validation_fraction = {validation_fraction}; it lies between 0 and 1")
    num_validation = max(1, round(num_samples * validation_fraction))
    if num_samples - num_validation < 1 or seed < 0:
        raise ConfigError(
            f"{kind}: num_samples = {num_samples}, seed = {seed}; at least 2 samples and a seed of at least 0"
        )
    return {"train": num_samples - num_validation, "validation": num_validation}


@contextmanager
def new_folder(kind: str, out: Path) -> Iterator[Path]:
    """A folder beside `out`, with an empty folder `data`, that is renamed to `out` at the end.

    Raises: DataError: `out` exists, or cannot be made.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{kind}: {out} exists already; remove it or name another folder")
    aside = out.parent / f".{out.name}.part-{os.getpid()}"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        (aside / "data").mkdir(parents=True)
    except OSError as error:
        raise DataError(f"{kind}: {out} cannot be made: {error.strerror}; name another folder") from None
    try:
        yield aside
        os.replace(aside, out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def told(samples: Iterable[T], progress: Progress | None, before: int, total: int) -> Iterator[T]:
    """The samples, of which progress is told after each one; `before` were made before them."""
    for index, sample in enumerate(samples, before + 1):
        yield sample
        if progress:
            progress(index, total)
