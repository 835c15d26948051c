"""Shared by the built-in data sets: colours, splits, and a folder that is either absent or complete."""

import io
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from PIL import Image

from mmtrain.errors import ConfigError, DataError

T = TypeVar("T")

Progress = Callable[[int, int], None]
"""Called with (samples made, samples in all)."""

_ROWS_OF_A_GROUP = 100

COLOURS = {
    "red": (220, 20, 30),
    "blue": (20, 70, 230),
    "green": (10, 150, 40),
    "yellow": (250, 205, 0),
    "purple": (150, 30, 190),
    "orange": (255, 125, 0),
}
"""Name -> red, green, blue."""


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
    """A temporary folder next to `out`, with an empty folder `data`, that is renamed to `out` at the end.

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
    """The samples; reports progress after each one. Args: before: samples made earlier."""
    for index, sample in enumerate(samples, before + 1):
        yield sample
        if progress:
            progress(index, total)


def image_value(image: Image.Image) -> dict[str, Any]:
    """An image as a value of an `Image` feature: the bytes of a PNG file."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=4)
    return {"bytes": buffer.getvalue(), "path": None}


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]], features: Mapping[str, Any], images: str) -> int:
    """Writes a parquet file that `datasets` reads; returns the number of its images.

    Args: features: column -> its type in the form of `datasets`, which is kept in the file's metadata. images: the
        column of images, which are compressed already.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = [(name, _arrow_type(feature)) for name, feature in features.items()]
    schema = pa.schema(columns, metadata={"huggingface": json.dumps({"info": {"features": features}})})
    remaining, num_images = iter(rows), 0
    with pq.ParquetWriter(path, schema, compression={name: "snappy" for name in features if name != images}) as writer:
        while group := list(islice(remaining, _ROWS_OF_A_GROUP)):  # small groups keep a random read cheap
            writer.write_table(pa.Table.from_pylist(group, schema))
            num_images += sum(len(row[images]) for row in group)
    return num_images


def _arrow_type(feature: Mapping[str, Any]) -> Any:
    import pyarrow as pa

    if feature.get("_type") == "Image":
        return pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    if "dtype" in feature:
        return pa.type_for_alias(feature["dtype"])
    if "feature" in feature:
        return pa.list_(_arrow_type(feature["feature"]))
    return pa.struct([(name, _arrow_type(part)) for name, part in feature.items()])


def card_head(task: str, name: str) -> str:
    """The first lines of a data set card: its metadata and its title."""
    return f"""---
license: apache-2.0
task_categories: [{task}]
pretty_name: {name}
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*.parquet
  - split: validation
    path: data/validation-*.parquet
---
# {name}
"""
