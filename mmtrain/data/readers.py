"""Rows of local files by index: of JSON only the positions of objects are in memory, of parquet one row group."""

import bisect
import codecs
import json
import mmap
import re
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mmtrain.errors import ConfigError, DataError, shown

JSON_ENDINGS = (".jsonl", ".json")
"""One object a line; or, in .json, also one list of objects."""

_BOM = b"\xef\xbb\xbf"
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_FLAT = rb'(?>(?>[^\[\]{}"]+|' + _STRING + rb")*)"
_INSIDE = re.compile(rb'(?>(?>[^\[\]{}"]+|' + _STRING + rb"|[\[{]" + _FLAT + rb"[\]}])*)", re.DOTALL)
"""What JSON has up to the next bracket of an object or list that has others inside. Atomic groups, since before Python
3.11.4 a group that repeats possessively (`*+`) ends too early."""
_BRACKET = re.compile(rb"[\[\]{}]")


class JsonRows:
    """The objects of .jsonl files, or of the lists in .json files, by index; those of the first file come first.

    Each file is scanned once; 16 bytes an object stay in memory, whatever their size.
    Raises: ConfigError: a file has no object or is no UTF-8, a list is damaged, or no object can be read.
    """

    def __init__(self, *paths: Path) -> None:
        self.paths = paths
        self._starts, self._ends, self._counts = array("q"), array("q"), list[int]()
        for path in paths:
            _check_encoding(path)
            for start, end in _list_spans(path) if _is_list(path) else _line_spans(path):
                self._starts.append(start)
                self._ends.append(end)
            self._counts.append(len(self._starts))
        path = paths[0]
        if not self._starts:
            raise ConfigError(f"{path} is empty; it needs one JSON object a line{_OR_LIST[path.suffix]}")
        if next(self.layouts(), None) is None:  # the first ones may be damaged
            raise ConfigError(
                f"{path}: no line of it is a JSON object; it needs one a line{_OR_LIST[path.suffix]}{_outer_list(path)}"
            )

    def layouts(self) -> Iterator[list[str]]:
        """The keys of each object that can be read."""
        for index in range(len(self)):
            try:
                yield list(self[index].keys())
            except (AttributeError, DataError):
                continue

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Any:
        path = self.paths[bisect.bisect_right(self._counts, index)]
        with path.open("rb") as file:
            file.seek(self._starts[index])
            text = file.read(self._ends[index] - self._starts[index])
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"sample {index} of {path}: not valid JSON: {error}") from None


_OR_LIST = {".jsonl": "", ".json": ", or one list of objects"}


def _check_encoding(path: Path) -> None:
    with path.open("rb") as file:
        head = file.read(2)
    if head in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) or (len(head) == 2 and head.strip(b"\0") in (b"{", b"[")):
        raise ConfigError(
            f"{path} is UTF-16 or UTF-32, but JSON is read as UTF-8; convert the file, for example by iconv"
        )


def _outer_list(path: Path) -> str:
    """What to change if a .json file is one object, of some lines, that has a list of objects."""
    if path.suffix != ".json" or path.stat().st_size > _MOST_OUTER_BYTES:
        return ""
    try:
        lists = lists_of_objects(json.loads(path.read_bytes()))
    except (ValueError, RecursionError):
        return ""
    return f"; it is one object with the list {lists[0]!r}: write that list alone" if lists else ""


_MOST_OUTER_BYTES = 2**26
"""The most bytes of a file that is decoded as a whole to say what is wrong with it."""


def lists_of_objects(row: Any) -> list[str]:
    """The keys of an object whose values are lists of objects."""
    items = row.items() if isinstance(row, dict) else ()
    return [key for key, value in items if isinstance(value, list) and value and isinstance(value[0], dict)]


def _is_list(path: Path) -> bool:
    """Whether a .json file begins as a list; its objects are otherwise one a line, as in .jsonl."""
    with path.open("rb") as file:
        return path.suffix == ".json" and file.read(4096).removeprefix(_BOM).lstrip().startswith(b"[")


def _line_spans(path: Path) -> Iterator[tuple[int, int]]:
    """Start and end of each line that is not blank."""
    with path.open("rb") as file:
        for line in iter(file.readline, b""):
            if line.strip():
                yield file.tell() - len(line), file.tell()


def _list_spans(path: Path) -> Iterator[tuple[int, int]]:
    """Start and end of each object of the list that a file holds; none of them is decoded.

    Raises: ConfigError: something else stands between two objects, or the list does not end.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        position, end, count = data.find(b"[") + 1, 0, 0
        while (bracket := _BRACKET.search(data, position)) and bracket[0] in b"[{":
            start, position, depth = bracket.start(), bracket.end(), 1
            _check_between(path, count, data[end:start])
            while depth:
                inside = _INSIDE.match(data, position)
                assert inside is not None, "it matches nothing, too"
                position = inside.end()
                character = data[position : position + 1]
                if character not in (b"[", b"{", b"]", b"}"):  # the end, also of a string that is cut off
                    raise _not_closed(path)
                depth += 1 if character in b"[{" else -1
                position += 1
            end, count = position, count + 1
            yield start, end
        if data[end:].removeprefix(_BOM).strip() not in (b"]", b"[]"):
            raise _not_closed(path)


def _not_closed(path: Path) -> ConfigError:
    return ConfigError(f"{path}: its list is not closed at the end of the file, which is cut off or damaged")


def _check_between(path: Path, index: int, text: bytes) -> None:
    """Checks what stands in front of the object of an index: the list's bracket, or a comma."""
    if text.removeprefix(_BOM).strip() != (b"," if index else b"["):
        raise ConfigError(
            f"{path}: {shown(text[:99].decode(errors='replace'))} stands in front of object {index} of its list; write "
            "a list of objects, with one comma between two"
        )


class ParquetRows:
    """Rows of parquet files by index, read by pyarrow a row group at a time; used without `datasets`."""

    def __init__(self, paths: Sequence[str]) -> None:
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
