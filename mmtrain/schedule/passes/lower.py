"""The lowering of a plan to a program: small pure passes that add transfers, waits and stage-wide actions.

Rules: every rank's list is a part of one global order of compute and transfers, so no transport can deadlock, whatever
its streams. Data-parallel replicas run different plans, so their collectives run in one canonical order at both ends of
the step.
"""

import hashlib
import heapq
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from mmtrain.errors import PlanError
from mmtrain.schedule.action import NOT_COMPUTE, RESULT_OF, Action, Kind
from mmtrain.schedule.graph import Edge, WorkGraph
from mmtrain.schedule.plan import Plan, check, orders_text, parse_orders
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.simulate import simulate
from mmtrain.schedule.timeline import Row, Timeline

KEEP = "keep"
"""Name of the memory option that the runtime can ignore."""

RankAction = tuple[int, Action]
"""A rank and an action of its list."""


@dataclass(frozen=True)
class Program:
    """The actions of each rank: compute, transfers, waits and stage-wide actions, in order."""

    graph: WorkGraph
    actions: tuple[tuple[Action, ...], ...]
    """[rank] -> its list."""
    memory: Mapping[tuple[int, int], str] = field(default_factory=dict)
    """The name of the memory option of each (stage, work) with a backward; default: `KEEP`."""

    def __str__(self) -> str:
        """One line a rank: its actions separated by spaces; `parse` reads it back, without the memory options."""
        return orders_text(self.actions)

    @classmethod
    def parse(cls, graph: WorkGraph, text: str) -> "Program":
        """The program of a text that has one line a rank. Raises: PlanError: as `parse_orders`."""
        return cls(graph, parse_orders(text, graph.num_ranks))

    @cached_property
    def hash(self) -> int:
        """A 64-bit number (a signed int64): equal programs have equal hashes."""
        text = f"{self}\n{sorted(self.memory.items())}" if self.memory else str(self)
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


def lower(
    plan: Plan,
    problem: PlanningProblem,
    *,
    sharded: bool,
    regathered: Collection[int] = (),
    reduce: bool | None = None,
    timeline: Timeline | None = None,
) -> Program:
    """The program of a plan: the actions of every rank, in an order that no transport can deadlock.

    Args:
        sharded: add UNSHARD, REDUCE and RESHARD of every stage (FSDP).
        regathered: stages without UNSHARD and RESHARD: their parameters are gathered around each use.
        reduce: whether the step ends with REDUCE. None: if this plan has any backward; a training step of several
            replicas must pass True, since the plan of another replica may have one.
        timeline: of this plan as `simulate` returns it; None: it is simulated here.
    Raises: PlanError: the plan breaks a rule of `check`, or one activation would be sent twice between the same stages.
    """
    check(plan)
    check_edges(plan.graph)
    steps = order_globally(plan, problem, timeline)
    steps = add_waits(plan.graph, steps)
    lists = [tuple(action for holder, action in steps if holder == rank) for rank in range(plan.graph.num_ranks)]
    names = {node: plan.option(problem, *node).name for node in plan.graph.nodes() if plan.graph.has_backward(*node)}
    program = Program(plan.graph, tuple(lists), {node: name for node, name in names.items() if name != KEEP})
    if not sharded:
        return program
    return add_stage_wide(program, plan.graph.has_any_backward if reduce is None else reduce, regathered)


def check_edges(graph: WorkGraph) -> None:
    """Checks that no two edges move the same activation between the same stages: their transfers would have one name.

    Raises: PlanError: with the works; such a graph can be planned and simulated, but not run.
    """
    seen: dict[tuple[int, int, int], int] = {}
    for stage, work in graph.nodes():
        for edge in graph.inputs(stage, work):
            key = (edge.source, edge.target, edge.work)
            if key in seen:
                raise PlanError(
                    f"works[{work}].after: work {edge.work} feeds works {seen[key]} and {work} through the "
                    "same stages, and the two transfers cannot be told apart; join these works into one"
                )
            seen[key] = work


