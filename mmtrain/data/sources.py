"""Records from Hugging Face `datasets` (hub id, folder, parquet) and from files of JSON.

A source is read by index, or as a stream: in order, from any position, without an index. What its rows may be is a
`RecordKind`: `conversation_records` and `video_records` have one each. Images stay encoded, see `media`.

Images in parquet and hub data are the `Image` feature (bytes or a path). In JSON they are paths or
`data:image/...;base64,` URLs. Relative paths start at the folder of the file that contains the record.
"""

import hashlib
import importlib.util
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from mmtrain.config.data import DataConfig
from mmtrain.data.dataset_cards import check_card, check_files
from mmtrain.data.listed_sources import LIST, listed_set
from mmtrain.data.readers import JSON_ENDINGS, JsonRows, ParquetRows, lists_of_objects
from mmtrain.errors import ConfigError, DataError, one_line
from mmtrain.spec.hub_files import local_path, near_name

R_co = TypeVar("R_co", covariant=True)

_END = object()

MakeRecord = Callable[[Any, int, str, str], R_co]
"""A function (row, its index, name of the source in errors, folder of relative paths) -> record; raises DataError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordKind(Generic[R_co]):
    """What the rows of a source may be, and how they become records."""

    columns: tuple[str, ...]
    """All columns that are read; others are not decoded."""
    recognise: Callable[[str, list[str]], MakeRecord[R_co]]
    """A function (name of the source in errors, names of its columns) -> how one of its rows becomes a record; raises
    ConfigError if records cannot be made of them."""


class Source(Protocol[R_co]):
    """Records by index."""

    num_samples: int | None
    """Number of records; None for a stream."""

    def __getitem__(self, index: int) -> R_co | None:
        """The record of that index, or None behind the end of a stream.

        Raises: DataError: the record is not a valid sample. ConfigError: the source itself cannot be read.
        """


class IndexedSource(Generic[R_co]):
    """Records of anything that has a length and rows by index."""

    def __init__(self, rows: Any, make: MakeRecord[R_co], name: str, folder: str = "") -> None:
        self.num_samples: int | None = len(rows)
        self._rows, self._make, self._name, self._folder = rows, make, name, folder

    def __len__(self) -> int:
        assert self.num_samples is not None
        return self.num_samples

    def __getitem__(self, index: int) -> R_co | None:
        try:
            row = self._rows[index]
        except OSError as error:
            raise _unreadable(self._name, index, error) from None
        return self._make(row, index, self._name, self._folder)


class StreamSource(Generic[R_co]):
    """Records of a stream, by rising index; reading any earlier one again, except the last, reopens the stream.

    A `DataError` of a stream concerns one record; after any other error its position is unknown.
    """

    def __init__(
        self, open_at: Callable[[int], Iterator[Any]], make: MakeRecord[R_co], name: str, folder: str = ""
    ) -> None:
        self.num_samples: int | None = None
        self._open_at, self._make, self._name, self._folder = open_at, make, name, folder
        self._rows: Iterator[Any] | None = None
        self._last: tuple[int, Any] = (-1, None)

    def __getitem__(self, index: int) -> R_co | None:
        if index != self._last[0]:
            if self._rows is None or index != self._last[0] + 1:
                self._rows = self._open_at(index)
            rows, self._rows = self._rows, None  # an iterator that has failed or ended is not used again
            try:
                row = next(rows, _END)
            except DataError:
                raise
            except Exception as error:
                raise _unreadable(self._name, index, error) from None
            if row is _END:
                return None
            self._last, self._rows = (index, row), rows
        return self._make(self._last[1], index, self._name, self._folder)


def _unreadable(name: str, index: int, error: Exception) -> ConfigError:
    return ConfigError(f"data.source {name} cannot be read at sample {index}: {one_line(error)}; restore its files")


def open_source(data: DataConfig, split: str, kind: RecordKind[R_co]) -> Source[R_co]:
    """The records of one split of `data.source`, by index or as a stream.

    Raises: ConfigError: the source or the split does not exist, or lacks a column; names what exists.
    """
    path = local_path("data.source", data.source) or Path(data.source)
    name = f"{data.source} ({split})"
    if listed := listed_set(path, split):
        make = listed.wrapped(kind.recognise(name, listed.made_columns))
        rows = ParquetRows([str(listed.file)]) if listed.file.suffix == ".parquet" else JsonRows(listed.file)
        return _local(rows, data, make, name, listed.folder)
    if json_files := _json_files(path, split):
        return _json_source(JsonRows(*json_files), data, kind, name, _folder_of([str(file) for file in json_files], ""))
    if not _has_datasets():
        files = [str(file) for file in _parquet_files(path, split)]
        parquet = ParquetRows(files)
        make = _without_nulls(kind.recognise(name, parquet.columns))
        return _local(parquet, data, make, name, _folder_of(files, str(path)))
    rows, columns, folder = _load_dataset(data, path, split)
    make = _without_nulls(kind.recognise(name, columns))
    rows = rows.select_columns([column for column in columns if column in kind.columns])
    if data.streaming:
        return StreamSource(lambda i: iter(rows.skip(i)), make, name, folder)
    return IndexedSource(rows, make, name, folder)


class Sources(Generic[R_co]):
    """The sources of a job as one: the record of index i in source s of S has the number i * S + s.

    Raises: ConfigError: as `open_source`.
    """

    def __init__(self, data: DataConfig, split: str, kind: RecordKind[R_co]) -> None:
        """Args: split: of all sources; the training split may be another one of single sources."""
        self._names = tuple(source.label for source in data.sources) or ("",)
        held_out = bool(data.validation_part) and split == data.validation_split
        split = data.split if held_out else split
        if data.sources:
            parts = [replace(data, source=source.source, sources=[]) for source in data.sources]
            splits = [source.split * (split == data.split) or split for source in data.sources]
        else:
            parts, splits = [data], [split]
        self._sources = [open_source(part, name, kind) for part, name in zip(parts, splits, strict=True)]
        self._parts = [PartOfSource.of(source, data, held_out=held_out) for source in self._sources]
        self.num_samples = tuple(
            source.num_samples if part is None else len(part.indices)
            for source, part in zip(self._sources, self._parts, strict=True)
        )
        """The number of samples of each source; None for streams."""

    def __getitem__(self, number: int) -> R_co | None:
        """The record of a number, or None behind the end of a stream. Raises: as `Source.__getitem__`."""
        index, name = self.sample(number)
        record: Any = self._sources[number % len(self._sources)][index]
        named: R_co | None = replace(record, source=name) if record is not None and name else record
        return named

    def sample(self, number: int) -> tuple[int, str]:
        """The index of a sample in its source, and the name of the source; empty if the job has one."""
        index, which = divmod(number, len(self._sources))
        part = self._parts[which]
        return (index if part is None else int(part.indices[index])), self._names[which]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartOfSource:
    """The samples of a source that train, or those that are held out (`data.validation_part`)."""

    indices: np.ndarray
    """The indices of the samples in the source, rising."""

    @classmethod
    def of(cls, source: Source[Any], data: DataConfig, *, held_out: bool) -> "PartOfSource | None":
        """One of the two parts of a source; None: it is not divided.

        Raises: ConfigError: no sample would be held out.
        """
        if not data.validation_part:
            return None
        count = source.num_samples
        assert count is not None, "a stream is not divided"
        part = Fraction(str(data.validation_part))
        ends = np.array([math.floor(part * index) for index in range(count + 1)])
        is_held_out = np.diff(ends) > 0
        if not is_held_out.any():
            raise ConfigError(
                f"data.validation_part = {data.validation_part} of the {count} samples of {data.description} is less "
                "than one sample to validate on; raise it"
            )
        return cls(indices=np.flatnonzero(is_held_out == held_out))


def _json_source(rows: JsonRows, data: DataConfig, kind: RecordKind[R_co], name: str, folder: str) -> Source[R_co]:
    """The records of JSON, whose objects may have keys of their own: some of the first ones must be records."""
    first: ConfigError | None = None
    for columns in islice(rows.layouts(), _MOST_LAYOUTS):
        try:
            return _local(rows, data, kind.recognise(name, columns), name, folder)
        except ConfigError as error:
            first = first or error
    assert first is not None, "JsonRows has an object that can be read"
    if len(rows) == 1 and (lists := lists_of_objects(rows[0])):
        raise ConfigError(f"{first}; it is one object: if its records are the list {lists[0]!r}, write that list alone")
    raise first


_MOST_LAYOUTS = 100
"""Objects at the start of a JSON file among which one must be a record."""


def _local(
    rows: JsonRows | ParquetRows, data: DataConfig, make: MakeRecord[R_co], name: str, folder: str
) -> Source[R_co]:
    if data.streaming:
        return StreamSource(lambda i: map(rows.__getitem__, range(i, len(rows))), make, name, folder)
    return IndexedSource(rows, make, name, folder)


def _without_nulls(make: MakeRecord[R_co]) -> MakeRecord[R_co]:
    """Records of rows of tables, where a struct has every key that one of them has: null stands for an absent key."""
    return lambda row, index, name, folder: make(
        {column: _present(value) for column, value in row.items()}, index, name, folder
    )


def _present(value: Any) -> Any:
    """A value without the null keys of the structs in it."""
    if isinstance(value, dict):
        return {key: _present(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list) and any(isinstance(inner, dict | list) for inner in value[:1]):
        return [_present(inner) for inner in value]
    return value


def _folder_of(files: Sequence[str], source: str) -> str:
    """The common folder (or URL of one) of the files of a split, at which relative paths start; of several folders the
    source itself."""
    folders = {file.rpartition("/")[0] if "://" in file else str(Path(file).absolute().parent) for file in files}
    folder = folders.pop() if len(folders) == 1 else source
    return folder if "://" in folder else str(Path(folder).absolute())


# ------------------------------------------------------------------------------------------------- files

_BOOKKEEPING = (LIST, "dataset_infos.json", "dataset_dict.json", "state.json", "config.json")
_NO_RECORDS = (*_BOOKKEEPING, "metadata.jsonl")
"""Files that are not records of ours; `datasets` makes records of metadata.jsonl and the images that it names."""
_HELD_OUT = {"validation", "valid", "val", "dev", "test", "testing", "eval", "evaluation", "heldout"}
"""Words in names of files that are not for training."""


def _is_held_out(file: Path) -> bool:
    """Whether the name of a file has such a word: my_test.jsonl, coco_val2014.json, ScienceQATest.json."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", file.stem)
    return not _HELD_OUT.isdisjoint(word.lower() for word in words)


