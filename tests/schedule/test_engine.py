"""The engine's policies against each other and against plain statements of the rules."""

from dataclasses import replace

import pytest
from hypothesis import given

from mmtrain.schedule.action import RESULT_OF, Kind
from mmtrain.schedule.engine import Engine, Run
from mmtrain.schedule.graph import WorkGraph
from mmtrain.schedule.library.breadth_first import gpipe
from mmtrain.schedule.library.one_f_one_b import backward_order, forward_order, one_f_one_b
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.table import Table
from tests.schedule.problems import chain, problems

TURNS = ("alternate", "forward", "backward")


def table(graph: WorkGraph, turn: str, room: int = 2) -> Table:
    """All in the orders of 1F1B, each node a pair of its own."""
    nodes = range(graph.items.num_nodes)
    return Table(
        forwards=[graph.items.item(Kind.F, *node) for node in forward_order(graph)],
        backwards=[graph.items.item(Kind.B, *node) for node in backward_order(graph)],
        turn=turn,  # type: ignore[arg-type]
        pair=list(nodes),
        in_flight=[room + rank for rank in range(graph.num_ranks)],
        ticks=[1 + node % 3 for node in nodes],
    )


@given(problem=problems())
def test_items_need_what_the_graph_says(problem: PlanningProblem) -> None:
    graph, items = problem.graph, problem.graph.items
    for stage, work in graph.nodes():
        for kind in (Kind.F, Kind.B, Kind.W) if graph.has_backward(stage, work) else (Kind.F,):
            item, needs = items.item(kind, stage, work), graph.needs(kind, stage, work)
            assert items.num_needs[item] == len(needs)
            for result, edge in needs:
                (message,) = (m for dependent, m in items.dependents[items.item(*result)] if dependent == item)
                seconds = [*problem.message_s, 0.0][message]
                assert seconds == (problem.transfer_s(edge) if edge else 0.0)


@given(problem=problems())
def test_a_table_starts_nothing_before_the_engine_lets_it(problem: PlanningProblem) -> None:
    graph = problem.graph
    for turn in TURNS:
        given = table(graph, turn)
        orders = given.run(graph)
        items = [[graph.items.item(a.kind, a.stage, graph.work_of(a)) for a in order] for order in orders]
        seconds = [[float(given.ticks[i % graph.items.num_nodes]) for i in order] for order in items]
        assert Run(Engine(graph.items), items, seconds).complete
        assert sum(map(len, orders)) == len(given.forwards) + len(given.backwards)


@pytest.mark.parametrize(("ranks", "count"), [(1, 3), (2, 4), (4, 9)])
def test_preferring_forwards_without_a_limit_is_gpipe_and_backwards_with_one_1f1b(ranks: int, count: int) -> None:
    problem = chain(ranks, count)
    graph = problem.graph
    nodes = list(range(graph.items.num_nodes))
    free = Table(
        forwards=nodes,
        backwards=[len(nodes) + node for node in nodes],
        turn="forward",
        pair=nodes,
        in_flight=[count] * ranks,
        ticks=[1] * len(nodes),
    )
    assert free.run(graph) == gpipe(problem).orders
    bounded = replace(free, turn="backward", in_flight=[ranks - rank for rank in range(ranks)])
    assert bounded.run(graph) == one_f_one_b(problem).orders


def test_a_result_made_twice_counts_once() -> None:
    graph = chain(1, 1).graph
    engine = Engine(graph.items)
    assert engine.start(0, 2.0) == [graph.items.item(Kind.B, 0, 0)]
    assert engine.start(0, 9.0) == [] and engine.end[0] == 2.0
    assert set(RESULT_OF.values()) == {Kind.F, Kind.B, Kind.W}
