"""A recipe as a schedule: it makes a plan for any work graph."""

from mmtrain.errors import RecipeError
from mmtrain.schedule.action import COMPUTE, Kind
from mmtrain.schedule.engine import Engine
from mmtrain.schedule.passes.separate import separate_gradients
from mmtrain.schedule.plan import Plan, exceeds
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.recipe.bound_recipe import Bound
from mmtrain.schedule.recipe.language import Recipe
from mmtrain.schedule.recipe.rank_policy import Ranks
from mmtrain.schedule.recipe.shared import Shared


def plan_of(recipe: Recipe, problem: PlanningProblem, *, compiled: bool = False, at_once: bool = False) -> Plan:
    """The plan of a recipe for a problem.

    A recipe with a check or a step function runs twice, and both runs must agree.

    Args:
        compiled: by numba if the recipe has no functions, with equal results; worth its start where many recipes are
            run.
        at_once: an action without duration ends before the next rank decides, as of `Policy`; never compiled.
    Raises:
        RecipeError: the recipe gets stuck, a limit has the wrong length, or a function of the recipe raises, returns
            something else or is impure.
        PlanError: one microbatch alone exceeds a memory limit.
    """
    if not problem.graph.works:
        return Plan(problem.graph, ((),) * problem.graph.num_ranks)
    return plan_with(recipe, Shared(problem), compiled=compiled, at_once=at_once)


def plan_with(recipe: Recipe, shared: Shared, *, compiled: bool = False, at_once: bool = False) -> Plan:
    """The plan of `plan_of`. Args: shared: of a problem with at least one work."""
    bound, has_functions = Bound(recipe, shared), recipe.check or recipe.step
    plan = _compiled(bound) if compiled and not at_once and not has_functions else None
    plan = plan or _run(bound, at_once=at_once)
    if has_functions and _run(Bound(recipe, shared), at_once=at_once) != plan:
        raise RecipeError(
            "the recipe's functions are impure: two runs on one problem made different plans; let them depend on "
            "their arguments alone"
        )
    return _separated(bound, plan) if recipe.separate_gradients else plan


def _run(bound: Bound, *, at_once: bool = False) -> Plan:
    """The plan of one run. Raises: RecipeError: it gets stuck, or a function of the recipe fails."""
    ranks = Ranks(bound, at_once=at_once)
    items = Engine(bound.items, bound.message_s).run(ranks)
    plan = bound.plan(items)
    if len(items) < bound.num_actions:
        raise ranks.stuck(plan.orders)
    return plan


def _compiled(bound: Bound) -> Plan | None:
    """The plan of one run of the kernel; None: it gets stuck, and `_run` says why."""
    from mmtrain.schedule.recipe import kernel, kernel_state  # with numpy and numba

    state = kernel_state.Arrays(bound.shared).state(bound)
    complete = kernel.compiled().run(state) == bound.num_actions
    return bound.plan(map(int, state.begun)) if complete else None


def _separated(bound: Bound, plan: Plan) -> Plan:
    """The plan with gradients separated; the plan itself where that would break a limit of the recipe."""
    separated = separate_gradients(plan, bound.problem, in_flight=bound.limits.of_ranks)
    before, after, memories = _peaks(bound, plan), _peaks(bound, separated), bound.memories()
    limits = [max(peak, *(memory.limit(pool) for memory in memories)) for pool, peak in enumerate(before)]
    return plan if any(map(exceeds, after, limits)) else separated


def _peaks(bound: Bound, plan: Plan) -> list[float]:
    """[pool] -> the most that a plan holds of what it counts."""
    held, peaks = [0.0] * len(bound.limits.pools), [0.0] * len(bound.limits.pools)
    first, position = bound.items.first, bound.graph.position
    for parts in plan.parts:
        for _, action, work in parts:
            node = first[work] + position[action.stage]
            for pool, amount, kept in (level.of(node) for level in bound.limits.levels):
                if pool >= 0 and action.kind in COMPUTE and bound.items.has_backward[node]:
                    change = {Kind.F: amount, Kind.I: kept - amount, Kind.W: -kept, Kind.B: -amount}
                    held[pool] += change[action.kind]
                    peaks[pool] = max(peaks[pool], held[pool])
    return peaks
