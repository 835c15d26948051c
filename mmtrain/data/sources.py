"""Where records come from: Hugging Face `datasets` (hub id, folder, parquet) and jsonl files.

A source is read by index, or as a stream: in order, from any position, without an index. A record
has `messages` (a list of role and content), optionally `images` and `grade`; what records of video
clips have is in `video_records`. Pictures stay encoded.

Pictures in parquet and hub data are the `Image` feature (bytes or a path). In jsonl they are paths,
relative to the file's folder, or `data:image/...;base64,` URLs.
"""

import base64
import binascii
import bisect
import difflib
import hashlib
import importlib.util
import io
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Generic, Protocol, TypeVar

from mmtrain.config import DataConfig
from mmtrain.errors import ConfigError, DataError

R_co = TypeVar("R_co", covariant=True)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RawImage:
    """An encoded picture (or another file of a record), in memory or in a file."""

    data: bytes | None
    path: str = ""
    """Local path or URL; read when `data` is None."""

    def read(self) -> bytes:
        """The encoded bytes.

        Raises: DataError: the file cannot be read.
        """
        with self.open() as file:
            return self._guarded(file.read)

    @contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """The encoded bytes as a file, for what reads a part of them.

        Raises: DataError: the file cannot be opened.
        """
        if self.data is not None:
            yield io.BytesIO(self.data)
            return
        with self._guarded(self._open_path) as file:
            yield file

    def _open_path(self) -> IO[bytes]:
        if "://" in self.path:  # hf://, zip://: what `datasets` names when it streams
            import fsspec

            opened: IO[bytes] = fsspec.open(self.path, "rb").open()
            return opened
        return Path(self.path).open("rb")

    def _guarded(self, action: Callable[[], T]) -> T:
        try:
            return action()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or " ".join(str(error).split())
            raise DataError(f"its file {self.path} cannot be read: {reason}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One sample as the source holds it."""

    sample: int
    """Its index in the source."""
    messages: tuple[Mapping[str, Any], ...]
    images: tuple[RawImage, ...]
    grade: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordForm(Generic[R_co]):
    """What the rows of a source must be, and how a record is made of one."""

    check: Callable[[str, list[str]], None]
    """(how errors call the source, names of its columns); raises ConfigError where a record cannot be made of them."""
    make: Callable[[Any, int, str, str], R_co]
    """(row, its index, how errors call the source, folder of relative paths) -> record; raises DataError."""


class Source(Protocol[R_co]):
    """Records by index."""

    num_samples: int | None
    """Records in all; None for a stream."""

    def __getitem__(self, index: int) -> R_co | None:
        """The record of that index, or None behind the end of a stream.

        Raises: DataError: the record has not the form of a sample.
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
        return self._form.make(self._rows[index], index, self._name, self._folder)


class StreamSource(Generic[R_co]):
    """Records of a stream, by rising index; reading again any but the last one opens the stream anew."""

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
            row = next(self._rows, None)
            if row is None:
                self._rows = None
                return None
            self._last = (index, row)
        return self._form.make(self._last[1], index, self._name, self._folder)


def open_source(data: DataConfig, split: str, form: RecordForm[R_co]) -> Source[R_co]:
    """The records of one split of `data.source`, by index or as a stream.

    Raises: ConfigError: the source or the split does not exist, or lacks a column of the form; names what exists.
    """
    path = Path(data.source).expanduser()
    name = f"{data.source} ({split})"
    jsonl = _jsonl_file(path, split)
    if jsonl:
        rows = JsonLines(jsonl)
        form.check(name, rows.columns)
        if data.streaming:
            return StreamSource(rows.lines_from, form, name, str(jsonl.parent))
        return IndexedSource(rows, form, name, str(jsonl.parent))
    if not path.exists() and (path.suffix in (".parquet", ".jsonl") or data.source.startswith((".", "/", "~"))):
        raise ConfigError(f"data.source = {data.source!r} does not exist; {_siblings(path)}")
    if not _has_datasets():
        table = ParquetRows(_parquet_files(path, split))
        form.check(name, table.columns)
        if data.streaming:
            return StreamSource(lambda i: (table[j] for j in range(i, len(table))), form, name)
        return IndexedSource(table, form, name)
    rows = _load_dataset(data, path, split)
    if rows.column_names is not None:
        form.check(name, rows.column_names)
    if data.streaming:
        return StreamSource(lambda i: iter(rows.skip(i)), form, name)
    return IndexedSource(rows, form, name)


def make_record(row: Any, index: int, name: str, folder: str = "") -> Record:
    """The record of a row.

    Raises: DataError: a column is missing or of another form.
    """
    where = f"sample {index} of {name}"
    if not isinstance(row, Mapping) or row.get("messages") is None:
        has = ", ".join(map(str, row)) if isinstance(row, Mapping) else type(row).__name__
        raise DataError(f"{where}: no `messages`; it has {has}")
    messages = row["messages"]
    if isinstance(messages, Mapping):  # how older `datasets` give a list of structs
        columns = [list(column) for column in messages.values()]
        messages = [dict(zip(messages, values, strict=True)) for values in zip(*columns, strict=True)]
    if not isinstance(messages, list) or not all(isinstance(m, Mapping) for m in messages):
        raise DataError(f"{where}: `messages` is not a list of role and content")
    images = row.get("images")
    images = [] if images is None else images
    if not isinstance(images, list):
        raise DataError(f"{where}: `images` is a {type(images).__name__}; it must be a list")
    raw = tuple(raw_image(image, f"image {i} of {where}", folder) for i, image in enumerate(images))
    return Record(sample=index, messages=tuple(messages), images=raw, grade=row.get("grade") or "")


def raw_image(value: Any, where: str, folder: str) -> RawImage:
    """The picture (or other file) that a value of a row holds or names: bytes, a path, a `data:` URL, or a struct.

    Raises: DataError: it is none of these.
    """
    if isinstance(value, Mapping):
        data, path = value.get("bytes"), value.get("path")
        if data is None and not path:
            raise DataError(f"{where}: it has neither bytes nor a path")
        return RawImage(data=data, path=_place(path or "", folder))
    if isinstance(value, bytes):
        return RawImage(data=value)
    if isinstance(value, str) and value.startswith("data:"):
        try:
            return RawImage(data=base64.b64decode(value.partition(",")[2], validate=True))
        except binascii.Error as error:
            raise DataError(f"{where}: its base64 text is damaged: {error}") from None
    if isinstance(value, str) and value:
        return RawImage(data=None, path=_place(value, folder))
    raise DataError(f"{where}: a {type(value).__name__}; it must be a path, a data: URL, or bytes")


def _place(path: str, folder: str) -> str:
    return path if not path or "://" in path else str(Path(folder) / path)


# ---------------------------------------------------------------------------------------------- readers


class JsonLines:
    """The lines of a jsonl file by index; only their positions are kept in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._starts: list[int] = []
        with path.open("rb") as file:
            first = b""
            for line in iter(file.readline, b""):
                if line.strip():
                    first = first or line
                    self._starts.append(file.tell() - len(line))
        if not first:
            raise ConfigError(f"{path} is empty; it needs one JSON object a line")
        row = self._parse(first, 0)
        self.columns = list(row) if isinstance(row, dict) else []

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Any:
        with self.path.open("rb") as file:
            file.seek(self._starts[index])
            return self._parse(file.readline(), index)

    def lines_from(self, index: int) -> Iterator[Any]:
        """The lines from an index to the end."""
        return (self[i] for i in range(index, len(self)))

    def _parse(self, line: bytes, index: int) -> Any:
        try:
            return json.loads(line)
        except ValueError as error:
            raise DataError(f"{self.path}, record {index}: not valid JSON: {error}") from None


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
        found: dict[str, Any] = self._cached[1].slice(row, 1).to_pylist()[0]
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
    if path.is_dir() and (found := sorted(path.glob("*.jsonl"))):
        if (path / f"{split}.jsonl").is_file():
            return path / f"{split}.jsonl"
        if not any(path.rglob("*.parquet")):
            splits = ", ".join(p.stem for p in found)
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


def _load_dataset(data: DataConfig, path: Path, split: str) -> Any:
    import datasets

    datasets.disable_progress_bars()
    try:
        if path.is_file():
            if path.suffix != ".parquet":
                raise ConfigError(f"data.source = {data.source!r}: a file must end in .parquet or .jsonl")
            rows = datasets.load_dataset(
                "parquet", data_files=str(path), split=split, streaming=data.streaming, cache_dir=_cache_of(path)
            )
        elif path.is_dir():
            rows = datasets.load_dataset(
                str(path.absolute()), split=split, streaming=data.streaming, cache_dir=_cache_of(path)
            )
        elif data.source.isidentifier() and importlib.util.find_spec(f"datasets.packaged_modules.{data.source}"):
            raise ConfigError(  # one of them unpickles whatever the working directory holds
                f"data.source = {data.source!r} is a file format of `datasets`; name a file, a folder or a hub id"
            )
        else:
            rows = datasets.load_dataset(data.source, split=split, streaming=data.streaming)
        # Pictures and videos are decoded by us, and only where they are used.
        for column, feature in (rows.features or {}).items():
            inner = getattr(feature, "feature", None)
            if isinstance(inner, datasets.Image):
                rows = rows.cast_column(column, type(feature)(datasets.Image(decode=False)))
            elif isinstance(feature, datasets.Video):
                rows = rows.cast_column(column, datasets.Video(decode=False))
    except (ConfigError, DataError):
        raise
    except Exception as error:  # builders, hub clients and file systems raise whatever they like
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"data.source = {data.source!r}, split {split!r} cannot be opened: {reason}") from None
    return rows


