"""What all recipes of one problem share; made once."""

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from mmtrain.schedule.library.list_schedule import widest
from mmtrain.schedule.library.memory import Memory, choose_options, components
from mmtrain.schedule.library.one_f_one_b import module_order
from mmtrain.schedule.library.weights import worth_splitting
from mmtrain.schedule.problem import PlanningProblem


class Shared:
    """What does not depend on the recipe, and values of nodes that many recipes have in common."""

    def __init__(self, problem: PlanningProblem) -> None:
        """Args: problem: with at least one work."""
        graph, items = problem.graph, problem.graph.items
        self.problem, self.graph, self.items = problem, graph, items
        self.component = components(graph)
        """[work] -> its component."""
        self.nodes = list(zip(items.stage, items.work, strict=True))
        """[node] -> (stage, work)."""
        depth = {module: position for position, module in enumerate(module_order(graph))}
        self.stages = [
            sorted(graph.stages_of_rank(rank), key=lambda s: (depth[graph.module_of[s]], graph.position[s]))
            for rank in range(graph.num_ranks)
        ]
        """[rank] -> its stages, front layers first."""
        number = {microbatch: i for i, microbatch in enumerate(sorted({work.microbatch for work in graph.works}))}
        self.microbatch = [number[graph.works[work].microbatch] for work in items.work]
        """[node] -> index of its microbatch among those of the iteration."""
        self.trained = {stage for stage, flag in zip(items.stage, items.has_backward, strict=True) if flag}
        """The stages with a backward."""
        self._settled: dict[tuple[bool, Sequence[bool]], Settled] = {}
        self._levels: dict[tuple[Any, ...], Level] = {}

    @cached_property
    def age(self) -> list[int]:
        """[item of F or B] -> position in its slot, oldest component first; B of the last stage first."""
        graph, items, age = self.graph, self.items, [0] * (2 * self.items.num_nodes)
        nodes = [items.first[work] + graph.position[stage] for stage, work in graph.nodes()]
        group = [(self.component[work], graph.works[work].microbatch) for work in items.work]
        for position, node in enumerate(sorted(nodes, key=group.__getitem__)):
            age[node] = position
        nodes.reverse()
        for position, node in enumerate(sorted(nodes, key=group.__getitem__), items.num_nodes):
            age[items.num_nodes + node] = position
        return age

    def settled(self, *, memory: bool, splits: Sequence[bool]) -> "Settled":
        """The options and splits of all nodes; the same object for equal arguments.

        Args: memory: whether memory limits count. splits: [stage] -> whether its backwards are to be split.
        Raises: PlanError: one microbatch alone exceeds a memory limit.
        """
        key = (memory, tuple(splits) if any(splits) else ())
        if key not in self._settled:
            self._settled[key] = Settled(self, memory=memory, splits=splits)
        return self._settled[key]

    def in_flight(self, pools: Sequence[int], until: Sequence[str]) -> "Level":
        """The level that counts works in flight; the same object for equal arguments.

        Args: pools: [stage] -> pool; -1: none. until: [stage] -> where a flight ends.
        """
        key = (tuple(pools), "I" in until and tuple(until))
        if key not in self._levels:
            # A stage without a backward holds nothing in flight.
            stage, flags = self.items.stage, self.items.has_backward
            pool = [pools[s] if flag else -1 for s, flag in zip(stage, flags, strict=True)]
            kept = [0.0 if until[s] == "I" else share for s, share in zip(stage, self._share, strict=True)]
            self._levels[key] = Level(pool, self._share, kept)
        return self._levels[key]

    def bytes_held(self, settled: "Settled", first: int) -> "Level":
        """The level that counts bytes; the same object for the same arguments. Args: first: pool of the first rank."""
        key = (settled, first)
        if key not in self._levels:
            taken = [
                widest(option) if split else option
                for option, split in zip(settled.options, settled.split, strict=True)
            ]
            self._levels[key] = Level(
                [first + rank for rank in self.items.rank],
                [option.activation_bytes for option in taken],
                [option.held_for_weight_bytes for option in settled.options],
            )
        return self._levels[key]

    @cached_property
    def _share(self) -> list[float]:
        """[node] -> its share of its (microbatch, stage) pair; 0 without a backward."""
        pairs = list(zip(self.items.stage, self.microbatch, strict=True))
        works = Counter(pairs)
        return [flag / works[pair] for flag, pair in zip(self.items.has_backward, pairs, strict=True)]


class Level:
    """One kind of limit, for all nodes."""

    def __init__(self, pool: list[int], amount: list[float], kept: list[float]) -> None:
        """Args: as the attributes."""
        self.pool = pool
        """[node] -> pool; -1: none."""
        self.amount = amount
        """[node] -> what an F takes."""
        self.kept = kept
        """[node] -> what is still held after an I."""

    def of(self, node: int) -> tuple[int, float, float]:
        """Pool, what F takes and what is kept after I."""
        return self.pool[node], self.amount[node], self.kept[node]


class Settled:
    """The memory option of each node, and which backwards are split."""

    def __init__(self, shared: Shared, *, memory: bool, splits: Sequence[bool]) -> None:
        """Args: as of `Shared.settled`."""
        problem, items = shared.problem, shared.items
        self.chosen = choose_options(problem, shared.component) if memory else dict.fromkeys(shared.nodes, 0)
        """The index of the option of each (stage, work)."""
        self.options = [problem.options(*node)[self.chosen[node]] for node in shared.nodes]
        """[node] -> its option."""
        self.split = [
            splits[stage] and flag and worth_splitting(option)
            for stage, flag, option in zip(items.stage, items.has_backward, self.options, strict=True)
        ]
        """[node] -> whether its backward is I and W."""
        if memory and any(self.split):
            self._keep_wide_whole(shared)

    def _keep_wide_whole(self, shared: Shared) -> None:
        """Splits no backward of a component that fits alone, but not with what its I leaves for W."""
        component = shared.component
        widths = [widest(option) if split else option for option, split in zip(self.options, self.split, strict=True)]
        memory = Memory.of(shared.problem, component, dict(zip(shared.nodes, widths, strict=True)))
        wide = {number for number, _ in memory.oversize()}
        works = (work for _, work in shared.nodes)
        self.split = [split and component[work] not in wide for split, work in zip(self.split, works, strict=True)]
