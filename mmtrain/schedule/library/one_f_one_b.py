"""1F1B on a work graph: Megatron's one-forward-one-backward orders where the graph is a plain chain.

The order depends on the shape of the graph alone, never on costs. On a chain with one stage a rank it
is PipeDream's non-interleaved 1F1B, with several it is Megatron-LM's interleaved 1F1B
(arXiv:2104.04473, section 2.2); both by rules that also make sense for several modules, several
sub-microbatches, absent modalities and frozen stages:

- Microbatches go in groups of P. Inside of a group, forwards are segment by segment in forward order
  (all of the group's microbatches through one segment, then the next), backwards segment by segment
  in backward order.
- A *pair* is one microbatch in one segment of a rank, however many sub-microbatches (and, where a mixed partition
  has the end of one module and the beginning of the next on one rank, stages) it has. Pipeline
  rank r has at most P - r pairs between forward and backward if it has one segment with a backward, at
  most 2(P - r - 1) + (V - 1)P + 1 if it has V > 1 (Megatron's warm-up, plus one).
- The orders are what unit-time ranks do that follow both orders, alternate where both are possible,
  and after a backward wait for a forward whose missing inputs are being computed already.
"""

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from mmtrain.schedule.action import Action, Kind
from mmtrain.schedule.graph import Result, WorkGraph
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import PlanningProblem

Node = tuple[int, int]
"""(stage, work)."""


def one_f_one_b(problem: PlanningProblem) -> Plan:
    """One forward, one backward; with several stages a rank, Megatron-LM's interleaved order.

    The bubble on a chain of V stages a rank is (P - 1)(F + I + W) / V, in seconds of all that a rank holds, with
    several stages if P divides M; P microbatches are held at most, with several stages P + (P - 1) / V. The order
    depends on the work graph alone, never on costs. Every (stage, work) takes its option 0; memory limits are not
    looked at.

    Source: PipeDream-Flush, arXiv:2006.09503, and Megatron-LM's interleaved schedule, arXiv:2104.04473, section 2.2.
    """
    return Plan(problem.graph, alternate(problem.graph))


def alternate(graph: WorkGraph, ahead: int | None = None) -> tuple[tuple[Action, ...], ...]:
    """One order of F and B a rank: one forward, one backward, under the limit of pairs in flight.

    Args: ahead: pairs that a rank may start before its first backward for each rank behind it; 1 or 2. None: as in
        1F1B, 1 on a rank with one segment and 2 on a rank with several.
    """
    return _Ranks(graph, ahead).run()


def segments(graph: WorkGraph) -> dict[int, int]:
    """stage -> its place among its rank's stages in forward order: the rank's segments, counted from 0.

    Stages that `joined` puts together are in one segment.
    """
    count = [0] * graph.num_ranks
    found: dict[int, int] = {}
    together = joined(graph)
    for module in module_order(graph):
        for stage in graph.modules[module].stages:
            if stage in together:
                found[stage] = found[together[stage]]
                continue
            rank = graph.stage_rank[stage]
            found[stage] = count[rank]
            count[rank] += 1
    return found


def joined(graph: WorkGraph) -> dict[int, int]:
    """First stage of a module -> last stage of the one before it, where a mixed partition put both into one part.

    That is where they are on one of several ranks, and both modules go round the ranks.
    """
    found: dict[int, int] = {}
    order = module_order(graph)
    for before, behind in itertools.pairwise(order):
        last, first = graph.modules[before].stages[-1], graph.modules[behind].stages[0]
        same = graph.num_ranks > 1 and graph.stage_rank[last] == graph.stage_rank[first]
        if same and _goes_round(graph, before) and _goes_round(graph, behind):
            found[first] = found.get(last, last)
    return found


def _goes_round(graph: WorkGraph, module: int) -> bool:
    ranks = [graph.stage_rank[stage] for stage in graph.modules[module].stages]
    return all(b == (a + 1) % graph.num_ranks for a, b in itertools.pairwise(ranks))


