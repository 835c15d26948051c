"""Greedy list scheduling of a work graph with two queues a rank, under memory limits that cannot deadlock.

Source: DIP, arXiv:2504.14145, section 5.2. Its "disable the forward queue when memory is full" can deadlock: forwards
of many microbatches may fill a rank, so that none of them can reach its backward. Here `Memory` decides on admission,
so that all works can finish.
"""

import heapq
from collections.abc import Sequence

from mmtrain.schedule.action import Action, Kind
from mmtrain.schedule.engine import Engine, Policy
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
    component = components(problem.graph)
    chosen = choose_options(problem, component)
    policy = _DualQueues(problem, component, chosen)
    orders: list[list[Action]] = [[] for _ in range(problem.graph.num_ranks)]
    for item in Engine(problem.graph.items, problem.message_s).run(policy):
        orders[problem.graph.items.rank_of[item]].append(policy.action(item))
    return Plan(problem.graph, tuple(map(tuple, orders)), {n: i for n, i in chosen.items() if i})


class _DualQueues(Policy):
    """A queue of forwards and one of backwards on each rank, the oldest microbatch first; they alternate."""

    at_once = True

    def __init__(self, problem: PlanningProblem, component: Sequence[int], chosen: dict[tuple[int, int], int]) -> None:
        graph = self._graph = problem.graph
        items = self._items = graph.items
        options = [problem.options(*node)[chosen[node]] for node in zip(items.stage, items.work, strict=True)]
        self._memory = Memory.of(problem, component, {n: problem.options(*n)[i] for n, i in chosen.items()})
        self.seconds = [option.duration_s(Kind.F) for option in options]
        self.seconds += [
            option.duration_s(Kind.B) if flag else None
            for option, flag in zip(options, items.has_backward, strict=True)
        ]
        self.seconds += [None] * (items.num_items - len(self.seconds))
        self._ready: list[list[list[tuple[tuple[int, int, int], int]]]] = [
            [[] for _ in range(items.num_ranks)] for _ in range(2)
        ]
        """[0: F, 1: B][rank] -> heap of (priority, item)."""
        self._goes_forward = [True] * items.num_ranks
        """[rank] -> whether a forward is next where both could start."""
        self._priority: list[tuple[int, int, int]] = [(0, 0, 0)] * (2 * items.num_nodes)
        """[item]"""
        for position, (stage, work) in enumerate(graph.nodes()):
            age = component[work], graph.works[work].microbatch
            for kind, sign in ((Kind.F, 1), (Kind.B, -1)):
                self._priority[items.item(kind, stage, work)] = (*age, sign * position)

    def action(self, item: int) -> Action:
        """The action of an item."""
        slot, node = divmod(item, self._items.num_nodes)
        return self._graph.action(Kind.B if slot else Kind.F, self._items.stage[node], self._items.work[node])

    def arrive(self, item: int) -> None:
        queue = self._ready[item // self._items.num_nodes][self._items.rank_of[item]]
        heapq.heappush(queue, (self._priority[item], item))

    def choose(self, rank: int, now: float) -> int | None:
        forwards, backwards = self._ready[0][rank], self._ready[1][rank]
        backward = backwards[0][1] if backwards else None
        if backward is not None and not self._goes_forward[rank]:
            return backward
        forward = next((item for _, item in sorted(forwards) if self._memory.fits(item)), None)
        return backward if forward is None else forward

    def start(self, item: int, now: float, end: float) -> None:
        slot, rank = item // self._items.num_nodes, self._items.rank_of[item]
        queue = self._ready[slot][rank]
        if queue[0][1] == item:
            heapq.heappop(queue)
        else:
            queue.remove((self._priority[item], item))
            heapq.heapify(queue)
        self._goes_forward[rank] = bool(slot)
        if not slot:
            self._memory.start_forward(item)

    def end(self, item: int) -> None:
        if item >= self._items.num_nodes:
            self._memory.end_backward(item - self._items.num_nodes)

    def force(self, now: float) -> int | None:
        """The oldest forward that fits, where the guarantee cannot be kept (a stage without a backward whose inputs
        have one). Raises: PlanError: none fits."""
        waiting = [item for _, item in sorted(entry for queue in self._ready[0] for entry in queue)]
        if not waiting:
            return None
        for node in waiting:
            if self._memory.fits_now(node):
                return node
        raise self._memory.refusal(self.action(waiting[0]), waiting[0])
