"""List scheduling with split backwards: which action a rank starts now, under memory limits, by a few rules.

The rules are those of the automatic schedule of the zero-bubble paper (arXiv:2401.10241, section 3.1), generalised from
chains to work graphs:

1. *Warm-up.* A rank runs forwards as long as they do not delay its first backward, whose earliest time follows from the
critical paths of the work graph, and as long as memory admits them.
2. *Steady state.* Forward and backward alternate where both could start. The amount in flight (forwards without a
backward yet, in seconds) when the first backward started is not exceeded again.
3. *Ws* fill the time in which a rank can start nothing else, and free memory where it is full.

`Memory` decides on admission, so that all works can finish. An *eager* run uses rule 3 only and runs forwards whenever
memory admits them: better where ranks hold several stages, whose forwards wait for each other, or little memory.
"""

import heapq
import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from mmtrain.schedule.action import Action, Kind
from mmtrain.schedule.engine import Engine
from mmtrain.schedule.library.greedy import components
from mmtrain.schedule.library.memory import Memory
from mmtrain.schedule.library.weights import worth_splitting
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import Option, PlanningProblem

Node = tuple[int, int]
"""(stage, work)."""

Priority = tuple[int, int, int]
"""Of a node among those of its kind: component, microbatch and position; the least is served first."""


@dataclass(frozen=True)
class Outcome:
    """A plan with its times."""

    plan: Plan
    makespan_s: float
    longest_s: float
    """The longest time from the first start to the last end on one rank."""
    perfect: bool
    """Whether no run can be better: the last rank to end, and the busiest one, never idled between their first and
    last action."""


class ListScheduler:
    """List scheduling of one problem under given limits; the data shared by its runs."""

    def __init__(
        self,
        problem: PlanningProblem,
        limits: Sequence[float],
        chosen: Mapping[Node, int] | None = None,
        *,
        soft: Collection[int] = (),
    ) -> None:
        """Args:
        limits: bytes of activations a rank; each microbatch fits alone with whole backwards.
        chosen: index of the option of each (stage, work); None: 0.
        soft: ranks whose limit may be exceeded to avoid a deadlock.
        """
        graph = problem.graph
        self.problem, self.graph, self.limits, self.soft = problem, graph, limits, soft
        self.component = components(graph)
        self.chosen = {node: index for node, index in (chosen or {}).items() if index}
        given = {n: problem.options(*n)[self.chosen.get(n, 0)] for n in graph.nodes()}
        self.split = {node for node, option in given.items() if worth_splitting(option)}
        self.options = {n: widest(option) if n in self.split else option for n, option in given.items()}
        too_wide = {component for component, _ in Memory(problem, self.component, self.options, limits).oversize()}
        for node, option in given.items():
            if self.component[node[1]] in too_wide:  # what I leaves for W is too much: backwards stay whole
                self.split.discard(node)
                self.options[node] = option
        self.stages = [graph.stages_of_rank(rank) for rank in range(graph.num_ranks)]
        items = graph.items
        nodes = list(zip(items.stage, items.work, strict=True))
        self.option_of = [self.options[node] for node in nodes]
        """[node]"""
        self.component_of = [self.component[work] for work in items.work]
        """[node]"""
        self.done_as = [Kind.F] * items.num_nodes + [Kind.I if node in self.split else Kind.B for node in nodes]
        """[item of F or I] -> kind of the action that runs: B where splitting is not worthwhile."""
        self.seconds = [self.option_of[i % items.num_nodes].duration_s(kind) for i, kind in enumerate(self.done_as)]
        """[item of F or I]"""
        self.priority: list[Priority] = [(0, 0, 0)] * len(self.done_as)
        """[item of F or I]"""
        self.forwards = []
        """The items of F, in the order of the graph's nodes."""
        for position, node in enumerate(graph.nodes()):
            age = (self.component[node[1]], graph.works[node[1]].microbatch)
            self.forwards.append(items.item(Kind.F, *node))
            for kind, sign in ((Kind.F, 1), (Kind.I, -1)):
                self.priority[items.item(kind, *node)] = (*age, sign * position)

    def run(self, *, eager: bool = False, patient: bool = False) -> Outcome:
        """The plan of one run of the rules, and its times.

        Args:
            eager: skip rules 1 and 2.
            patient: a rank starts no W that would delay its last gradient.
        Raises: PlanError: a forward does not fit, even after all others have finished.
        """
        return _Run(self, eager=eager, patient=patient).run()

    @property
    def several_stages(self) -> bool:
        """Whether some rank has works on more than one stage."""
        used = {stage for stage, _ in self.options}
        return any(sum(stage in used for stage in stages) > 1 for stages in self.stages)

    @cached_property
    def first_backwards(self) -> list[float]:
        """[rank] -> the earliest start of any of its backwards, by dependencies only; inf: none."""
        items = self.graph.items
        engine = Engine(items, self.problem.message_s)
        first = [math.inf] * self.graph.num_ranks
        backwards = [items.num_nodes + n for n in reversed(self.forwards) if items.has_backward[n]]
        for item in (*self.forwards, *backwards):
            start = engine.arrival[item]
            engine.start(item, start + self.seconds[item])
            if item >= items.num_nodes:
                rank = items.rank[item - items.num_nodes]
                first[rank] = min(first[rank], start)
        return first