def module_order(graph: WorkGraph) -> list[int]:
    """The modules, each after those that feed it in this iteration; else (or in a circle) by index."""
    feeds = {(graph.works[o].module, w.module) for w in graph.works for o in w.after}
    left = list(range(len(graph.modules)))
    order: list[int] = []
    while left:
        free = [m for m in left if not any((other, m) in feeds for other in left if other != m)]
        order.append((free or left)[0])
        left.remove(order[-1])
    return order


def forward_order(graph: WorkGraph, group_size: int = 0) -> list[Node]:
    """All (stage, work) by group of microbatches (of P; or `group_size`), segment, microbatch and sub-microbatch."""
    segment, group = segments(graph), _groups(graph, group_size)

    def key(node: Node) -> tuple[int, ...]:
        stage, work = node
        w = graph.works[work]
        return (
            group[w.microbatch],
            segment[stage],
            w.microbatch,
            w.sub_microbatch,
            graph.place[stage][1],
            stage,
        )

    nodes = list(graph.nodes())
    return linear_extension(nodes, lambda n: [(e.source, e.work) for e in graph.inputs(*n)], key)


def backward_order(graph: WorkGraph, group_size: int = 0) -> list[Node]:
    """All (stage, work) with a backward by group of microbatches, segment from the last, and microbatch."""
    segment, group = segments(graph), _groups(graph, group_size)

    def key(node: Node) -> tuple[int, ...]:
        stage, work = node
        w = graph.works[work]
        return (
            group[w.microbatch],
            -segment[stage],
            w.microbatch,
            w.sub_microbatch,
            -graph.place[stage][1],
            stage,
        )

    nodes = [node for node in graph.nodes() if graph.has_backward(*node)]
    return linear_extension(nodes, lambda n: [(e.target, e.target_work) for e in graph.outputs(*n) if e.grad], key)


