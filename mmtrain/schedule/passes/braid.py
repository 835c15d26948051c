"""Blocks in any plan: a forward and a backward of one rank run together where that hides exchanges.

A block of a forward and a B, I or W of another work takes less time than both, but it waits for the inputs of both, and
their results leave at its end. So it shortens a plan only where other ranks can wait. As in `separate`, one pass over
the plan goes backwards in time from an end, and notes when each action has to end at the latest. A second one goes
forwards: where an action starts, it becomes a block with one of the next actions of its rank, the one that saves the
rank most time among those with which both, and the actions that the second one overtakes, end in time or no later than
without the block.

From the plan's own end no plan becomes longer, but few become shorter. Earlier ends leave no action in time: they count
on shorter actions, as if a share of all exchanges were hidden already. What comes of them goes on from its own end.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from mmtrain.schedule.action import COMPUTE, Action, Braid, Kind
from mmtrain.schedule.engine import Engine, Run
from mmtrain.schedule.option import Load
from mmtrain.schedule.plan import Plan, exceeds
from mmtrain.schedule.problem import EntryCost, PlanningProblem

ROUNDING = 1e-9
"""Share of a time that is no difference."""
REACH = 6
"""The next entries of its rank among which an action finds the other one of its block."""
SHARES = (1.0, 0.75, 0.5, 0.0)
"""The shares of all exchanges that an end counts as hidden."""
MOST_ROUNDS = 2
"""Runs from a plan's own end after each of these; more bring nothing."""


def braid(plan: Plan, problem: PlanningProblem) -> Plan:
    """The plan with those blocks that shorten it; the plan itself if there are none.

    All other actions keep their order, and blocks of the given plan stay. The makespan is never longer than before. A
    rank exceeds its memory limit only where it does so before.

    Raises: PlanError: the plan has a deadlock.
    """
    if not problem.runs_units:
        return plan
    entries: dict[Action, _OrderEntry] = {}
    best = given = _Simulated(plan, problem, entries)
    for share in SHARES:
        found = _Simulated(given.braided(share), problem, entries)
        for _ in range(MOST_ROUNDS):
            if not found.makespan_s < best.makespan_s * (1 - ROUNDING):
                break
            best, found = found, _Simulated(found.braided(0.0), problem, entries)
    return best.plan


@dataclass(frozen=True, slots=True)
class _OrderEntry:
    """One entry of an order."""

    action: Action
    items: tuple[int, ...]
    cost: EntryCost
    work: int
    load: Load | None
    """The load by which it may join another entry; None: it joins none."""

    def joins(self, other: "_OrderEntry") -> bool:
        """Whether both may be one block: a forward, and a B, I or W of another work."""
        both = self.load is not None and other.load is not None and self.work != other.work
        return both and (self.action.kind is Kind.F) != (other.action.kind is Kind.F)


class _Latest(NamedTuple):
    """The latest ends of an entry with which all entries end in time."""

    for_results: float
    """The latest end for the entries that wait for its results."""
    for_next: float
    """The latest end for the next entry of its rank."""


class _BraidedRank:
    """What one rank runs: its entries in their order, but for those that join an earlier one."""

    def __init__(
        self,
        order: Sequence[_OrderEntry],
        latest: Sequence[_Latest],
        limit_bytes: float | None,
        engine: Engine,
        block_s: Callable[[Load, Load], float],
    ) -> None:
        """Args: latest: [step]. block_s: seconds of a block of two loads."""
        self._order, self._latest, self._limit_bytes = order, latest, limit_bytes
        self._engine, self._block_s = engine, block_s
        self._joined = [False] * len(order)
        """[step] -> whether it has run with an earlier one."""
        self._end_s, self._held_bytes = 0.0, 0.0
        self.actions: list[Action] = []

    def run(self, step: int) -> None:
        """Runs the entry of a step, alone or as a block, unless it has run."""
        if self._joined[step]:
            return
        first = self._order[step]
        start = max(self._end_s, *(self._engine.arrival[item] for item in first.items))
        other, self._end_s = self._choose(step, start)
        entries = [first]
        if other != step:
            entries.append(self._order[other])
            entries.sort(key=lambda entry: entry.action.kind is not Kind.F)
            self._joined[other] = True
        actions = [entry.action for entry in entries]
        self.actions.append(Braid.of(*actions) if len(actions) > 1 else actions[0])
        for entry in entries:
            self._held_bytes += entry.cost.growth_bytes
            for item in entry.items:
                self._engine.start(item, self._end_s)

    def _choose(self, step: int, start: float) -> tuple[int, float]:
        """The step of the entry that an entry becomes a block with (its own: none), and when that ends."""
        waiting, arrival, latest, first = self._engine.waiting, self._engine.arrival, self._latest, self._order[step]
        best, alone_end = step, start + first.cost.seconds
        best_end, most_saved = alone_end, 0.0
        if first.load is None:
            return best, best_end
        overtaken: list[EntryCost] = []
        end, by = alone_end, latest[step].for_results
        late = max(0.0, end - by)
        # Of what comes before the other entry: its end without a block, when a block has to end for its sake, and by
        # how much it is late without a block.
        for other in range(step + 1, min(len(self._order), step + 1 + REACH)):
            if self._joined[other]:
                continue
            entry = self._order[other]
            if first.joins(entry) and not waiting[entry.items[0]]:
                assert first.load is not None and entry.load is not None
                seconds = self._block_s(first.load, entry.load)
                block_end = max(start, arrival[entry.items[0]]) + seconds
                whole_end = max(end, arrival[entry.items[0]]) + entry.cost.seconds
                saved = whole_end - (block_end + end - alone_end)
                for_results, for_next = latest[other]
                allowed = max(late, whole_end - min(for_results, for_next)) + ROUNDING * block_end
                in_time = block_end <= min(by, for_results, for_next - (end - alone_end)) + allowed
                is_better = in_time and saved > most_saved + ROUNDING * seconds
                if is_better and self._fits(first.cost, entry.cost, overtaken):
                    best, best_end, most_saved = other, block_end, saved
            end += entry.cost.seconds
            late = max(late, end - latest[other].for_results)
            by = min(by, latest[other].for_results - (end - alone_end))
            overtaken.append(entry.cost)
        return best, best_end

    def _fits(self, first: EntryCost, second: EntryCost, overtaken: Sequence[EntryCost]) -> bool:
        """Whether a block and the entries that it overtakes stay within the memory limit."""
        if self._limit_bytes is None:
            return True
        both = first.needed_bytes + second.needed_bytes, first.growth_bytes + second.growth_bytes
        held = self._held_bytes
        for needed, growth in (both, *((cost.needed_bytes, cost.growth_bytes) for cost in overtaken)):
            if exceeds(held + max(needed, growth), self._limit_bytes):
                return False
            held += growth
        return True


