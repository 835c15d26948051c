"""Shared by the built-in data sets: colours, splits, and how a data set is written."""

import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

from PIL import Image

from mmtrain.errors import ConfigError
from mmtrain.launch.atomic_files import new_folder

T = TypeVar("T")

Progress = Callable[[int, int], None]
"""Called with (samples made, samples in all)."""

_ROWS_OF_A_GROUP = 100

MESSAGES = {
    "feature": {
        "role": {"dtype": "string", "_type": "Value"},
        "content": {"dtype": "string", "_type": "Value"},
    },
    "_type": "List",
}
"""Column type of conversations, as `datasets` writes it."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Size of a data set that was written."""

    num_train: int
    num_validation: int
    num_images: int
    """Images of both splits, or what else the data set shows."""
    num_bytes: int
    """Size of both parquet files."""


@dataclass(frozen=True, kw_only=True)
class DataSet(Generic[T]):
    """What a built-in data set is made of."""

    kind: str
    """The name of the kind in the command."""
    samples: Callable[[str, int, int], Iterator[T]]
    """A function (split, count, seed) -> samples, not yet drawn."""
    row: Callable[[T], Mapping[str, Any]]
    """Draws a sample: column -> value."""
    features: Mapping[str, Any]
    """Column -> its type in the form of `datasets`, which is kept in the file's metadata."""
    images: str
    """The column of images."""
    card: Callable[[Summary, int, int], str]
    """A function (size, num_samples, seed) -> the data set card."""

    def make(
        self,
        out: str | Path,
        num_samples: int,
        seed: int = 0,
        *,
        validation_fraction: float = 0.1,
        progress: Progress | None = None,
    ) -> Summary:
        """The size of the data set that was written to a new folder `out`.

        Equal arguments give equal bytes on one machine. The folder is either absent or complete.

        Args:
            num_samples: of both splits together.
            validation_fraction: share of them in the validation split, which has charts, or combinations of colour,
                shape and motion, of its own.
            progress: called after every sample.
        Raises: ConfigError: num_samples too small, the fraction outside of (0, 1), or `out` exists.
        """
        splits = split_sizes(self.kind, num_samples, seed, validation_fraction)
        with new_folder(Path(out)) as aside:
            (aside / "data").mkdir()
            made = num_images = num_bytes = 0
            for split, count in splits.items():
                path = aside / "data" / f"{split}-00000-of-00001.parquet"
                samples = with_progress(self.samples(split, count, seed), progress, made, num_samples)
                num_images += write_rows(path, map(self.row, samples), self.features, self.images)
                num_bytes += path.stat().st_size
                made += count
            summary = Summary(
                num_train=splits["train"],
                num_validation=splits["validation"],
                num_images=num_images,
                num_bytes=num_bytes,
            )
            (aside / "README.md").write_text(self.card(summary, num_samples, seed), encoding="utf-8")
        return summary


def with_progress(samples: Iterable[T], progress: Progress | None, before: int, total: int) -> Iterator[T]:
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

    Args: features: column -> its type. images: the column of images, which are compressed already.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = [(name, _arrow_type(feature)) for name, feature in features.items()]
    schema = pa.schema(columns, metadata={"huggingface": json.dumps({"info": {"features": features}})})
    remaining, num_images = iter(rows), 0
    with pq.ParquetWriter(path, schema, compression={name: "snappy" for name in features if name != images}) as writer:
        while group := list(islice(remaining, _ROWS_OF_A_GROUP)):  # small groups keep a random read cheap
            writer.write_table(pa.Table.from_pylist(group, schema))
            num_images += sum(len(row[images]) if isinstance(row[images], list) else 1 for row in group)
    return num_images


def _arrow_type(feature: Mapping[str, Any]) -> Any:
    import pyarrow as pa

    if feature.get("_type") in ("Image", "Audio"):
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
