"""The tiny models of `tests/models/`."""

from tests.models.conftest import tiny

__all__ = ["tiny"]
