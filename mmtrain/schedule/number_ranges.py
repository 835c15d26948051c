"""Ranges of the numbers of a planning problem: one table, with units. Pure.

The limits are far above those of any job. Within them no sum of times or bytes overflows, and no table exceeds a
machine's memory, even for a malicious file. docs/planner.md shows the table.
"""

from dataclasses import dataclass

from mmtrain.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The smallest and the largest allowed value of a quantity."""

    what: str
    least: float
    most: float
    unit: str

    def __contains__(self, value: float) -> bool:
        return self.least <= value <= self.most  # so NaN is outside

    @property
    def rule(self) -> str:
        """The rule for a value, as the rest of a sentence about it."""
        return f"it must be between {show(self.least)} and {show(self.most)}{' ' * bool(self.unit)}{self.unit}"

    def check(self, where: str, value: float) -> None:
        """Checks a value. Raises: PlanError: with its name, the value and the range."""
        if value not in self:
            raise PlanError(f"{where} = {value}; {self.rule}")


def show(value: float) -> str:
    """A bound as errors and docs write it."""
    return f"{value:,.0f}" if value < 1e9 else f"{value:g}"


SECONDS = Range(what="time of an action or a transfer, and latency", least=0, most=1e9, unit="s")
BYTES = Range(what="size of activations and outputs, and memory limit", least=0, most=1e18, unit="bytes")
BYTES_PER_S = Range(what="bandwidth", least=1, most=1e21, unit="bytes/s")
RANKS = Range(what="pipeline ranks", least=1, most=1024, unit="ranks")
STAGES = Range(what="stages", least=0, most=10_000, unit="stages")
VISITS = Range(what="stages that the works pass through, added up", least=0, most=100_000, unit="stages")
WORKS_BY_RANKS = Range(what="works times pipeline ranks", least=0, most=1_000_000, unit="")
GROUPS_BY_RANKS = Range(what="passes of works over the ranks, times pipeline ranks", least=0, most=4_000_000, unit="")
OPTIONS = Range(what="options of one list", least=1, most=256, unit="options")
THREADS = Range(what="threads of a search", least=1, most=1024, unit="threads")
FILE_BYTES = Range(what="text of a .json or .json.gz file, unpacked", least=0, most=2**27, unit="bytes")
