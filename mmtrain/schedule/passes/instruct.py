"""Instructions in plans of schedules that do not plan any: they plan the problem without, and these are added.

An instruction is local to its rank, so that it can stand anywhere between the results that it waits for and those that
wait for it. Whatever its position in the order of its rank, it delays others, but never leads to a deadlock.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mmtrain.errors import PlanError
from mmtrain.schedule.action import RESULT_OF, Action
from mmtrain.schedule.graph import WorkGraph
from mmtrain.schedule.items import Result
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import PlanningProblem


def without_instructions(problem: PlanningProblem) -> PlanningProblem:
    """The problem without instructions; the problem itself if it has none."""
    if not problem.graph.instructions:
        return problem
    return replace(problem, graph=replace(problem.graph, instructions=()))


def plan_without(plan: Plan, bare: PlanningProblem) -> Plan:
    """A plan without its instructions. Args: bare: `without_instructions` of its problem."""
    if not plan.graph.instructions:
        return plan
    known = plan.graph.instruction
    orders = tuple(
        tuple(e for e, work in zip(order, works, strict=True) if (e.kind, e.stage, work) not in known)
        for order, works in zip(plan.orders, plan.works, strict=True)
    )
    return replace(plan, graph=bare.graph, orders=orders)


def instruct(plan: Plan, problem: PlanningProblem) -> Plan:
    """The plan with the instructions of a problem, each as soon as what it waits for has ended on its rank.

    Args: plan: of `without_instructions(problem)`.
    Raises: PlanError: a rank runs something that waits for an instruction before something that this waits for.
    """
    if not problem.graph.instructions:
        return plan
    ranks = enumerate(plan.orders)
    orders = tuple(tuple(_with_instructions(problem.graph, rank, order)) for rank, order in ranks)
    return replace(plan, graph=problem.graph, orders=orders)


@dataclass(frozen=True, slots=True)
class Instructed:
    """A schedule that runs the instructions of a problem, from one that knows none. Data workers get copies of it."""

    __wrapped__: Callable[..., Plan]

    def __call__(self, problem: PlanningProblem, **more: Any) -> Plan:
        """The plan. Errors: of the schedule, and of `instruct`."""
        return instruct(self.__wrapped__(without_instructions(problem), **more), problem)


def _with_instructions(graph: WorkGraph, rank: int, order: Sequence[Action]) -> Iterator[Action]:
    given = {key: one for key, one in graph.instruction.items() if graph.stage_rank[one.stage] == rank}
    needs = {key: len({*one.after}) for key, one in given.items()}
    """Instruction that has not run -> number of results that it waits for."""
    behind: dict[Result, list[Result]] = defaultdict(list)
    ahead: dict[Result, list[Result]] = defaultdict(list)
    """Result -> the instructions that wait for it, and those that it waits for."""
    for key, one in given.items():
        for result in dict.fromkeys(one.after):
            behind[result].append(key)
        for result in one.before:
            ahead[result].append(key)
    ended: set[Result] = set()

    def end(results: Iterable[Result]) -> Iterator[Action]:
        """The instructions that wait for nothing more after these results."""
        queue = deque(results)
        while queue:
            ended.add(result := queue.popleft())
            for key in behind[result]:
                needs[key] -= 1
                if not needs[key]:
                    queue.append(key)
                    yield graph.action(*key)

    free = [key for key, count in needs.items() if not count]
    yield from (graph.action(*key) for key in free)
    yield from end(free)
    for entry in order:
        results = [(RESULT_OF[part.kind], part.stage, graph.work_of(part)) for part in entry.parts]
        for key in (key for result in results for key in ahead[result] if needs[key]):
            needed = graph.action(*min({*given[key].after} - ended))
            raise PlanError(
                f"rank {rank}: {graph.action(*key)} is an instruction after {needed} and before {entry}, but the "
                f"schedule runs {entry} first; leave out `before`, or plan by a recipe"
            )
        yield entry
        yield from end(results)
    for key in (key for key, count in needs.items() if count):
        needed = graph.action(*min({*given[key].after} - ended))
        raise PlanError(
            f"rank {rank}: {graph.action(*key)} is an instruction after {needed}, which the schedule does not run; "
            "where backwards are whole, wait for B in place of W"
        )
