from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmtrain.costs.operators.execution import simulate
from mmtrain.costs.operators.operator_graph import Device, DeviceKind, Graph, Operator, OpKind, Phase, TensorNode
from mmtrain.errors import PlanError
from mmtrain.spec.work_size import Rates
from tests.costs.operators.graphs import LATENCIES, SIZES, graphs
from tests.examples import examples

NVLINK = Device(DeviceKind.NVLINK)


def op(name: str, inputs: tuple[int, ...] = (), outputs: tuple[int, ...] = (), **more: object) -> Operator:
    return Operator(name=name, kind=OpKind.ELEMENTWISE, inputs=inputs, outputs=outputs, **more)  # type: ignore[arg-type]


def tensors(count: int) -> tuple[TensorNode, ...]:
    return tuple(TensorNode(name=f"t{i}") for i in range(count))


def test_needs_come_from_tensors_and_edges() -> None:
    graph = Graph(operators=(op("a", (), (0,)), op("b"), op("c", (0,))), tensors=tensors(1), edges=frozenset({(1, 2)}))
    assert graph.needs == ((), (), (0, 1))
    assert graph.before == (-1, 0, 1)
    assert graph.order == (0, 1, 2)


def test_an_edge_to_an_earlier_operator_changes_the_order() -> None:
    graph = Graph(operators=(op("a", device=NVLINK), op("b"), op("c")), edges=frozenset({(1, 0)}))
    assert graph.order == (1, 0, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Graph(operators=(op("a", (2,)),), tensors=tensors(1)), r"names tensor 2; the graph has 0\.\.0"),
        (
            lambda: Graph(operators=(op("a", (), (0,)), op("b", (), (0,))), tensors=tensors(1)),
            "made by a and again by b",
        ),
        (lambda: Graph(operators=(op("a", net_bytes=Rates(row=1.0)),)), "sends bytes, but this device computes"),
        (lambda: Graph(operators=(op("a", device=NVLINK, flops=Rates(fixed=1.0)),)), "only moves bytes"),
        (lambda: Graph(operators=(op("a", device=NVLINK, mem_bytes=Rates(fixed=1.0)),)), "only moves bytes"),
        (lambda: Graph(operators=(op("a"),), edges=frozenset({(0, 1)})), "edge 0 -> 1"),
        (lambda: Graph(operators=(op("a"), op("b")), edges=frozenset({(1, 0)})), "a on gpu 0.* waits forever for b"),
        (lambda: Graph(operators=(op("a", launches=-1),)), "launches = -1"),
    ],
)
def test_what_cannot_run_is_refused(make, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(PlanError, match=message):
        make()


def test_a_phase_alone_finds_what_others_made() -> None:
    backward = op("b", (0,), (1,), phase=Phase.BACKWARD_INPUT)
    graph = Graph(operators=(op("a", (), (0,)), backward, op("c", (0,), (2,))), tensors=tensors(3))
    assert [o.name for o in graph.only(Phase.FORWARD).operators] == ["a", "c"]
    assert graph.only(Phase.BACKWARD_INPUT).needs == ((),)


def unfold(graph: Graph, ranks: int) -> Graph:
    """The graph of `ranks` equal ranks, of which `graph` describes rank 0.

    A collective waits for its inputs on all ranks and ends on all links at the same time. Operator i of rank r has the
    index `i * ranks + r`.
    """
    operators = [
        replace(
            op,
            device=replace(op.device, rank=rank),
            inputs=tuple(
                tensor * ranks + source_rank
                for tensor in op.inputs
                for source_rank in (range(ranks) if op.kind.is_collective else (rank,))
            ),
            outputs=tuple(tensor * ranks + rank for tensor in op.outputs),
        )
        for op in graph.operators
        for rank in range(ranks)
    ]
    tensors = [replace(tensor, rank=rank) for tensor in graph.tensors for rank in range(ranks)]
    edges = {(a * ranks + rank, b * ranks + rank) for a, b in graph.edges for rank in range(ranks)}
    return Graph(operators=tuple(operators), tensors=tuple(tensors), edges=frozenset(edges))


@given(graphs(), st.integers(2, 4))
@settings(max_examples=examples(40), deadline=None)
def test_one_rank_stands_for_all_of_them(graph: Graph, ranks: int) -> None:
    one, all_ranks = simulate(graph, LATENCIES, SIZES[0]), simulate(unfold(graph, ranks), LATENCIES, SIZES[0])
    for rank in range(ranks):
        assert all_ranks.end_s[rank::ranks].tolist() == one.end_s.tolist()
        assert all_ranks.peak_bytes(rank) == one.peak_bytes()
