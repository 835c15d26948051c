"""TOML files that people write, read into tables; what is no TOML is shown with what to write instead. Pure."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mmtrain.errors import ConfigError, one_line

_PLACE = re.compile(r" \(at line (\d+), column \d+\)")
_CURLY = str.maketrans(dict.fromkeys("\u201c\u201d\u2018\u2019"))


def read_toml(path: Path) -> dict[str, Any]:
    """The table of a file in UTF-8, with or without a byte order mark.

    Raises: ConfigError: it is no TOML, with its line and, where that is plain, what to write in place of it.
        OSError: it cannot be read.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
        return tomllib.loads(text)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: not valid TOML: it is no text in UTF-8 ({error.reason}); save it as UTF-8"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {_explained(str(error), text)}") from error
    except (ValueError, RecursionError) as error:  # of a number of 4300 digits, or nesting
        raise ConfigError(f"{path}: not valid TOML: {error}") from error


def _explained(reason: str, text: str) -> str:
    """Why a text is no TOML. Args: reason: as tomllib says it."""
    place = _PLACE.search(reason)
    if place is None:
        return reason
    line = text.split("\n")[int(place[1]) - 1].strip()
    others = () if _is_toml(line) else _others(line)
    better = next((f"; {what}: {other}" for what, other in others if _is_toml(other)), "")
    return f"{reason}: {one_line(line, 120)}{better and one_line(better, 160)}"


def _others(line: str) -> Iterator[tuple[str, str]]:
    """Lines that may have been meant, each after what the given one lacks."""
    key, sign, value = line.partition("=")
    if not sign:
        key, sign, value = line.partition(":")
    key, value = key.strip(), value.partition(" #")[0].strip()
    yield "a value is behind `=`", f"{key} = {value}"
    yield "a boolean is in small letters", f"{key} = {value.lower()}"
    plain = value.strip('"').translate(_CURLY)
    if plain and not plain[0].isdigit() and plain[0] not in "[{+-":
        yield "a string needs quotes", f'{key} = "{plain}"'
        yield "a string with backslashes needs single quotes", f"{key} = '{plain}'"


def _is_toml(line: str) -> bool:
    try:
        return len(tomllib.loads(line)) == 1
    except (ValueError, RecursionError):
        return False
