"""Amounts of memory as a user writes them: bytes with a unit, or a part of a device. Pure."""

import math
import re
from dataclasses import dataclass

from mmtrain.errors import ConfigError

GIB = 2.0**30
"""Bytes."""

_UNITS = {
    "B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": GIB, "TiB": 2.0**40,
}  # fmt: skip
_LONGEST = 20
"""Characters of an amount, so that its number of bytes is finite."""
_FORM = re.compile(rf"(?P<number>\d+(?:\.\d+)?)(?P<unit>%|{'|'.join(_UNITS)})")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAmount:
    """Some bytes, or a part of a device's memory: one of the two."""

    text: str
    """The amount as it was written."""
    num_bytes: float | None = None
    fraction: float | None = None

    @classmethod
    def parse(cls, key: str, text: str) -> "MemoryAmount":
        """The amount that a text such as "72GiB", "500MB" or "90%" stands for.

        Args: key: how errors call it.
        Raises: ConfigError: another form, nothing, or more than all of a device.
        """
        match = _FORM.fullmatch(text) if len(text) <= _LONGEST else None
        if not match:
            raise ConfigError(
                f"{key} = {text[:40]!r} is not an amount of memory; write a number and a unit without a space, as in "
                f'"72GiB" or "500MB" (units: {", ".join(_UNITS)}), or a part of the device, as in "90%"'
            )
        number = float(match["number"])
        if number <= 0:
            raise ConfigError(f'{key} = "{text}"; it must be above 0, or empty for no limit')
        if match["unit"] != "%":
            return cls(text=text, num_bytes=number * _UNITS[match["unit"]])
        if number > 100:
            raise ConfigError(f'{key} = "{text}" is more than the device has; it is at most 100%')
        return cls(text=text, fraction=number / 100)

    def bytes_of(self, device_bytes: float | None) -> float | None:
        """The amount in bytes. Args: device_bytes: memory of the device. None for either: not known."""
        if self.fraction is None:
            return self.num_bytes
        return None if device_bytes is None else self.fraction * device_bytes


def show_bytes(num_bytes: float) -> str:
    """Bytes with three significant digits in the unit that suits them, as "30.2 MiB"."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(len(units) - 1, int(math.log2(max(1.0, 1.0005 * num_bytes)) // 10))  # 1023.9 KiB is shown as 1 MiB
    return f"{_three_digits(num_bytes / 2.0 ** (10 * power))} {units[power]}"


def show_gib(num_bytes: float) -> str:
    """Bytes in GiB with three significant digits, without an exponent and without the unit."""
    return _three_digits(num_bytes / GIB)


def _three_digits(value: float) -> str:
    if abs(value) < 5e-7:
        return "0"
    exponent = int(f"{value:.2e}".split("e")[1])
    return f"{value:.{max(0, 2 - exponent)}f}"
