"""Start and end of the actions of a step on all pipeline ranks of a replica, and the metrics of each module."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.distributed as dist

from mmtrain.launch.launched import local_world_size
from mmtrain.observe.metrics import Metrics
from mmtrain.parallel.mesh import Mesh
from mmtrain.parallel.runtime import StepOutcome
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.timeline import Timeline
from mmtrain.schedule.view.waits import Floats, Waits, waits
from mmtrain.spec.layer import Flops


@dataclass(frozen=True, kw_only=True)
class StepTiming:
    """The actions of one step on all pipeline ranks; equal on all of them.

    Seconds on a clock shared by the ranks. Ranks of several machines have no such clock: there all programs count as
    started at the same time, which is exact except for the different ends of the step before.
    """

    plan: Plan
    starts_s: tuple[Floats, ...]
    """[pp_rank] -> of each action of its order."""
    ends_s: tuple[Floats, ...]
    spans_s: tuple[float, ...]
    """[pp_rank] -> seconds of its whole program, with gathers and reductions of parameters."""

    @classmethod
    def gathered(cls, mesh: Mesh, plan: Plan, outcome: StepOutcome) -> "StepTiming":
        """The timing of a step. Collective over pp: one gather. Args: outcome: of `plan` on this rank."""
        counts = [len(order) for order in plan.orders]
        assert tuple(a for a, _, _ in outcome.rows) == plan.orders[mesh.pp_rank], "the runtime ran another order"
        local = torch.zeros(2 + 2 * max(counts), dtype=torch.float64)
        times = [*outcome.span, *(s for _, s, _ in outcome.rows), *(e for _, _, e in outcome.rows)]
        local[: len(times)] = torch.tensor(times, dtype=torch.float64)
        gathered = [local]
        if mesh.layout.pp > 1:
            gathered = [torch.empty_like(local) for _ in counts]
            dist.all_gather(gathered, local, group=mesh.pp_group)
        own_clocks = local_world_size(mesh.layout.world_size) < mesh.layout.world_size
        starts, ends, spans = [], [], []
        for count, row in zip(counts, gathered, strict=True):
            values = row.numpy()
            zero = values[0] if own_clocks else 0.0
            starts.append(values[2 : 2 + count] - zero)
            ends.append(values[2 + count : 2 + 2 * count] - zero)
            spans.append(float(values[1] - values[0]))
        return cls(plan=plan, starts_s=tuple(starts), ends_s=tuple(ends), spans_s=tuple(spans))

    @cached_property
    def waits(self) -> Waits:
        """What idle ranks waited for."""
        return waits(self.plan, self.starts_s, self.ends_s)

    @property
    def makespan_s(self) -> float:
        """Seconds from the first start of an action to the last end."""
        return float(max(row.max() for row in self.ends_s if row.size) - min(r.min() for r in self.starts_s if r.size))

    @property
    def bubble(self) -> float:
        """The fraction of rank-seconds without compute while the longest program runs."""
        busy = sum(float((end - start).sum()) for start, end in zip(self.starts_s, self.ends_s, strict=True))
        return 1 - busy / self._available_s

    @property
    def _available_s(self) -> float:
        return max(self.spans_s) * len(self.spans_s)

    def record(self, metrics: Metrics, flops: Mapping[str, Flops], peak_flops: float, planned: Timeline) -> None:
        """Records the pipeline's times, and of each module the time of its actions and the idle time due to them.

        Args:
            flops: module -> model FLOPs of the step on this replica.
            peak_flops: of all devices of a pipeline rank (cp x tp) together; NaN: not known.
            planned: the simulated timeline.
        """
        modules = self.plan.graph.modules
        bubbles: dict[str, float] = {}
        total: dict[str, float] = {}
        for module, waited in zip(modules, self.waits.module_s(len(modules)), strict=True):
            bubbles[module.label] = bubbles.get(module.label, 0.0) + waited / self._available_s
            of_module = flops[module.name].total if module.name in flops else 0.0
            total[module.label] = total.get(module.label, 0.0) + of_module
        metrics.record("bubble", self.bubble)
        metrics.record("bubble_other", self.bubble - sum(bubbles.values()))
        metrics.record("program_s", max(self.spans_s))
        metrics.record("makespan_s", self.makespan_s)
        metrics.record("planned_makespan_s", planned.makespan_s)
        metrics.record("peak_s", sum(f.total for f in flops.values()) / (peak_flops * len(self.spans_s)))
        timeline, planned_spread_s = self.timeline(), planned.spread_s
        seconds, spread_s = timeline.microbatch_s, timeline.spread_s
        for name, bubble in bubbles.items():
            compute_s = sum(seconds.get(name, ()))
            per_s = total[name] / compute_s if compute_s > 0 else math.nan
            metrics.record("compute_s_{}", compute_s, name)
            metrics.record("tflops_{}", per_s / 1e12, name)
            metrics.record("mfu_{}", per_s / peak_flops, name)
            metrics.record("bubble_{}", bubble, name)
            metrics.record("spread_s_{}", spread_s.get(name, math.nan), name)
            metrics.record("planned_spread_s_{}", planned_spread_s.get(name, math.nan), name)

    def timeline(self) -> Timeline:
        """The timeline for drawings."""
        rows = [
            (rank, *row)
            for rank, columns in enumerate(zip(self.plan.orders, self.starts_s, self.ends_s, strict=True))
            for row in zip(columns[0], columns[1].tolist(), columns[2].tolist(), strict=True)
        ]
        return Timeline.from_rows(self.plan.graph, rows)


def planned_timing(plan: Plan, timeline: Timeline) -> StepTiming:
    """A simulated timeline as a `StepTiming`."""
    starts: list[list[float]] = [[] for _ in plan.orders]
    ends: list[list[float]] = [[] for _ in plan.orders]
    times = {row.action: (row.start_s, row.end_s) for row in timeline.rows}
    for rank, order in enumerate(plan.orders):
        for action in order:
            start, end = times[action]
            starts[rank].append(start)
            ends[rank].append(end)
    return StepTiming(
        plan=plan,
        starts_s=tuple(np.array(row) for row in starts),
        ends_s=tuple(np.array(row) for row in ends),
        spans_s=(timeline.makespan_s,) * len(plan.orders),
    )
