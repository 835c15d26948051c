"""Systems that train while nodes are lost and join: what each runs on the nodes that are there. Pure.

A system says which pipelines run, on which nodes, and how long a step takes. What a change costs follows from that, see
`trace_replay`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mmtrain.errors import ConfigError
from mmtrain.simulator.allocation.compositions import Composition, Layer, Template, Templates
from mmtrain.simulator.allocation.local_rule import local

Slots = tuple[tuple[str | None, ...], ...]
"""[pipeline][its node] -> name; None: lost, and its work is done by others."""


@dataclass(frozen=True, kw_only=True)
class Running:
    """What a system runs between two events."""

    composition: Composition
    slots: Slots
    step_s: float
    """Seconds of a step."""

    def held(self) -> dict[str, frozenset[Layer]]:
        """Node -> layers of which it holds the state."""
        rows = zip(self.composition.pipelines, self.slots, strict=True)
        return {
            node: layers for one, row in rows for node, layers in zip(row, one.held, strict=True) if node is not None
        }


class System(Protocol):
    """One way to go on."""

    templates: Templates
    """The templates as simulated."""
    live: bool
    """Whether nodes copy what they lack from each other; otherwise all restart from a checkpoint."""

    def running(self, before: Running | None, nodes: Sequence[str]) -> Running | None:
        """What it runs on some nodes; None: nothing, they are too few.

        Args: before: what ran until now, also on nodes that were lost; None: nothing.
        """
        ...


class Placer:
    """Puts nodes where they hold most of what they need."""

    def __init__(self, templates: Templates) -> None:
        self._bytes = templates.layer_bytes
        self._shared: dict[tuple[frozenset[Layer], frozenset[Layer]], float] = {}

    def placed(self, before: Running | None, pipelines: Sequence[Template], nodes: Sequence[str]) -> Slots:
        """The slots of pipelines. Whole pipelines stay; then each slot takes the node that holds most of its layers."""
        free = dict.fromkeys(nodes)
        kept: dict[int, list[tuple[str | None, ...]]] = {}
        if before is not None:
            wanted = Counter(one.nodes for one in pipelines)
            for one, row in zip(before.composition.pipelines, before.slots, strict=True):
                if wanted[one.nodes] and all(node in free for node in row):
                    wanted[one.nodes] -= 1
                    kept.setdefault(one.nodes, []).append(row)
                    for node in row:
                        free.pop(str(node))
        held = before.held() if before is not None else {}
        slots: list[tuple[str | None, ...]] = []
        for one in pipelines:
            if kept.get(one.nodes):
                slots.append(kept[one.nodes].pop(0))
                continue
            chosen: list[str] = []
            for layers in one.held:
                best = max(free, key=lambda node: self.bytes_of(layers, held.get(node, frozenset())))
                free.pop(best)
                chosen.append(best)
            slots.append(tuple(chosen))
        return tuple(slots)

    def bytes_of(self, layers: frozenset[Layer], others: frozenset[Layer]) -> float:
        """Bytes of the layers that are in both."""
        key = layers, others
        if key not in self._shared:
            self._shared[key] = sum(self._bytes.get(layer, 1.0) for layer in layers & others)
        return self._shared[key]


@dataclass(kw_only=True)
class BestComposition:
    """The best composition at each event, live."""

    templates: Templates
    live: bool = True
    _found: dict[tuple[int, tuple[int, ...]], Composition] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.placer = Placer(self.templates)

    def running(self, before: Running | None, nodes: Sequence[str]) -> Running | None:
        """See `System`."""
        try:
            return self._placed(before, self.best(len(nodes), before), nodes)
        except ConfigError:
            return None

    def best(self, nodes: int, before: Running | None) -> Composition:
        """The best composition. Raises: ConfigError: see `Templates.best`."""
        key = nodes, before.composition.nodes if before else ()
        if key not in self._found:
            self._found[key] = self.templates.best(nodes, before.composition if before else None)
        return self._found[key]

    def _placed(self, before: Running | None, composition: Composition, nodes: Sequence[str]) -> Running:
        slots = self.placer.placed(before, composition.pipelines, nodes)
        return Running(composition=composition, slots=slots, step_s=composition.seconds)


class LocalRule(BestComposition):
    """Oobleck's rule at losses, the best composition when nodes join."""

    def running(self, before: Running | None, nodes: Sequence[str]) -> Running | None:
        """See `System`."""
        try:
            composition = self._gone_on(before, nodes) if before is not None else self.best(len(nodes), None)
        except ConfigError:
            try:
                composition = self.best(len(nodes), before)
            except ConfigError:
                return None
        return self._placed(before, composition, nodes)

    def _gone_on(self, before: Running, nodes: Sequence[str]) -> Composition:
        """The composition after losses, which unused nodes replace first. Raises: ConfigError: see `local`."""
        there = set(nodes)
        lost = [sum(node not in there for node in row) for row in before.slots]
        spare = len(there) - sum(before.composition.nodes) + sum(lost)
        if not sum(lost) or spare > sum(lost):
            return self.best(len(nodes), before)
        for index, count in enumerate(lost):
            replaced = min(count, spare)
            lost[index], spare = count - replaced, spare - replaced
        return self.dealt(local(self.templates, before.composition, lost))

    def dealt(self, composition: Composition) -> Composition:
        """The composition with its division of microbatches."""
        return composition


