import pytest
from hypothesis import given, settings

from mmtrain.costs.operators.execution import simulate
from mmtrain.costs.operators.hardware import load_hardware
from mmtrain.costs.operators.latency import TICK_S, Latencies
from mmtrain.costs.operators.operator_graph import Device, DeviceKind, Graph, Operator, OpKind, TensorNode
from mmtrain.spec.work_size import Rates, WorkSize
from tests.costs.operators.graphs import LATENCIES, SIZES, graphs
from tests.examples import examples

GPU, LINK = Device(DeviceKind.GPU), Device(DeviceKind.NVLINK)


def timed(*ops: tuple[str, Device, float, tuple[int, ...], tuple[int, ...]], sizes: tuple[float, ...]) -> Graph:
    """Operators (name, device, seconds, inputs, outputs) that a rule gives their seconds, and tensors of some bytes."""
    return Graph(
        operators=tuple(
            Operator(name=f"{name}:{seconds}", kind=OpKind.ELEMENTWISE, device=device, inputs=i, outputs=o)
            for name, device, seconds, i, o in ops
        ),
        tensors=tuple(TensorNode(name=f"t{i}", num_bytes=Rates(fixed=n)) for i, n in enumerate(sizes)),
    )


BY_NAME = Latencies(load_hardware("h800"), rule=lambda op, size, seconds: float(op.name.partition(":")[2]))


def test_devices_run_side_by_side_and_each_in_its_order() -> None:
    graph = timed(
        ("a", GPU, 1.0, (0,), (1,)),
        ("send", LINK, 4.0, (1,), (2,)),
        ("b", GPU, 2.0, (), (3,)),
        ("c", GPU, 1.0, (2, 3), (4,)),
        sizes=(1.0, 10.0, 100.0, 1000.0, 1e4),
    )
    found = simulate(graph, BY_NAME)
    assert found.start_s.tolist() == [0.0, 1.0, 1.0, 5.0]
    assert found.end_s.tolist() == [1.0, 5.0, 3.0, 6.0]
    assert found.makespan_s == 6.0
    assert (found.busy_s(GPU), found.busy_s(LINK)) == (4.0, 4.0)


def test_tensors_live_from_their_maker_to_their_last_reader() -> None:
    graph = timed(
        ("a", GPU, 1.0, (0,), (1,)),
        ("b", GPU, 2.0, (1,), (2,)),
        ("c", GPU, 1.0, (1,), (3,)),
        sizes=(1.0, 10.0, 100.0, 1000.0),
    )
    found = simulate(graph, BY_NAME)
    assert found.lifetimes == ((0.0, 1.0), (0.0, 4.0), (1.0, 3.0), (3.0, 4.0))
    assert found.memory() == ((0.0, 11.0), (1.0, 110.0), (3.0, 1010.0), (4.0, 0.0))
    assert found.peak_bytes() == 1010.0
    assert found.memory(rank=1) == ()


def test_persistent_tensors_stay() -> None:
    graph = Graph(
        operators=(Operator(name="a:1.0", kind=OpKind.NORM, inputs=(0,)),),
        tensors=(TensorNode(name="w", num_bytes=Rates(fixed=5.0), persistent=True),),
    )
    assert simulate(graph, BY_NAME).memory() == ((0.0, 5.0),)


def test_an_empty_graph_takes_no_time() -> None:
    found = simulate(Graph(operators=()), LATENCIES)
    assert (found.makespan_s, found.peak_bytes()) == (0.0, 0.0)


@given(graphs(ranks=2))
@settings(max_examples=examples(40), deadline=None)
def test_no_operator_waits_longer_than_it_must(graph: Graph) -> None:
    found = simulate(graph, LATENCIES, SIZES[0])
    for index, start in enumerate(found.start_s.tolist()):
        waits = [need for need in (*graph.needs[index], graph.before[index]) if need >= 0]
        assert start == max((float(found.end_s[need]) for need in waits), default=0.0)


@pytest.mark.parametrize("rows", [1, 7, 10**6])
def test_seconds_are_whole_ticks(rows: int) -> None:
    graph = Graph(operators=(Operator(name="a", kind=OpKind.NORM, mem_bytes=Rates(row=1.3)),))
    seconds = LATENCIES(graph, WorkSize(rows=rows, pairs=0, outputs=0))[0]
    assert (seconds / TICK_S).is_integer()