def _groups(graph: WorkGraph, size: int) -> dict[int, int]:
    numbers = sorted({w.microbatch for w in graph.works})
    return {number: place // (size or graph.num_ranks) for place, number in enumerate(numbers)}


def linear_extension(
    nodes: list[Node], before: Callable[[Node], list[Node]], key: Callable[[Node], tuple[Any, ...]]
) -> list[Node]:
    """The nodes in the order of their keys, but each after what must come before it."""
    waiting = {node: len(before(node)) for node in nodes}
    after: dict[Node, list[Node]] = {}
    for node in nodes:
        for other in before(node):
            after.setdefault(other, []).append(node)
    ready = [(key(node), node) for node, count in waiting.items() if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, node = heapq.heappop(ready)
        order.append(node)
        for other in after.get(node, ()):
            waiting[other] -= 1
            if not waiting[other]:
                heapq.heappush(ready, (key(other), other))
    return order


class _Ranks:
    """Unit-time ranks that follow a forward and a backward order under a limit of pairs in flight."""

    def __init__(self, graph: WorkGraph, ahead: int | None) -> None:
        ranks = range(graph.num_ranks)
        self.graph = graph
        self.ahead = ahead
        self.together = joined(graph)
        self.forward_order, backwards = forward_order(graph), backward_order(graph)
        self.queue = {
            Kind.F: [[n for n in self.forward_order if graph.stage_rank[n[0]] == r] for r in ranks],
            Kind.B: [[n for n in backwards if graph.stage_rank[n[0]] == r] for r in ranks],
        }
        self.needs = {
            kind: {node: [r for r, _ in graph.needs(kind, *node)] for queue in self.queue[kind] for node in queue}
            for kind in (Kind.F, Kind.B)
        }
        self.next = {kind: [0 for _ in ranks] for kind in (Kind.F, Kind.B)}
        self.started: set[Result] = set()
        self.done: set[Result] = set()
        self.orders: list[list[Action]] = [[] for _ in ranks]
        works = Counter(self._pair(node) for node in graph.nodes())
        self.tick = math.lcm(*works.values(), 1)
        self.ticks = {pair: self.tick // count for pair, count in works.items()}
        self.owed = Counter(self._pair(node) for node in graph.nodes() if graph.has_backward(*node))
        self.open: list[set[tuple[int, int]]] = [set() for _ in ranks]
        self.limit = [self._limit(rank) for rank in ranks]

    def _pair(self, node: Node) -> tuple[int, int]:
        stage, work = node
        return self.together.get(stage, stage), self.graph.works[work].microbatch

    def _limit(self, rank: int) -> int:
        P = self.graph.num_ranks
        V = len({stage for stage, _ in self.owed if self.graph.stage_rank[stage] == rank})
        ahead = self.ahead or (1 if V <= 1 else 2)
        return ahead * (P - rank - 1) + max(V - 1, 0) * P + 1

    def run(self) -> tuple[tuple[Action, ...], ...]:
        """The order of each rank."""
        total = sum(len(queue) for queues in self.queue.values() for queue in queues)
        running: list[tuple[int, int, Kind, Node]] = []  # (end, rank, kind, node)
        idle = set(range(self.graph.num_ranks))
        now = 0
        while sum(map(len, self.orders)) < total:
            # Whose turn it is to go forward but cannot decides last: it may wait for what now starts.
            for rank in sorted(idle, key=lambda r: (self._lacks_forward(r), r)):
                kind = self._choose(rank)
                if kind:
                    self._start(rank, kind, now, running)
                    idle.discard(rank)
            if not running:
                # The limit of pairs stands in the way (possible on unusual placements only): the
                # earliest forward of all may exceed it, so that something always goes on.
                rank = self._earliest_forward()
                self._start(rank, Kind.F, now, running)
                idle.discard(rank)
            now = running[0][0]
            while running and running[0][0] == now:
                _, rank, kind, node = heapq.heappop(running)
                self._finish(rank, kind, node)
                idle.add(rank)
        return tuple(map(tuple, self.orders))

    def _head(self, rank: int, kind: Kind, results: set[Result]) -> Node | None:
        """The next of a rank's queue if all that it needs is among the results and the limit admits it."""
        queue, place = self.queue[kind][rank], self.next[kind][rank]
        if place == len(queue):
            return None
        node = queue[place]
        if not results.issuperset(self.needs[kind][node]):
            return None
        opens = kind is Kind.F and self.graph.has_backward(*node) and self._pair(node) not in self.open[rank]
        return None if opens and len(self.open[rank]) >= self.limit[rank] else node

    def _lacks_forward(self, rank: int) -> bool:
        """Whether the rank just did a backward and its next forward is not possible yet."""
        after_backward = bool(self.orders[rank]) and self.orders[rank][-1].kind is Kind.B
        return after_backward and self._head(rank, Kind.F, self.done) is None

    def _choose(self, rank: int) -> Kind | None:
        """What an idle rank does next; None: it waits."""
        forward, backward = self._head(rank, Kind.F, self.done), self._head(rank, Kind.B, self.done)
        if self._lacks_forward(rank) and self._head(rank, Kind.F, self.started):
            return None
        if forward and backward:
            return Kind.F if self.orders[rank][-1].kind is Kind.B else Kind.B
        return Kind.F if forward else Kind.B if backward else None

    def _earliest_forward(self) -> int:
        stage, _ = next(n for n in self.forward_order if (Kind.F, *n) not in self.done)
        return self.graph.stage_rank[stage]

    def _start(self, rank: int, kind: Kind, now: int, running: list[tuple[int, int, Kind, Node]]) -> None:
        node = self.queue[kind][rank][self.next[kind][rank]]
        self.next[kind][rank] += 1
        self.orders[rank].append(self.graph.action(kind, *node))
        self.started.add((kind, *node))
        if kind is Kind.F and self.graph.has_backward(*node):
            self.open[rank].add(self._pair(node))
        heapq.heappush(running, (now + self.ticks[self._pair(node)], rank, kind, node))

    def _finish(self, rank: int, kind: Kind, node: Node) -> None:
        self.done.add((kind, *node))
        if kind is Kind.B:
            pair = self._pair(node)
            self.owed[pair] -= 1
            if not self.owed[pair]:
                self.open[rank].discard(pair)
