"""A recipe bound to a problem: its memory options, splits, rules of ranks and limits."""

from collections.abc import Iterable, Sequence
from functools import cached_property

from mmtrain.errors import RecipeError, shown
from mmtrain.schedule.action import Action, Kind
from mmtrain.schedule.library.memory import Memory
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.recipe.language import Recipe
from mmtrain.schedule.recipe.limits import Limits
from mmtrain.schedule.recipe.shared import Shared

INSTRUCTION = 3
"""Slot of the items of registered instructions."""


class Bound:
    """A recipe and a problem, as every run of the two needs them."""

    def __init__(self, recipe: Recipe, shared: Shared) -> None:
        """Args: shared: of a problem with at least one work. Raises: RecipeError: overrides or limits do not fit it."""
        self.recipe, self.shared, self.problem = recipe, shared, shared.problem
        self.graph, self.items = shared.graph, shared.items
        self._check_overrides()
        names = [self.graph.modules[module].name for module in self.graph.module_of]
        rules = [recipe.rule(*key) for key in zip(names, self.graph.stage_rank, strict=True)]
        self.settled = shared.settled(memory=recipe.memory, splits=[rule.split_backward for rule in rules])
        self.chosen, self.options, self.split = self.settled.chosen, self.settled.options, self.settled.split
        self.limits = Limits(recipe, shared, self.settled, [rule.until for rule in rules])

    @cached_property
    def rules(self) -> list[Recipe]:
        """[rank] -> the recipe there: with the override of its module, if the rank holds only one, and its own.

        Raises: RecipeError: an override of a module that shares a rank names what a rank chooses among all stages.
        """
        return [self._rule_of_rank(rank) for rank in range(self.graph.num_ranks)]

    @property
    def num_actions(self) -> int:
        """How many actions its plan has."""
        items = self.items
        return items.num_nodes + sum(items.has_backward) + sum(self.split) + len(self.graph.instructions)

    @property
    def message_s(self) -> Sequence[float] | None:
        """[message] -> seconds of its transfer by the recipe's clock; None: transfers take no time."""
        return None if self.recipe.clock == "lockstep" else self.problem.message_s

    def seconds(self) -> list[float | None]:
        """[item] -> duration of its action by the recipe's clock; None: there is none."""
        num_nodes, lockstep = self.items.num_nodes, self.recipe.clock == "lockstep"
        runs = [True] * num_nodes + self.items.has_backward + self.split
        kinds = [Kind.F] * num_nodes + [Kind.I if split else Kind.B for split in self.split] + [Kind.W] * num_nodes
        return [
            *(
                (1.0 if lockstep else option.duration_s(kind)) if run else None
                for run, kind, option in zip(runs, kinds, self.options * 3, strict=True)
            ),
            *(1.0 if lockstep else given.seconds for given in self.graph.instructions),
        ]

    def memories(self) -> list[Memory]:
        """[level of limits] -> what it admits before the first action; one component always has room."""
        component = [self.shared.component[work] for work in self.items.work]
        limits = [pool.limit for pool in self.limits.pools]
        memories = [
            Memory(component, level.pool, level.amount, level.kept, self.items.has_backward, limits)
            for level in self.limits.levels
        ]
        for memory in memories:
            memory.widen()
        return memories

    def plan(self, items: Iterable[int]) -> Plan:
        """The plan of items in the order of their start."""
        orders: list[list[Action]] = [[] for _ in range(self.graph.num_ranks)]
        for item in items:
            orders[self.items.rank_of[item]].append(self.action(item))
        options = {node: index for node, index in self.chosen.items() if index}
        return Plan(self.graph, tuple(map(tuple, orders)), options)

    def action(self, item: int) -> Action:
        """The action of an item."""
        slot, node = divmod(item, self.items.num_nodes)
        if slot >= INSTRUCTION:
            given = self.graph.instructions[item - INSTRUCTION * self.items.num_nodes]
            return self.graph.action(given.kind, given.stage, given.work)
        kind = (Kind.F, Kind.I if self.split[node] else Kind.B, Kind.W)[slot]
        return self.graph.action(kind, *self.shared.nodes[node])

    def _check_overrides(self) -> None:
        names = [module.name for module in self.graph.modules]
        for key in (*self.recipe.overrides, *self.recipe.placements):
            if isinstance(key, str) and key and key not in names:
                raise RecipeError(f"the recipe names a module {key!r}; this model has {', '.join(names)}")
            if isinstance(key, int) and not 0 <= key < self.graph.num_ranks:
                raise RecipeError(f"Recipe.overrides[{key}] names a rank; use 0 .. {self.graph.num_ranks - 1}")

    def _rule_of_rank(self, rank: int) -> Recipe:
        if not self.recipe.overrides:
            return self.recipe
        stages = self.shared.stages[rank]
        modules = sorted({self.graph.modules[self.graph.module_of[stage]].name for stage in stages})
        for module in modules if len(modules) > 1 else ():
            for name in ("first", "units", "forward", "backward"):
                given = getattr(self.recipe.overrides.get(module), name, None)
                if given is not None:
                    raise RecipeError(
                        f"Recipe.overrides[{module!r}].{name} = {shown(given)}: rank {rank} holds "
                        f"{' and '.join(modules)}, and chooses among all its stages; set {name} for ranks"
                    )
        return self.recipe.rule(*modules if len(modules) == 1 else (), rank)