def _json_files(path: Path, split: str) -> list[Path]:
    """The .jsonl or .json files of a split: `path` itself (its one split is train), or SPLIT.jsonl, SPLIT.json or its
    shards in a folder; for train also data.jsonl, data.json or the only such file that is not held out by its name."""
    if path.suffix in JSON_ENDINGS and path.is_file():
        if split != "train":
            raise ConfigError(
                f"data.source = {str(path)!r} is one file, whose only split is 'train'; for {split!r} name a "
                f"folder with train.jsonl and {split}.jsonl"
            )
        return [path]
    if not path.is_dir():
        return []
    files = [file for ending in JSON_ENDINGS for file in sorted(path.glob(f"*{ending}"))]
    files = [file for file in files if file.name not in _NO_RECORDS]
    named = {file.stem: file for file in reversed(files)}
    if split in named:
        return [named[split]]
    if not files or any(path.rglob("*.parquet")):
        return []
    if shards := _shards(files, split):
        return shards
    others = [file for file in files if not _is_held_out(file)]
    train = named.get("train") or named.get("data") or (others[0] if len(others) == 1 else None)
    if train and split == "train":
        return [train]
    parts = any(file.stem.startswith(split) for file in files)  # as train_0.json
    if parts or (path / "README.md").is_file():
        return []  # `datasets` may know them
    splits = ", ".join(file.stem for file in files)
    held_out = " (by its name held out)" if split == "train" and len(files) == 1 else ""
    raise ConfigError(
        f"data: split {split!r} of {str(path)!r} does not exist; it has {splits}{held_out}; call its file "
        f"{split}.jsonl or {split}.json, or name one file in data.source"
    )


