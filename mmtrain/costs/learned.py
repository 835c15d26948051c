"""Costs that follow what steps took: factors of the seconds of a module's actions on each pipeline rank. Pure.

A factor is learned from the seconds of all actions of one kind that a rank ran for a module in a step, over those that
the cost model says; blocks of two actions teach nothing. Transfers, copies and the optimizer are as modelled.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mmtrain.schedule.action import Action, Kind
from mmtrain.schedule.graph import WorkGraph
from mmtrain.schedule.option import Option
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import PlanningProblem

PARTS = (Kind.F, Kind.I, Kind.W)
"""What has a factor; a whole backward consists of the last two."""
WEIGHT = 0.3
"""The weight of a step in the mean of the logarithms of its ratio and of what was learned before."""
MOST_CHANGE = 2.0
"""A step counts as if its seconds were at most so many times the learned ones, and at least that part."""

COST_ERRORS = ("cost_error", "cost_error_unlearned")
"""Metrics of `mean_error`."""

Floats = NDArray[np.float64]


class Jump(NamedTuple):
    """Seconds that were too far from the learned ones to be believed at once."""

    module: str
    pp_rank: int
    kind: Kind
    ratio: float
    """The ratio of measured to learned seconds."""

    def __str__(self) -> str:
        """The jump as the log writes it."""
        return f"{self.kind} of {self.module} on pp_rank {self.pp_rank} took {self.ratio:.3g} times as long"


@dataclass(frozen=True, eq=False)
class LearnedCosts:
    """The factors of a run's steps; equal on all ranks of the job."""

    modules: tuple[str, ...]
    num_ranks: int
    """Pipeline ranks."""
    history: tuple[tuple[int, Floats], ...] = ()
    """(first step that is planned with them, [module, pp_rank, part] factors, NaN: never seen), ascending; the last two
    are kept, since the plan of a step is begun before the one before it has ended."""

    @classmethod
    def of(cls, graph: WorkGraph | Any) -> "LearnedCosts":
        """Nothing learned yet. Args: graph: or a partition, with `modules` and `num_ranks`."""
        return cls(tuple(module.name for module in graph.modules), graph.num_ranks)

    def at(self, step: int) -> Floats:
        """[module, pp_rank, part]: the factors with which a step is planned; 1 where nothing is known."""
        known = [factors for first_step, factors in self.history if first_step <= step]
        return np.nan_to_num(known[-1], nan=1.0) if known else np.ones(self._shape)

    def after(self, step: int, seconds: Floats) -> "tuple[LearnedCosts, list[Jump]]":
        """The costs after a step, for the steps from the next but one on, and the jumps that were not believed.

        Args: seconds: of all ranks together, as of `step_seconds`.
        """
        newest = self.history[-1][1] if self.history else np.full(self._shape, math.nan)
        measured, modelled = seconds[..., 0], seconds[..., 1]
        seen = (measured > 0) & (modelled > 0)
        ratio = np.where(seen, measured, 1.0) / np.where(seen, modelled, 1.0)
        change = np.log(ratio / np.where(np.isnan(newest), ratio, newest))
        most = math.log(MOST_CHANGE)
        moved = np.where(np.isnan(newest), ratio, newest) * np.exp(WEIGHT * np.clip(change, -most, most))
        jumps = [
            Jump(self.modules[m], int(rank), PARTS[part], math.exp(change[m, rank, part]))
            for m, rank, part in np.argwhere(seen & (np.abs(change) > most))
        ]
        kept = (*self.history[-1:], (step + 2, np.where(seen, moved, newest)))
        return replace(self, history=kept), jumps

    def to_dict(self) -> dict[str, Any]:
        """The state for a checkpoint; `resumed` reads it."""
        history = [[step, np.nan_to_num(factors, nan=0.0).tolist()] for step, factors in self.history]
        return {"modules": list(self.modules), "num_ranks": self.num_ranks, "history": history}

    def resumed(self, saved: Mapping[str, Any]) -> "LearnedCosts":
        """What an earlier run learned.

        Args: saved: of `to_dict`, not empty.
        Raises: ValueError: it is of other modules or another number of pipeline ranks; says which.
        """
        for name, own in (("modules", list(self.modules)), ("num_ranks", self.num_ranks)):
            if saved.get(name) != own:
                raise ValueError(f"{name.replace('num_ranks', 'pipeline ranks')} {saved.get(name)}, this job {own}")
        history = []
        for step, rows in saved["history"]:
            factors = np.array(rows, np.float64)
            if factors.shape != self._shape or not (np.isfinite(factors) & (factors >= 0)).all():
                raise ValueError(f"factors of step {step} that are no numbers of shape {self._shape}")
            history.append((int(step), np.where(factors > 0, factors, math.nan)))
        return replace(self, history=tuple(history))

    @property
    def _shape(self) -> tuple[int, int, int]:
        return len(self.modules), self.num_ranks, len(PARTS)


