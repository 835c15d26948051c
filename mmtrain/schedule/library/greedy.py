"""Greedy list scheduling of a work graph with two queues a rank, under memory limits that cannot deadlock.

Source: DIP, arXiv:2504.14145, section 5.2. Its "disable the forward queue when memory is full" can deadlock: forwards
of many microbatches may fill a rank, so that none of them can reach its backward. Here `Memory` decides on admission,
so that all works can finish.
"""

from collections.abc import Iterable

from mmtrain.schedule.action import Action, Kind
from mmtrain.schedule.engine import Engine
from mmtrain.schedule.library.memory import Memory, choose_options, components
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import PlanningProblem


def greedy(problem: PlanningProblem) -> Plan:
    """The plan that always schedules the action that can start earliest; on ties, that of the oldest microbatch.

    Each rank has a queue of forwards and one of backwards. The rank whose next action can start earliest is served. If
    both of its queues have an action that could have started before the rank's last action ended, forward and backward
    alternate, else the earlier start wins.

    Raises: PlanError: the activations of one microbatch alone exceed a rank's memory limit.
    """
    return _Greedy(problem).run()


class _Greedy:
    """One run of the dual-queue list scheduler: a policy of the engine."""

    def __init__(self, problem: PlanningProblem) -> None:
        graph = self.graph = problem.graph
        items = self.items = graph.items
        component = components(graph)
        self.chosen = choose_options(problem, component)
        self.options = [problem.options(*node)[self.chosen[node]] for node in zip(items.stage, items.work, strict=True)]
        """[node]"""
        self.memory = Memory.of(problem, component, {n: problem.options(*n)[i] for n, i in self.chosen.items()})
        self.engine = Engine(items, problem.message_s)
        ranks = range(graph.num_ranks)
        self.orders: list[list[Action]] = [[] for _ in ranks]
        self.candidates: list[tuple[float, int] | None] = [None for _ in ranks]
        self.stale = set(ranks)  # ranks whose candidate must be computed again
        self.t_last = [0.0 for _ in ranks]
        self.ready: list[list[list[int]]] = [[[] for _ in ranks] for _ in range(2)]
        """[0: F, 1: B][rank] -> items."""
        self.priority: list[tuple[int, int, int]] = [(0, 0, 0)] * (2 * items.num_nodes)
        """[item]"""
        for position, (stage, work) in enumerate(graph.nodes()):
            age = component[work], graph.works[work].microbatch
            for kind, sign in ((Kind.F, 1), (Kind.B, -1)):
                self.priority[items.item(kind, stage, work)] = (*age, sign * position)
        self._queue(node for node in range(items.num_nodes) if not items.num_needs[node])

    def _queue(self, items: Iterable[int]) -> None:
        for item in items:
            slot, node = divmod(item, self.items.num_nodes)
            if slot < 2:
                rank = self.items.rank[node]
                self.ready[slot][rank].append(item)
                self.stale.add(rank)

    def run(self) -> Plan:
        """The plan."""
        for _ in range(self.items.num_nodes + sum(self.items.has_backward)):
            item = self._next()
            self._schedule(self._forced() if item is None else item)
        return Plan(self.graph, tuple(map(tuple, self.orders)), {n: i for n, i in self.chosen.items() if i})

    def _next(self) -> int | None:
        """The item that the rank that can start earliest runs next; None if nothing may start."""
        for rank in self.stale:
            self.candidates[rank] = self._candidate(rank)
        self.stale.clear()
        starts = [(c[0], rank) for rank, c in enumerate(self.candidates) if c]
        return self.candidates[min(starts)[1]][1] if starts else None  # type: ignore[index]

    def _candidate(self, rank: int) -> tuple[float, int] | None:
        """The earliest start on a rank and the item that starts then; None if nothing may start there."""
        last, arrival, priority = self.t_last[rank], self.engine.arrival, self.priority
        heads: list[tuple[float, tuple[int, int, int], int] | None] = [None, None]
        for slot in range(2):
            # Arrived items by priority, else the item that arrives first.
            best = None
            for item in self.ready[slot][rank]:
                entry = (max(arrival[item], last), priority[item], item)
                if best is not None and entry >= best:
                    continue
                if slot or self.memory.fits(item):
                    best = entry
            heads[slot] = best
        forward, backward = heads
        if forward is None or backward is None:
            head = forward or backward
            return None if head is None else (head[0], head[2])
        if forward[0] != backward[0]:
            turn = forward[0] < backward[0]
        else:
            turn = not self.orders[rank] or self.orders[rank][-1].kind is Kind.B
        return (forward[0], forward[2]) if turn else (backward[0], backward[2])

    def _forced(self) -> int:
        """The oldest forward that fits, where the guarantee cannot be kept (a stage without a backward whose inputs
        have one). Raises: PlanError: none fits."""
        waiting = sorted((item for queue in self.ready[0] for item in queue), key=self.priority.__getitem__)
        for node in waiting:
            if self.memory.fits_now(node):
                return node
        node = waiting[0]
        name = self.graph.action(Kind.F, self.items.stage[node], self.items.work[node])
        raise self.memory.refusal(name, node)

    def _schedule(self, item: int) -> None:
        items = self.items
        slot, node = divmod(item, items.num_nodes)
        kind = Kind.B if slot else Kind.F
        rank, option = items.rank[node], self.options[node]
        end = max(self.t_last[rank], self.engine.arrival[item]) + option.duration_s(kind)
        self.t_last[rank] = end
        self.ready[slot][rank].remove(item)
        self.orders[rank].append(self.graph.action(kind, items.stage[node], items.work[node]))
        self.stale.add(rank)
        (self.memory.end_backward if slot else self.memory.start_forward)(node)
        self._queue(self.engine.start(item, end))
