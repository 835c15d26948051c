"""Gradient separation: of any plan, the backwards that hold up other ranks are split.

Where a rank idles, a chain of actions of other ranks holds up its next action. The weight gradients of the backwards on
this chain are set aside, which makes it shorter, and computed later, where their own ranks idle.

The paper goes from one idle interval to the next. Here three passes over the plan do the same for all of them:

1. Forwards in time without any weight gradient: no action can start earlier. This bounds when a plan of these orders
can end.
2. Backwards in time from an end: when each action has to end at the latest, so that all ranks end in time.
3. Forwards in time: a backward stays whole if it ends in time. A weight gradient that was set aside runs as soon as it
fits before the next action of its rank, in idle time or while that action can wait; at the latest where the limits of
the rank demand it, or as its last action.

Passes 2 and 3 try three ends: the bound of pass 1; one that is over before it begins, so that no action can wait, all
backwards are split and weight gradients run in idle time alone; and the ends of the best plan by then. The second one
is the paper's rule. On a chain with F = I = W the first one is as short, but holds fewer activations.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from operator import itemgetter
from typing import NamedTuple

from mmtrain.errors import PlanError
from mmtrain.schedule.action import COMPUTE, Action, Kind
from mmtrain.schedule.engine import Engine
from mmtrain.schedule.library.one_f_one_b import joined
from mmtrain.schedule.library.weights import worth_splitting
from mmtrain.schedule.plan import Plan, exceeds
from mmtrain.schedule.problem import EntryCost, PlanningProblem

ROUNDING = 1e-9
"""Share of a time that is no difference."""


def separate_gradients(plan: Plan, problem: PlanningProblem, *, in_flight: Sequence[int] | None = None) -> Plan:
    """The plan with those backwards split that hold up other actions, each W later on its rank; the plan itself if
    this does not help.

    All other actions keep their order, also the I and W of the given plan. The makespan is never longer than before: of
    the plans tried, the one of least makespan is taken, then of least span of any rank, then of fewest splits. A rank
    exceeds its memory limit or its limit in flight only where it does so before, and not by more. Backwards that are
    not worth splitting, those in braids and those whose W would wait for an instruction stay whole.

    Args: in_flight: [rank] -> maximum number of pairs of a microbatch and a stage between the start of their first F
        and the end of their last B or W (stages that `joined` combines count as one); None: no maximum.
    Raises: PlanError: `in_flight` does not have one entry a rank; the plan has a deadlock.
    Source: FlexPipe, section 5.2 (bubble optimizations) and figure 10.
    """
    num_ranks = plan.graph.num_ranks
    if in_flight is not None and len(in_flight) != num_ranks:
        raise PlanError(f"in_flight has {len(in_flight)} entries for {num_ranks} ranks; give one a rank")
    separation = _Separation(plan, problem, [math.inf] * num_ranks if in_flight is None else in_flight)
    best = separation.given
    for end_s in (separation.bound_s, -math.inf):
        best = best.better(separation.run([end_s] * num_ranks))
    best = best.better(separation.run(best.ends_s))
    return plan if best is separation.given else replace(plan, orders=best.orders)


@dataclass(frozen=True)
class _SeparationResult:
    orders: tuple[tuple[Action, ...], ...]
    starts_s: Sequence[float]
    """[rank] -> of its first action."""
    ends_s: Sequence[float]
    """[rank] -> of its last action."""

    @property
    def makespan_s(self) -> float:
        """The end of the last rank; the first one starts at 0."""
        return max(self.ends_s)

    @property
    def span_s(self) -> float:
        """The longest one of a rank."""
        return max(end - start for start, end in zip(self.starts_s, self.ends_s, strict=True))

    def better(self, other: "_SeparationResult") -> "_SeparationResult":
        """The one of less makespan; else of less span; else of fewer split backwards; else this one."""
        for ours, theirs in ((self.makespan_s, other.makespan_s), (self.span_s, other.span_s)):
            if abs(ours - theirs) > ROUNDING * ours:
                return self if ours < theirs else other
        return min(self, other, key=lambda outcome: sum(map(len, outcome.orders)))


StageMicrobatch = tuple[int, int]
"""A stage and a microbatch."""


class _Step(NamedTuple):
    """One entry of the given orders."""

    entry: Action
    items: tuple[int, ...]
    cost: EntryCost
    separate: tuple[EntryCost, EntryCost] | None
    """Cost of I and of W; None: the entry stays as it is."""
    num_opened: int
    """Number of pairs of which it has the first F."""
    pairs: tuple[StageMicrobatch, ...]
    """The pair of each B or W in it."""

    @property
    def least_s(self) -> float:
        """Seconds without a W that can be set aside."""
        return (self.separate[0] if self.separate else self.cost).seconds


class _SimulatedRank:
    """What one rank has run, and what it holds."""

    def __init__(
        self, limit_bytes: float | None, in_flight: float, remaining_backwards: Counter[StageMicrobatch]
    ) -> None:
        self._limit_bytes, self._in_flight, self._remaining_backwards = limit_bytes, in_flight, remaining_backwards
        self._held_bytes, self._num_pairs = 0.0, 0
        self.order: list[Action] = []
        self.start_s = self.end_s = 0.0
        self.waiting: list[tuple[Action, EntryCost, tuple[StageMicrobatch, ...]]] = []
        """The Ws that wait, each with its cost and its pair, in the order of their Is."""

    def fits(self, cost: EntryCost, num_opened: int = 0) -> bool:
        """Whether an action that opens some pairs fits into the limits now."""
        during = self._held_bytes + max(cost.needed_bytes, cost.growth_bytes)
        is_over = self._limit_bytes is not None and exceeds(during, self._limit_bytes)
        return not is_over and (not num_opened or self._num_pairs + num_opened <= self._in_flight)

    def run(
        self,
        action: Action,
        cost: EntryCost,
        pairs: tuple[StageMicrobatch, ...],
        num_opened: int = 0,
        arrival_s: float = 0.0,
    ) -> None:
        """Runs an action as soon as its inputs have arrived. Args: pairs: of each B or W."""
        if not self.order:
            self.start_s = arrival_s
        self.order.append(action)
        self.end_s = max(self.end_s, arrival_s) + cost.seconds
        self._held_bytes += cost.growth_bytes
        self._num_pairs += num_opened
        for pair in pairs:
            self._remaining_backwards[pair] -= 1
            self._num_pairs -= not self._remaining_backwards[pair]

    def run_weight(self, end_by_s: float = math.inf) -> bool:
        """Runs the first waiting W that ends by a given time; whether there is one."""
        for index, (action, cost, pairs) in enumerate(self.waiting):
            if self.end_s + cost.seconds <= end_by_s:
                del self.waiting[index]
                self.run(action, cost, pairs)
                return True
        return False


class _Separation:
    """Runs of a plan with some of its Ws set aside."""

    def __init__(self, plan: Plan, problem: PlanningProblem, in_flight: Sequence[float]) -> None:
        self._items, self._message_s = plan.graph.items, problem.message_s
        self._limits = list(zip(problem.memory_limit_bytes, in_flight, strict=True))
        self._steps = [list(_steps(plan, problem, rank)) for rank in range(plan.graph.num_ranks)]
        """The steps, [rank][step]."""
        seconds = [[step.cost.seconds for step in steps] for steps in self._steps]
        whole = plan.run(seconds, self._message_s)
        quick = plan.run([[step.least_s for step in steps] for steps in self._steps], self._message_s)
        self._ranks = quick.ranks
        """The rank of each step, in topological order."""
        self.given = _SeparationResult(
            plan.orders, [min(s, default=0.0) for s in whole.starts], [max(e, default=0.0) for e in whole.ends]
        )
        # When a step starts, its seconds and those of all later ones are ahead of the rank, Ws included.
        self.bound_s = max(
            (
                start + ahead
                for starts, local in zip(quick.starts, seconds, strict=True)
                for start, ahead in zip(reversed(starts), accumulate(reversed(local)), strict=True)
            ),
            default=0.0,
        )
        """No plan of these orders has a shorter makespan."""

    def run(self, end_by_s: Sequence[float]) -> _SeparationResult:
        """The orders of passes 2 and 3. Args: end_by_s: [rank] -> when to end, if possible."""
        ranks = [
            _SimulatedRank(*limits, Counter(pair for step in steps for pair in step.pairs))
            for limits, steps in zip(self._limits, self._steps, strict=True)
        ]
        engine, latest = Engine(self._items, self._message_s), self._latest(end_by_s)
        remaining = [zip(steps, times, strict=True) for steps, times in zip(self._steps, latest, strict=True)]
        for number in self._ranks:
            rank, (step, (start_by, end_by)) = ranks[number], next(remaining[number])
            arrival = max(engine.arrival[item] for item in step.items)
            while rank.run_weight(max(arrival, start_by) * (1 + ROUNDING)):
                pass
            while rank.waiting and not rank.fits(step.cost, step.num_opened):
                rank.run_weight()
            is_late = max(rank.end_s, arrival) + step.cost.seconds > end_by * (1 + ROUNDING)
            if step.separate and is_late and rank.fits(step.separate[0]):
                rank.run(replace(step.entry, kind=Kind.I), step.separate[0], (), 0, arrival)
                rank.waiting.append((replace(step.entry, kind=Kind.W), step.separate[1], step.pairs))
            else:
                rank.run(step.entry, step.cost, step.pairs, step.num_opened, arrival)
            for item in step.items:
                engine.start(item, rank.end_s)
        for rank in ranks:
            while rank.run_weight():
                pass
        orders = tuple(tuple(rank.order) for rank in ranks)
        return _SeparationResult(orders, [rank.start_s for rank in ranks], [rank.end_s for rank in ranks])

    def _latest(self, end_by_s: Sequence[float]) -> list[list[tuple[float, float]]]:
        """[rank][step] -> when it must start (as I) and end, so that each rank can end by a given time."""
        item_by = [math.inf] * self._items.num_items
        latest: list[list[tuple[float, float]]] = [[] for _ in self._steps]
        left, next_by = list(end_by_s), list(end_by_s)
        """[rank] -> end less all later seconds; start of the next step."""
        message_s = [*self._message_s, 0.0]
        remaining = list(map(reversed, self._steps))
        for rank in reversed(self._ranks):
            step = next(remaining[rank])
            end = min(left[rank], next_by[rank])
            for item in step.items:
                for dependent, message in self._items.dependents[item]:
                    end = min(end, item_by[dependent] - message_s[message])
            left[rank] -= step.cost.seconds
            start = next_by[rank] = min(end - step.least_s, left[rank])
            latest[rank].append((start, end))
            for item in step.items:
                item_by[item] = start
        return [local[::-1] for local in latest]


def _steps(plan: Plan, problem: PlanningProblem, rank: int) -> Iterator[_Step]:
    """The entries of a rank's order."""
    graph, items, together = plan.graph, plan.graph.items, joined(plan.graph)
    opened: set[StageMicrobatch] = set()
    for step, group in groupby(plan.parts[rank], key=itemgetter(0)):
        parts = [(action, work) for _, action, work in group]
        pairs = [
            (action.kind, (together.get(action.stage, action.stage), action.microbatch))
            for action, work in parts
            if action.kind in COMPUTE and graph.has_backward(action.stage, work)
        ]
        new = {pair for kind, pair in pairs if kind is Kind.F} - opened
        opened |= new
        entry, work = plan.orders[rank][step], parts[0][1]
        yield _Step(
            entry,
            tuple(items.item(action.kind, action.stage, work) for action, work in parts),
            problem.entry_cost(entry, work, plan.options),
            _separate(plan, problem, entry, work),
            len(new),
            tuple(pair for kind, pair in pairs if kind in (Kind.B, Kind.W)),
        )


def _separate(plan: Plan, problem: PlanningProblem, entry: Action, work: int) -> tuple[EntryCost, EntryCost] | None:
    """The costs of I and W of an entry that may be split; None: it may not."""
    if entry.kind is not Kind.B or not worth_splitting(plan.option(problem, entry.stage, work)):
        return None
    items = plan.graph.items
    if items.num_needs[items.item(Kind.W, entry.stage, work)] > 1:
        return None  # its W waits for an instruction, too
    i, w = (problem.entry_cost(replace(entry, kind=kind), work, plan.options) for kind in (Kind.I, Kind.W))
    return i, w
