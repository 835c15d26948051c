"""Bounds of single values of a section, for its `__post_init__`: they refuse, and change nothing."""

import math
from typing import Any

from mmtrain.errors import ConfigError

MOST_INTEGER, MOST_FLOAT = 2**31 - 1, 1e21
"""What no count or size, and no rate, is above, where nothing less is said."""


def at_least(section: str, values: Any, **bounds: float) -> None:
    """Refuses fields of a section that are below a bound, infinite, or larger than any job needs."""
    for name, bound in bounds.items():
        value = getattr(values, name)
        if not bound <= value < math.inf:
            raise ConfigError(f"{section}.{name} = {value}; it must be at least {bound} and finite")
        at_most(section, values, **{name: MOST_INTEGER if isinstance(value, int) else MOST_FLOAT})


def at_most(section: str, values: Any, **bounds: float) -> None:
    """Refuses fields of a section that no job needs so large: libraries would fail on them in ways of their own."""
    for name, bound in bounds.items():
        value = getattr(values, name)
        if not value <= bound:
            raise ConfigError(f"{section}.{name} = {value}; it must be at most {bound}")


def not_empty(section: str, values: Any, *names: str) -> None:
    """Refuses fields of a section that are empty."""
    for name in names:
        if not getattr(values, name):
            raise ConfigError(f"{section}.{name} is empty; give it a name, or leave the key out")
