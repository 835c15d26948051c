"""Many recipes on one problem: makespan and peaks of each without a `Plan`.

The compiled kernel runs each recipe, 1.0 to 1.5 us an action with all that is around it; only finalists become plans.
"""

from dataclasses import dataclass

import numpy as np

from mmtrain.schedule.plan import Plan, check
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.recipe import kernel
from mmtrain.schedule.recipe.bound_recipe import Bound
from mmtrain.schedule.recipe.kernel_state import Arrays
from mmtrain.schedule.recipe.language import Recipe
from mmtrain.schedule.recipe.policy import plan_with
from mmtrain.schedule.recipe.shared import Shared
from mmtrain.schedule.simulate import simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What `simulate` says of a recipe's plan."""

    num_actions: int
    num_started: int
    """Fewer than `num_actions` if the recipe gets stuck; `RecipeGrid.plan` says why. The other values are then those of
    the actions before."""
    makespan_s: float
    span_s: tuple[float, ...]
    """[rank] -> seconds from its first start to its last end."""
    busy_s: tuple[float, ...]
    """The busy seconds of each rank."""
    peak_bytes: tuple[float, ...]
    """[rank] -> most activation bytes."""

    @property
    def stuck(self) -> bool:
        """Whether the recipe gets stuck before its last action."""
        return self.num_started < self.num_actions

    @property
    def bubble(self) -> float:
        """The fraction of rank-seconds without compute; 0 if nothing ran."""
        available = len(self.busy_s) * self.makespan_s
        return 1 - sum(self.busy_s) / available if available else 0.0


class RecipeGrid:
    """Recipes of one problem, one after the other."""

    def __init__(self, problem: PlanningProblem, *, compiled: bool = True) -> None:
        """Args: problem: with at least one work. compiled: by numba, with equal results."""
        self._problem, self._shared, self._compiled = problem, Shared(problem), compiled
        self._arrays = Arrays(self._shared)
        self._kernel = kernel.compiled() if compiled else kernel.Entries(kernel.run, kernel.measure)

    def score(self, recipe: Recipe) -> Score:
        """The score of a recipe.

        One with functions or with `separate_gradients` has to be planned and simulated, at 20 times the cost.

        Raises: PlanError: as `policy.plan_of`, but not where a recipe without functions gets stuck.
        """
        if recipe.check or recipe.step or recipe.separate_gradients:
            return self._simulated(recipe)
        bound = Bound(recipe, self._shared)
        state, costs = self._arrays.state(bound), self._arrays.costs(bound.settled)
        started = self._kernel.run(state)
        found = np.zeros((4, bound.graph.num_ranks))
        found[kernel.STARTS] = np.inf
        self._kernel.measure(costs, state.begun[:started], np.zeros(bound.items.num_items), found)
        starts, ends, busy_s, peak_bytes = found.tolist()
        return Score(
            num_actions=bound.num_actions,
            num_started=started,
            makespan_s=max(0.0, max(ends) - min(starts)),
            span_s=tuple(max(0.0, end - start) for start, end in zip(starts, ends, strict=True)),
            busy_s=tuple(busy_s),
            peak_bytes=tuple(peak_bytes),
        )

    def plan(self, recipe: Recipe) -> Plan:
        """The plan of a recipe, checked. Raises: PlanError: as `policy.plan_of`."""
        plan = plan_with(recipe, self._shared, compiled=self._compiled)
        check(plan, self._problem if recipe.memory else None)
        return plan

    def _simulated(self, recipe: Recipe) -> Score:
        timeline = simulate(self._problem, plan_with(recipe, self._shared, compiled=self._compiled))
        return Score(
            num_actions=len(timeline.rows),
            num_started=len(timeline.rows),
            makespan_s=timeline.makespan_s,
            span_s=timeline.span_s,
            busy_s=timeline.busy_s,
            peak_bytes=timeline.peak_bytes,
        )
