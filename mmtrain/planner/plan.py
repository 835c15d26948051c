"""The one entry point of planning, and its result."""

from dataclasses import dataclass
from typing import Literal

from mmtrain.errors import PlanError
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.schedule.library.forward_only import forward_only
from mmtrain.schedule.plan import Plan, check
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.simulate import simulate
from mmtrain.schedule.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """The result of planning: a plan with its simulated timeline, or the reason why there is none."""

    status: Literal["optimal", "improved", "first", "infeasible"]
    message: str
    """One sentence for the user."""
    plan: Plan | None = None
    timeline: Timeline | None = None
    evaluations: int = 1
    """Plans that were tried."""
    seed: int = 0
    """Seed of the search."""


def make_plan(problem: PlanningProblem, schedule: str) -> PlanResult:
    """The checked and simulated plan of a named schedule; of `forward_only` if the iteration has no backward.

    If a schedule that keeps memory limits finds no plan, the result has the status "infeasible" and a message.

    Raises: PlanError: there is no schedule of that name, or a schedule that bounds memory by its own rule exceeds a
        limit.
    """
    if schedule not in CATALOGUE:
        raise PlanError(f"schedule {schedule!r} does not exist; choose one of {', '.join(CATALOGUE)}")
    make = CATALOGUE[schedule].make if problem.graph.has_any_backward else forward_only
    try:
        plan = make(problem)
        check(plan, problem)
    except PlanError as error:
        if make is CATALOGUE[schedule].make and not CATALOGUE[schedule].keeps_memory_limits:
            bounded = " and ".join(name for name, other in CATALOGUE.items() if other.keeps_memory_limits)
            raise PlanError(f"schedule {schedule} does not look at memory limits ({bounded} do): {error}") from error
        return PlanResult(status="infeasible", message=str(error))
    name = schedule if problem.graph.has_any_backward else "forward_only"
    return PlanResult(
        status="first", message=f"the order of schedule {name}", plan=plan, timeline=simulate(problem, plan)
    )
