"""How the rows of an activation are divided among ranks: the arithmetic that plans and modules share. Pure."""

from typing import Any, Protocol


def padded(rows: int, degree: int) -> int:
    """The least multiple of `degree` that is not below `rows`."""
    return share_of(rows, degree) * degree


def share_of(rows: int, degree: int) -> int:
    """Rows of each of `degree` ranks that divide `rows`, filled up where they do not come out even."""
    return -(-rows // degree)


def part_of(units: int, part: int, parts: int) -> tuple[int, int]:
    """[lo, hi) of the `part`-th of `parts` consecutive parts of `units` units, as equal as possible."""
    return units * part // parts, units * (part + 1) // parts


class RowSharding(Protocol):
    """How tensor-parallel ranks divide the rows between two blocks (sequence parallelism)."""

    degree: int

    def shard(self, x: Any) -> Any:
        """[..., R, D], equal on all ranks -> this rank's [..., ceil(R / degree), D], zeros behind all R; gradients are
        gathered."""

    def gather(self, x: Any) -> Any:
        """[..., r, D] of each rank -> [..., degree x r, D] on all, with what filled up the rows; everything after must
        be equal on all ranks."""


class WholeRows:
    """One rank has all rows."""

    degree = 1

    def shard(self, x: Any) -> Any:
        """x."""
        return x

    def gather(self, x: Any) -> Any:
        """x."""
        return x
