"""Records from Hugging Face `datasets` (hub id, folder, parquet) and from files of JSON.

A source is read by index, or as a stream: in order, from any position, without an index. What its rows may be is a
`RecordKind`: `conversation_records` and `video_records` have one each. Images stay encoded, see `media`.

Images in parquet and hub data are the `Image` feature (bytes or a path). In JSON they are paths or
`data:image/...;base64,` URLs. Relative paths start at the folder of the file that contains the record.
"""

import difflib
import hashlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from mmtrain.config.data import DataConfig
from mmtrain.data.dataset_cards import check_card, check_files
from mmtrain.data.readers import JSON_ENDINGS, JsonRows, ParquetRows
from mmtrain.errors import ConfigError, DataError, one_line
from mmtrain.spec.hub_files import local_path, near_name

R_co = TypeVar("R_co", covariant=True)

_END = object()

Make = Callable[[Any, int, str, str], R_co]
"""(row, its index, name of the source in errors, folder of relative paths) -> record; raises DataError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordKind(Generic[R_co]):
    """What the rows of a source may be, and how they become records."""

    columns: tuple[str, ...]
    """All columns that are read; others are not decoded."""
    recognise: Callable[[str, list[str]], Make[R_co]]
    """(name of the source in errors, names of its columns) -> how one of its rows becomes a record; raises ConfigError
    if records cannot be made of them."""


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

    def __init__(self, rows: Any, make: Make[R_co], name: str, folder: str = "") -> None:
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

    def __init__(self, open_at: Callable[[int], Iterator[Any]], make: Make[R_co], name: str, folder: str = "") -> None:
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
    if file := _json_file(path, split):
        return _local(JsonRows(file), data, kind, name, _folder_of([str(file)], ""))
    if not _has_datasets():
        files = [str(file) for file in _parquet_files(path, split)]
        return _local(ParquetRows(files), data, kind, name, _folder_of(files, str(path)))
    rows, columns, folder = _load_dataset(data, path, split)
    make = kind.recognise(name, columns)
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
        if data.sources:
            parts = [replace(data, source=source.source, sources=[]) for source in data.sources]
            splits = [source.split * (split == data.split) or split for source in data.sources]
        else:
            parts, splits = [data], [split]
        self._sources = [open_source(part, name, kind) for part, name in zip(parts, splits, strict=True)]
        self.num_samples = tuple(source.num_samples for source in self._sources)
        """Of each source; None for streams."""

    def __getitem__(self, number: int) -> R_co | None:
        """The record of a number, or None behind the end of a stream. Raises: as `Source.__getitem__`."""
        index, name = self.sample(number)
        record: Any = self._sources[number % len(self._sources)][index]
        named: R_co | None = replace(record, source=name) if record is not None and name else record
        return named

    def sample(self, number: int) -> tuple[int, str]:
        """(index in its source, name of the source; empty if the job has one)."""
        return number // len(self._sources), self._names[number % len(self._sources)]


def _local(
    rows: JsonRows | ParquetRows, data: DataConfig, kind: RecordKind[R_co], name: str, folder: str
) -> Source[R_co]:
    make = kind.recognise(name, rows.columns)
    if data.streaming:
        return StreamSource(lambda i: map(rows.__getitem__, range(i, len(rows))), make, name, folder)
    return IndexedSource(rows, make, name, folder)


def _folder_of(files: Sequence[str], source: str) -> str:
    """The common folder (or URL of one) of the files of a split, at which relative paths start; of several folders the
    source itself."""
    folders = {file.rpartition("/")[0] if "://" in file else str(Path(file).absolute().parent) for file in files}
    folder = folders.pop() if len(folders) == 1 else source
    return folder if "://" in folder else str(Path(folder).absolute())


# ------------------------------------------------------------------------------------------------- files

_BOOKKEEPING = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json")
_NO_RECORDS = (*_BOOKKEEPING, "metadata.jsonl")
"""Files that are not records of ours; `datasets` makes records of metadata.jsonl and the images that it names."""
_HELD_OUT = ("validation", "valid", "val", "dev", "test", "eval")
"""Names of files that are not for training."""


def _json_file(path: Path, split: str) -> Path | None:
    """The .jsonl or .json file of a split: `path` itself (its one split is train), or SPLIT.jsonl or SPLIT.json in a
    folder; for train also data.jsonl, data.json or the only such file."""
    if path.suffix in JSON_ENDINGS and path.is_file():
        if split != "train":
            raise ConfigError(
                f"data.source = {str(path)!r} is one file, whose only split is 'train'; for {split!r} name a "
                f"folder with train.jsonl and {split}.jsonl"
            )
        return path
    if not path.is_dir():
        return None
    files = [file for ending in JSON_ENDINGS for file in sorted(path.glob(f"*{ending}"))]
    files = [file for file in files if file.name not in _NO_RECORDS]
    named = {file.stem: file for file in reversed(files)}
    if split in named:
        return named[split]
    if not files or any(path.rglob("*.parquet")):
        return None
    others = [file for file in files if file.stem not in _HELD_OUT]
    train = named.get("train") or named.get("data") or (others[0] if len(others) == 1 else None)
    if train and split == "train":
        return train
    parts = any(file.stem.startswith(split) for file in files)  # as train-00000-of-00002.json
    if (parts or (path / "README.md").is_file()) and all(file.suffix == ".json" for file in files):
        return None  # `datasets` may know them
    splits = ", ".join(file.stem for file in files)
    raise ConfigError(
        f"data: split {split!r} of {str(path)!r} does not exist; it has {splits}; call its file "
        f"{split}.jsonl or {split}.json"
    )


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
        source, root = str(path.absolute()), ""
        if path.is_file():
            if path.suffix != ".parquet":
                raise ConfigError(f"data.source = {data.source!r}: a file must end in .parquet, .jsonl or .json")
            what = {"path": "parquet", "data_files": str(path), "cache_dir": _cache_of(path)}
        elif path.is_dir():
            check_card(f"data.source = {data.source!r}", path)
            what, root = {"path": source, "cache_dir": _cache_of(path)}, f"{path.resolve()}/"
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


def check_column(wanted: str, name: str, columns: list[str]) -> None:
    """Checks that a source has a column. Raises: ConfigError: with its columns, and a similar name."""
    if wanted not in columns:
        near = difflib.get_close_matches(wanted, columns, 1, cutoff=0.75)
        hint = f"; did you mean {near[0]!r}? rename it" if near else ""
        raise ConfigError(f"data.source {name} has no column `{wanted}`; it has {', '.join(columns)}{hint}")
