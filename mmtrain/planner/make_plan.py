"""The one entry point of planning: a problem and a method in, a result out.

make_plan(problem, "1F1B")                              the plan of a schedule
make_plan(problem, SearchOptions(budget_s=1.0))         the best plan of a search
make_plan(problem, JobMethod(schedule, section))        the first plan of a job, which fits if any does
make_plan(problem, JobMethod.searching(schedule, section, seed=0))    the plan that a job trains with
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from mmtrain.config.planner import PlannerConfig
from mmtrain.costs.noise import EXACT, Noise
from mmtrain.errors import PlanError
from mmtrain.planner.result import PlanResult
from mmtrain.planner.scheduled import scheduled
from mmtrain.planner.search.evaluate import fit_memory
from mmtrain.planner.search.search import may_bind, search, with_options_chosen
from mmtrain.planner.search.search_options import SearchOptions
from mmtrain.planner.search_settings import search_options
from mmtrain.schedule.library.catalogue import Schedule
from mmtrain.schedule.passes.offload import offload
from mmtrain.schedule.plan import check
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.recipe.schedule_files import schedule_of


class Search(Protocol):
    """Finds the plans of iterations, as `make_plan` does."""

    def __call__(
        self, problem: PlanningProblem, options: SearchOptions, /, *, cancelled: Callable[[], bool]
    ) -> PlanResult:
        """The best plan found. Args: cancelled: asked now and then; the search ends early where it says True."""
        ...


@dataclass(frozen=True)
class JobMethod:
    """How a job plans its iterations."""

    schedule: str | Schedule
    """The schedule of parallelism.pipeline_parallel_schedule."""
    section: PlannerConfig
    search: SearchOptions | None = None
    """Options of the search; None: no search."""

    @classmethod
    def searching(
        cls, schedule: str | Schedule, section: PlannerConfig, *, seed: int, noise: Noise = EXACT
    ) -> "JobMethod":
        """The method with the search that the section describes. Args: seed: as `search_seed` gives it."""
        return cls(schedule, section, search_options(section, seed=seed, threads=1, noise=noise))


def make_plan(
    problem: PlanningProblem,
    method: str | Schedule | SearchOptions | JobMethod,
    *,
    cancelled: Callable[[], bool] = lambda: False,
) -> PlanResult:
    """A checked plan, or the status "infeasible" and the reason.

    Args:
        method: a schedule or its name: its order as it is. Options: the best plan of that search. That of a job: the
            order of its schedule, or one that fits; if it searches, the plan of the search, unless it is longer.
        cancelled: polled by a search, which ends early once it returns True.
    Raises:
        ConfigError: there is no schedule of that name, or its file cannot be used.
        PlanError: a schedule that bounds memory by its own rule is over a limit, or a recipe gets stuck; or a search
            has no budget. The method of a job raises neither of the first two.
    """
    if isinstance(method, SearchOptions):
        return search(problem, method, cancelled=cancelled)
    if not isinstance(method, JobMethod):
        return scheduled(problem, method)
    given = method.schedule
    given = given if isinstance(given, Schedule) else schedule_of(given, problem.graph.num_ranks)
    problem = given.with_instructions(problem)
    first = _first(problem, given, method.section)
    if method.search is None or not method.section.search.interleave:
        return first
    if method.search.strategy == "first" and given.name == "interleave" and method.search.memory:
        return replace(first, seed=method.search.seed)  # no search would make the same plan again
    return best_of(first, search(problem, method.search, cancelled=cancelled))


def best_of(first: PlanResult, searched: PlanResult) -> PlanResult:
    """The result of a search, or the first plan if the search says that its own is longer."""
    if not first.has_plan or not searched.has_plan or searched.makespan_s <= first.makespan_s:
        return searched
    return replace(first, evaluations=searched.evaluations, seed=searched.seed)


def _first(problem: PlanningProblem, given: Schedule, section: PlannerConfig) -> PlanResult:
    """The plan of a schedule, or why there is none: the fallback of a timed-out search, and its baseline.

    If a limit forbids it, activations of first chunks are offloaded, where blocks may do so, or other memory options
    are chosen for its orders. A schedule that keeps limits gives microbatches the fastest options that fit alone, so
    that few are in flight: where another choice of options makes it shorter, that plan is the result. If none fits and
    the planner may change the orders, the result is the plan of `interleave`, which keeps limits: a timed-out search
    must not end a job.
    """
    result, may_reorder = _made(problem, given), section.enable and section.search.interleave
    if given.keeps_memory_limits and may_reorder:
        result = with_options_chosen(result, braid=section.search.braid)
    elif (given.keeps_memory_limits or not result.has_plan) and may_bind(result):
        result = min(result, _fitted(problem, given), key=lambda made: made.makespan_s)
    if not result.has_plan and may_reorder:
        bounded = search(problem, SearchOptions(strategy="first", braid=section.search.braid))
        if bounded.has_plan:
            result = replace(bounded, message=f"{bounded.message}, since there is no other: {result.message}")
    return result


def _made(problem: PlanningProblem, schedule: Schedule) -> PlanResult:
    """The plan of a schedule, or why there is none."""
    try:
        return scheduled(problem, schedule)
    except PlanError as error:  # of schedules that bound memory by their own rule
        return PlanResult(problem=problem, status="infeasible", message=str(error))


def _fitted(problem: PlanningProblem, schedule: Schedule) -> PlanResult:
    """The orders that a schedule makes without limits, with activations offloaded or memory options that fit."""
    unlimited = _made(replace(problem, memory_limit_bytes=(None,) * problem.graph.num_ranks), schedule)
    if not unlimited.has_plan:
        return replace(unlimited, problem=problem)
    plan, how = offload(unlimited.plan, problem), "activations of first chunks offloaded"
    if plan is None:
        plan, how = fit_memory(problem, unlimited.plan), "memory options chosen for it"
    if plan is None:
        return PlanResult(problem=problem, status="infeasible", message="no memory options fit")
    check(plan, problem)
    return replace(unlimited, problem=problem, message=f"{unlimited.message}, with {how}", plan_or_none=plan)