def corrected(problem: PlanningProblem, factors: Floats) -> PlanningProblem:
    """The problem with the seconds of each stage times its factors. Args: factors: [module, pp_rank, part]."""
    graph = problem.graph
    table: list[tuple[Option, ...]] = []
    index: dict[tuple[int, int, int], int] = {}
    rows: list[tuple[int, ...]] = []
    for work, row in enumerate(problem.cost_index):
        module, of_row = graph.works[work].module, []
        for stage, listed in zip(graph.stages(work), row, strict=True):
            key = listed, module, graph.stage_rank[stage]
            if key not in index:
                index[key] = len(table)
                table.append(tuple(option.scaled(*map(float, factors[key[1:]])) for option in problem.costs[listed]))
            of_row.append(index[key])
        rows.append(tuple(of_row))
    return replace(problem, costs=tuple(table), cost_index=tuple(rows))


def step_seconds(
    plan: Plan, problem: PlanningProblem, factors: Floats, rows: Iterable[tuple[Action, float, float]]
) -> Floats:
    """[module, pp_rank, part, 2]: seconds of the actions of a rank, measured and as the cost model says them.

    Args: problem: with `factors` in its seconds. rows: (action, start, end) of what the rank ran.
    """
    graph, total = problem.graph, np.zeros((*factors.shape, 2))
    for action, start_s, end_s in rows:
        if action.kind not in (Kind.F, Kind.B, Kind.I, Kind.W):
            continue  # blocks, of which no part has seconds of its own, and instructions
        work = graph.work_of(action)
        option = plan.option(problem, action.stage, work)
        place = graph.works[work].module, graph.stage_rank[action.stage]
        planned_s = option.duration_s(action.kind)
        shares = {action.kind: 1.0}
        if action.kind is Kind.B:  # by the seconds of its parts
            both_s = option.backward_input_s + option.backward_weight_s
            shares = {Kind.I: option.backward_input_s / both_s, Kind.W: option.backward_weight_s / both_s}
        for kind, share in shares.items():
            part = PARTS.index(kind)
            total[(*place, part)] += share * (end_s - start_s), share * planned_s / factors[(*place, part)]
    return total


def mean_error(seconds: Floats, factors: Floats) -> tuple[float, float]:
    """How far modelled seconds are from measured ones, with the factors and without any, as a part of the measured; NaN
    if nothing was measured.

    Both are first made equal to the measured ones in all: only ratios matter to a plan, and the speed of a machine may
    change from step to step.

    Args: seconds: as of `step_seconds`.
    """
    measured, modelled = seconds[..., 0], seconds[..., 1]
    if not measured.sum() or not modelled.sum():
        return math.nan, math.nan
    parts = [given / given.sum() - measured / measured.sum() for given in (factors * modelled, modelled)]
    learned, unlearned = (float(np.abs(part).sum()) for part in parts)
    return learned, unlearned
