"""One search over the grouping of a batch's samples and the order of its works. Pure.

Where the busiest rank waits or recomputes for long, smaller and larger groupings than the given one are judged by short
searches for an order, with a few of the memory options. The best of them gets what is left of the budget. If it is not
shorter by far, the given one is searched with all of the budget, too, or alone: with a budget in evaluations the plan
is no longer than without other groupings.
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
from mmtrain.planner.search.search import search as search_orders
from mmtrain.planner.search.search_options import SearchOptions
from mmtrain.schedule.action import Kind
from mmtrain.schedule.option import Option
from mmtrain.schedule.problem import PlanningProblem

FACTORS = ((0.5, 1.5), (0.5, 2.0), (0.5, 1.0), (0.25, 1.0), (1.0, 1.5), (2.0, 1.0))
"""Size of works and number of microbatches, relative to the given ones, those first that are best most often
(`benchmarks/joint.py`)."""
SHARE = 0.5
"""Evaluations and time in which groupings are judged, at most, as a part of the budget."""
LEAST_GAIN, SURE_GAIN = 0.015, 0.03
"""Parts of the makespan by which a grouping must have been judged shorter than the given one to be searched at all, and
alone: judged makespans are off by as much."""
IN_VAIN = 2
"""Groupings in a row that are judged without being shorter than the best one before."""
LEAST_SPARE = 0.1
"""Part of the first plan in which the busiest rank waits or recomputes, below which no grouping is judged: the search
for an order alone gains half of it."""
JUDGED_OPTIONS = 4
"""Memory options of a list in the problems by which groupings are judged; judged makespans are as near as with all of
them, in half of the time."""
JUDGED_NODE_S = 8e-4
"""Seconds in which a core makes and judges a grouping, for each stage of each work: so a budget in seconds that is too
short for two groupings goes to the given one."""
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
    them and the first plan leaves something to gain. With a budget in evaluations, the result depends on nothing but
    the iteration, the budget and the seed; with one in seconds, judging is a part of them.

    Args: planner: of the iteration. search: finds the orders. cancelled: as of `search`.
    Raises: PlanError: no budget; and what `search` raises.
    """
    found, start = iteration, time.perf_counter()
    judged = _Judged(math.inf, math.inf)
    if planner.job.section.search.regroup and _spare(iteration, options) >= LEAST_SPARE:
        found, judged = _best_grouping(planner, iteration, options, cancelled)
    taken = time.perf_counter() - start
    both = found is not iteration and judged.best_s > (1 - SURE_GAIN) * judged.given_s
    left_s = options.budget_s and max(LEAST_S, options.budget_s - taken)
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
    """The seconds of the best one."""
    number: int = 0
    """The number of groupings."""
    evaluations: int = 0

    @property
    def charged(self) -> int:
        """Evaluations that are taken from the budget."""
        return self.number * (JUDGED_GROUPING + MADE_GROUPING)


def _best_grouping(
    planner: IterationPlanner, iteration: Iteration, options: SearchOptions, cancelled: Callable[[], bool]
) -> tuple[Iteration, _Judged]:
    """The iteration in the grouping that is judged best."""
    start, most = time.perf_counter(), len(FACTORS)
    if options.budget_evaluations:
        most = min(most, int(SHARE * options.budget_evaluations) // (JUDGED_GROUPING + MADE_GROUPING))
    if options.budget_s:
        nodes = sum(1 for _ in iteration.problem.graph.nodes())
        most = min(most, int(SHARE * options.budget_s / (JUDGED_NODE_S * nodes)))
    if most < 2:
        return iteration, _Judged(math.inf, math.inf)
    groupings = Groupings(planner.job, iteration.meta)
    short = replace(options, budget_evaluations=JUDGED_GROUPING, budget_s=SHARE / 2 * options.budget_s)

    def judge(one: Iteration) -> PlanResult:
        return search_orders(_judged_problem(one.problem), short, cancelled=cancelled)

    best, given = iteration, judge(iteration)
    judged, tried, in_vain = _Judged(given.cost_s, given.cost_s, 1, given.evaluations), list[Grouping](), 0
    for factors in FACTORS:
        next_s = (time.perf_counter() - start) * (1 + 1 / judged.number)
        late = options.budget_s and next_s > SHARE * options.budget_s
        if judged.number == most or late or in_vain == IN_VAIN or cancelled():
            break
        grouping = groupings.of(*factors)
        if grouping is None or grouping in tried:
            continue
        tried.append(grouping)
        judged, in_vain = replace(judged, number=judged.number + 1), in_vain + 1
        try:
            made = planner.regrouped(iteration, grouping)
        except PlanError:  # no plan fits
            continue
        other = judge(made)
        judged = replace(judged, evaluations=judged.evaluations + other.evaluations)
        if other.cost_s < judged.best_s:
            best, judged, in_vain = made, replace(judged, best_s=other.cost_s), 0
    least = SURE_GAIN if options.budget_s else LEAST_GAIN  # a second search has no time
    return (best if judged.best_s < (1 - least) * judged.given_s else iteration), judged


def _spare(iteration: Iteration, options: SearchOptions) -> float:
    """The part of the first plan in which the busiest rank waits or recomputes; with blocks, exchanges too."""
    problem, seconds = iteration.problem, Option.busy_s if options.braid else Option.duration_s
    fastest = [sum(seconds(listed[0], kind) for kind in (Kind.F, Kind.B)) for listed in problem.costs]
    busy = [0.0] * problem.graph.num_ranks
    for work, row in enumerate(problem.cost_index):
        for stage, index in zip(problem.graph.stages(work), row, strict=True):
            busy[problem.graph.stage_rank[stage]] += fastest[index]
    return 1 - max(busy) / iteration.first.makespan_s


def _judged_problem(problem: PlanningProblem) -> PlanningProblem:
    """The problem with `JUDGED_OPTIONS` options of each list, the fastest and the smallest among them.

    All restore as much as the one that restores most, for which room is kept anyway, so that no half of the budget goes
    to plans without it.
    """
    costs = []
    for listed in problem.costs:
        last, restored = len(listed) - 1, max(option.restored_bytes for option in listed)
        few = dict.fromkeys(round(i * last / (JUDGED_OPTIONS - 1)) for i in range(JUDGED_OPTIONS))
        costs.append(tuple(replace(listed[i], restored_bytes=restored) for i in few))
    return replace(problem, costs=tuple(costs))