def order_globally(plan: Plan, problem: PlanningProblem, timeline: Timeline | None = None) -> list[RankAction]:
    """All compute and transfers in one order: by simulated start, a transfer when its producer ends.

    Both ends of a transfer are adjacent, so any two ranks see their common transfers in the same order, in both
    directions.
    """
    steps_of = list(map(iter, plan.orders))
    position = {next(steps_of[rank]): i for i, rank in enumerate(plan.run().ranks)}
    # Actions of zero duration may start together: the run order then keeps causes before effects.
    timeline = timeline or simulate(problem, plan)
    rows = sorted(timeline.rows, key=lambda row: (row.start_s, row.end_s, position[row.action]))
    steps: list[RankAction] = []
    leaving: list[tuple[float, int, Row]] = []
    for i, row in enumerate(rows):
        while leaving and leaving[0][0] <= row.start_s:
            steps += transfers_after(plan.graph, heapq.heappop(leaving)[2].action)
        steps.append((row.rank, row.action))
        heapq.heappush(leaving, (row.end_s, i, row))
    while leaving:
        steps += transfers_after(plan.graph, heapq.heappop(leaving)[2].action)
    return steps


def transfers_after(graph: WorkGraph, action: Action) -> list[RankAction]:
    """The transfers of a result of a compute action to other ranks, each send followed by its receive."""
    steps: list[RankAction] = []
    for part in action.parts:
        result = RESULT_OF.get(part.kind)
        if result is Kind.F:
            for e in _remote(graph, graph.outputs(part.stage, graph.work_of(part))):
                steps += _pair(graph, Kind.SEND_F, e.source, Kind.RECV_F, e.target, e.work)
        elif result is Kind.B:
            for e in _remote(graph, graph.inputs(part.stage, graph.work_of(part))):
                if e.grad:
                    steps += _pair(graph, Kind.SEND_B, e.target, Kind.RECV_B, e.source, e.work)
    return steps


def _remote(graph: WorkGraph, edges: Iterable[Edge]) -> list[Edge]:
    return [edge for edge in edges if not graph.is_local(edge)]


def _pair(graph: WorkGraph, send: Kind, sender: int, receive: Kind, receiver: int, work: int) -> list[RankAction]:
    return [
        (graph.stage_rank[sender], graph.action(send, sender, work, receiver)),
        (graph.stage_rank[receiver], graph.action(receive, receiver, work, sender)),
    ]


def add_waits(graph: WorkGraph, steps: list[RankAction]) -> list[RankAction]:
    """The steps with a wait for each received input directly before the compute action that consumes it."""
    with_waits: list[RankAction] = []
    for rank, action in steps:
        if action.kind not in NOT_COMPUTE:
            with_waits += [(rank, wait) for wait in waits_before(graph, action)]
        with_waits.append((rank, action))
    return with_waits


def waits_before(graph: WorkGraph, action: Action) -> list[Action]:
    """The waits for the received inputs of a compute action."""
    return [
        graph.action(Kind.WAIT_F, e.target, e.work, e.source)
        if kind is Kind.F
        else graph.action(Kind.WAIT_B, e.source, e.work, e.target)
        for part in action.parts
        for (kind, _, _), e in graph.needs(part.kind, part.stage, graph.work_of(part))
        if e is not None and not graph.is_local(e)
    ]


def add_stage_wide(program: Program, reduce: bool, regathered: Collection[int] = ()) -> Program:
    """The program with its stages gathered first, and reduced and freed last, ascending on every rank.

    It contains every stage, also one without work, since another replica may have work for it.
    """
    lists = []
    for rank, actions in enumerate(program.actions):
        stages = program.graph.stages_of_rank(rank)
        gathered = [stage for stage in stages if stage not in regathered]
        before = [Action(Kind.UNSHARD, stage) for stage in gathered]
        last = [Action(Kind.REDUCE, stage) for stage in stages] if reduce else []
        after = [Action(Kind.RESHARD, stage) for stage in gathered]
        lists.append((*before, *actions, *last, *after))
    return replace(program, actions=tuple(lists))
