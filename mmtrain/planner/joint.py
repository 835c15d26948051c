"""One search over the grouping of a batch's samples and the order of its works. Pure.

Smaller and larger groupings than the given one are judged by short searches for an order. The best of them gets what
is left of the budget. If it is not shorter by far, the given one is searched with all of the budget, too, or alone:
with a budget in evaluations the plan is no longer than without other groupings.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from mmtrain.config.planner import JUDGED_GROUPING, MADE_GROUPING
from mmtrain.errors import PlanError
from mmtrain.planner.grouping import Grouping, Groupings
from mmtrain.planner.iteration import Iteration, IterationPlanner
from mmtrain.planner.make_plan import Search, best_of
from mmtrain.planner.result import PlanResult
from mmtrain.planner.search.search import shortest_s
from mmtrain.planner.search.search_options import SearchOptions

FACTORS = ((0.5, 1.5), (0.5, 2.0), (0.5, 1.0), (0.25, 1.0), (1.0, 1.5), (2.0, 1.0))
"""Size of works and number of microbatches, relative to the given ones, those first that are best most often
(`benchmarks/joint.py`)."""
SHARE = 0.5
"""Evaluations and time in which groupings are judged, at most, as a part of the budget."""
LEAST_GAIN, SURE_GAIN = 0.03, 0.06
"""Parts of the makespan by which a grouping must have been judged shorter than the given one to be searched at all, and
alone: judged makespans are off by as much."""
IN_VAIN = 3
"""Other groupings that are judged, if none of them replaces the given one."""
LEAST_S = 0.01
"""Seconds of the search for an order, at least."""


def search_iteration(
    planner: IterationPlanner,
    iteration: Iteration,
    options: SearchOptions,
    search: Search,
    *,
    cancelled: Callable[[], bool] = lambda: False,
) -> tuple[Iteration, PlanResult]:
    """The best plan that is found for an iteration, or its first plan if that is shorter; and the iteration in the
    grouping that the plan is for.

    With `planner.search.regroup` other groupings than the given one are tried, if half of the budget judges one of
    them. With a budget in evaluations, the result depends on nothing but the iteration, the budget and the seed; with
    one in seconds, judging is a part of them.

    Args: planner: of the iteration. search: finds the orders. cancelled: as of `search`.
    Raises: PlanError: no budget; and what `search` raises.
    """
    found, start = iteration, time.perf_counter()
    judged = _Judged(math.inf, math.inf)
    if planner.job.section.search.regroup:
        found, judged = _best_grouping(planner, iteration, options, cancelled)
    taken = time.perf_counter() - start
    both = found is not iteration and judged.best_s > (1 - SURE_GAIN) * judged.given_s
    left_s = options.budget_s and max(LEAST_S, options.budget_s - taken) / (1 + both)
    rest = replace(options, budget_s=left_s)
    less = replace(rest, budget_evaluations=options.budget_evaluations and options.budget_evaluations - judged.charged)
    result = search(found.problem, rest if found is iteration else less, cancelled=cancelled)
    evaluations = judged.evaluations + result.evaluations
    if both or (found is not iteration and result.cost_s > judged.given_s):  # it may be worse than it was judged
        spent = time.perf_counter() - start
        rest = replace(options, budget_s=options.budget_s and max(LEAST_S, options.budget_s - spent))
        given = search(iteration.problem, rest, cancelled=cancelled)
        evaluations += given.evaluations
        if given.cost_s <= result.cost_s:
            found, result = iteration, given
    best = best_of(iteration.first, replace(result, evaluations=evaluations))
    return (found if best.plan_or_none is result.plan_or_none else iteration), best


@dataclass(frozen=True)
class _Judged:
    """What was judged before the search for an order."""

    given_s: float
    """Seconds of the given grouping."""
    best_s: float
    """Of the best one."""
    number: int = 0

    @property
    def evaluations(self) -> int:
        return self.number * JUDGED_GROUPING

    @property
    def charged(self) -> int:
        """Evaluations that take as long."""
        return self.number * (JUDGED_GROUPING + MADE_GROUPING)


def _best_grouping(
    planner: IterationPlanner, iteration: Iteration, options: SearchOptions, cancelled: Callable[[], bool]
) -> tuple[Iteration, _Judged]:
    """The iteration in the grouping that is judged best."""
    start, most = time.perf_counter(), len(FACTORS)
    if options.budget_evaluations:
        most = min(most, int(SHARE * options.budget_evaluations) // (JUDGED_GROUPING + MADE_GROUPING))
    if most < 2:
        return iteration, _Judged(math.inf, math.inf)
    groupings = Groupings(planner.job, iteration.meta)
    short = replace(options, budget_evaluations=JUDGED_GROUPING, budget_s=0.0)
    best, given_s = iteration, shortest_s(iteration.problem, short)
    judged, tried = _Judged(given_s, given_s, 1), list[Grouping]()
    for factors in FACTORS:
        late = options.budget_s and time.perf_counter() - start > SHARE * options.budget_s
        in_vain = judged.number > IN_VAIN and judged.best_s > (1 - LEAST_GAIN) * judged.given_s
        if judged.number == most or late or in_vain or cancelled():
            break
        grouping = groupings.of(*factors)
        if grouping is None or grouping in tried:
            continue
        tried.append(grouping)
        judged = replace(judged, number=judged.number + 1)
        try:
            made = planner.regrouped(iteration, grouping)
        except PlanError:  # no plan fits
            continue
        seconds = shortest_s(made.problem, short)
        if seconds < judged.best_s:
            best, judged = made, replace(judged, best_s=seconds)
    return (best if judged.best_s < (1 - LEAST_GAIN) * judged.given_s else iteration), judged
