"""Random operator graphs for tests of the simulator."""

from hypothesis import strategies as st
from subgraph_reuse.nest import Call, Leaf, Nest

from mmtrain.costs.operators.hardware import load_hardware
from mmtrain.costs.operators.latency import Latencies
from mmtrain.costs.operators.operator_graph import Device, DeviceKind, Graph, Operator, OpKind, TensorNode
from mmtrain.spec.work_size import Rates, WorkSize

LATENCIES = Latencies(load_hardware("h800"))
SIZES = (WorkSize(rows=100, pairs=5000, outputs=10), WorkSize(rows=3000, pairs=1, outputs=7))
KINDS = ((DeviceKind.GPU, OpKind.ELEMENTWISE), (DeviceKind.NVLINK, OpKind.ALL_GATHER), (DeviceKind.NETWORK, OpKind.P2P))


@st.composite
def graphs(draw: st.DrawFn, num_inputs: int = 0, max_operators: int = 8, ranks: int = 1) -> Graph:
    """Operators on three devices a rank; tensor t is made by operator t - num_inputs, the first ones are given."""
    operators = []
    for index in range(draw(st.integers(1, max_operators))):
        device, kind = draw(st.sampled_from(KINDS))
        amount = Rates(fixed=draw(st.integers(0, 10**7)), row=draw(st.integers(0, 10**6)))
        made = num_inputs + index
        operators.append(
            Operator(
                name=f"op{index}",
                kind=kind,
                device=Device(device, draw(st.integers(0, ranks - 1))),
                inputs=tuple(sorted(draw(st.sets(st.integers(0, made - 1), max_size=3)))) if made else (),
                outputs=(made,),
                mem_bytes=amount if device.computes else Rates(),
                net_bytes=Rates() if device.computes else amount,
            )
        )
    tensors = [
        TensorNode(name=f"t{i}", num_bytes=Rates(fixed=draw(st.integers(0, 100))))
        for i in range(num_inputs + len(operators))
    ]
    return Graph(operators=tuple(operators), tensors=tuple(tensors))


@st.composite
def leaves(draw: st.DrawFn) -> Leaf:
    """A graph with up to two inputs and up to three outputs, which may be inputs passed on."""
    num_inputs = draw(st.integers(0, 2))
    graph = draw(graphs(num_inputs))
    outputs = draw(st.lists(st.integers(0, len(graph.tensors) - 1), max_size=3))
    return Leaf(graph, tuple(range(num_inputs)), tuple(outputs))


@st.composite
def nests(draw: st.DrawFn, depth: int = 2) -> Nest:
    """Calls of a few bodies, each used several times on some ranks and for some sizes."""
    inner = leaves() if depth == 1 else st.one_of(leaves(), nests(depth=depth - 1))
    bodies = draw(st.lists(inner, min_size=1, max_size=3))
    num_inputs = draw(st.integers(0, 2))
    calls: list[Call] = []
    for index in range(draw(st.integers(1, 6))):
        body = draw(st.sampled_from(bodies))
        there = [(-1, port) for port in range(num_inputs)]
        there += [(other, port) for other, call in enumerate(calls) for port in range(call.body.num_outputs)]
        if body.num_inputs and not there:
            continue
        calls.append(
            Call(
                body,
                tuple(draw(st.sampled_from(there)) for _ in range(body.num_inputs)),
                size=draw(st.sampled_from(SIZES)),
                rank=draw(st.integers(0, 1)),
                after=tuple(draw(st.sets(st.integers(0, index - 1), max_size=2))) if index == len(calls) > 0 else (),
            )
        )
    ports = [(-1, port) for port in range(num_inputs)]
    ports += [(index, port) for index, call in enumerate(calls) for port in range(call.body.num_outputs)]
    outputs = draw(st.lists(st.sampled_from(ports), max_size=3)) if ports else []
    return Nest(tuple(calls), num_inputs, tuple(outputs))
