"""Records from Hugging Face `datasets` (hub id, folder, parquet) and jsonl files.

A source is read by index, or as a stream: in order, from any position, without an index. A record has `messages` (a
list of role and content), optionally `images` and `grade`; for video clips see `video_records`. Images stay encoded,
see `media`.

Images in parquet and hub data are the `Image` feature (bytes or a path). In json and jsonl they are paths or
`data:image/...;base64,` URLs. Relative paths start at the folder of the file that contains the record.
"""

import bisect
import difflib
import hashlib
import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from mmtrain.config.data import DataConfig
from mmtrain.data.media import RawImage, check_text, raw_image
from mmtrain.errors import ConfigError, DataError, one_line, shown
from mmtrain.spec.hub_files import local_path, near_name

R_co = TypeVar("R_co", covariant=True)

_END = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One sample of the source, not decoded."""

    sample: int
    """Its index in the source."""
    messages: tuple[Mapping[str, Any], ...]
    images: tuple[RawImage, ...]
    grade: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordForm(Generic[R_co]):
    """The form of the rows of a source, and how a row becomes a record."""

    columns: tuple[str, ...]
    """The columns that `make` reads; others are not decoded."""
    check: Callable[[str, list[str]], None]
    """(name of the source in errors, names of its columns); raises ConfigError if records cannot be made of them."""
    make: Callable[[Any, int, str, str], R_co]
    """(row, its index, name of the source in errors, folder of relative paths) -> record; raises DataError."""


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

    def __init__(self, rows: Any, form: RecordForm[R_co], name: str, folder: str = "") -> None:
        self.num_samples: int | None = len(rows)
        self._rows, self._form, self._name, self._folder = rows, form, name, folder

    def __len__(self) -> int:
        assert self.num_samples is not None
        return self.num_samples

    def __getitem__(self, index: int) -> R_co | None:
        try:
            row = self._rows[index]
        except OSError as error:
            raise _unreadable(self._name, index, error) from None
        return self._form.make(row, index, self._name, self._folder)


class StreamSource(Generic[R_co]):
    """Records of a stream, by rising index; reading any earlier one again, except the last, reopens the stream.

    A `DataError` of a stream concerns one record; after any other error its position is unknown.
    """

    def __init__(
        self, open_at: Callable[[int], Iterator[Any]], form: RecordForm[R_co], name: str, folder: str = ""
    ) -> None:
        self.num_samples: int | None = None
        self._open_at, self._form, self._name, self._folder = open_at, form, name, folder
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
        return self._form.make(self._last[1], index, self._name, self._folder)


def _unreadable(name: str, index: int, error: Exception) -> ConfigError:
    return ConfigError(f"data.source {name} cannot be read at sample {index}: {one_line(error)}; restore its files")


def open_source(data: DataConfig, split: str, form: RecordForm[R_co]) -> Source[R_co]:
    """The records of one split of `data.source`, by index or as a stream.

    Raises: ConfigError: the source or the split does not exist, or lacks a column; names what exists.
    """
    path = local_path("data.source", data.source) or Path(data.source)
    name = f"{data.source} ({split})"
    if jsonl := _jsonl_file(path, split):
        return _local(JsonLines(jsonl), data, form, name, str(jsonl.parent))
    if not _has_datasets():
        return _local(ParquetRows(files := _parquet_files(path, split)), data, form, name, _folder_of(files, path))
    rows, folder = _load_dataset(data, path, split)
    if rows.column_names is not None:
        form.check(name, rows.column_names)
        rows = rows.select_columns([column for column in rows.column_names if column in form.columns])
    if data.streaming:
        return StreamSource(lambda i: iter(rows.skip(i)), form, name, folder)
    return IndexedSource(rows, form, name, folder)


def _local(
    rows: "JsonLines | ParquetRows", data: DataConfig, form: RecordForm[R_co], name: str, folder: str
) -> Source[R_co]:
    form.check(name, rows.columns)
    if data.streaming:
        return StreamSource(lambda i: map(rows.__getitem__, range(i, len(rows))), form, name, folder)
    return IndexedSource(rows, form, name, folder)


def _folder_of(files: Sequence[Path], source: Path) -> str:
    """The common folder of the files of a split, at which relative paths start; of several folders the source
    itself."""
    folders = {file.parent for file in files}
    return str(folders.pop() if len(folders) == 1 else source)


def make_record(row: Any, index: int, name: str, folder: str = "") -> Record:
    """The record of a row.

    Raises: DataError: a column is missing or of another form.
    """
    where = f"sample {index} of {name}"
    if not isinstance(row, Mapping) or row.get("messages") is None:
        has = ", ".join(map(str, row)) if isinstance(row, Mapping) else type(row).__name__
        raise DataError(f"{where}: no `messages`; it has {has}")
    messages = row["messages"]
    if isinstance(messages, Mapping):  # the form of a list of structs in older `datasets`
        columns = [list(column) for column in messages.values()]
        messages = [dict(zip(messages, values, strict=True)) for values in zip(*columns, strict=True)]
    if not isinstance(messages, list) or not all(isinstance(m, Mapping) for m in messages):
        raise DataError(f"{where}: `messages` is not a list of role and content")
    images = row.get("images")
    images = [] if images is None else images
    if not isinstance(images, list):
        raise DataError(f"{where}: `images` is a {type(images).__name__}; it must be a list")
    raw = tuple(raw_image(image, f"image {i} of {where}", folder) for i, image in enumerate(images))
    grade = row.get("grade") or ""
    if not isinstance(grade, str):
        raise DataError(f"{where}: `grade` = {shown(grade)}; it must be text")
    return Record(sample=index, messages=tuple(messages), images=raw, grade=check_text(grade, f"{where}: `grade`"))


# ---------------------------------------------------------------------------------------------- readers


class JsonLines:
    """The lines of a jsonl file by index; only their positions are in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns: list[str] = []
        self._starts: list[int] = []
        with path.open("rb") as file:
            for line in iter(file.readline, b""):
                if line.strip():
                    self._starts.append(file.tell() - len(line))
        if not self._starts:
            raise ConfigError(f"{path} is empty; it needs one JSON object a line")
        for index in range(len(self)):  # the first lines may be damaged
            try:
                self.columns = list(self[index].keys())
                break
            except (AttributeError, DataError):
                if index + 1 == len(self):
                    raise ConfigError(f"{path}: no line of it is a JSON object; it needs one a line") from None

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Any:
        with self.path.open("rb") as file:
            file.seek(self._starts[index])
            line = file.readline()
        try:
            return json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"sample {index} of {self.path}: not valid JSON: {error}") from None