def _cache_of(path: Path) -> str:
    """A cache folder of `datasets` for the local files as they are now.

    Its own key for a folder with a README (4.7) is the folder's name and the README: another folder of that name,
    or the same one written anew, would silently give the samples that were read first.
    """
    import datasets

    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    stats = [(file, file.stat()) for file in files]
    now = "\n".join(f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}" for file, stat in stats)
    return str(Path(datasets.config.HF_DATASETS_CACHE) / "mmtrain" / hashlib.sha256(now.encode()).hexdigest()[:16])


def check_column(wanted: str, name: str, columns: list[str]) -> None:
    """Refuses a source that lacks a column.

    Raises: ConfigError: with the columns that it has, and one whose name is near.
    """
    if wanted not in columns:
        near = difflib.get_close_matches(wanted, columns, 1)
        hint = f"; did you mean {near[0]!r}? rename it" if near else ""
        raise ConfigError(f"data.source {name} has no column `{wanted}`; it has {', '.join(columns)}{hint}")


def _check_conversations(name: str, columns: list[str]) -> None:
    check_column("messages", name, columns)


CONVERSATIONS = RecordForm(check=_check_conversations, make=make_record)
"""Records with `messages`."""


def _siblings(path: Path) -> str:
    if not path.parent.is_dir():
        return f"neither does its folder {path.parent}"
    names = sorted(p.name for p in path.parent.iterdir() if not p.name.startswith("."))
    near = difflib.get_close_matches(path.name, names, 1)
    return f"did you mean {path.parent / near[0]}?" if near else f"{path.parent} has {', '.join(names) or 'no file'}"