class _Simulated:
    """A plan with its times."""

    def __init__(self, plan: Plan, problem: PlanningProblem, entries: dict[Action, _OrderEntry]) -> None:
        """Args: entries: those that are known, of plans with the same options; new ones are added."""
        self.plan, self._problem = plan, problem
        for action in itertools.chain(*plan.orders):
            if action not in entries:
                entries[action] = _entry(plan, problem, action)
        self._orders = [[entries[action] for action in order] for order in plan.orders]
        """The entries, [rank][step]."""
        self._run = self._simulated(self._seconds(0.0))
        self.makespan_s = max((ends[-1] for ends in self._run.ends if ends), default=0.0)

    def _simulated(self, seconds: Sequence[Sequence[float]]) -> Run:
        """The execution of the orders. Args: seconds: [rank][step]."""
        numbers = [[entry.items[0] for entry in order] for order in self._orders]
        blocks = [
            {step: entry.items for step, entry in enumerate(order) if len(entry.items) > 1} for order in self._orders
        ]
        run = Run(Engine(self.plan.graph.items, self._problem.message_s), numbers, seconds, blocks)
        if not run.complete:
            self.plan.run()  # says where
        return run

    def _seconds(self, share: float) -> list[list[float]]:
        """[rank][step] -> seconds, less a share of the exchanges."""
        return [[entry.cost.seconds - share * entry.cost.exposed_s for entry in order] for order in self._orders]

    def braided(self, share: float) -> Plan:
        """The plan with blocks. Args: share: of all exchanges, that its end counts as hidden."""
        engine = Engine(self.plan.graph.items, self._problem.message_s)
        block_s = cache(lambda first, second: first.together(second).seconds)
        ranks = [
            _BraidedRank(order, latest, limit, engine, block_s)
            for order, latest, limit in zip(
                self._orders, self._latest(share), self._problem.memory_limit_bytes, strict=True
            )
        ]
        for rank, step in self._in_time():
            ranks[rank].run(step)
        return replace(self.plan, orders=tuple(tuple(rank.actions) for rank in ranks))

    def _in_time(self) -> list[tuple[int, int]]:
        """All entries as (rank, step) in the order of their start, each after those that it needs."""
        steps = [iter(range(len(order))) for order in self._orders]
        topological = [(rank, next(steps[rank])) for rank in self._run.ranks]
        return sorted(topological, key=lambda at: self._run.starts[at[0]][at[1]])

    def _latest(self, share: float) -> list[list[_Latest]]:
        """[rank][step]. Args: share: as of `braided`."""
        seconds = self._seconds(share)
        run = self._simulated(seconds) if share else self._run
        end_s = max((ends[-1] for ends in run.ends if ends), default=0.0)
        dependents, message_s = self.plan.graph.items.dependents, [*self._problem.message_s, 0.0]
        item_by = [end_s] * self.plan.graph.items.num_items
        reversed_latest: list[list[_Latest]] = [[] for _ in self._orders]
        next_by = [end_s] * len(self._orders)
        for rank in reversed(run.ranks):
            step = len(self._orders[rank]) - 1 - len(reversed_latest[rank])
            items = self._orders[rank][step].items
            needed_by = (item_by[i] - message_s[message] for item in items for i, message in dependents[item])
            latest = _Latest(min(needed_by, default=end_s), next_by[rank])
            reversed_latest[rank].append(latest)
            next_by[rank] = min(latest) - seconds[rank][step]
            for item in items:
                item_by[item] = next_by[rank]
        return [latest[::-1] for latest in reversed_latest]


def _entry(plan: Plan, problem: PlanningProblem, action: Action) -> _OrderEntry:
    graph, work = plan.graph, plan.graph.work_of(action)
    items = tuple(graph.items.item(part.kind, part.stage, graph.work_of(part)) for part in action.parts)
    load = plan.option(problem, action.stage, work).load(action.kind) if action.kind in COMPUTE else None
    return _OrderEntry(action, items, problem.entry_cost(action, work, plan.options), work, load)
