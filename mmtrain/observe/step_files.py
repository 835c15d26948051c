"""Files about one step: its measured and planned timelines as a trace, an image and data."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mmtrain.launch.atomic_files import write_whole
from mmtrain.observe.step_timing import StepTiming, planned_timing
from mmtrain.planner.iteration import IterationPlan
from mmtrain.planner.job import Job
from mmtrain.schedule.action import COMPUTE, Action, Kind
from mmtrain.schedule.timeline import Timeline
from mmtrain.schedule.view.draw import png, svg, trace_events
from mmtrain.spec.layer import Flops


@dataclass(frozen=True, kw_only=True)
class StepFiles:
    """The files of a step, on replica 0."""

    step: int
    job: Job
    plan: IterationPlan
    timing: StepTiming

    @cached_property
    def timelines(self) -> dict[str, Timeline]:
        """The measured and the planned timeline, by name."""
        return {"measured": self.timing.timeline(), "planned": self.plan.result.timeline}

    def write_trace(self, path: Path) -> None:
        """Writes a Chrome / Perfetto trace with both timelines and arrows for results needed by other ranks."""
        graph = self.plan.problem.graph
        details = {entry: self._details(entry) for order in self.timing.plan.orders for entry in order}
        write_whole(path, json.dumps(trace_events(self.timelines, graph=graph, details=details)))

    def write_timeline(self, path: Path) -> None:
        """Writes PATH.svg, both timelines at one scale, and PATH.json, from which `mmtrain report` draws them.

        The JSON object has `modules` (names), `stages` ([module, rank, first layer, last layer]), and for each action
        of all ranks' orders, one after the other, a row of `actions`: [stage, kind, microbatch, sub-microbatch,
        measured start, measured end, planned start, planned end, rows, FLOPs, part, parts]. A block has a row for each
        of its `parts`, with the times of the block. `deferred` names the works that the next microbatch reads: [module,
        microbatch, sub-microbatch]. `waits` has of both timelines the idle stretches: [rank, start,
        end, action that was waited for, or -1]. Seconds, each from its own first start.
        """
        write_whole(path.with_suffix(".svg"), svg(self.timelines))
        write_whole(path.with_suffix(".json"), json.dumps(self._record(), separators=(",", ":")))

    def image(self) -> bytes:
        """Both timelines as a PNG file."""
        return png(self.timelines, width=1200, scale=1)

    def _record(self) -> dict[str, Any]:
        graph = self.plan.problem.graph
        planned = planned_timing(self.timing.plan, self.timelines["planned"])
        both = {"measured": self.timing, "planned": planned}
        zeros = {name: self.timelines[name].start_s for name in both}
        labels = list(dict.fromkeys(module.label for module in graph.modules))
        label_of = [labels.index(module.label) for module in graph.modules]
        actions: list[list[Any]] = []
        first_rows: list[int] = []
        for rank, order in enumerate(self.timing.plan.orders):
            for index, entry in enumerate(order):
                first_rows.append(len(actions))
                times = [
                    round(float(times[rank][index]) - zeros[name], 7)
                    for name, timing in both.items()
                    for times in (timing.starts_s, timing.ends_s)
                ]
                for number, action in enumerate(entry.parts):
                    work = self._works[action]
                    actions.append(
                        [
                            action.stage, action.kind, action.microbatch, action.sub_microbatch, *times,
                            self.plan.batching.sizes[work].rows, round(self._flops(action)), number, len(entry.parts),
                        ]
                    )  # fmt: skip
        return {
            "step": self.step,
            "modules": labels,
            "num_ranks": graph.num_ranks,
            "stages": [
                [label_of[graph.module_of[stage.index]], stage.pp_rank, stage.layers[0], stage.layers[1] - 1]
                for stage in self.job.partition.stages
            ],
            "actions": actions,
            "deferred": [
                [label_of[work.module], work.microbatch, work.sub_microbatch]
                for work in (graph.works[index] for index in sorted(graph.deferred))
            ],
            "waits": {name: _waits(timing, zeros[name], first_rows) for name, timing in both.items()},
        }

    @cached_property
    def _works(self) -> Mapping[Action, int]:
        return {action: work for parts in self.timing.plan.parts for _, action, work in parts}

    def _flops(self, action: Action) -> float:
        """Model FLOPs of an action."""
        stage, size = self.job.partition.stages[action.stage], self.plan.batching.sizes[self._works[action]]
        return flops_of(action.kind, self.job.spec.flops(stage.module, size, range(*stage.layers)))

    def _details(self, entry: Action) -> dict[str, Any]:
        """The details of an entry of an order in a trace; of a block, those of each part under its name."""
        if len(entry.parts) > 1:
            return {str(part): self._details(part) for part in entry.parts}
        (action,) = entry.parts
        stage, work = self.job.partition.stages[action.stage], self._works[action]
        size = self.plan.batching.sizes[work]
        return {
            "module": stage.module,
            "layers": f"{stage.layers[0]}-{stage.layers[1] - 1}",
            "microbatch": action.microbatch,
            "sub_microbatch": action.sub_microbatch,
            "work": work,
            "rows": size.rows,
            "model_flops": self._flops(action),
            "memory": self.timing.plan.option(self.plan.problem, action.stage, work).name,
        }


def flops_of(kind: Kind, flops: Flops) -> float:
    """FLOPs of a compute action of a stage and work; 0 of an instruction."""
    if kind not in COMPUTE:
        return 0.0
    if kind is Kind.F:
        return flops.forward
    if kind is Kind.I:
        return flops.backward_input
    if kind is Kind.W:
        return flops.backward_weight
    return flops.backward_input + flops.backward_weight


def _waits(timing: StepTiming, zero: float, first_rows: list[int]) -> list[list[float]]:
    """Args: first_rows: entry of all orders -> its first row of actions."""
    waits = timing.waits
    columns = (waits.rank, waits.start_s - zero, waits.end_s - zero, waits.action)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [
        [rank, round(start, 7), round(end, 7), first_rows[entry] if entry >= 0 else entry]
        for rank, start, end, entry in rows
    ]