@dataclass(kw_only=True)
class EqualPipelines:
    """The best number of equal pipelines; nodes beyond are idle."""

    templates: Templates
    live: bool
    _found: dict[int, Composition | None] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.placer = Placer(self.templates)

    def best(self, nodes: int) -> Composition | None:
        """The fastest equal pipelines; live: at least f + 1. None: there are none."""
        if nodes not in self._found:
            least = self.templates.max_failures + 1 if self.live else 1
            made = [
                self.templates.composed([one] * count)
                for one in self.templates.templates
                for count in range(least, nodes // one.nodes + 1)
                if count * one.replicas <= self.templates.microbatches
            ]
            self._found[nodes] = min(made, key=lambda one: one.seconds, default=None)
        return self._found[nodes]

    def running(self, before: Running | None, nodes: Sequence[str]) -> Running | None:
        """See `System`. What runs goes on if no node of it was lost and no grid is faster."""
        best = self.best(len(nodes))
        if best is None:
            return None
        if before is not None and best.seconds >= before.step_s and set(before.held()) <= set(nodes):
            return before
        slots = self.placer.placed(before, best.pipelines, nodes)
        return Running(composition=best, slots=slots, step_s=best.seconds)


class ReRouting(EqualPipelines):
    """A lost node's microbatches go to the nodes with the same stages in other pipelines."""

    def running(self, before: Running | None, nodes: Sequence[str]) -> Running | None:
        """See `System`. The best grid instead, where that is faster or a stage has no node."""
        fresh = super().running(None, nodes)
        if before is None:
            return fresh
        there = set(nodes)
        spare = [node for node in nodes if node not in before.held()]
        kept = [[node if node in there else None for node in row] for row in before.slots]
        by_stage = list(zip(*kept, strict=True))
        stages = sorted(range(len(by_stage)), key=lambda stage: -by_stage[stage].count(None))
        while spare and any(None in row for row in kept):
            for stage in stages:
                hole = next((row for row in kept if row[stage] is None), None)
                if hole is not None and spare:
                    hole[stage] = spare.pop(0)
        alive = min(sum(row[stage] is not None for row in kept) for stage in stages)
        if not alive:
            return fresh
        step_s = self.re_routed_s(before.composition, alive)
        if fresh is not None and fresh.step_s < step_s * (1 - 1e-9):
            slots = self.placer.placed(before, fresh.composition.pipelines, nodes)
            return Running(composition=fresh.composition, slots=slots, step_s=fresh.step_s)
        return Running(composition=before.composition, slots=tuple(map(tuple, kept)), step_s=step_s)

    def re_routed_s(self, grid: Composition, alive: int) -> float:
        """Seconds of a step in which some stage has nodes in `alive` pipelines alone: that stage's work of all
        pipelines, without a bubble; and at least a step with all nodes."""
        one, count = grid.pipelines[0], max(grid.microbatches)
        steady = one.seconds(count) - one.seconds(one.replicas)
        busy_s = steady * count / max(1, count - one.replicas)
        return max(grid.pipeline_s, busy_s * len(grid.pipelines) / alive) + grid.sums_s
