"""What the values in the file of an image or video processor must be. Pure."""

from collections.abc import Callable, Mapping
from typing import Any

from mmtrain.config.bounds import MOST_INTEGER
from mmtrain.errors import ConfigError, shown


def _is_number(value: Any, least: float) -> bool:
    return type(value) in (int, float) and least <= value <= 1e6


def _is_colour(value: Any, least: float) -> bool:
    """Whether a value is three numbers, for the channels. Args: least: of each."""
    return isinstance(value, list | tuple) and len(value) == 3 and all(_is_number(item, least) for item in value)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MOST_INTEGER


def _is_size(value: Any) -> bool:
    sides = value.values() if isinstance(value, Mapping) else [value]
    return all(side is None or _is_count(side) for side in sides)


_RULES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "image_mean": (lambda value: _is_colour(value, -1e6), "three numbers"),
    "image_std": (lambda value: _is_colour(value, 1e-6), "three numbers above 0"),
    "rescale_factor": (lambda value: _is_number(value, 1e-9), "a number above 0"),
    "resample": (lambda value: type(value) is int and 0 <= value <= 5, "the number of a filter of Pillow, 0 to 5"),
    **dict.fromkeys(("size", "crop_size"), (_is_size, "a number of pixels, or one for each side")),
    **dict.fromkeys(
        ("min_pixels", "max_pixels", "max_num_patches", "patch_size"), (_is_count, "an integer of at least 0")
    ),
}
"""Key -> check of its value, unless it is null, and what it must be."""


def checked_values(where: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a processor, without null ones: these stand for defaults.

    Args: where: the key that names the processor, and its folder, for errors.
    Raises: ConfigError: a value is of another type, or so that no image could be made of it.
    """
    given = {key: value for key, value in config.items() if value is not None}
    for key, (fits, expected) in _RULES.items():
        if key in given and not fits(given[key]):
            raise ConfigError(f"{where}: {key} = {shown(given[key])}; it must be {expected}")
    return given