def _shards(files: Sequence[Path], split: str) -> list[Path]:
    """The files SPLIT-00000-of-00002 and so on of a split, in order. Raises: ConfigError: one is missing."""
    named = ((re.fullmatch(rf"{re.escape(split)}-(\d+)-of-(\d+)", file.stem), file) for file in files)
    shards = sorted((int(match[1]), int(match[2]), file) for match, file in named if match)
    numbers, counts = [number for number, _, _ in shards], {count for _, count, _ in shards}
    if shards and (len(counts) > 1 or numbers not in (list(range(max(counts))), list(range(1, max(counts) + 1)))):
        names = ", ".join(file.name for _, _, file in shards)
        raise ConfigError(
            f"data: shards of split {split!r} are missing or doubled: {names}; each of them must be there once"
        )
    return [file for _, _, file in shards]


def _parquet_files(path: Path, split: str) -> list[Path]:
    if path.is_file():
        if split == "train":
            return [path]
        raise ConfigError(f"data.source = {str(path)!r} is one file, whose only split is 'train', not {split!r}")
    if not path.is_dir():
        raise ConfigError(
            f"data.source = {str(path)!r} is no local file or folder, and the hub needs the package "
            "`datasets`; install it"
        )
    files = sorted(p for p in path.rglob("*.parquet") if p.stem == split or p.stem.startswith(f"{split}-"))
    if not files:
        known = ", ".join(sorted({p.stem.split("-")[0] for p in path.rglob("*.parquet")})) or "no parquet file"
        raise ConfigError(f"data: split {split!r} of {str(path)!r} does not exist; it has {known}")
    return files


