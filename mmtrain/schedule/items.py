"""A work graph as numbered items and their dependencies, for everything that executes actions.

A *node* is a (stage, work): node `first[work] + k` is the k-th stage of the work. An *item* is one result: F, B (of B
or I) or W of a node, numbered `slot * num_nodes + node`, then the graph's instructions. A *message* is a result that
another rank needs: the output of node n has number n.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from mmtrain.schedule.action import NEEDS, RESULT_OF, SLOTS, Action, Kind

if TYPE_CHECKING:
    from mmtrain.schedule.graph import WorkGraph

SAME_RANK = -1
"""The message of a result that is needed on its own rank."""

Dependent = tuple[int, int]
"""(item that waits, message)."""


class Items:
    """The items of one work graph. All lists are read only."""

    def __init__(self, graph: "WorkGraph") -> None:
        works = range(len(graph.works))
        self.first = [0, *accumulate(len(graph.stages(work)) for work in works)]
        """[work] -> its first node; the last entry is the number of nodes."""
        self.num_nodes = self.first[-1]
        self.position = graph.position
        """[stage] -> its position in its module's chain."""
        self.stage = [stage for work in works for stage in graph.stages(work)]
        """[node]"""
        self.work = [work for work in works for _ in graph.stages(work)]
        """[node]"""
        self.rank = [graph.stage_rank[stage] for stage in self.stage]
        """[node]"""
        self.has_backward = [flag for row in graph.backward for flag in row]
        """[node]"""
        self.num_items = 3 * self.num_nodes + len(graph.instructions)
        self.num_needs = [0] * self.num_items
        """[item] -> number of results it needs."""
        self.dependents: list[list[Dependent]] = [[] for _ in range(self.num_items)]
        """[item] -> the items that wait for it."""
        self.over_edges: list[tuple[int, int, int]] = []
        """(result, item that needs it, message) of all edges, those into and out of one node in the graph's order."""
        self.link_bytes: list[float] = []
        """Sizes of the further messages: links with their own `size_bytes`."""
        self._add_table(graph)
        self._instructions = {key: 3 * self.num_nodes + number for number, key in enumerate(graph.instruction)}
        for key, instruction in graph.instruction.items():
            for result in instruction.after:
                self._add(self.item(*result), self.item(*key), SAME_RANK)
            for result in instruction.before:
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

    @property
    def num_messages(self) -> int:
        """Number of messages."""
        return self.num_nodes + len(self.link_bytes)

    def _add(self, result: int, item: int, message: int) -> None:
        self.dependents[result].append((item, message))
        self.num_needs[item] += 1

    def _add_table(self, graph: "WorkGraph") -> None:
        """Adds the dependencies of the table `NEEDS` for all nodes."""
        edges, N = self._edges(graph), self.num_nodes
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

    def _edges(self, graph: "WorkGraph") -> list[tuple[int, int, int, bool]]:
        """(source node, target node, message, whether its gradient is sent back) of all edges."""
        rank, grad, first = self.rank, self.has_backward, self.first
        edges = []
        for work in range(len(graph.works)):
            begin = first[work]
            for link in graph.links[work]:
                source, target = first[link.work] + link.source, begin + link.target
                message = SAME_RANK if rank[source] == rank[target] else source
                if link.size_bytes is not None and message != SAME_RANK:
                    message = self.num_nodes + len(self.link_bytes)
                    self.link_bytes.append(link.size_bytes)
                edges.append((source, target, message, link.grad and grad[source] and grad[target]))
            for node in range(begin, first[work + 1] - 1):
                message = SAME_RANK if rank[node] == rank[node + 1] else node
                edges.append((node, node + 1, message, grad[node] and grad[node + 1]))
        return edges
