"""The plan of a schedule as it is, without a search and without other memory options."""

from mmtrain.errors import PlanError, RecipeError
from mmtrain.planner.result import PlanResult
from mmtrain.schedule.library.catalogue import CATALOGUE, Schedule
from mmtrain.schedule.library.forward_only import forward_only
from mmtrain.schedule.plan import check
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.recipe.schedule_files import schedule_of


def scheduled(problem: PlanningProblem, schedule: str | Schedule) -> PlanResult:
    """The checked plan of a schedule. An iteration without any backward gets forward_only from named ones.

    If a schedule that keeps memory limits finds no plan, the result has the status "infeasible" and a message.

    Raises:
        ConfigError: there is no schedule of that name, or its file cannot be used.
        PlanError: a schedule that bounds memory by its own rule is over a limit, a recipe gets stuck, or the order of
            the schedule contradicts an instruction.
    """
    given = schedule if isinstance(schedule, Schedule) else schedule_of(schedule, problem.graph.num_ranks)
    problem = given.with_instructions(problem)
    own = problem.graph.has_any_backward or given.plans_forward_only
    try:
        plan = (given.make if own else forward_only)(problem)
        check(plan, problem)
    except RecipeError:
        raise
    except PlanError as error:
        if not own or given.keeps_memory_limits:
            return PlanResult(problem=problem, status="infeasible", message=str(error))
        if given.text:
            raise
        bounded = " and ".join(name for name, other in CATALOGUE.items() if other.keeps_memory_limits)
        raise PlanError(f"schedule {given.name} does not look at memory limits ({bounded} do): {error}") from error
    name = given.name if own else "forward_only"
    name += ", gradients separated" if given.separates_gradients and own else ""
    name += ", in blocks" if given.braids and problem.runs_units and own else ""
    return PlanResult(problem=problem, status="first", message=f"the order of schedule {name}", plan_or_none=plan)
