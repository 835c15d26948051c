"""Ranges of layers as a user writes them: "12..", "..3", "0..3, 8", "-4..". Pure."""

import re

from mmtrain.config.toml_sections import shown
from mmtrain.errors import ConfigError

_RANGE = re.compile(r"(-?\d{1,6})?(\.\.)?(-?\d{1,6})?")


def check_ranges(where: str, text: str) -> None:
    """Checks the form of ranges. Args: where: the key, for errors. Raises: ConfigError."""
    for part in text.split(","):
        found = _RANGE.fullmatch(part.strip())
        first, dots, last = found.groups() if found else (None, None, None)
        if (first is None and last is None) or (last is not None and dots is None):
            raise ConfigError(
                f"{where} = {shown(text)}: {shown(part.strip())} is no range of layers; write a first and a "
                'last one, as in "0..3, 8, 12..", or count from the end, as in "-4.."'
            )


def layers_of(where: str, text: str, count: int) -> frozenset[int]:
    """The layers that ranges name; of an empty text all.

    Args: where: the key, for errors. count: of all layers, which are numbered from 0; -1 is the last one.
    Raises: ConfigError: a layer that there is not, or a range that ends before it begins.
    """
    if not text:
        return frozenset(range(count))
    chosen: set[int] = set()
    for part in text.split(","):
        found = _RANGE.fullmatch(part.strip())
        assert found is not None
        first, dots, last = found.groups()
        start = int(first) if first is not None else 0
        end = int(last) if last is not None else count - 1 if dots else start
        start, end = (index + count if index < 0 else index for index in (start, end))
        if not 0 <= start <= end < count:
            raise ConfigError(
                f"{where} = {shown(text)}: {shown(part.strip())} names no layers of 0..{count - 1}, which "
                "are those of the module; write ranges within these, the first one before the last"
            )
        chosen.update(range(start, end + 1))
    return frozenset(chosen)
