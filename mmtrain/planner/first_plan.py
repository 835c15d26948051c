"""The plan of an iteration without a search: the fallback of a timed-out search, and its baseline."""

from dataclasses import replace

from mmtrain.config.sections import PlannerConfig
from mmtrain.errors import PlanError
from mmtrain.planner.plan import PlanResult, make_plan
from mmtrain.planner.search.evaluate import fit_memory
from mmtrain.planner.search.search import SearchOptions, makespan_s, may_bind, search, with_options_chosen
from mmtrain.schedule.library.catalogue import Schedule
from mmtrain.schedule.passes.offload import offload
from mmtrain.schedule.plan import check
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.recipe.files import schedule_of
from mmtrain.schedule.simulate import simulate


def first_plan(problem: PlanningProblem, schedule: str | Schedule, section: PlannerConfig) -> PlanResult:
    """The plan of a schedule, or why there is none; never an exception.

    If a limit forbids it, activations of first chunks are offloaded, where blocks may do so, or other memory options
    are chosen for its orders. A schedule that keeps limits gives microbatches the fastest options that fit alone, so
    that few are in flight: where another choice of options makes it shorter, that plan is the result. If none fits and
    the planner may change the orders, the result is the plan of `interleave`, which keeps limits: a timed-out search
    must not end a job.
    """
    given = schedule if isinstance(schedule, Schedule) else schedule_of(schedule, problem.graph.num_ranks)
    result, may_reorder = _made(problem, given), section.enable and section.interleave
    if given.keeps_memory_limits and may_reorder:
        result = with_options_chosen(problem, result, braid=section.braid)
    elif (given.keeps_memory_limits or result.plan is None) and may_bind(problem, result):
        result = min(result, _fitted(problem, given), key=makespan_s)
    if result.plan is None and may_reorder:
        bounded = search(problem, SearchOptions(strategy="first", braid=section.braid))
        if bounded.plan is not None:
            result = replace(bounded, message=f"{bounded.message}, since there is no other: {result.message}")
    return result


def _made(problem: PlanningProblem, schedule: Schedule) -> PlanResult:
    """The plan of a schedule, or why there is none."""
    try:
        return make_plan(problem, schedule)
    except PlanError as error:  # of schedules that bound memory by their own rule
        return PlanResult(status="infeasible", message=str(error))


def _fitted(problem: PlanningProblem, schedule: Schedule) -> PlanResult:
    """The orders that a schedule makes without limits, with activations offloaded or memory options that fit."""
    unlimited = _made(replace(problem, memory_limit_bytes=(None,) * problem.graph.num_ranks), schedule)
    if unlimited.plan is None:
        return unlimited
    plan, how = offload(unlimited.plan, problem), "activations of first chunks offloaded"
    if plan is None:
        plan, how = fit_memory(problem, unlimited.plan), "memory options chosen for it"
    if plan is None:
        return PlanResult(status="infeasible", message="no memory options fit")
    check(plan, problem)
    return replace(unlimited, message=f"{unlimited.message}, with {how}", plan=plan, timeline=simulate(problem, plan))