def _has_datasets() -> bool:
    try:
        return bool(importlib.util.find_spec("datasets"))
    except (ModuleNotFoundError, ValueError):
        return False


def _check_reachable(source: str, path: Path) -> None:
    """Checks once whether the hub answers, since `datasets` would retry for a minute.

    Raises: ConfigError: it does not answer, and no copy of the data set is in the cache of `datasets`.
    """
    import datasets
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi(endpoint=datasets.config.HF_ENDPOINT).dataset_info(source, timeout=10)
    except HfHubHTTPError:  # an answer, which `datasets` explains
        return
    except Exception as error:  # no network, a time-out, HF_HUB_OFFLINE
        try:
            datasets.load.CachedDatasetModuleFactory(source).get_module()
        except FileNotFoundError:
            reason, near = one_line(error).rstrip("."), near_name(path)
            raise ConfigError(
                f"data.source = {source!r}: no such folder, and the hub cannot be asked: {reason}"
                + (f"; {near}" if near else "")
            ) from None


def _load_dataset(data: DataConfig, path: Path, split: str) -> tuple[Any, list[str], str]:
    """The rows of a split as `datasets` opens them, their columns, and the folder of relative paths."""
    import datasets

    datasets.disable_progress_bars()
    try:
        source, root = str(path.resolve()), ""
        if path.is_file():
            if path.suffix != ".parquet":
                raise ConfigError(f"data.source = {data.source!r}: a file must end in .parquet, .jsonl or .json")
            what = {"path": "parquet", "data_files": str(path), "cache_dir": _cache_of(path)}
        elif path.is_dir():
            check_card(f"data.source = {data.source!r}", path)
            what, root = {"path": source, "cache_dir": _cache_of(path)}, f"{source}/"
        elif data.source.isidentifier() and importlib.util.find_spec(f"datasets.packaged_modules.{data.source}"):
            raise ConfigError(  # one of them unpickles files of the working directory
                f"data.source = {data.source!r} is a file format of `datasets`; name a file, a folder or a hub id"
            )
        else:
            _check_reachable(data.source, path)
            what, source = {"path": data.source}, f"hf://datasets/{data.source}"
            root = f"{source}@" if "/" in data.source else "hf://datasets/"  # an old name without its owner
        files = datasets.load_dataset_builder(**what).config.data_files or {}
        check_files(f"data.source = {data.source!r}", root, files)
        rows = datasets.load_dataset(**what, split=split, streaming=data.streaming)
        columns = list(rows.column_names or next(iter(rows), {}))  # a stream may not know them before its first row
        # Images, videos and sounds are decoded by us, and only those in use.
        for column, feature in (rows.features or {}).items():
            inner = getattr(feature, "feature", feature)
            if isinstance(inner, datasets.Image | datasets.Video | datasets.Audio):
                encoded = type(inner)(decode=False)
                rows = rows.cast_column(column, encoded if inner is feature else type(feature)(encoded))
    except (ConfigError, DataError):
        raise
    except Exception as error:  # builders, hub clients and file systems raise any kind of error
        reason = one_line(error, 300)
        raise ConfigError(f"data.source = {data.source!r}, split {split!r} cannot be opened: {reason}") from None
    return rows, columns, _folder_of(files.get(split, ()), source)


def _cache_of(path: Path) -> str:
    """A cache folder of `datasets` for the current local files.

    Its own key for a folder with a README (4.7) is the folder's name and the README: another folder of that name, or
    the same one after a change, would silently yield the old samples.
    """
    import datasets

    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    stats = [(file, file.stat()) for file in files]
    now = "\n".join(f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}" for file, stat in stats)
    return str(Path(datasets.config.HF_DATASETS_CACHE) / "mmtrain" / hashlib.sha256(now.encode()).hexdigest()[:16])
