"""Strict JSON: unknown keys, duplicate keys and wrong types are errors with their dotted path."""

import gzip
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from reprlib import Repr
from typing import Any

from mmtrain.errors import PlanError, for_terminal
from mmtrain.schedule.number_ranges import FILE_BYTES

_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 200


def show(value: Any) -> str:
    """A value from a file as errors show it: in one line, abbreviated in the middle."""
    return _SHORT.repr(value)


def read_text(path: str | Path) -> str:
    """The text of a .json or .json.gz file.

    Raises: PlanError: no such file, another ending, too long, or not UTF-8 text.
    """
    file = json_path(path)
    if not file.is_file():
        raise PlanError(f"{file}: {'is a folder' if file.is_dir() else 'there is no such file'}")
    most = int(FILE_BYTES.most)
    try:
        with (gzip.open if file.suffix == ".gz" else open)(file, "rb") as stream:
            data = stream.read(most + 1)
        if len(data) > most:
            raise PlanError(
                f"{file}: its text, unpacked, has more than {most} bytes, the most that is read; shorten it"
            )
        return data.decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise PlanError(f"{file}: cannot be read: {error}") from error


def write_text(path: str | Path, text: str) -> None:
    """Writes a .json or .json.gz file (without a time stamp: equal texts give equal bytes)."""
    file = json_path(path)
    data = text.encode()
    file.write_bytes(gzip.compress(data, mtime=0) if file.suffix == ".gz" else data)


def json_path(path: str | Path) -> Path:
    """The path of a .json or .json.gz file. Raises: PlanError: another ending."""
    file = Path(path)
    if not file.name.endswith((".json", ".json.gz")):
        raise PlanError(f"{file}: the name must end in .json or .json.gz")
    return file


def loads(text: str) -> Any:
    """The value of a JSON text. Raises: PlanError: the text is not JSON, or an object has a key twice."""
    try:
        return json.loads(text, object_pairs_hook=_refuse_doubled_keys)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"not valid JSON: {error}") from error


def _refuse_doubled_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [key for key, _ in pairs]
        doubled = next(key for key in names if names.count(key) > 1)
        raise PlanError(f"the key {doubled!r} occurs twice in one object; keep one")
    return table


def fields(table: Any, where: str, required: Sequence[str], optional: Sequence[str] = ()) -> None:
    """Checks that a value is an object with exactly these keys. Raises: PlanError: with the dotted path."""
    if not isinstance(table, Mapping):
        raise PlanError(f"{where or 'the file'} must be an object, not {_json_type(table)}")
    prefix = f"{where}." if where else ""
    for key in table:
        if key not in required and key not in optional:
            name = key if key.isidentifier() and key.isascii() else repr(key)
            raise PlanError(f"{prefix}{name} is unknown; known are {', '.join((*required, *optional))}")
    for key in required:
        if key not in table:
            raise PlanError(f"{prefix}{key} is missing")


def items(value: Any, where: str) -> Sequence[Any]:
    """The value, if it is an array. Raises: PlanError: with the dotted path."""
    if not isinstance(value, (list, tuple)):
        raise PlanError(f"{where} must be an array, not {_json_type(value)}")
    return value


def integer(value: Any, where: str) -> int:
    """The value, if it is an integer. Raises: PlanError: with the dotted path."""
    if type(value) is not int:
        raise PlanError(f"{where} = {show(value)} must be an integer, not {_json_type(value)}")
    if not -(2**63) <= value < 2**63:
        raise PlanError(f"{where} = {show(value)} must be an integer of 64 bits")
    return value


def integers(value: Any, where: str) -> list[int]:
    """The values of an array of integers. Raises: PlanError: with the dotted path."""
    return [integer(v, f"{where}[{i}]") for i, v in enumerate(items(value, where))]


def number(value: Any, where: str) -> float:
    """The value as a float, if it is a number. Raises: PlanError: with the dotted path."""
    if type(value) not in (int, float):
        raise PlanError(f"{where} = {show(value)} must be a number, not {_json_type(value)}")
    try:
        return float(value)
    except OverflowError as error:
        raise PlanError(f"{where} is too large for a float") from error


def amount(value: Any, where: str) -> float:
    """The value as a float, if it is a finite number of at least 0. Raises: PlanError: with the dotted path."""
    found = number(value, where)
    if not 0 <= found < math.inf:
        raise PlanError(f"{where} = {show(value)} must be a finite number, and not negative")
    return found


def string(value: Any, where: str) -> str:
    """The value, if it is a string. Raises: PlanError: with the dotted path."""
    if not isinstance(value, str):
        raise PlanError(f"{where} = {show(value)} must be a string, not {_json_type(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise PlanError(f"{where} = {show(value)} is no text: {error.reason}") from error
    if value != for_terminal(value):
        raise PlanError(f"{where} = {show(value)} has control characters; remove them")
    return value


def _json_type(value: Any) -> str:
    names = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", dict: "an object"}
    return "null" if value is None else names.get(type(value), "an array")
