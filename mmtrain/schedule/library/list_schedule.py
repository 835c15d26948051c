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
from mmtrain.schedule.engine import Engine, Policy
from mmtrain.schedule.library.memory import Memory, components
from mmtrain.schedule.library.weights import worth_splitting
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import Option, PlanningProblem

StageWork = tuple[int, int]
"""A stage and a work."""

Priority = tuple[int, int, int]
"""The priority of a node among those of its kind: component, microbatch and position; the least is served first."""


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
        chosen: Mapping[StageWork, int] | None = None,
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
        too_wide = {component for component, _ in Memory.of(problem, self.component, self.options, limits).oversize()}
        for node, option in given.items():
            if self.component[node[1]] in too_wide:  # what I leaves for W is too much: backwards stay whole
                self.split.discard(node)
                self.options[node] = option
        self.stages = [graph.stages_of_rank(rank) for rank in range(graph.num_ranks)]
        items = graph.items
        nodes = list(zip(items.stage, items.work, strict=True))
        self.option_of = [self.options[node] for node in nodes]
        """[node] -> its option."""
        self.component_of = [self.component[work] for work in items.work]
        """[node] -> its component."""
        self.done_as = [Kind.F] * items.num_nodes + [Kind.I if node in self.split else Kind.B for node in nodes]
        """[item of F or I] -> kind of the action that runs: B where splitting is not worthwhile."""
        self.seconds = [self.option_of[i % items.num_nodes].duration_s(kind) for i, kind in enumerate(self.done_as)]
        """[item of F or I] -> its seconds."""
        self.priority: list[Priority] = [(0, 0, 0)] * len(self.done_as)
        """[item of F or I] -> its priority."""
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
        return _Rules(self, eager=eager, patient=patient).outcome()

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
    memory = Memory.of(problem, component, {node: widest(option) for node, option in options.items()})
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