class ParquetRows:
    """Rows of parquet files by index, read by pyarrow a row group at a time; used without `datasets`."""

    def __init__(self, paths: list[Path]) -> None:
        import pyarrow.parquet as pq

        self._files = [pq.ParquetFile(path) for path in paths]
        self._groups = [(f, g) for f in self._files for g in range(f.metadata.num_row_groups)]
        self._ends: list[int] = []
        for file, group in self._groups:
            self._ends.append((self._ends or [0])[-1] + file.metadata.row_group(group).num_rows)
        self.columns = list(self._files[0].schema_arrow.names)
        self._cached: tuple[int, Any] = (-1, None)

    def __len__(self) -> int:
        return (self._ends or [0])[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        at = bisect.bisect_right(self._ends, index)
        if self._cached[0] != at:
            file, group = self._groups[at]
            self._cached = (at, file.read_row_group(group))
        row = index - (self._ends[at - 1] if at else 0)
        try:
            found: dict[str, Any] = self._cached[1].slice(row, 1).to_pylist()[0]
        except ValueError as error:  # text that is not UTF-8
            raise DataError(f"sample {index}: its row cannot be read: {error}") from None
        return found


def _jsonl_file(path: Path, split: str) -> Path | None:
    """The jsonl file of a split: `path` itself (its one split is train), or SPLIT.jsonl in a folder."""
    if path.suffix == ".jsonl" and path.is_file():
        if split != "train":
            raise ConfigError(
                f"data.source = {str(path)!r} is one file, whose only split is 'train'; for {split!r} name a "
                f"folder with train.jsonl and {split}.jsonl"
            )
        return path
    if path.is_dir() and (files := sorted(path.glob("*.jsonl"))):
        if (path / f"{split}.jsonl").is_file():
            return path / f"{split}.jsonl"
        if not any(path.rglob("*.parquet")):
            splits = ", ".join(p.stem for p in files)
            raise ConfigError(f"data: split {split!r} of {str(path)!r} does not exist; it has {splits}")
    return None


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


def _load_dataset(data: DataConfig, path: Path, split: str) -> tuple[Any, str]:
    """The rows of a split as `datasets` opens them, and the folder of relative paths."""
    import datasets

    datasets.disable_progress_bars()
    try:
        folder = ""
        if path.is_file():
            if path.suffix != ".parquet":
                raise ConfigError(f"data.source = {data.source!r}: a file must end in .parquet or .jsonl")
            what = {"path": "parquet", "data_files": str(path), "cache_dir": _cache_of(path)}
            folder = str(path.parent)
        elif path.is_dir():
            what = {"path": str(path.absolute()), "cache_dir": _cache_of(path)}
            files = datasets.load_dataset_builder(**what).config.data_files or {}
            folder = _folder_of([Path(file) for file in files.get(split, ())], path)
        elif data.source.isidentifier() and importlib.util.find_spec(f"datasets.packaged_modules.{data.source}"):
            raise ConfigError(  # one of them unpickles files of the working directory
                f"data.source = {data.source!r} is a file format of `datasets`; name a file, a folder or a hub id"
            )
        else:
            _check_reachable(data.source, path)
            what = {"path": data.source}
        rows = datasets.load_dataset(**what, split=split, streaming=data.streaming)
        # Images and videos are decoded by us, and only those in use.
        for column, feature in (rows.features or {}).items():
            inner = getattr(feature, "feature", feature)
            if isinstance(inner, datasets.Image | datasets.Video):
                encoded = type(inner)(decode=False)
                rows = rows.cast_column(column, encoded if inner is feature else type(feature)(encoded))
    except (ConfigError, DataError):
        raise
    except Exception as error:  # builders, hub clients and file systems raise any kind of error
        reason = one_line(error, 300)
        raise ConfigError(f"data.source = {data.source!r}, split {split!r} cannot be opened: {reason}") from None
    return rows, folder


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


def _check_conversations(name: str, columns: list[str]) -> None:
    if "messages" not in columns and "conversations" in columns:
        raise ConfigError(
            f"data.source {name} has `conversations` (from, value), which are not read yet; write them as `messages`: "
            '[{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}] (docs/bringing_data.md has '
            "a script)"
        )
    check_column("messages", name, columns)


CONVERSATIONS = RecordForm(columns=("messages", "images", "grade"), check=_check_conversations, make=make_record)
"""Records with `messages`."""
