"""A recipe as a policy of the engine: it makes a plan for any work graph."""

from collections.abc import Callable, Sequence
from typing import Any

from mmtrain.errors import RecipeError, shown
from mmtrain.schedule.action import COMPUTE, Action, Kind
from mmtrain.schedule.passes.separate import separate_gradients
from mmtrain.schedule.plan import Plan, exceeds, show_steps
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.recipe import kernel
from mmtrain.schedule.recipe.arrays import state_of
from mmtrain.schedule.recipe.bound import Bound
from mmtrain.schedule.recipe.kernel import READY, B, F, State
from mmtrain.schedule.recipe.language import Moment, Recipe
from mmtrain.schedule.recipe.limits import call
from mmtrain.schedule.recipe.shared import Shared


def plan_of(recipe: Recipe, problem: PlanningProblem, *, compiled: bool = False) -> Plan:
    """The plan of a recipe for a problem.

    A recipe with a check or a step function runs twice, and both runs must agree.

    Args: compiled: by numba, with equal results; worth its start where many recipes are run.
    Raises:
        RecipeError: the recipe gets stuck, a limit has the wrong length, or a function of the recipe raises, returns
            something else or is impure.
        PlanError: one microbatch alone exceeds a memory limit.
    """
    if not problem.graph.works:
        return Plan(problem.graph, ((),) * problem.graph.num_ranks)
    run = RecipeRun(recipe, problem)
    plan = run.plan(compiled=compiled)
    if (recipe.check or recipe.step) and RecipeRun(recipe, problem).plan() != plan:
        raise RecipeError(
            "the recipe's functions are impure: two runs on one problem made different plans; let them depend on "
            "their arguments alone"
        )
    return run.separated(plan) if recipe.separate_gradients else plan


