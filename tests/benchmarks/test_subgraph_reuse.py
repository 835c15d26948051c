import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from subgraph_reuse.flat import flatten
from subgraph_reuse.nest import Call, Leaf, Nest, chain
from subgraph_reuse.reuse import Reuse

from mmtrain.costs.operators.execution import run
from mmtrain.costs.operators.operator_graph import Device, DeviceKind, Graph, Operator, OpKind, TensorNode
from mmtrain.errors import PlanError
from mmtrain.spec.work_size import Rates, WorkSize
from tests.costs.operators.graphs import LATENCIES, SIZES, nests
from tests.examples import examples


@given(nests())
@settings(max_examples=examples(60), deadline=None)
def test_reuse_gives_the_times_of_every_operator(nest: Nest) -> None:
    found = Reuse(LATENCIES).simulate(nest)
    graph, seconds = flatten(nest, LATENCIES)
    ends = run(graph, seconds.tolist())
    assert found.makespan_s == max(ends, default=0.0)  # equal, not only close
    assert found.operators().end_s.tolist() == ends


@given(nests(), st.data())
@settings(max_examples=examples(60), deadline=None)
def test_a_resumed_simulation_equals_a_new_one(nest: Nest, data: st.DataObject) -> None:
    reuse = Reuse(LATENCIES)
    done = reuse.simulate(nest)
    if len(nest.calls) < 2:
        return
    a, b = data.draw(st.lists(st.integers(0, len(nest.calls) - 1), min_size=2, max_size=2, unique=True))
    try:
        more = nest.with_edges([(a, b)])
    except PlanError:
        return  # the edge closes a circle
    resumed, new = reuse.resume(done, more), Reuse(LATENCIES).simulate(more)
    assert resumed.states == new.states
    assert resumed.operators().end_s.tolist() == new.operators().end_s.tolist()


def leaf() -> Leaf:
    """Compute, send, compute: 1 ms each or so."""
    ops = (
        Operator(name="a", kind=OpKind.ELEMENTWISE, inputs=(0,), outputs=(1,), mem_bytes=Rates(row=1e6)),
        Operator(
            name="b",
            kind=OpKind.P2P,
            device=Device(DeviceKind.NETWORK),
            inputs=(1,),
            outputs=(2,),
            net_bytes=Rates(row=1e5),
        ),
        Operator(name="c", kind=OpKind.ELEMENTWISE, outputs=(3,), mem_bytes=Rates(row=2e6)),
    )
    tensors = tuple(TensorNode(name=f"t{i}", num_bytes=Rates(fixed=8.0)) for i in range(4))
    return Leaf(Graph(operators=ops, tensors=tensors), (0,), (2,))


def in_turn(count: int) -> Nest:
    body = leaf()
    calls = tuple(Call(body, ((i - 1, 0) if i else (-1, 0),), SIZES[0], rank=i % 2) for i in range(count))
    return Nest(calls, 1, ((count - 1, 0),))


def test_a_repeated_subgraph_is_simulated_once() -> None:
    asked: list[WorkSize] = []

    class Counting(Reuse):
        def _paths(self, leaf, size):  # type: ignore[no-untyped-def]
            asked.append(size)
            return super()._paths(leaf, size)

    inner = in_turn(8)
    Counting(LATENCIES).simulate(Nest(tuple(Call(inner, ((i - 1, 0) if i else (-1, 0),)) for i in range(5)), 1))
    assert asked == [SIZES[0]]


@pytest.mark.parametrize("count", [1, 2, 3, 11])
def test_a_chain_is_one_use_after_the_other(count: int) -> None:
    body = leaf()
    unit = Nest((Call(body, ((-1, 0),), SIZES[0]),), 1, ((0, 0),))
    halves, plain = chain(unit, count), [Call(body, ((i - 1, 0),), SIZES[0]) for i in range(count)]
    reuse = Reuse(LATENCIES)
    found, wanted = reuse.simulate(halves), reuse.simulate(Nest(tuple(plain), 1, ((count - 1, 0),)))
    assert found.makespan_s == wanted.makespan_s
    assert found.operators().end_s.tolist() == wanted.operators().end_s.tolist()
    assert np.array_equal(reuse.matrix(halves, SIZES[0]), reuse.matrix(wanted.nest, SIZES[0]))


def test_more_calls_and_edges_evaluate_only_what_they_touch() -> None:
    body, reuse = leaf(), Reuse(LATENCIES)
    apart = Nest(tuple(Call(body, ((-1, 0),), SIZES[0], rank=r) for r in range(6)), 1)
    done = reuse.simulate(apart)
    assert done.evaluated == 6
    assert reuse.resume(done, apart).evaluated == 0
    edged = reuse.resume(done, apart.with_edges([(0, 4)]))
    assert edged.evaluated == 1
    assert edged.makespan_s == 2 * done.makespan_s
    longer = Nest((*apart.calls, Call(body, ((2, 0),), SIZES[0], rank=5)), 1)
    assert reuse.resume(done, longer).evaluated == 1


def test_an_edge_may_name_a_later_call() -> None:
    body, reuse = leaf(), Reuse(LATENCIES)
    apart = Nest(tuple(Call(body, ((-1, 0),), SIZES[0], rank=r) for r in range(2)), 1)
    found = reuse.simulate(apart.with_edges([(1, 0)]))
    assert found.end_s(0) == 2 * found.end_s(1)
    graph, seconds = flatten(found.nest, LATENCIES)
    assert found.operators().end_s.tolist() == run(graph, seconds.tolist())


def test_memory_follows_the_calls() -> None:
    found = Reuse(LATENCIES).simulate(in_turn(2)).operators()
    assert found.peak_bytes(0) > 0
    assert {tensor.rank for tensor in found.graph.tensors} == {0, 1}
    assert np.array_equal(found.start_s + found.seconds, found.end_s)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda body: Nest((Call(body, ()),)), "names 0 sources for 1 inputs"),
        (lambda body: Nest((Call(body, ((0, 0),)),)), "name \\(earlier call, its output\\)"),
        (lambda body: Nest((Call(body, ((-1, 1),)),), 1), "name \\(earlier call, its output\\)"),
        (lambda body: Nest((Call(body, ((-1, 0),), after=(3,)),), 1), "there are 0..0"),
        (lambda body: in_turn(2).with_edges([(1, 0)]), "wait for each other"),
        (lambda body: chain(in_turn(1), 0), "a chain of 0 subgraphs"),
        (lambda body: chain(Nest((Call(body, ((-1, 0),)),), 1), 2), "with 1 inputs and 0 outputs"),
        (lambda body: Leaf(body.graph, (1,)), "is an input of a subgraph that makes it"),
        (lambda body: Reuse(LATENCIES).resume(Reuse(LATENCIES).simulate(in_turn(2)), in_turn(3)), "more calls behind"),
    ],
)
def test_what_does_not_fit_is_refused(make, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(PlanError, match=message):
        make(leaf())
