"""The plan that an iteration has without any search: the fallback of one that is late, and what it is compared with."""

from dataclasses import replace

from mmtrain.config.sections import PlannerConfig
from mmtrain.errors import PlanError
from mmtrain.planner.plan import PlanResult, make_plan
from mmtrain.planner.search.search import fit_memory
from mmtrain.schedule.library.catalogue import Schedule
from mmtrain.schedule.plan import check
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.simulate import simulate


def first_plan(problem: PlanningProblem, schedule: str | Schedule, section: PlannerConfig) -> PlanResult:
    """The plan of a schedule, or why there is none; never an exception.

    Where the schedule's own choice of memory options fits into no limit, they are chosen for its orders; where no
    choice fits into these, and the planner may make the orders, it is the plan of `interleave`, which keeps limits: a
    search that is late must not end a job.
    """
    try:
        found = make_plan(problem, schedule)
    except PlanError as error:  # of schedules that bound memory by their own rule
        found = PlanResult(status="infeasible", message=str(error))
    if found.plan is None and any(len(options) > 1 for options in problem.costs):
        found = _fitted(problem, schedule) or found
    if found.plan is None and section.enable and section.interleave:
        bounded = make_plan(problem, "interleave")
        found = bounded if bounded.plan is not None else found
    return found


def _fitted(problem: PlanningProblem, schedule: str | Schedule) -> PlanResult | None:
    """The orders of a schedule with memory options that fit; None: none do."""
    try:
        free = make_plan(replace(problem, memory_limit_bytes=(None,) * problem.graph.num_ranks), schedule)
    except PlanError:  # not a matter of memory
        return None
    plan = fit_memory(problem, free.plan) if free.plan is not None else None
    if plan is None:
        return None
    check(plan, problem)
    message = f"{free.message}, with memory options chosen for it"
    return replace(free, message=message, plan=plan, timeline=simulate(problem, plan))
