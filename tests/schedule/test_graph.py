from dataclasses import replace
from typing import Any

import pytest

from mmtrain.errors import PlanError
from mmtrain.schedule.action import Action, Kind
from mmtrain.schedule.graph import Edge, ModuleStages, Work, WorkGraph
from tests.schedule.problems import option, two_modules

GRAPH = two_modules(2, [2, 0]).graph  # works: vision 0.0, vision 0.1, language 0.0, language 1.0


def test_edges_join_chains_at_the_language_model() -> None:
    assert GRAPH.inputs(2, 2) == (Edge(1, 2, 0, 2, True), Edge(1, 2, 1, 2, True))
    assert GRAPH.inputs(2, 3) == ()
    assert GRAPH.outputs(1, 1) == (Edge(1, 2, 1, 2, True),)
    assert GRAPH.outputs(3, 2) == ()
    assert not GRAPH.is_local(Edge(1, 2, 0, 2, True))


def test_edge_from_a_frozen_module_brings_no_gradient() -> None:
    graph = two_modules(2, [1], vision=option(backward_s=0.0)).graph
    assert [e.grad for e in graph.inputs(2, 1)] == [False]
    assert [e.grad for e in graph.inputs(3, 1)] == [True]
    assert not graph.has_backward(0, 0)


@pytest.mark.parametrize(
    ("kind", "stage", "work", "needs"),
    [
        (Kind.F, 0, 0, []),
        (Kind.F, 2, 2, [(Kind.F, 1, 0), (Kind.F, 1, 1)]),
        (Kind.B, 1, 1, [(Kind.F, 1, 1), (Kind.B, 2, 2)]),
        (Kind.I, 1, 1, [(Kind.F, 1, 1), (Kind.B, 2, 2)]),
        (Kind.I, 3, 2, [(Kind.F, 3, 2)]),
        (Kind.W, 3, 2, [(Kind.B, 3, 2)]),
    ],
)
def test_needs(kind: Kind, stage: int, work: int, needs: list[tuple[Kind, int, int]]) -> None:
    assert [result for result, _ in GRAPH.needs(kind, stage, work)] == needs


@pytest.mark.parametrize(
    ("text", "work"),
    [("1F0.1", 1), ("2F0.0", 2), ("2RECV_F0.1<1", 1), ("2SEND_B0.1>1", 1), ("1WAIT_B0.1<2", 1)],
)
def test_transfers_name_the_producing_work(text: str, work: int) -> None:
    assert GRAPH.work_of(Action.parse(text)) == work


@pytest.mark.parametrize("text", ["9F0.0", "0F1.0", "2F0.1", "2RECV_F1.0<1", "2RECV_F0.0<9"])
def test_actions_of_absent_works_are_refused(text: str) -> None:
    with pytest.raises(PlanError, match=rf"action {text}: "):
        GRAPH.work_of(Action.parse(text))


def test_works_may_stand_in_any_order() -> None:
    vision = Work(module=0, microbatch=0, sub_microbatch=0)
    language = Work(module=1, microbatch=0, sub_microbatch=0, after=(1,))
    graph = replace(GRAPH, works=(language, vision), backward=((True, True), (True, True)))
    assert graph.work_order == (1, 0)
    assert list(graph.nodes()) == [(0, 1), (1, 1), (2, 0), (3, 0)]


def test_every_stage_of_a_rank_is_listed() -> None:
    assert GRAPH.stages_of_rank(1) == (1, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_ranks": 0}, "num_ranks = 0"),
        ({"modules": (ModuleStages(name="a", stages=()),)}, r"modules\[0\]\.stages: .* has no stage"),
        ({"modules": (ModuleStages(name="a", stages=(0, 4)),)}, r"modules\[0\]\.stages\[1\] = 4"),
        ({"modules": (ModuleStages(name="a", stages=(0, 0)),)}, r"modules\[0\]\.stages\[1\] = 0: .*'a'"),
        ({"modules": (ModuleStages(name="a", stages=(0, 1, 2)),)}, r"stage_rank\[3\]: .* no module"),
        ({"stage_rank": (0, 1, 0, 2)}, r"stage_rank\[3\] = 2"),
        ({"backward": ()}, "backward has 0 rows"),
        ({"backward": ((True,),) * 4}, r"backward\[0\]"),
        ({"works": (replace(GRAPH.works[0], module=5), *GRAPH.works[1:])}, r"works\[0\]\.module = 5"),
        (
            {"works": (replace(GRAPH.works[0], microbatch=-1), *GRAPH.works[1:])},
            r"works\[0\]\.microbatch = -1",
        ),
        ({"works": (replace(GRAPH.works[0], after=(4,)), *GRAPH.works[1:])}, r"works\[0\]\.after\[0\] = 4"),
        (
            {"works": (replace(GRAPH.works[0], after=(3, 3)), *GRAPH.works[1:])},
            r"after\[1\] = 3 is named twice",
        ),
        ({"works": (replace(GRAPH.works[0], after=(2,)), *GRAPH.works[1:])}, r"works\[0\]\.after: .* cycle"),
        ({"works": (GRAPH.works[1], *GRAPH.works[1:])}, r"works\[1\] repeats .* works\[0\]"),
    ],
)
def test_broken_graphs_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        replace(GRAPH, **change)


def test_graph_is_a_value() -> None:
    assert isinstance(GRAPH, WorkGraph)
    assert two_modules(2, [2, 0]).graph == GRAPH
