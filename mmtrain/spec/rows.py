"""The division of an activation's rows among ranks: the arithmetic that plans and modules share. Pure."""

from typing import Any, Protocol


def padded(rows: int, degree: int) -> int:
    """The least multiple of `degree` that is not below `rows`."""
    return share_of(rows, degree) * degree


def share_of(rows: int, degree: int) -> int:
    """Rows of each of `degree` ranks that divide `rows`, rounded up."""
    return -(-rows // degree)


def part_of(units: int, part: int, parts: int) -> tuple[int, int]:
    """[lo, hi) of the `part`-th of `parts` consecutive parts of `units` units, as equal as possible."""
    return units * part // parts, units * (part + 1) // parts


class RowSharding(Protocol):
    """The division of rows between two blocks over tensor-parallel ranks (sequence parallelism)."""

    degree: int

    def shard(self, x: Any) -> Any:
        """[..., R, D], equal on all ranks -> this rank's [..., ceil(R / degree), D], padded with zeros after all R;
        gradients are gathered."""

    def gather(self, x: Any) -> Any:
        """[..., r, D] of each rank -> [..., degree x r, D] on all ranks, padding included; all later operations must be
        equal on all ranks."""


class WholeRows:
    """The division for one rank, which has all rows."""

    degree = 1

    def shard(self, x: Any) -> Any:
        """The rows x as they are."""
        return x

    def gather(self, x: Any) -> Any:
        """The rows x as they are."""
        return x
