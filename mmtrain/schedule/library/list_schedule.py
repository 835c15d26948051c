"""List scheduling with split backwards: what a rank can start now, under memory limits, by a few rules.

The rules are those of the automatic schedule of the zero-bubble paper (arXiv:2401.10241, section 3.1) in a form that
needs no chain:

1. *Warm-up.* A rank goes forward as long as that does not hold up its first backward, whose earliest time follows
   from the critical paths of the work graph, and as long as memory admits it.
2. *Steady state.* Forward and backward alternate where both could start. What was in flight (forwards without a
   backward yet, in seconds) when the first backward started is not exceeded again.
3. *Weight halves* fill the time in which a rank can start nothing else, and make room where memory is full.

`Memory` decides on admission and always leaves a way to the end. An *eager* run has rule 3 alone and goes forward
whenever memory admits it: better where ranks hold several stages, whose forwards wait for each other, or little memory.
"""

import heapq
import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from mmtrain.errors import PlanError
from mmtrain.schedule.action import Action, Kind
from mmtrain.schedule.library.greedy import clusters
from mmtrain.schedule.library.memory import Memory
from mmtrain.schedule.library.weights import worth_splitting
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import Option, PlanningProblem

Node = tuple[int, int]
"""(stage, work)."""

Priority = tuple[int, int, int]
"""Of a node among those of its kind: cluster, microbatch and place; the least is served first."""


@dataclass(frozen=True)
class Outcome:
    """A plan with the times that it was made for."""

    plan: Plan
    makespan_s: float
    longest_s: float
    """The longest time from the first start to the last end on one rank."""
    perfect: bool
    """Whether no run can be better: the last rank to end, and the busiest one, never idled once they had begun."""


class ListScheduler:
    """List scheduling of one problem under given limits; what its runs have in common."""

    def __init__(
        self,
        problem: PlanningProblem,
        limits: Sequence[float],
        chosen: Mapping[Node, int] | None = None,
        *,
        soft: Collection[int] = (),
    ) -> None:
        """Nothing run yet.

        Args:
            limits: bytes of activations a rank; each microbatch fits alone with whole backwards.
            chosen: index of the option of each (stage, work); None: 0.
            soft: ranks whose limit may be exceeded where nothing could go on otherwise.
        """
        graph = problem.graph
        self.problem, self.graph, self.limits, self.soft = problem, graph, limits, soft
        self.cluster = clusters(graph)
        self.chosen = {node: index for node, index in (chosen or {}).items() if index}
        given = {n: problem.options(*n)[self.chosen.get(n, 0)] for n in graph.nodes()}
        self.split = {node for node, option in given.items() if worth_splitting(option)}
        self.options = {n: _widest(option) if n in self.split else option for n, option in given.items()}
        too_wide = {cluster for cluster, _ in Memory(problem, self.cluster, self.options, limits).oversize()}
        for node, option in given.items():
            if self.cluster[node[1]] in too_wide:  # what a half leaves behind is too much: its backwards stay whole
                self.split.discard(node)
                self.options[node] = option
        self.stages = [graph.stages_of_rank(rank) for rank in range(graph.num_ranks)]
        self.priority: dict[tuple[Kind, Node], Priority] = {}
        self.needs: dict[tuple[Kind, Node], int] = {}
        self.sends: dict[tuple[Kind, Node], list[tuple[int, Node, float]]] = {}
        """What a forward or backward sends: (rank, node, seconds)."""
        for place, node in enumerate(graph.nodes()):
            age = (self.cluster[node[1]], graph.works[node[1]].microbatch)
            kinds = (Kind.F, Kind.I) if graph.has_backward(*node) else (Kind.F,)
            for kind in kinds:
                self.priority[kind, node] = (*age, place if kind is Kind.F else -place)
                self.needs[kind, node] = len(graph.needs(kind, *node))
            self.sends[Kind.F, node] = [
                (graph.stage_rank[e.target], (e.target, e.target_work), problem.transfer_s(e))
                for e in graph.outputs(*node)
            ]
            self.sends[Kind.I, node] = [
                (graph.stage_rank[e.source], (e.source, e.work), problem.transfer_s(e))
                for e in graph.inputs(*node)
                if e.grad
            ]

    def run(self, *, eager: bool = False, patient: bool = False) -> Outcome:
        """The plan of one run of the rules, and its times.

        Args:
            eager: leave out rules 1 and 2.
            patient: a rank starts no weight half that its last gradient would have to wait for.
        Raises: PlanError: a forward does not fit, whatever is finished before.
        """
        return _Run(self, eager=eager, patient=patient).run()

    @property
    def several_stages(self) -> bool:
        """Whether some rank has works on more than one stage."""
        used = {stage for stage, _ in self.options}
        return any(sum(stage in used for stage in mine) > 1 for mine in self.stages)

    @cached_property
    def first_backwards(self) -> list[float]:
        """[rank] -> the earliest time at which any of its backwards could start, by dependencies alone; inf: none."""
        arrival = dict.fromkeys(self.needs, 0.0)
        first = [math.inf] * self.graph.num_ranks
        nodes = list(self.options)
        for kind, order in ((Kind.F, nodes), (Kind.I, [n for n in nodes[::-1] if (Kind.I, n) in self.needs])):
            for node in order:
                start, option = arrival[kind, node], self.options[node]
                end = start + option.duration_s(self.done_as(kind, node))
                for _, target, seconds in self.sends[kind, node]:
                    arrival[kind, target] = max(arrival[kind, target], end + seconds)
                if kind is Kind.I:
                    rank = self.graph.stage_rank[node[0]]
                    first[rank] = min(first[rank], start)
                elif option.has_backward:
                    arrival[Kind.I, node] = max(arrival[Kind.I, node], end)
        return first

    def done_as(self, kind: Kind, node: Node) -> Kind:
        """The kind of the action that is done: B in the place of an I that is not worth its own action."""
        return Kind.B if kind is Kind.I and node not in self.split else kind


