"""Searches for tests of what stands around a search: any plan at all, and every way to do it wrong."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from mmtrain.planner.result import PlanResult
from mmtrain.planner.search.search_options import SearchOptions
from mmtrain.planner.search_settings import search_seed
from mmtrain.schedule.action import RESULT_OF, Action, Kind
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import PlanningProblem


def random_plan(problem: PlanningProblem, rng: random.Random, *, split: bool = True) -> Plan:
    """Any valid plan: what can run next is drawn, and whether a backward is split. Memory limits are not kept."""
    graph = problem.graph
    orders: list[list[Action]] = [[] for _ in range(graph.num_ranks)]
    waiting = [(Kind.F, *node) for node in graph.nodes()]
    for node in graph.nodes():
        if graph.has_backward(*node):
            halves = split and rng.random() < 0.5
            waiting += [(kind, *node) for kind in ((Kind.I, Kind.W) if halves else (Kind.B,))]
    done = set()
    while waiting:
        ready = [a for a in waiting if all(result in done for result, _ in graph.needs(*a))]
        kind, stage, work = rng.choice(ready)
        waiting.remove((kind, stage, work))
        done.add((RESULT_OF[kind], stage, work))
        orders[graph.stage_rank[stage]].append(graph.action(kind, stage, work))
    return Plan(graph, tuple(map(tuple, orders)))


@dataclass(frozen=True, kw_only=True)
class Claimed(PlanResult):
    """A result that says that its plan takes no time, so that it runs even if the first one is shorter."""

    @property
    def makespan_s(self) -> float:
        return 0.0


def random_search(problem: PlanningProblem, options: SearchOptions, *, cancelled: Callable[[], bool]) -> PlanResult:
    """One random plan, by the seed, which says that it takes no time."""
    plan = random_plan(problem, random.Random(options.seed), split=options.split)
    return Claimed(problem=problem, status="improved", message="drawn", plan_or_none=plan, seed=options.seed)


def _changed(problem: PlanningProblem, options: SearchOptions, change: Callable[[list[Action]], object]) -> PlanResult:
    result = random_search(problem, replace(options, split=False), cancelled=lambda: False)
    orders = [list(order) for order in result.plan.orders]
    change(orders[-1])
    return replace(result, plan_or_none=Plan(problem.graph, tuple(map(tuple, orders))))


def _sleep(seconds: float, cancelled: Callable[[], bool]) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not cancelled():
        time.sleep(0.01)


def _foreign(problem: PlanningProblem, options: SearchOptions) -> PlanResult:
    """A plan of a part of the iteration, as one of another batch would be."""
    graph = problem.graph
    last = max(work.microbatch for work in graph.works)
    keep = [i for i, work in enumerate(graph.works) if work.microbatch < last]
    assert keep == list(range(len(keep))) and keep
    smaller = replace(problem, **{
        "graph": replace(graph, works=graph.works[: len(keep)], backward=graph.backward[: len(keep)]),
        "cost_index": problem.cost_index[: len(keep)],
        "output_bytes": problem.output_bytes[: len(keep)],
    })  # fmt: skip
    return random_search(smaller, options, cancelled=lambda: False)


FAULTS: tuple[str, ...] = (
    "crash", "memory", "nothing", "nonsense", "deadlock", "missing", "doubled", "transfer", "foreign", "foreign work",
    "late", "stubborn", "slow",
)  # fmt: skip


def faulty(fault: str, problem: PlanningProblem, options: SearchOptions, cancelled: Callable[[], bool]) -> PlanResult:
    """A search that does something wrong."""
    if fault == "crash":
        raise RuntimeError("the search broke down")
    if fault == "memory":
        raise MemoryError
    if fault == "nothing":
        return PlanResult(problem=problem, status="infeasible", message="nothing fits")
    if fault == "nonsense":
        return None  # type: ignore[return-value]
    if fault == "deadlock":
        return _changed(problem, options, lambda order: order.reverse())
    if fault == "missing":
        return _changed(problem, options, lambda order: order.pop())
    if fault == "doubled":
        return _changed(problem, options, lambda order: order.append(order[0]))
    if fault == "transfer":
        return _changed(problem, options, lambda order: order.append(Action(Kind.REDUCE, order[0].stage)))
    if fault == "foreign":
        return _foreign(problem, options)
    if fault == "foreign work":
        return _changed(problem, options, lambda order: order.append(replace(order[0], microbatch=99)))
    if fault == "late":
        _sleep(60, cancelled)
    elif fault == "stubborn":
        time.sleep(1.5)
    else:
        assert fault == "slow"
        time.sleep(0.05)
    return random_search(problem, options, cancelled=cancelled)


@dataclass
class Faulty:
    """A search that does something wrong in some steps, and draws a plan in the others."""

    seed: int
    """Of the job."""
    faults: dict[int, str] = field(default_factory=dict)
    """step -> what goes wrong."""

    def __call__(
        self, problem: PlanningProblem, options: SearchOptions, *, cancelled: Callable[[], bool]
    ) -> PlanResult:
        seeds = {search_seed(self.seed, step): fault for step, fault in self.faults.items()}
        if options.seed in seeds:
            return faulty(seeds[options.seed], problem, options, cancelled)
        return random_search(problem, options, cancelled=cancelled)