class RecipeRun:
    """One run of a recipe on a problem."""

    def __init__(self, recipe: Recipe, problem: PlanningProblem) -> None:
        """Args: problem: with at least one work. Raises: RecipeError: overrides or limits that do not fit it."""
        self.bound = Bound(recipe, Shared(problem))
        self.recipe, self.problem, self.graph, self.items = recipe, problem, problem.graph, problem.graph.items
        self.limits, self.action = self.bound.limits, self.bound.action
        self.state = state_of(self.bound)

    def plan(self, *, compiled: bool = False) -> Plan:
        """The plan. Raises: RecipeError: see `plan_of`."""
        state = self.state
        if self.recipe.check or self.recipe.step:
            kernel.with_hooks(self._hooks())(state)
        elif compiled:
            state = kernel.as_arrays(state)
            kernel.compiled()(state)
        else:
            kernel.run(state)
        return self.plan_from(state)

    def plan_from(self, state: State) -> Plan:
        """The plan of a state that has run. Raises: RecipeError: not all actions have started."""
        orders: list[list[Action]] = [[] for _ in range(self.graph.num_ranks)]
        for item in map(int, state.begun):
            if item < 0:
                raise self._stuck(state, orders)
            orders[state.rank_of[item]].append(self.action(item))
        return Plan(
            self.graph, tuple(map(tuple, orders)), {node: index for node, index in self.bound.chosen.items() if index}
        )

    def separated(self, plan: Plan) -> Plan:
        """The plan with gradients separated; the plan itself where that would break a limit of the recipe."""
        separated = separate_gradients(plan, self.problem, in_flight=self.limits.of_ranks)
        before, after = self._peaks(plan), self._peaks(separated)
        limits = [max(given, peak) for given, peak in zip(self.state.limit, before, strict=True)]
        return plan if any(map(exceeds, after, limits)) else separated

    def _peaks(self, plan: Plan) -> list[float]:
        """[pool] -> the most that a plan holds of what it counts."""
        held, peaks = [0.0] * len(self.limits.pools), [0.0] * len(self.limits.pools)
        first, position = self.items.first, self.graph.position
        for parts in plan.parts:
            for _, action, work in parts:
                node = first[work] + position[action.stage]
                for pool, amount, kept in (level.of(node) for level in self.limits.levels):
                    if pool >= 0 and action.kind in COMPUTE and self.items.has_backward[node]:
                        change = {Kind.F: amount, Kind.I: kept - amount, Kind.W: -kept, Kind.B: -amount}
                        held[pool] += change[action.kind]
                        peaks[pool] = max(peaks[pool], held[pool])
        return peaks

    # ----------------------------------------------------------------------------------------- callbacks

    def _hooks(self) -> dict[str, Callable[..., Any]]:
        """The kernel's functions that take part in a run with callbacks."""
        check, step = self.recipe.check, self.recipe.step
        moments = _Moments(self)

        def awaken(t: State, now: float) -> None:
            moments.advance(t, now)
            t.awake[:] = [1] * len(t.awake)  # a function may look at the time

        def allowed(t: State, item: int) -> bool:
            assert check is not None
            action = self.action(item)
            answer = call("Recipe.check", check, moments.of(t.rank_of[item]), action)
            if not isinstance(answer, bool):
                raise RecipeError(f"Recipe.check returned {shown(answer)} for {action}; return True or False")
            return answer

        def choose(t: State, rank: int, promise: int) -> int:
            assert step is not None
            ready = self._ready(t, rank, promise)
            if not ready:
                return -1
            answer = call("Recipe.step", step, moments.of(rank, tuple(ready)))
            if answer is not None and (not isinstance(answer, Action) or answer not in ready):
                raise RecipeError(
                    f"Recipe.step returned {shown(answer)} for rank {rank}, which could start "
                    f"{', '.join(map(str, ready))}; return one of moment.ready, or None"
                )
            return -1 if answer is None else ready[answer]

        return {"awaken": awaken} | ({"allowed": allowed} if check else {}) | ({"choose": choose} if step else {})

    def _ready(self, t: State, rank: int, promise: int) -> dict[Action, int]:
        """Action -> item of what a rank could start: F, then B or I, oldest first, then W in the order of their I."""
        S, N = len(self.graph.stage_rank), self.items.num_nodes
        rows = [t.queue[t.at[row] : t.first[row + 1]] for s in self.bound.shared.stages[rank] for row in (s, S + s)]
        items = sorted((item for row in rows for item in row), key=t.age.__getitem__)
        items += t.due[t.first_due[rank] : t.last_due[rank]]
        items += t.instructions[t.first_instruction[rank] : t.first_instruction[rank + 1]]
        return {
            self.action(item): item
            for item in items
            if t.status[item] == READY and (item >= N or kernel.admits(t, item, promise))
        }

    def _stuck(self, t: State, orders: Sequence[Sequence[Action]]) -> RecipeError:
        """The error of a run that has not started all actions."""
        reasons = [self._reason(t, rank, slot) for rank in range(self.graph.num_ranks) for slot in (F, B)]
        steps = {rank: len(order) for rank, order in enumerate(orders)}
        started, count = sum(map(len, orders)), len(t.begun)
        return RecipeError(
            f"the recipe gets stuck after {started} of {count} actions: {max(reasons)[1]}\n{show_steps(orders, steps)}"
        )

    def _reason(self, t: State, rank: int, slot: int) -> tuple[int, str]:
        """What holds up a rank that has something of a slot ready, and how likely it is the cause of all."""
        N, S = self.items.num_nodes, len(self.graph.stage_rank)
        nodes = [n for n in range(N) if t.status[slot * N + n] == READY and t.rank_of[n] == rank]
        waits = t.waits[2 * rank + slot] and not self.recipe.step
        if not nodes:
            return 0, "nothing is ready"
        reasons = []
        if slot == F and not kernel.admits(t, nodes[0], 0):
            pools = [t.pool[level * N + nodes[0]] for level in range(t.sizes[3])]
            full = [p for p in pools if p >= 0 and t.total[p] + 1e-9 >= t.limit[p]] or pools
            reasons.append(f"{self.limits.pools[full[0]].where} has no room; raise it")
        if waits:
            behind = [
                s for s in self.bound.shared.stages[rank] if t.remaining[slot * S + s] and not t.num_ready[slot * S + s]
            ]
            on = f" for stage {behind[0]}" if behind else ""
            kind = "backward" if slot else "forward"
            reasons.append(f"its {kind} traversal waits{on}; leave out wait, or change every")
        if self.recipe.step:
            reasons.append("Recipe.step returns None")
        elif self.recipe.check:
            reasons.append("Recipe.check admits nothing")
        action = self.action(slot * N + nodes[0])
        return 2 * waits + bool(reasons), f"rank {rank} could start {action}, but " + ", and ".join(reasons)


class _Moments:
    """The moments that functions of a recipe see."""

    def __init__(self, run: RecipeRun) -> None:
        self._run, self._now, self._count = run, 0.0, 0
        self._started: list[list[Action]] = [[] for _ in range(run.graph.num_ranks)]
        self._sets: list[frozenset[Action]] = [frozenset() for _ in range(run.graph.num_ranks)]

    def advance(self, t: State, now: float) -> None:
        """The time goes on, and what has been started is known."""
        self._now = now
        while self._count < len(t.begun) and t.begun[self._count] >= 0:
            item = t.begun[self._count]
            rank = t.rank_of[item]
            self._started[rank].append(self._run.action(item))
            self._count += 1

    def of(self, rank: int, ready: tuple[Action, ...] = ()) -> Moment:
        """The moment of a rank."""
        started = self._started[rank]
        if len(self._sets[rank]) < len(started):
            self._sets[rank] = frozenset(started)
        return Moment(
            rank=rank,
            num_ranks=len(self._started),
            now=self._now,
            ready=ready,
            started=self._sets[rank],
            last=started[-1] if started else None,
        )