def rank_footprints(problem: PlanningProblem, microbatches: float) -> list[float]:
    """Bytes of activations of so many microbatches of mean size on each rank; at least those of the largest."""
    graph, cluster = problem.graph, clusters(problem.graph)
    options = {node: problem.options(*node)[0] for node in graph.nodes()}
    memory = Memory(problem, cluster, {node: _widest(option) for node, option in options.items()})
    found = []
    for rank in range(graph.num_ranks):
        amounts = [memory.footprint(c, rank) for c in range(memory.num_clusters)]
        found.append(max(max(amounts), microbatches * sum(amounts) / len(amounts)) if amounts else 0.0)
    return found


def _widest(option: Option) -> Option:
    """The option with as much from F to I as it may ever take."""
    if option.held_for_weight_bytes <= option.activation_bytes:
        return option
    return replace(option, activation_bytes=option.held_for_weight_bytes)


class _Run:
    """One run of the list scheduler, in the order of time."""

    def __init__(self, setting: ListScheduler, *, eager: bool, patient: bool) -> None:
        graph, ranks = setting.graph, range(setting.graph.num_ranks)
        self.setting, self.graph, self.eager, self.patient = setting, graph, eager, patient
        self.cluster, self.options = setting.cluster, setting.options
        self.memory = Memory(setting.problem, self.cluster, self.options, setting.limits)
        self.ready: dict[Kind, list[list[tuple[Priority, Node]]]] = {
            kind: [[] for _ in graph.stage_rank] for kind in (Kind.F, Kind.I)
        }
        """[stage] -> heap of what could start."""
        self.due: list[deque[Node]] = [deque() for _ in ranks]
        self.begun: set[tuple[int, int]] = set()
        """(rank, cluster) with a forward that has a backward to come or behind it."""
        self.in_flight = [0.0 for _ in ranks]
        self.most_in_flight = [math.inf for _ in ranks]
        self.backwards = [0 for _ in ranks]
        self.gradients: list[list[float]] = [[] for _ in ranks]
        """[rank] -> heap of the times at which gradients arrive there."""
        self.alarm = [False for _ in ranks]
        self.busy = [False for _ in ranks]
        self.orders: list[list[Action]] = [[] for _ in ranks]
        self.previous = [Kind.I for _ in ranks]
        self.start_s = [math.inf for _ in ranks]
        self.end_s = [0.0 for _ in ranks]
        self.work_s = [0.0 for _ in ranks]
        self.events: list[tuple[float, int, int, bool, Kind, Node]] = []
        """Heap of (time, number, rank, whether an action ended there (else an input of it arrived), the action)."""
        self.count = 0
        self.waiting = dict(setting.needs)
        self.left = len(self.waiting)
        for (kind, node), needs in self.waiting.items():
            self.backwards[graph.stage_rank[node[0]]] += kind is Kind.I
            if not needs:
                heapq.heappush(self.ready[kind][node[0]], (setting.priority[kind, node], node))

    def run(self) -> Outcome:
        """The plan."""
        now, awake = 0.0, set(range(self.graph.num_ranks))
        while self.left or self.events or any(self.due):
            for rank in sorted(awake):
                if not self.busy[rank]:
                    self._serve(rank, now)
            if not self.events:
                self._force(now)
            now, awake = self.events[0][0], set()
            while self.events and self.events[0][0] <= now:
                _, _, rank, ended, kind, node = heapq.heappop(self.events)
                awake.add(rank)
                if ended and self._end(rank, kind, node, now):
                    awake.update(range(self.graph.num_ranks))  # others may have more room
                elif not ended:
                    self._arrive(kind, node)
        plan = Plan(self.graph, tuple(map(tuple, self.orders)), self.setting.chosen)
        spans = [end - start for start, end in zip(self.start_s, self.end_s, strict=True) if start < math.inf]
        makespan, longest = max(self.end_s), max(spans, default=0.0)
        earliest = max((s + w for s, w in zip(self.start_s, self.work_s, strict=True) if s < math.inf), default=0.0)
        perfect = makespan <= earliest * (1 + 1e-9) and longest <= max(self.work_s) * (1 + 1e-9)
        return Outcome(plan, makespan, longest, perfect)

    def _serve(self, rank: int, now: float) -> None:
        """Starts what the rules tell an idle rank to start, if anything."""
        backward = min((queue[0] for queue in self._queues(Kind.I, rank)), default=None)
        turn = backward is None or self.previous[rank] is Kind.I
        forward = self._forward(rank, now) if turn else None
        if forward:
            self._start(Kind.F, forward, now)
        elif backward:
            self._start(Kind.I, backward[1], now)
        elif self.due[rank] and not self._too_long(rank, now):
            self._start(Kind.W, self.due[rank].popleft(), now)

    def _queues(self, kind: Kind, rank: int) -> list[list[tuple[Priority, Node]]]:
        ready = self.ready[kind]
        return [ready[stage] for stage in self.setting.stages[rank] if ready[stage]]

    def _forward(self, rank: int, now: float) -> Node | None:
        """The oldest forward that the rules admit, those that are next on a stage before the others."""
        queues = self._queues(Kind.F, rank)
        if not queues:
            return None
        fits = self.memory.room(rank)

        def admits(node: Node) -> bool:
            option, cluster = self.options[node], self.cluster[node[1]]
            opens = not self.eager and option.has_backward and (rank, cluster) not in self.begun
            return not (opens and self._holds_up(rank, now, option.forward_s)) and fits(cluster, option)

        for _, node in sorted(queue[0] for queue in queues) if len(queues) > 1 else (queues[0][0],):
            if admits(node):
                return node
        # The next on a stage may keep room for what stands behind it: a forward that leaves nothing.
        behind = sorted(entry for queue in queues for entry in queue[1:] if not self.options[entry[1]].has_backward)
        return next((node for _, node in behind if admits(node)), None)

    def _holds_up(self, rank: int, now: float, seconds: float) -> bool:
        """Whether the first forward of a microbatch on a rank would break rule 1 or 2."""
        if self.most_in_flight[rank] < math.inf:
            return self.in_flight[rank] + seconds > self.most_in_flight[rank] * (1 + 1e-9)
        first = self.setting.first_backwards[rank]
        if now < first < math.inf and now + seconds > first * (1 + 1e-9):
            if not self.alarm[rank]:  # the backward may come later than its earliest time: then go on
                self.alarm[rank] = True
                self._post(first, rank, False, Kind.W, (-1, -1))
            return True
        return False

    def _force(self, now: float) -> None:
        """Starts the oldest forward where rule 1 or 2 admits none; if none keeps the promise, one that fits at all."""
        ready = sorted(entry for queue in self.ready[Kind.F] for entry in queue)
        for _, node in ready:
            rank, option = self.graph.stage_rank[node[0]], self.options[node]
            if self.memory.room(rank)(self.cluster[node[1]], option):
                return self._start(Kind.F, node, now)
        for _, node in ready:
            rank, option = self.graph.stage_rank[node[0]], self.options[node]
            if rank in self.setting.soft or self.memory.fits_now(rank, option):
                return self._start(Kind.F, node, now)
        _, node = ready[0]
        rank = self.graph.stage_rank[node[0]]
        raise PlanError(
            f"rank {rank}: no forward fits into the memory limit of {self.memory.limit(rank):.4g} bytes; "
            f"the oldest that waits, {self.graph.action(Kind.F, *node)}, takes "
            f"{self.options[node].activation_bytes:.4g}; raise the limit"
        )

    def _start(self, kind: Kind, node: Node, now: float) -> None:
        """Starts F, I (or B in its place) or W of a node."""
        rank, option = self.graph.stage_rank[node[0]], self.options[node]
        if kind is not Kind.W:
            queue = self.ready[kind][node[0]]
            if queue[0][1] == node:
                heapq.heappop(queue)
            else:
                queue.remove((self.setting.priority[kind, node], node))
                heapq.heapify(queue)
            self.left -= 1
            self.previous[rank] = kind
        if kind is Kind.F:
            self.memory.start_forward(self.cluster[node[1]], rank, option)
            if option.has_backward:
                self.begun.add((rank, self.cluster[node[1]]))
                self.in_flight[rank] += option.forward_s
        elif kind is Kind.I:
            self.most_in_flight[rank] = min(self.most_in_flight[rank], self.in_flight[rank])
            self.in_flight[rank] -= option.forward_s
            self.backwards[rank] -= 1
        done = self.setting.done_as(kind, node)
        self.orders[rank].append(self.graph.action(done, *node))
        self.busy[rank] = True
        self.start_s[rank] = min(self.start_s[rank], now)
        seconds = option.duration_s(done)
        end = self.end_s[rank] = now + seconds
        self.work_s[rank] += seconds
        self._post(end, rank, True, done, node)
        for target_rank, target, transfer_s in self.setting.sends.get((kind, node), ()):
            self._post(end + transfer_s, target_rank, False, kind, target)
            if kind is Kind.I:
                heapq.heappush(self.gradients[target_rank], end + transfer_s)

    def _end(self, rank: int, kind: Kind, node: Node, now: float) -> bool:
        """What is there once an action has ended; tells whether its cluster may be finished by it."""
        self.busy[rank] = False
        cluster, option = self.cluster[node[1]], self.options[node]
        if kind is Kind.F:
            if option.has_backward:
                self._arrive(Kind.I, node)
            return not option.has_backward
        if kind is Kind.I:
            self.due[rank].append(node)
            self.memory.end_input(cluster, rank, option)
            return False
        return self.memory.end_backward(cluster, rank, option, split=kind is Kind.W)

    def _too_long(self, rank: int, now: float) -> bool:
        """Whether a patient rank waits for its last gradient instead of starting its oldest W."""
        if not self.patient or self.backwards[rank] != 1:
            return False
        gradients = self.gradients[rank]
        while gradients and gradients[0] <= now:
            heapq.heappop(gradients)
        weight = self.options[self.due[rank][0]].backward_weight_s
        return bool(gradients) and gradients[0] < now + weight * (1 - 1e-9)

    def _arrive(self, kind: Kind, node: Node) -> None:
        """Counts an input of a node that has arrived."""
        if kind is Kind.W:  # nothing arrived: a rank looks again
            return
        self.waiting[kind, node] -= 1
        if not self.waiting[kind, node]:
            heapq.heappush(self.ready[kind][node[0]], (self.setting.priority[kind, node], node))

    def _post(self, when: float, rank: int, ended: bool, kind: Kind, node: Node) -> None:
        self.count += 1
        heapq.heappush(self.events, (when, self.count, rank, ended, kind, node))
