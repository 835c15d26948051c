"""With how many examples a property is tried: fewer in each daily run than by night, and other ones each day."""

from hypothesis import settings

DAILY, NIGHTLY = 40, 400
"""Of a property that does not say; what the profiles of `tests/conftest.py` give."""


def examples(count: int) -> int:
    """`count`, scaled as the profile scales the 100 examples of a property that does not say: 40 % of it daily."""
    return max(5, count * settings.default.max_examples // 100)