def rank_footprints(problem: PlanningProblem, microbatches: float) -> list[float]:
    """Bytes of activations of a number of microbatches of mean size on each rank; at least those of the largest one."""
    graph, component = problem.graph, components(problem.graph)
    options = {node: problem.options(*node)[0] for node in graph.nodes()}
    memory = Memory(problem, component, {node: widest(option) for node, option in options.items()})
    footprints = []
    for rank in range(graph.num_ranks):
        amounts = [memory.footprint(c, rank) for c in range(memory.num_components)]
        footprints.append(max(max(amounts), microbatches * sum(amounts) / len(amounts)) if amounts else 0.0)
    return footprints


def widest(option: Option) -> Option:
    """The option with the most bytes that it may ever hold from F to I."""
    if option.held_for_weight_bytes <= option.activation_bytes:
        return option
    return replace(option, activation_bytes=option.held_for_weight_bytes)


class _Run:
    """One run of the list scheduler, in the order of time: a policy of the engine."""

    def __init__(self, setting: ListScheduler, *, eager: bool, patient: bool) -> None:
        graph, ranks, items = setting.graph, range(setting.graph.num_ranks), setting.graph.items
        self.setting, self.graph, self.items, self.eager, self.patient = setting, graph, items, eager, patient
        self.component, self.options = setting.component_of, setting.option_of
        self.memory = Memory(setting.problem, setting.component, setting.options, setting.limits)
        self.message_s = [*setting.problem.message_s, 0.0]
        self.engine = Engine(items, setting.problem.message_s)
        self.ready: list[list[list[tuple[Priority, int]]]] = [[[] for _ in graph.stage_rank] for _ in range(2)]
        """[0: F, 1: I][stage] -> heap of what could start."""
        self.due: list[deque[int]] = [deque() for _ in ranks]
        """[rank] -> nodes."""
        self.begun: set[tuple[int, int]] = set()
        """(rank, component) that has started a forward whose backward remains or has run."""
        self.in_flight = [0.0 for _ in ranks]
        self.most_in_flight = [math.inf for _ in ranks]
        self.backwards = [0 for _ in ranks]
        self.gradients: list[list[float]] = [[] for _ in ranks]
        """[rank] -> heap of the times at which gradients arrive there, if it is patient."""
        self.alarm = [False for _ in ranks]
        self.busy = [False for _ in ranks]
        self.orders: list[list[Action]] = [[] for _ in ranks]
        self.previous = [Kind.I for _ in ranks]
        self.start_s = [math.inf for _ in ranks]
        self.end_s = [0.0 for _ in ranks]
        self.work_s = [0.0 for _ in ranks]
        self.events: list[tuple[float, int, int, int, Kind | None]] = []
        """Heap of (time, number, rank, item, kind of the action that ended; None: the item is ready). Item -1: the
        rank decides again at that time."""
        self.count = 0
        self.left = items.num_nodes + sum(items.has_backward)
        for node in range(items.num_nodes):
            self.backwards[items.rank[node]] += items.has_backward[node]
            if not items.num_needs[node]:
                self._queue(node)

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
                _, _, rank, item, kind = heapq.heappop(self.events)
                awake.add(rank)
                if kind is None:
                    if item >= 0:
                        self._queue(item)
                elif self._end(rank, kind, item % self.items.num_nodes):
                    awake.update(range(self.graph.num_ranks))  # others may have more room
        plan = Plan(self.graph, tuple(map(tuple, self.orders)), self.setting.chosen)
        spans = [end - start for start, end in zip(self.start_s, self.end_s, strict=True) if start < math.inf]
        makespan, longest = max(self.end_s), max(spans, default=0.0)
        earliest = max((s + w for s, w in zip(self.start_s, self.work_s, strict=True) if s < math.inf), default=0.0)
        perfect = makespan <= earliest * (1 + 1e-9) and longest <= max(self.work_s) * (1 + 1e-9)
        return Outcome(plan, makespan, longest, perfect)

    def _queue(self, item: int) -> None:
        slot, node = divmod(item, self.items.num_nodes)
        heapq.heappush(self.ready[slot][self.items.stage[node]], (self.setting.priority[item], item))

    def _serve(self, rank: int, now: float) -> None:
        """Starts the action that the rules select for an idle rank, if any."""
        backward = min((queue[0] for queue in self._queues(1, rank)), default=None)
        turn = backward is None or self.previous[rank] is Kind.I
        forward = self._forward(rank, now) if turn else None
        if forward is not None:
            self._start(forward, now)
        elif backward:
            self._start(backward[1], now)
        elif self.due[rank] and not self._too_long(rank, now):
            self._run_action(Kind.W, self.due[rank].popleft() + 2 * self.items.num_nodes, now)

    def _queues(self, slot: int, rank: int) -> list[list[tuple[Priority, int]]]:
        ready = self.ready[slot]
        return [ready[stage] for stage in self.setting.stages[rank] if ready[stage]]

    def _forward(self, rank: int, now: float) -> int | None:
        """The oldest forward that the rules admit, preferably the next one of a stage."""
        queues = self._queues(0, rank)
        if not queues:
            return None
        fits = self.memory.room(rank)

        def admits(node: int) -> bool:
            option, component = self.options[node], self.component[node]
            opens = not self.eager and option.has_backward and (rank, component) not in self.begun
            return not (opens and self._holds_up(rank, now, option.forward_s)) and fits(component, option)

        for _, node in sorted(queue[0] for queue in queues) if len(queues) > 1 else (queues[0][0],):
            if admits(node):
                return node
        # The next forward on a stage may keep room for one behind it that has no backward.
        behind = sorted(entry for queue in queues for entry in queue[1:] if not self.options[entry[1]].has_backward)
        return next((node for _, node in behind if admits(node)), None)

    def _holds_up(self, rank: int, now: float, seconds: float) -> bool:
        """Whether the first forward of a microbatch on a rank would break rule 1 or 2."""
        if self.most_in_flight[rank] < math.inf:
            return self.in_flight[rank] + seconds > self.most_in_flight[rank] * (1 + 1e-9)
        first = self.setting.first_backwards[rank]
        if now < first < math.inf and now + seconds > first * (1 + 1e-9):
            if not self.alarm[rank]:  # the backward may start later than that: then go on
                self.alarm[rank] = True
                self._post(first, rank, -1)
            return True
        return False

    def _force(self, now: float) -> None:
        """Starts the oldest forward where rules 1 and 2 admit none; if none keeps the guarantee, one that fits at
        all."""
        ready = sorted(entry for queue in self.ready[0] for entry in queue)
        for _, node in ready:
            if self.memory.room(self.items.rank[node])(self.component[node], self.options[node]):
                return self._start(node, now)
        for _, node in ready:
            rank = self.items.rank[node]
            if rank in self.setting.soft or self.memory.fits_now(rank, self.options[node]):
                return self._start(node, now)
        _, node = ready[0]
        name = self.graph.action(Kind.F, self.items.stage[node], self.items.work[node])
        raise self.memory.refusal(self.items.rank[node], name, self.options[node])

    def _start(self, item: int, now: float) -> None:
        """Starts the F, or the I (or B), of a node."""
        slot, node = divmod(item, self.items.num_nodes)
        rank, option, component = self.items.rank[node], self.options[node], self.component[node]
        queue = self.ready[slot][self.items.stage[node]]
        if queue[0][1] == item:
            heapq.heappop(queue)
        else:
            queue.remove((self.setting.priority[item], item))
            heapq.heapify(queue)
        self.left -= 1
        if not slot:
            self.previous[rank] = Kind.F
            self.memory.start_forward(component, rank, option)
            if option.has_backward:
                self.begun.add((rank, component))
                self.in_flight[rank] += option.forward_s
        else:
            self.previous[rank] = Kind.I
            self.most_in_flight[rank] = min(self.most_in_flight[rank], self.in_flight[rank])
            self.in_flight[rank] -= option.forward_s
            self.backwards[rank] -= 1
        self._run_action(self.setting.done_as[item], item, now)

    def _run_action(self, kind: Kind, item: int, now: float) -> None:
        node = item % self.items.num_nodes
        rank = self.items.rank[node]
        self.orders[rank].append(self.graph.action(kind, self.items.stage[node], self.items.work[node]))
        self.busy[rank] = True
        self.start_s[rank] = min(self.start_s[rank], now)
        seconds = self.options[node].duration_s(kind)
        end = self.end_s[rank] = now + seconds
        self.work_s[rank] += seconds
        self._post(end, rank, item, kind)
        for ready in self.engine.start(item, end):
            if ready < 2 * self.items.num_nodes:  # a W is due at the end of its I
                self._post(self.engine.arrival[ready], self.items.rank[ready % self.items.num_nodes], ready)
        if self.patient and kind is not Kind.F and kind is not Kind.W:
            for dependent, message in self.items.dependents[item]:
                if dependent < 2 * self.items.num_nodes:
                    arrives, target = end + self.message_s[message], self.items.rank[dependent - self.items.num_nodes]
                    heapq.heappush(self.gradients[target], arrives)
                    self._post(arrives, target, -1)

    def _end(self, rank: int, kind: Kind, node: int) -> bool:
        """Frees the memory of an action that ended; returns whether its component may have finished."""
        self.busy[rank] = False
        component, option = self.component[node], self.options[node]
        if kind is Kind.F:
            return not option.has_backward
        if kind is Kind.I:
            self.due[rank].append(node)
            self.memory.end_input(component, rank, option)
            return False
        return self.memory.end_backward(component, rank, option, split=kind is Kind.W)

    def _too_long(self, rank: int, now: float) -> bool:
        """Whether a patient rank waits for its last gradient instead of starting its oldest W."""
        if not self.patient or self.backwards[rank] != 1:
            return False
        gradients = self.gradients[rank]
        while gradients and gradients[0] <= now:
            heapq.heappop(gradients)
        weight = self.options[self.due[rank][0]].duration_s(Kind.W)
        return bool(gradients) and gradients[0] < now + weight * (1 - 1e-9)

    def _post(self, when: float, rank: int, item: int, kind: Kind | None = None) -> None:
        self.count += 1
        heapq.heappush(self.events, (when, self.count, rank, item, kind))
