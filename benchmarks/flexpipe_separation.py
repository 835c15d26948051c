"""FlexPipe's gradient separation as section 5.2 and figure 10 have it, to compare it with `passes.separate`.

Where a rank idles before an action, the chain of actions that it waits for is walked back; the backwards on it are
split and their weight gradients stashed. A stashed weight gradient runs in a later idle interval of its rank in which
it fits, or at the rank's end. The paper takes one interval after the other; here all intervals of a plan are taken at
once, and then those that are left, until none has a backward on its chain. The paper bounds neither rounds nor memory
and does not say what becomes of a plan that gets longer: the shortest of all rounds is the result.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from mmtrain.schedule.action import Action, Kind
from mmtrain.schedule.engine import Engine
from mmtrain.schedule.library.weights import worth_splitting
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import PlanningProblem

ROUNDS = 12
"""At most, of walks through all idle intervals."""
EPSILON = 1e-9
"""Share of a time that is no difference."""

Step = tuple[int, int]
"""(rank, position in its order)."""


def separated_to_the_letter(plan: Plan, problem: PlanningProblem, rounds: int = ROUNDS) -> Plan:
    """The shortest plan of all rounds, maybe the given one. Args: plan: of whole backwards."""
    given, split = _Given(plan, problem), set[Step]()
    best = run = given.run(split)
    for _ in range(rounds):
        new = given.on_chains(run) - split
        if not new:
            break
        split |= new
        run = given.run(split)
        best = min(best, run, key=lambda one: one.end_s)
    return replace(plan, orders=best.orders)


@dataclass(frozen=True)
class _Run:
    orders: tuple[tuple[Action, ...], ...]
    starts_s: Sequence[Sequence[float]]
    """[rank][position in the given order]"""
    ends_s: Sequence[Sequence[float]]
    follows: Sequence[Sequence[bool]]
    """[rank][position] -> whether it starts as soon as its rank is free."""
    end_s: float


class _Given:
    """A plan with the costs of its actions."""

    def __init__(self, plan: Plan, problem: PlanningProblem) -> None:
        self.plan, self.problem, self.items = plan, problem, plan.graph.items
        self.numbers = [
            list(self.items.of_order(order, works)) for order, works in zip(plan.orders, plan.works, strict=True)
        ]
        """[rank][position] -> item."""
        self.step_of = {item: (r, i) for r, items in enumerate(self.numbers) for i, item in enumerate(items)}
        self.ranks = plan.run().ranks
        """The rank of each step in topological order."""

    def _cost(self, step: Step, kind: Kind) -> float:
        rank, index = step
        entry, work = self.plan.orders[rank][index], self.plan.works[rank][index]
        return self.problem.entry_cost(replace(entry, kind=kind), work, self.plan.options).seconds

    @cached_property
    def splittable(self) -> frozenset[Step]:
        """The backwards with weight gradients."""
        return frozenset(
            (rank, index)
            for rank, order in enumerate(self.plan.orders)
            for index, action in enumerate(order)
            if action.kind is Kind.B
            and worth_splitting(self.plan.option(self.problem, action.stage, self.plan.works[rank][index]))
        )

    @cached_property
    def seconds(self) -> list[list[float]]:
        """[rank][position] -> of the whole action."""
        return [
            [self._cost((rank, index), action.kind) for index, action in enumerate(order)]
            for rank, order in enumerate(self.plan.orders)
        ]

    def run(self, split: set[Step]) -> _Run:
        """The plan with these backwards split."""
        count = self.plan.graph.num_ranks
        engine, position, free = Engine(self.items, self.problem.message_s), [0] * count, [0.0] * count
        orders: list[list[Action]] = [[] for _ in range(count)]
        stashed: list[list[tuple[Action, float]]] = [[] for _ in range(count)]
        starts: list[list[float]] = [[] for _ in range(count)]
        ends: list[list[float]] = [[] for _ in range(count)]
        follows: list[list[bool]] = [[] for _ in range(count)]
        for rank in self.ranks:
            step = rank, position[rank]
            position[rank] += 1
            entry, item = self.plan.orders[rank][step[1]], self.numbers[rank][step[1]]
            arrival = engine.arrival[item]
            for weight in list(stashed[rank]):
                if free[rank] + weight[1] <= arrival * (1 + EPSILON):
                    stashed[rank].remove(weight)
                    orders[rank].append(weight[0])
                    free[rank] += weight[1]
            start = max(free[rank], arrival)
            follows[rank].append(arrival <= free[rank] * (1 + EPSILON))
            seconds = self.seconds[rank][step[1]]
            if step in split:
                seconds = self._cost(step, Kind.I)
                stashed[rank].append((replace(entry, kind=Kind.W), self._cost(step, Kind.W)))
                entry = replace(entry, kind=Kind.I)
            orders[rank].append(entry)
            starts[rank].append(start)
            free[rank] = start + seconds
            ends[rank].append(free[rank])
            engine.start(item, free[rank])
        for rank, waiting in enumerate(stashed):
            orders[rank] += [action for action, _ in waiting]
            free[rank] += sum(seconds for _, seconds in waiting)
        return _Run(tuple(map(tuple, orders)), starts, ends, follows, max(free))

    def on_chains(self, run: _Run) -> set[Step]:
        """The backwards on the chains that end in an action for which a rank idles."""
        seen: set[Step] = set()
        found: set[Step] = set()
        walk = [(r, i) for r, flags in enumerate(run.follows) for i, flag in enumerate(flags) if not flag]
        while walk:
            rank, index = walk.pop()
            if (rank, index) in seen:
                continue
            seen.add((rank, index))
            before = self._before(run, rank, index)
            if before is not None:
                found |= {before} & self.splittable
                walk.append(before)
        return found

    def _before(self, run: _Run, rank: int, index: int) -> Step | None:
        """The step whose end lets a step start; None: it starts at once."""
        if run.follows[rank][index]:
            return (rank, index - 1) if index else None
        messages, late = [*self.problem.message_s, 0.0], list[tuple[float, Step]]()
        for item, message in self._needs[self.numbers[rank][index]]:
            if item in self.step_of:
                of_rank, position = step = self.step_of[item]
                late.append((run.ends_s[of_rank][position] + messages[message], step))
        return max(late)[1] if late else None

    @cached_property
    def _needs(self) -> list[list[tuple[int, int]]]:
        """[item] -> (item, message) that it needs."""
        needs: list[list[tuple[int, int]]] = [[] for _ in range(self.items.num_items)]
        for item, dependents in enumerate(self.items.dependents):
            for dependent, message in dependents:
                needs[dependent].append((item, message))
        return needs
