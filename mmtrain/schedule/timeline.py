"""A timeline: when each compute action ran, simulated or measured."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from statistics import pstdev
from typing import NamedTuple

from mmtrain.schedule.action import NOT_COMPUTE, Action
from mmtrain.schedule.graph import WorkGraph


class Row(NamedTuple):
    """One action's time on its rank."""

    rank: int
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """The compute actions of one iteration with start and end, seconds from a common zero."""

    num_ranks: int
    stage_modules: tuple[str, ...]
    """Label of the module of each stage, for drawings."""
    rows: tuple[Row, ...]
    """Sorted by rank, then by start."""
    memory: tuple[tuple[tuple[float, float], ...], ...] = ()
    """[rank] -> (seconds, activation bytes held from then on); empty: not recorded."""
    peak_bytes: tuple[float, ...] = ()
    """Peak of activation bytes on each rank; empty: not recorded."""
    deferred: frozenset[tuple[str, int, int]] = frozenset()
    """Module, microbatch and sub-microbatch of the works that feed another microbatch."""

    @classmethod
    def from_rows(
        cls,
        graph: WorkGraph,
        rows: Iterable[tuple[int, Action, float, float]],
        *,
        memory: tuple[tuple[tuple[float, float], ...], ...] = (),
        peak_bytes: tuple[float, ...] = (),
    ) -> "Timeline":
        """The timeline of rows (rank, action, start_s, end_s) in any order, without transfers."""
        names = tuple(graph.modules[module].label for module in graph.module_of)
        kept = [Row(*row) for row in rows if row[1].kind not in NOT_COMPUTE]
        kept.sort(key=lambda row: (row.rank, row.start_s, row.end_s))
        works = [graph.works[index] for index in graph.deferred]
        deferred = frozenset((graph.modules[w.module].label, w.microbatch, w.sub_microbatch) for w in works)
        return cls(graph.num_ranks, names, tuple(kept), memory, peak_bytes, deferred)

    def is_deferred(self, action: Action) -> bool:
        """Whether an action is of a work that feeds another microbatch."""
        module = self.stage_modules[action.stage]
        return (module, action.microbatch, action.sub_microbatch) in self.deferred

    @cached_property
    def start_s(self) -> float:
        """The start of the first action."""
        return min((row.start_s for row in self.rows), default=0.0)

    @cached_property
    def end_s(self) -> float:
        """The end of the last action."""
        return max((row.end_s for row in self.rows), default=0.0)

    @property
    def makespan_s(self) -> float:
        """Seconds from the first start to the last end."""
        return self.end_s - self.start_s

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds that each rank computes."""
        busy = [0.0] * self.num_ranks
        for row in self.rows:
            busy[row.rank] += row.end_s - row.start_s
        return tuple(busy)

    @cached_property
    def microbatch_s(self) -> dict[str, tuple[float, ...]]:
        """Module -> [microbatch] -> seconds of its actions on all ranks; 0 where it has no work."""
        count = 1 + max((part.microbatch for row in self.rows for part in row.action.parts), default=-1)
        seconds = {module: [0.0] * count for module in self.stage_modules}
        for row in self.rows:
            parts = row.action.parts  # of a block both have the same share
            for part in parts:
                seconds[self.stage_modules[part.stage]][part.microbatch] += (row.end_s - row.start_s) / len(parts)
        return {module: tuple(of) for module, of in seconds.items()}

    @property
    def spread_s(self) -> dict[str, float]:
        """Module -> standard deviation of the seconds of its actions for one microbatch."""
        return {module: pstdev(of) for module, of in self.microbatch_s.items() if of}

    @cached_property
    def span_s(self) -> tuple[float, ...]:
        """Seconds from each rank's first start to its last end; 0 if it ran nothing."""
        rows = [self.of_rank(rank) for rank in range(self.num_ranks)]
        return tuple(max(row.end_s for row in local) - local[0].start_s if local else 0.0 for local in rows)

    @property
    def bubble(self) -> float:
        """The fraction of rank-seconds without compute: 1 - busy / (ranks x makespan); 0 if nothing ran."""
        available = self.num_ranks * self.makespan_s
        return 1 - sum(self.busy_s) / available if available else 0.0

    def of_rank(self, rank: int) -> tuple[Row, ...]:
        """The rows of one rank, by start."""
        return tuple(row for row in self.rows if row.rank == rank)
