"""A recipe as a policy of the engine: it makes a plan for any work graph."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

from mmtrain.errors import RecipeError, shown
from mmtrain.schedule.action import COMPUTE, Action, Kind
from mmtrain.schedule.engine import Engine
from mmtrain.schedule.library.list_schedule import widest
from mmtrain.schedule.library.memory import Memory, choose_options, components
from mmtrain.schedule.library.one_f_one_b import module_order
from mmtrain.schedule.library.weights import worth_splitting
from mmtrain.schedule.passes.separate import separate_gradients
from mmtrain.schedule.plan import Plan, exceeds
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.recipe import kernel
from mmtrain.schedule.recipe.kernel import INSTRUCTION, B, F, State
from mmtrain.schedule.recipe.language import Recipe, traversal
from mmtrain.schedule.recipe.limits import Limits
from mmtrain.schedule.recipe.ranks import Ranks

PREFERRED = {"backward": kernel.BACKWARD_FIRST, "forward": kernel.FORWARD_FIRST, "alternate": kernel.ALTERNATE}
ORDERS = {"breadth": kernel.BREADTH, "depth": kernel.DEPTH, "oldest": kernel.OLDEST}


def plan_of(recipe: Recipe, problem: PlanningProblem, *, compiled: bool = False, at_once: bool = False) -> Plan:
    """The plan of a recipe for a problem.

    A recipe with a check or a step function runs twice, and both runs must agree.

    Args:
        compiled: by numba, with equal results; worth its start where many recipes are run.
        at_once: an action without duration ends before the next rank decides, as of `Policy`; never compiled.
    Raises:
        RecipeError: the recipe gets stuck, a limit has the wrong length, or a function of the recipe raises, returns
            something else or is impure.
        PlanError: one microbatch alone exceeds a memory limit.
    """
    if not problem.graph.works:
        return Plan(problem.graph, ((),) * problem.graph.num_ranks)
    run = RecipeRun(recipe, problem)
    plan = run.plan(compiled=compiled, at_once=at_once)
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
        graph, items = problem.graph, problem.graph.items
        self.recipe, self.problem, self.graph, self.items = recipe, problem, graph, items
        self._check_overrides()
        self.component = components(graph)
        """[work]"""
        self.nodes = list(zip(items.stage, items.work, strict=True))
        self.chosen = choose_options(problem, self.component) if recipe.memory else dict.fromkeys(self.nodes, 0)
        self.options = [problem.options(*node)[self.chosen[node]] for node in self.nodes]
        """[node]"""
        depth = {module: position for position, module in enumerate(module_order(graph))}
        self.stages = [
            sorted(graph.stages_of_rank(rank), key=lambda s: (depth[graph.module_of[s]], graph.position[s]))
            for rank in range(graph.num_ranks)
        ]
        """[rank] -> its stages, front layers first."""
        names = [graph.modules[module].name for module in graph.module_of]
        rules = [recipe.rule(*key) for key in zip(names, graph.stage_rank, strict=True)]
        self.split = [
            rules[stage].split_backward and items.has_backward[node] and worth_splitting(self.options[node])
            for node, stage in enumerate(items.stage)
        ]
        """[node]"""
        if recipe.memory:
            self._keep_wide_whole()
        self.limits = Limits(recipe, problem, self.stages, self.options, self.split, [rule.until for rule in rules])
        self.message_s = None if recipe.clock == "lockstep" else problem.message_s
        """[message] -> seconds of its transfer; None: transfers take no time."""
        self.seconds = self._seconds()
        """[item] -> duration of its action by the recipe's clock; None: it has none."""
        self.age = self._ages()
        number = {microbatch: i for i, microbatch in enumerate(sorted({work.microbatch for work in graph.works}))}
        self.microbatch = [number[graph.works[work].microbatch] for work in items.work]
        """[node] -> index of its microbatch among those of the iteration."""

    def plan(self, *, compiled: bool = False, at_once: bool = False) -> Plan:
        """The plan. Args: compiled: see `plan_of`. at_once: see `Policy`. Raises: RecipeError: see `plan_of`."""
        if compiled and not at_once and not self.recipe.check and not self.recipe.step:
            state = kernel.as_arrays(self._state())
            if kernel.compiled()(state) == len(state.begun):
                return self.plan_from(map(int, state.begun))
        ranks = Ranks(self, at_once=at_once)
        started = Engine(self.items, self.message_s).run(ranks)
        plan = self.plan_from(started)
        if len(started) < sum(seconds is not None for seconds in self.seconds):
            raise ranks.stuck(plan.orders)
        return plan

    def plan_from(self, items: Iterable[int]) -> Plan:
        """The plan of items in the order of their start."""
        orders: list[list[Action]] = [[] for _ in range(self.graph.num_ranks)]
        for item in items:
            orders[self.items.rank_of[item]].append(self.action(item))
        return Plan(
            self.graph, tuple(map(tuple, orders)), {node: index for node, index in self.chosen.items() if index}
        )

    def memories(self) -> list[Memory]:
        """The admission by each level of limits; one component always has room."""
        limits = [pool.limit for pool in self.limits.pools]
        component = [self.component[work] for work in self.items.work]
        memories = [
            Memory(component, level.pool, level.amount, level.kept, self.items.has_backward, limits)
            for level in self.limits.levels
        ]
        for memory in memories:
            memory.widen()
        return memories

    def separated(self, plan: Plan) -> Plan:
        """The plan with gradients separated; the plan itself where that would break a limit of the recipe."""
        separated = separate_gradients(plan, self.problem, in_flight=self.limits.of_ranks)
        before, after = self._peaks(plan), self._peaks(separated)
        widened = (max(memory.limit(pool) for memory in self.memories()) for pool in range(len(before)))
        limits = list(map(max, widened, before))
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

    def action(self, item: int) -> Action:
        """The action of an item."""
        slot, node = divmod(item, self.items.num_nodes)
        if slot >= INSTRUCTION:
            given = self.graph.instructions[item - INSTRUCTION * self.items.num_nodes]
            return self.graph.action(given.kind, given.stage, given.work)
        return self.graph.action((Kind.F, Kind.I if self.split[node] else Kind.B, Kind.W)[slot], *self.nodes[node])

    def _keep_wide_whole(self) -> None:
        """Splits no backward of a component that fits alone, but not with what its I leave for W."""
        widths = [widest(option) if split else option for option, split in zip(self.options, self.split, strict=True)]
        memory = Memory.of(self.problem, self.component, dict(zip(self.nodes, widths, strict=True)))
        wide = {component for component, _ in memory.oversize()}
        works = (work for _, work in self.nodes)
        self.split = [split and self.component[work] not in wide for split, work in zip(self.split, works, strict=True)]

    # --------------------------------------------------------------------------------------------- rules

    def _check_overrides(self) -> None:
        names = [module.name for module in self.graph.modules]
        for key in (*self.recipe.overrides, *self.recipe.placements):
            if isinstance(key, str) and key and key not in names:
                raise RecipeError(f"the recipe names a module {key!r}; this model has {', '.join(names)}")
            if isinstance(key, int) and not 0 <= key < self.graph.num_ranks:
                raise RecipeError(f"Recipe.overrides[{key}] names a rank; use 0 .. {self.graph.num_ranks - 1}")

    def rule_of_rank(self, rank: int) -> Recipe:
        """The recipe on a rank: with the override of its module, if it holds only one, and its own."""
        modules = sorted({self.graph.modules[self.graph.module_of[stage]].name for stage in self.stages[rank]})
        for module in modules if len(modules) > 1 else ():
            for name in ("first", "units", "forward", "backward"):
                given = getattr(self.recipe.overrides.get(module), name, None)
                if given is not None:
                    raise RecipeError(
                        f"Recipe.overrides[{module!r}].{name} = {shown(given)}: rank {rank} holds "
                        f"{' and '.join(modules)}, and chooses among all its stages; set {name} for ranks"
                    )
        return self.recipe.rule(*modules if len(modules) == 1 else (), rank)

    # ------------------------------------------------------------------------------------------- the state

    def _state(self) -> State:
        parts = self._of_items() | self._of_queues() | self._of_rules() | self._of_limits()
        return State(**parts)

    def _of_items(self) -> dict[str, Any]:
        graph, items = self.graph, self.items
        message_s = [*(self.message_s or [0.0] * items.num_messages), 0.0]
        dependents, of_item = _rows([[item for item, _ in row] for row in items.dependents])
        num_actions = sum(seconds is not None for seconds in self.seconds)
        return {
            "waiting": items.num_needs.copy(),
            "arrival": [0.0] * items.num_items,
            "dependents": dependents,
            "delay": [message_s[message] for row in items.dependents for _, message in row],
            "of_item": of_item,
            "seconds": [seconds or 0.0 for seconds in self.seconds],
            "rank_of": [*items.rank * 3, *(graph.stage_rank[given.stage] for given in graph.instructions)],
            "status": [kernel.WAITING] * items.num_items,
            "stage": items.stage,
            "component": [self.component[work] for work in items.work],
            "microbatch": self.microbatch,
            "has_backward": items.has_backward,
            "split": self.split,
            "begun": [-1] * num_actions,
            "ends": [0.0] * items.num_items,
            "sizes": [
                items.num_nodes,
                len(graph.stage_rank),
                max(self.component) + 1,
                len(self.limits.levels),
                num_actions,
            ],
        }

    def _of_queues(self) -> dict[str, Any]:
        graph, items, age = self.graph, self.items, self.age
        N, S, P = items.num_nodes, len(graph.stage_rank), graph.num_ranks
        queues: list[list[int]] = [[] for _ in range(2 * S)]
        for item in sorted(range(2 * N), key=age.__getitem__):
            if item < N or items.has_backward[item - N]:
                queues[item // N * S + items.stage[item % N]].append(item)
        queue, first = _rows(queues)
        stages, first_stage = _rows(self.stages)
        num_split = Counter(rank for rank, split in zip(items.rank, self.split, strict=True) if split)
        first_due = [0, *accumulate(num_split[rank] for rank in range(P))]
        instructions: list[list[int]] = [[] for _ in range(P)]
        for number, given in enumerate(graph.instructions):
            instructions[graph.stage_rank[given.stage]].append(INSTRUCTION * N + number)
        instruction, first_instruction = _rows(instructions)
        return {
            "age": age,
            "queue": queue,
            "first": first,
            "at": first[:-1],
            "num_ready": [0] * (2 * S),
            "remaining": list(map(len, queues)),
            "stages": stages,
            "first_stage": first_stage,
            "due": [-1] * first_due[-1],
            "first_due": first_due[:-1],
            "last_due": first_due[:-1],
            "instructions": instruction,
            "first_instruction": first_instruction,
        }

    def _of_rules(self) -> dict[str, Any]:
        P = self.graph.num_ranks
        rules = [self.rule_of_rank(rank) for rank in range(P)]
        sides = [traversal(order) for rule in rules for order in (rule.forward, rule.backward)]
        return {
            "preferred": [PREFERRED[rule.first] for rule in rules],
            "unit": [unit for rule in rules for unit in rule.units],
            "order": [ORDERS[side.order] for side in sides],
            "every": [side.every for side in sides],
            "waits": [side.wait for side in sides],
            "cursor": [0] * (2 * P),
            "served": [0] * (2 * P),
            "last": [-1] * P,
            "in_a_row": [0] * P,
            "busy": [0] * P,
            "awake": [0] * P,
        }

    def _of_limits(self) -> dict[str, Any]:
        items, levels, pools = self.items, self.limits.levels, self.limits.pools
        N, C = items.num_nodes, max(self.component) + 1
        pool = [x for level in levels for x in level.pool]
        amount = [x for level in levels for x in level.amount]
        to_hold, forwards = [0.0] * (len(pools) * C), [0] * (len(pools) * C)
        passing: list[list[int]] = [[] for _ in to_hold]
        for i, (number, taken) in enumerate(zip(pool, amount, strict=True)):
            if number >= 0:
                at = number * C + self.component[items.work[i % N]]
                forwards[at] += 1
                if items.has_backward[i % N]:
                    to_hold[at] += taken
                else:
                    passing[at].append(i)
        for row in passing:
            row.sort(key=lambda i: -amount[i])
        passing_nodes, first_passing = _rows(passing)
        return {
            "pool": pool,
            "amount": amount,
            "kept": [x for level in levels for x in level.kept],
            # One component always has room.
            "limit": [max(given.limit, *to_hold[i * C : (i + 1) * C]) for i, given in enumerate(pools)],
            "total": [0.0] * len(pools),
            "held": [0.0] * len(to_hold),
            "to_hold": to_hold,
            "forwards": forwards,
            "passing": passing_nodes,
            "first_passing": first_passing,
        }

    def _ages(self) -> list[int]:
        """[item of F or B] -> position in its slot, oldest component first; B of the last stage first."""
        graph, items = self.graph, self.items
        keys: list[tuple[int, ...]] = [()] * (2 * items.num_nodes)
        for position, (stage, work) in enumerate(graph.nodes()):
            for slot, kind, sign in ((F, Kind.F, 1), (B, Kind.B, -1)):
                age = (slot, self.component[work], graph.works[work].microbatch, sign * position)
                keys[items.item(kind, stage, work)] = age
        ages = [0] * len(keys)
        for position, item in enumerate(sorted(range(len(keys)), key=keys.__getitem__)):
            ages[item] = position
        return ages

    def _seconds(self) -> list[float | None]:
        kinds = [*[Kind.F] * self.items.num_nodes, *(Kind.I if split else Kind.B for split in self.split)]
        kinds += [Kind.W] * self.items.num_nodes
        runs = [True] * self.items.num_nodes + self.items.has_backward + self.split
        seconds = [
            option.duration_s(kind) if run else None
            for kind, run, option in zip(kinds, runs, self.options * 3, strict=True)
        ]
        seconds += [given.seconds for given in self.graph.instructions]
        if self.recipe.clock == "lockstep":
            return [None if s is None else 1.0 for s in seconds]
        return seconds


def _rows(rows: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """All rows one after the other, and where each begins, with the end of the last."""
    return [entry for row in rows for entry in row], [0, *accumulate(map(len, rows))]
