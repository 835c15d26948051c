"""A nest of calls as one graph of all its operators. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from mmtrain.costs.operators.latency import Floats, Latencies
from mmtrain.costs.operators.operator_graph import Device, Graph, Operator, TensorNode
from mmtrain.spec.work_size import Rates, WorkSize
from subgraph_reuse.nest import Leaf, Nest, Source


def flatten(nest: Nest, latencies: Latencies) -> tuple[Graph, Floats]:
    """The same as one graph of operators, call by call, with fixed amounts; and the seconds of each operator."""
    flat = _Flat(latencies)
    flat.tensors += [TensorNode(name="given")] * nest.num_inputs
    flat.add(nest, range(nest.num_inputs), 0)
    graph = Graph(operators=tuple(flat.operators), tensors=tuple(flat.tensors), edges=frozenset(flat.edges))
    return graph, np.concatenate([np.empty(0), *flat.seconds])


class _Flat:
    """A graph that grows by calls."""

    def __init__(self, latencies: Latencies) -> None:
        self.latencies = latencies
        self.operators: list[Operator] = []
        self.tensors: list[TensorNode] = []
        self.edges: set[tuple[int, int]] = set()
        self.seconds: list[Floats] = []
        self._known: dict[tuple[Leaf, WorkSize, int], tuple[list[Operator], list[TensorNode]]] = {}

    def add(self, nest: Nest, given: Sequence[int], rank: int) -> list[int]:
        """Its outputs. Args: given: its inputs."""
        made: list[list[int]] = []
        spans = []

        def source(place: Source) -> int:
            return made[place[0]][place[1]] if place[0] >= 0 else given[place[1]]

        for call in nest.calls:
            start, inputs = len(self.operators), [source(place) for place in call.sources]
            if isinstance(call.body, Leaf):
                made.append(self._leaf(call.body, inputs, call.size, rank + call.rank))
            else:
                made.append(self.add(call.body, inputs, rank + call.rank))
            spans.append(range(start, len(self.operators)))
        for call, span in zip(nest.calls, spans, strict=True):
            for other in call.after:
                self.edges.update((a, b) for a in self._ends(reversed(spans[other])) for b in self._ends(span))
        return [source(place) for place in nest.outputs]

    def _ends(self, span: Iterable[int]) -> Iterable[int]:
        """The first operator of each device."""
        found: dict[Device, int] = {}
        for index in span:
            found.setdefault(self.operators[index].device, index)
        return found.values()

    def _leaf(self, leaf: Leaf, inputs: Sequence[int], size: WorkSize, rank: int) -> list[int]:
        key = (leaf, size, rank)
        if key not in self._known:
            self._known[key] = _fixed(leaf.graph, size, rank)
        operators, tensors = self._known[key]
        known, place = dict(zip(leaf.inputs, inputs, strict=True)), []
        for index, node in enumerate(tensors):
            place.append(known[index] if index in known else len(self.tensors))
            if index not in known:
                self.tensors.append(node)
        first = len(self.operators)
        for op in operators:
            reads, makes = tuple(place[t] for t in op.inputs), tuple(place[t] for t in op.outputs)
            self.operators.append(replace(op, inputs=reads, outputs=makes))
        self.edges.update((first + a, first + b) for a, b in leaf.graph.edges)
        self.seconds.append(self.latencies(leaf.graph, size))
        return [place[tensor] for tensor in leaf.outputs]


def _fixed(graph: Graph, size: WorkSize, rank: int) -> tuple[list[Operator], list[TensorNode]]:
    """The operators and tensors of a graph for one size, some ranks on."""
    operators = [
        replace(
            op,
            device=Device(op.device.kind, op.device.rank + rank),
            flops=Rates(fixed=op.flops(size)),
            mem_bytes=Rates(fixed=op.mem_bytes(size)),
            net_bytes=Rates(fixed=op.net_bytes(size)),
            shape=None,
        )
        for op in graph.operators
    ]
    tensors = [
        replace(tensor, num_bytes=Rates(fixed=tensor.num_bytes(size)), rank=tensor.rank + rank)
        for tensor in graph.tensors
    ]
    return operators, tensors
