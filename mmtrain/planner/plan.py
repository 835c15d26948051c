"""The one entry point of planning, and its result."""

from dataclasses import dataclass
from typing import Literal

from mmtrain.errors import PlanError, RecipeError
from mmtrain.schedule.library.catalogue import CATALOGUE, Schedule
from mmtrain.schedule.library.forward_only import forward_only
from mmtrain.schedule.plan import Plan, check
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.recipe.files import schedule_of
from mmtrain.schedule.simulate import simulate
from mmtrain.schedule.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """The result of planning: a plan with its simulated timeline, or the reason why there is none."""

    status: Literal["optimal", "improved", "first", "infeasible"]
    message: str
    """One sentence for the user."""
    expected_s: float | None = None
    """Mean makespan over drawn seconds, by which a search chose the plan; None: it chose by the makespan."""
    plan: Plan | None = None
    timeline: Timeline | None = None
    evaluations: int = 1
    """Plans that were tried."""
    seed: int = 0
    """Seed of the search."""


def make_plan(problem: PlanningProblem, schedule: str | Schedule) -> PlanResult:
    """The checked plan of a schedule, simulated. An iteration without any backward gets forward_only from named ones.

    If a schedule that keeps memory limits finds no plan, the result has the status "infeasible" and a message.

    Raises:
        ConfigError: there is no schedule of that name, or its file cannot be used.
        PlanError: a schedule that bounds memory by its own rule is over a limit, or a recipe gets stuck.
    """
    given = schedule if isinstance(schedule, Schedule) else schedule_of(schedule, problem.graph.num_ranks)
    own = problem.graph.has_any_backward or given.plans_forward_only
    try:
        plan = (given.make if own else forward_only)(problem)
        check(plan, problem)
    except RecipeError:
        raise
    except PlanError as error:
        if not own or given.keeps_memory_limits:
            return PlanResult(status="infeasible", message=str(error))
        if given.text:
            raise
        bounded = " and ".join(name for name, other in CATALOGUE.items() if other.keeps_memory_limits)
        raise PlanError(f"schedule {given.name} does not look at memory limits ({bounded} do): {error}") from error
    name = given.name if own else "forward_only"
    name += ", gradients separated" if given.separates_gradients and own else ""
    name += ", in blocks" if given.braids and problem.runs_units and own else ""
    return PlanResult(
        status="first", message=f"the order of schedule {name}", plan=plan, timeline=simulate(problem, plan)
    )
