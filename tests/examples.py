"""With how many examples a property is tried: fewer in each daily run than by night, and other ones each day."""

from hypothesis import settings

DAILY, NIGHTLY = 40, 400
"""Of a property that does not say; what the profiles of `tests/conftest.py` give."""


def examples(count: int) -> int:
    """The number for a property that needs `count` by hand, where others need 100."""
    return max(5, count * settings.default.max_examples // 100)
