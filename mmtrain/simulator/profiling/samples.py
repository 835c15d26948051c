"""The measurements of one process, the slowest of several, and which times count. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from mmtrain.costs.cost_model import HostCopy
from mmtrain.schedule.action import Kind
from mmtrain.schedule.passes.lower import Program
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.simulator.profiling.pauses import Rows
from mmtrain.simulator.profiling.probing import ProbeCut

Key = TypeVar("Key")

ActionKey = tuple[int, int, Kind]
"""The stage, work and kind of an action."""

_SPEED_TOLERANCE = 0.15
"""Times count if the machine's speed was at most this fraction from its typical one. A process on the other hyper-
thread of a core slows it by 20 to 60 %."""

_LEAST = 2
"""Number of times of one action that always count: those nearest to the typical speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """One step of one trainer."""

    job: ProbeCut | None
    """How the layers were cut; None: the small job."""
    rows: Mapping[ActionKey, float]
    """Seconds of each action."""
    pauses: Mapping[ActionKey, float]
    """Seconds from the end of the action before it."""
    speeds_s: Mapping[ActionKey, float]
    """Seconds of a fixed piece of work next to each action, which measure the machine's speed; 0: not measured."""
    outside_s: float
    """Seconds of the step outside of its program."""
    outside_speed_s: float
    """Seconds of the fixed piece of work at that time."""


@dataclass(kw_only=True)
class ProcessSamples:
    """The measurements of one process."""

    steps: list[StepSample] = field(default_factory=list)
    held: dict[tuple[int, int], float] = field(default_factory=dict)
    """The bytes that autograd kept of the forward of each (stage, work), with one stage for each layer."""
    trips: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Bytes -> seconds of a message in one direction."""
    runs: list[tuple[PlanningProblem, Program, tuple[Rows, ...]]] = field(default_factory=list)
    """The programs of two pipeline ranks, and when their actions ran."""
    spans: list[tuple[float, float]] = field(default_factory=list)
    """The ends of the program and of the step on one of two pipeline ranks."""
    host_copy: HostCopy | None = None
    """Rate between the device and host memory, measured while nothing else runs."""


def slowest(ranks: Sequence[ProcessSamples]) -> ProcessSamples:
    """The joint measurements of ranks that divide works: the largest value of each, for which the others wait."""
    steps = []
    for same in zip(*(samples.steps for samples in ranks), strict=True):
        steps.append(
            StepSample(
                job=same[0].job,
                rows=_largest([step.rows for step in same]),
                pauses=_largest([step.pauses for step in same]),
                speeds_s=_largest([step.speeds_s for step in same]),
                outside_s=max(step.outside_s for step in same),
                outside_speed_s=max(step.outside_speed_s for step in same),
            )
        )
    return ProcessSamples(
        steps=steps, held=_largest([samples.held for samples in ranks]), host_copy=slowest_copy(ranks)
    )


def slowest_copy(ranks: Sequence[ProcessSamples]) -> HostCopy | None:
    copies = [samples.host_copy for samples in ranks if samples.host_copy is not None]
    return min(copies, key=lambda copy: copy.bytes_per_s, default=None)


def _largest(tables: Sequence[Mapping[Key, float]]) -> dict[Key, float]:
    return {key: max(table[key] for table in tables) for key in tables[0]}


class SpeedFilter:
    """Selects the times that were measured while the machine had about its typical speed.

    The speed of a shared machine changes by tens of per cent, for milliseconds to minutes. A profile describes one
    speed, so that numbers of different trainers are comparable: the median, at which ranks run that compute side by
    side. Its best speed would be that of a rank whose neighbours wait.
    """

    def __init__(self, steps: Sequence[StepSample]) -> None:
        speeds = [speed for step in steps for speed in step.speeds_s.values()] or [0.0]
        self._typical_s = float(np.median(speeds))
        self.speed_s = float(np.mean([speed for speed in speeds if self.counts(speed)]))
        """Mean seconds of the fixed piece of work next to times that count."""

    def counts(self, speed_s: float) -> bool:
        """Whether a time counts. Args: speed_s: seconds of the fixed piece of work next to it."""
        return self._distance_s(speed_s) <= _SPEED_TOLERANCE * self._typical_s

    def median(self, times: Iterable[tuple[float, float]]) -> float:
        """The median seconds of the times that count, or of the two nearest to the typical speed if fewer count.

        Args: times: (seconds of the fixed piece of work, measured seconds).
        """
        ordered = sorted(times, key=lambda time: self._distance_s(time[0]))
        return float(np.median([s for i, (speed, s) in enumerate(ordered) if i < _LEAST or self.counts(speed)]))

    def _distance_s(self, speed_s: float) -> float:
        return abs(speed_s - self._typical_s)


def typical(values: Sequence[float]) -> float:
    """The first quartile, which is robust to disturbances: these only add time."""
    return float(np.quantile(values, 0.25))
