"""The plan of an iteration without a search: the fallback of a timed-out search, and its baseline."""

from dataclasses import replace

from mmtrain.config.sections import PlannerConfig
from mmtrain.errors import PlanError
from mmtrain.planner.plan import PlanResult, make_plan
from mmtrain.planner.search.search import fit_memory
from mmtrain.schedule.library.catalogue import Schedule
from mmtrain.schedule.passes.offload import offload
from mmtrain.schedule.plan import check
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.simulate import simulate


def first_plan(problem: PlanningProblem, schedule: str | Schedule, section: PlannerConfig) -> PlanResult:
    """The plan of a schedule, or why there is none; never an exception.

    If the memory options that the schedule chooses exceed a limit, activations of first chunks are offloaded, where
    blocks may do so; if that is not enough, other options are chosen for its orders. If none fit and the planner may
    change the orders, the result is the plan of `interleave`, which keeps limits: a timed-out search must not end a
    job.
    """
    try:
        result = make_plan(problem, schedule)
    except PlanError as error:  # of schedules that bound memory by their own rule
        result = PlanResult(status="infeasible", message=str(error))
    if result.plan is None and any(len(options) > 1 for options in problem.costs):
        result = _fitted(problem, schedule) or result
    if result.plan is None and section.enable and section.interleave:
        bounded = make_plan(problem, "interleave")
        if bounded.plan is not None:
            result = replace(bounded, message=f"{bounded.message}, since there is no other: {result.message}")
    return result


def _fitted(problem: PlanningProblem, schedule: str | Schedule) -> PlanResult | None:
    """The orders of a schedule with memory options that fit; None: none do."""
    try:
        unlimited = make_plan(replace(problem, memory_limit_bytes=(None,) * problem.graph.num_ranks), schedule)
    except PlanError:  # not because of memory
        return None
    if unlimited.plan is None:
        return None
    plan, how = offload(unlimited.plan, problem), "activations of first chunks offloaded"
    if plan is None:
        plan, how = fit_memory(problem, unlimited.plan), "memory options chosen for it"
    if plan is None:
        return None
    check(plan, problem)
    message = f"{unlimited.message}, with {how}"
    return replace(unlimited, message=message, plan=plan, timeline=simulate(problem, plan))
