"""A work graph as numbered items and their dependencies, for everything that executes actions.

A *node* is a (stage, work): node `first[work] + k` is the k-th stage of the work. An *item* is one result: F, B (of B
or I) or W of a node, numbered `slot * num_nodes + node`, then the graph's instructions. A *message* is a result that
another rank needs: the output of node n has number n.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from mmtrain.schedule.action import NEEDS, RESULT_OF, SLOTS, Action, Kind

SAME_RANK = -1
"""The message of a result that is needed on its own rank."""

Dependent = tuple[int, int]
"""An item that waits, and the message that it waits for."""

Result = tuple[Kind, int, int]
"""The result of an action: (F, B, W or a registered kind; stage, work). B and I have the result B, the gradient of the
stage's input."""


class Input(NamedTuple):
    """An activation that a work takes from another one."""

    work: int
    """The work that it is taken from."""
    source: int
    """Position in its chain."""
    target: int
    """Position in the chain of the work that takes it."""
    grad: bool
    """Whether its gradient goes back, if both stages have a backward."""
    size_bytes: float | None
    """Bytes of the message; None: as the output of its stage."""


class Local(NamedTuple):
    """What a registered instruction waits for, and what waits for it, on its rank."""

    rank: int
    after: Sequence[Result]
    before: Sequence[Result]


class Items:
    """The items of one work graph. All lists are read only."""

    def __init__(
        self,
        num_ranks: int,
        stage_rank: Sequence[int],
        position: Sequence[int],
        chains: Sequence[Sequence[int]],
        backward: Sequence[Sequence[bool]],
        inputs: Sequence[Sequence[Input]],
        instructions: Mapping[Result, Local],
    ) -> None:
        """Args:
        stage_rank: [stage]
        position: [stage] -> its position in its module's chain.
        chains: [work] -> its stages.
        backward: [work][k] -> whether its k-th stage has a backward.
        inputs: [work] -> from other works.
        """
        self.num_ranks = num_ranks
        self.first = [0, *accumulate(map(len, chains))]
        """[work] -> its first node; the last entry is the number of nodes."""
        self.num_nodes = self.first[-1]
        self.position = position
        """[stage] -> its position in its module's chain."""
        self.stage = [stage for chain in chains for stage in chain]
        """[node] -> its stage."""
        self.work = [work for work, chain in enumerate(chains) for _ in chain]
        """[node] -> its work."""
        self.rank = [stage_rank[stage] for stage in self.stage]
        """[node] -> its rank."""
        self.rank_of = [*self.rank * 3, *(local.rank for local in instructions.values())]
        """[item] -> its rank."""
        self.has_backward = [flag for row in backward for flag in row]
        """[node] -> whether it has a backward."""
        self.num_items = 3 * self.num_nodes + len(instructions)
        self.num_needs = [0] * self.num_items
        """[item] -> number of results it needs."""
        self.dependents: list[list[Dependent]] = [[] for _ in range(self.num_items)]
        """[item] -> the items that wait for it."""
        self.over_edges: list[tuple[int, int, int]] = []
        """All edges as (result, item that needs it, message), those into and out of one node in the graph's order."""
        self.link_bytes: list[float] = []
        """Sizes of the further messages: links with their own `size_bytes`."""
        self.link_source: list[int] = []
        """The nodes that make them."""
        self.copies: dict[tuple[int, int], None] = {}
        """All pairs of a message and a rank that reads it, in the order of the edges."""
        self._add_table(self._edges(inputs))
        self._instructions = {key: 3 * self.num_nodes + number for number, key in enumerate(instructions)}
        for key, local in instructions.items():
            for result in local.after:
                self._add(self.item(*result), self.item(*key), SAME_RANK)
            for result in local.before:
                self._add(self.item(*key), self.item(*result), SAME_RANK)

    def item(self, kind: Kind, stage: int, work: int) -> int:
        """The item of the result of an action."""
        slot = SLOTS.get(kind)
        if slot is None:
            return self._instructions[kind, stage, work]
        return slot * self.num_nodes + self.first[work] + self.position[stage]

    def of_order(self, order: Sequence[Action], works: Sequence[int]) -> list[int]:
        """[step] -> item of that action; of a braid, its first."""
        first, position = self.first, self.position
        base = {kind: slot * self.num_nodes for kind, slot in SLOTS.items()}
        return [
            base[a.kind] + first[w] + position[a.stage] if a.kind in base else self.item(a.parts[0].kind, a.stage, w)
            for a, w in zip(order, works, strict=True)
        ]

    def in_cycles(self) -> set[int]:
        """The items that wait for each other in a cycle, and those that wait for these."""
        waiting, ready = self.num_needs.copy(), [item for item, count in enumerate(self.num_needs) if not count]
        reached = set(ready)
        while ready:
            for dependent, _ in self.dependents[ready.pop()]:
                waiting[dependent] -= 1
                if not waiting[dependent]:
                    ready.append(dependent)
                    reached.add(dependent)
        return set(range(self.num_items)) - reached

    @property
    def num_messages(self) -> int:
        """Number of messages."""
        return self.num_nodes + len(self.link_bytes)

    def _add(self, result: int, item: int, message: int) -> None:
        self.dependents[result].append((item, message))
        self.num_needs[item] += 1

    def _add_table(self, edges: Sequence[tuple[int, int, int, bool]]) -> None:
        """Adds the dependencies of the table `NEEDS` for all nodes."""
        N = self.num_nodes
        for kind, needs in NEEDS.items():
            if RESULT_OF[kind] is not kind:
                continue  # I has the result and the needs of B
            base = SLOTS[kind] * N
            if needs.own:
                own = SLOTS[needs.own] * N
                for node, flag in enumerate(self.has_backward):
                    if flag:
                        self._add(own + node, base + node, SAME_RANK)
            if needs.sources:
                made = SLOTS[needs.sources] * N
                self.over_edges += [(made + source, base + target, message) for source, target, message, _ in edges]
            if needs.targets:
                made = SLOTS[needs.targets] * N
                self.over_edges += [
                    (made + target, base + source, message) for source, target, message, g in edges if g
                ]
        for need in self.over_edges:
            self._add(*need)

    def _edges(self, inputs: Sequence[Sequence[Input]]) -> list[tuple[int, int, int, bool]]:
        """All edges as (source node, target node, message, whether its gradient is sent back)."""
        rank, grad, first = self.rank, self.has_backward, self.first
        edges = []
        for work, links in enumerate(inputs):
            begin = first[work]
            for link in links:
                source, target = first[link.work] + link.source, begin + link.target
                message = SAME_RANK if rank[source] == rank[target] else source
                if link.size_bytes is not None and message != SAME_RANK:
                    message = self.num_nodes + len(self.link_bytes)
                    self.link_bytes.append(link.size_bytes)
                    self.link_source.append(source)
                if message != SAME_RANK:
                    self.copies[message, rank[target]] = None
                edges.append((source, target, message, link.grad and grad[source] and grad[target]))
            for node in range(begin, first[work + 1] - 1):
                message = SAME_RANK if rank[node] == rank[node + 1] else node
                if message != SAME_RANK:
                    self.copies[message, rank[node + 1]] = None
                edges.append((node, node + 1, message, grad[node] and grad[node + 1]))
        return edges