class _Rules(Policy):
    """One run of the list scheduler."""

    def __init__(self, setting: ListScheduler, *, eager: bool, patient: bool) -> None:
        graph, ranks, items = setting.graph, range(setting.graph.num_ranks), setting.graph.items
        self.setting, self.graph, self.items, self.eager, self.patient = setting, graph, items, eager, patient
        self.component, self.options = setting.component_of, setting.option_of
        self.memory = Memory.of(setting.problem, setting.component, setting.options, setting.limits)
        self.engine = Engine(items, setting.problem.message_s)
        self.kinds = [*setting.done_as, *[Kind.W] * items.num_nodes]
        """[item] -> kind of the action that runs."""
        runs = (
            [True] * items.num_nodes
            + items.has_backward
            + [kind is Kind.I for kind in setting.done_as[items.num_nodes :]]
        )
        seconds = [*setting.seconds, *(option.duration_s(Kind.W) for option in self.options)]
        self.seconds = [s if run else None for s, run in zip(seconds, runs, strict=True)]
        self.seconds += [None] * len(graph.instructions)
        self.ready: list[list[list[tuple[Priority, int]]]] = [[[] for _ in graph.stage_rank] for _ in range(2)]
        """[0: F, 1: I][stage] -> heap of what could start."""
        self.due: list[deque[int]] = [deque() for _ in ranks]
        """[rank] -> items of W."""
        self.begun: set[tuple[int, int]] = set()
        """Each (rank, component) that has started a forward whose backward remains or has run."""
        self.in_flight = [0.0 for _ in ranks]
        self.most_in_flight = [math.inf for _ in ranks]
        self.backwards = [0 for _ in ranks]
        self.gradients: list[list[float]] = [[] for _ in ranks]
        """[rank] -> heap of the times at which gradients arrive there, if it is patient."""
        self.alarm = [False for _ in ranks]
        self.orders: list[list[Action]] = [[] for _ in ranks]
        self.previous = [Kind.I for _ in ranks]
        self.start_s = [math.inf for _ in ranks]
        self.end_s = [0.0 for _ in ranks]
        self.work_s = [0.0 for _ in ranks]
        for rank, has_backward in zip(items.rank, items.has_backward, strict=True):
            self.backwards[rank] += has_backward

    def outcome(self) -> Outcome:
        """The plan and its times."""
        self.engine.run(self)
        plan = Plan(self.graph, tuple(map(tuple, self.orders)), self.setting.chosen)
        spans = [end - start for start, end in zip(self.start_s, self.end_s, strict=True) if start < math.inf]
        makespan, longest = max(self.end_s), max(spans, default=0.0)
        earliest = max((s + w for s, w in zip(self.start_s, self.work_s, strict=True) if s < math.inf), default=0.0)
        perfect = makespan <= earliest * (1 + 1e-9) and longest <= max(self.work_s) * (1 + 1e-9)
        return Outcome(plan, makespan, longest, perfect)

    def arrive(self, item: int) -> None:
        slot, node = divmod(item, self.items.num_nodes)
        if slot == 2:
            self.due[self.items.rank[node]].append(item)
        else:
            heapq.heappush(self.ready[slot][self.items.stage[node]], (self.setting.priority[item], item))

    def choose(self, rank: int, now: float) -> int | None:
        backward = min((queue[0] for queue in self._queues(1, rank)), default=None)
        turn = backward is None or self.previous[rank] is Kind.I
        forward = self._forward(rank, now) if turn else None
        if forward is not None:
            return forward
        if backward:
            return backward[1]
        return self.due[rank][0] if self.due[rank] and not self._too_long(rank, now) else None

    def _queues(self, slot: int, rank: int) -> list[list[tuple[Priority, int]]]:
        ready = self.ready[slot]
        return [ready[stage] for stage in self.setting.stages[rank] if ready[stage]]

    def _forward(self, rank: int, now: float) -> int | None:
        """The oldest forward that the rules admit, preferably the next one of a stage."""
        queues = self._queues(0, rank)
        if not queues:
            return None

        def admits(node: int) -> bool:
            option = self.options[node]
            opens = not self.eager and option.has_backward and (rank, self.component[node]) not in self.begun
            return not (opens and self._holds_up(rank, now, option.forward_s)) and self.memory.fits(node)

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
                self.engine.wake(rank, first)
            return True
        return False

    def force(self, now: float) -> int | None:
        """The oldest forward where rules 1 and 2 admit none; if none keeps the guarantee, one that fits at all."""
        ready = [node for _, node in sorted(entry for queue in self.ready[0] for entry in queue)]
        for node in ready:
            if self.memory.fits(node):
                return node
        for node in ready:
            if self.items.rank[node] in self.setting.soft or self.memory.fits_now(node):
                return node
        if not ready:
            return None
        raise self.memory.refusal(
            self.graph.action(Kind.F, self.items.stage[ready[0]], self.items.work[ready[0]]), ready[0]
        )

    def start(self, item: int, now: float, end: float) -> None:
        slot, node = divmod(item, self.items.num_nodes)
        rank, option, kind = self.items.rank[node], self.options[node], self.kinds[item]
        self.orders[rank].append(self.graph.action(kind, self.items.stage[node], self.items.work[node]))
        self.start_s[rank] = min(self.start_s[rank], now)
        self.end_s[rank] = end
        self.work_s[rank] += self.seconds[item] or 0.0
        if slot == 2:
            self.due[rank].popleft()
            return
        queue = self.ready[slot][self.items.stage[node]]
        if queue[0][1] == item:
            heapq.heappop(queue)
        else:
            queue.remove((self.setting.priority[item], item))
            heapq.heapify(queue)
        self.previous[rank] = Kind.I if slot else Kind.F
        if not slot:
            self.memory.start_forward(node)
            if option.has_backward:
                self.begun.add((rank, self.component[node]))
                self.in_flight[rank] += option.forward_s
            return
        self.most_in_flight[rank] = min(self.most_in_flight[rank], self.in_flight[rank])
        self.in_flight[rank] -= option.forward_s
        self.backwards[rank] -= 1
        if self.patient:
            for dependent, message in self.items.dependents[item]:
                if dependent < 2 * self.items.num_nodes:
                    arrives, target = end + self.engine.message_s[message], self.items.rank_of[dependent]
                    heapq.heappush(self.gradients[target], arrives)
                    self.engine.wake(target, arrives)

    def end(self, item: int) -> None:
        node = item % self.items.num_nodes
        if self.kinds[item] is Kind.I:
            self.memory.end_input(node)
        elif self.kinds[item] is not Kind.F:
            self.memory.end_backward(node, split=self.kinds[item] is Kind.W)

    def _too_long(self, rank: int, now: float) -> bool:
        """Whether a patient rank waits for its last gradient instead of starting its oldest W."""
        if not self.patient or self.backwards[rank] != 1:
            return False
        gradients = self.gradients[rank]
        while gradients and gradients[0] <= now:
            heapq.heappop(gradients)
        weight = self.seconds[self.due[rank][0]]
        assert weight is not None
        return bool(gradients) and gradients[0] < now + weight * (1 - 1e-9)
