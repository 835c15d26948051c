"""The operator graph: what is computed, moved and held, on which device, and what needs what. Pure.

Operators read and write tensors; an operator needs those that made its inputs, and what extra edges name. Each device
runs its operators one at a time, in the order in which the graph lists them, as a CUDA stream or a link does.

Source: DIP, arXiv:2504.14145, section 6.1; PipeWeaver's SEMU, section 4.1.
"""

import heapq
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

from mmtrain.errors import PlanError
from mmtrain.spec.spec import ZERO_RATES, Rates


class DeviceKind(StrEnum):
    """What runs operators: two that compute, three that move bytes."""

    GPU = "gpu"
    CPU = "cpu"
    NVLINK = "nvlink"
    NETWORK = "network"
    PCIE = "pcie"

    @property
    def computes(self) -> bool:
        """Whether it computes; the others move bytes."""
        return self in (DeviceKind.GPU, DeviceKind.CPU)


@dataclass(frozen=True, slots=True, order=True)
class Device:
    """One queue of operators."""

    kind: DeviceKind
    rank: int = 0


class OpKind(StrEnum):
    """What an operator does; efficiency factors are given by it."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    NORM = "norm"
    ELEMENTWISE = "elementwise"
    CONVOLUTION = "convolution"
    EMBEDDING = "embedding"
    CROSS_ENTROPY = "cross_entropy"
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    P2P = "p2p"
    HOST_COPY = "host_copy"

    @property
    def is_collective(self) -> bool:
        """Whether all ranks of a group take part at once."""
        return self in (OpKind.ALL_REDUCE, OpKind.ALL_GATHER, OpKind.REDUCE_SCATTER)


class Phase(StrEnum):
    """Which action an operator belongs to: F, I or W of the schedule."""

    FORWARD = "forward"
    BACKWARD_INPUT = "backward_input"
    BACKWARD_WEIGHT = "backward_weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The extent of a product, which decides how well a device can run it.

    Of a matrix product [m, k] x [k, n]. Of an attention m is the number of queries, n that of attended pairs over all
    queries, and k the width of a head.
    """

    m: Rates
    n: Rates
    k: Rates


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNode:
    """A buffer."""

    name: str
    num_bytes: Rates = ZERO_RATES
    rank: int = 0
    """In whose memory it is."""
    persistent: bool = False
    """Held from the start to the end (parameters, gradients); others from the start of what makes them to the end of
    the last that reads them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operation on one device."""

    name: str
    kind: OpKind
    device: Device = Device(DeviceKind.GPU)
    phase: Phase = Phase.FORWARD
    inputs: tuple[int, ...] = ()
    """Tensors that it reads."""
    outputs: tuple[int, ...] = ()
    """Tensors that it makes."""
    flops: Rates = ZERO_RATES
    """Of products alone, a multiply-add is 2; other arithmetic hides behind its memory accesses."""
    mem_bytes: Rates = ZERO_RATES
    """Read from and written to the device's memory."""
    net_bytes: Rates = ZERO_RATES
    """Sent by each rank."""
    shape: Shape | None = None
    """Of a product; None: it runs at the full rate of its kind."""
    launches: int = 1
    """Kernels or messages, each of which has a fixed cost."""
    each_clip: bool = False
    """Whether it runs for one clip after another: amounts are of all clips, but launches, what is `fixed` and the
    shape of a product are those of a clip."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Graph:
    """Operators in the order in which they are issued, and the tensors between them.

    Raises: PlanError: a tensor that does not exist or has two makers, bytes over a network on a device that computes or
        work on one that does not, or a cycle of needs and orders.
    """

    operators: tuple[Operator, ...]
    tensors: tuple[TensorNode, ...] = ()
    edges: frozenset[tuple[int, int]] = field(default_factory=frozenset)
    """(a, b): operator b waits for operator a, in addition to what tensors say."""

    def __post_init__(self) -> None:
        for index, op in enumerate(self.operators):
            _check_operator(index, op, len(self.tensors))
        for before, after in self.edges:
            if not (0 <= before < len(self.operators) and 0 <= after < len(self.operators)):
                raise PlanError(
                    f"edge {before} -> {after}: the graph has operators 0..{len(self.operators) - 1}; name two of them"
                )
        _ = self.producer, self.order

    def with_edges(self, edges: Iterable[tuple[int, int]]) -> "Graph":
        """The graph with more edges. Raises: PlanError: one that does not exist, or a cycle."""
        return replace(self, edges=self.edges | frozenset(edges))

    @cached_property
    def producer(self) -> tuple[int, ...]:
        """[tensor] -> the operator that makes it; -1: it is there from the start."""
        made = [-1] * len(self.tensors)
        for index, op in enumerate(self.operators):
            for tensor in op.outputs:
                if made[tensor] >= 0:
                    raise PlanError(
                        f"tensor {tensor} ({self.tensors[tensor].name}) is made by {self.operators[made[tensor]].name} "
                        f"and again by {op.name}; make a new tensor"
                    )
                made[tensor] = index
        return tuple(made)

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """All devices, each once."""
        return tuple(sorted({op.device for op in self.operators}))

    @cached_property
    def needs(self) -> tuple[tuple[int, ...], ...]:
        """[operator] -> operators that must end before it starts, other than by the order of its device."""
        found = [{self.producer[tensor] for tensor in op.inputs if self.producer[tensor] >= 0} for op in self.operators]
        for before, after in self.edges:
            found[after].add(before)
        return tuple(tuple(sorted(before)) for before in found)

    @cached_property
    def before(self) -> tuple[int, ...]:
        """[operator] -> the one issued before it on its device; -1: it is the first."""
        last: dict[Device, int] = {}
        found = []
        for index, op in enumerate(self.operators):
            found.append(last.get(op.device, -1))
            last[op.device] = index
        return tuple(found)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """All operators, each after what it needs and after those before it on its device: the lowest index first."""
        waits = [{*needs, before} - {-1} for needs, before in zip(self.needs, self.before, strict=True)]
        order, stuck = topological(waits)
        if stuck:
            op = self.operators[stuck[0]]
            missing = ", ".join(self.operators[need].name for need in sorted(waits[stuck[0]] & set(stuck)))
            raise PlanError(
                f"operator {stuck[0]} ({op.name} on {op.device.kind} {op.device.rank}) waits forever for {missing}: "
                "needs and device orders form a cycle; issue it later, or remove an edge"
            )
        return order

    @cached_property
    def is_serial(self) -> bool:
        """Whether each operator waits for the one issued before it, so that nothing runs side by side."""
        pairs = enumerate(zip(self.needs, self.before, strict=True))
        return all(index == 0 or index - 1 in (*needs, before) for index, (needs, before) in pairs)

    def only(self, phase: Phase) -> "Graph":
        """The operators of one phase and the tensors that they touch; what others made is there from the start."""
        kept = [index for index, op in enumerate(self.operators) if op.phase is phase]
        place = {old: new for new, old in enumerate(kept)}
        touched = sorted({t for index in kept for t in (*self.operators[index].inputs, *self.operators[index].outputs)})
        tensor = {old: new for new, old in enumerate(touched)}
        operators = [
            replace(
                self.operators[index],
                inputs=tuple(tensor[t] for t in self.operators[index].inputs),
                outputs=tuple(tensor[t] for t in self.operators[index].outputs),
            )
            for index in kept
        ]
        return Graph(
            operators=tuple(operators),
            tensors=tuple(self.tensors[t] for t in touched),
            edges=frozenset({(place[a], place[b]) for a, b in self.edges if a in place and b in place}),
        )


def topological(waits: Sequence[Set[int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(an order in which each comes after what it waits for, the lowest first; those that a cycle keeps from it)."""
    if all(before < index for index, befores in enumerate(waits) for before in befores):
        return tuple(range(len(waits))), ()
    followers: list[list[int]] = [[] for _ in waits]
    missing = [len(befores) for befores in waits]
    for index, befores in enumerate(waits):
        for before in befores:
            followers[before].append(index)
    ready = [index for index, count in enumerate(missing) if not count]
    order = []
    while ready:
        index = heapq.heappop(ready)
        order.append(index)
        for follower in followers[index]:
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(ready, follower)
    return tuple(order), tuple(index for index, count in enumerate(missing) if count)


def _check_operator(index: int, op: Operator, num_tensors: int) -> None:
    where = f"operator {index} ({op.name} on {op.device.kind} {op.device.rank})"
    for tensor in (*op.inputs, *op.outputs):
        if not 0 <= tensor < num_tensors:
            raise PlanError(f"{where} names tensor {tensor}; the graph has 0..{num_tensors - 1}")
    if op.device.kind.computes and op.net_bytes != Rates():
        raise PlanError(f"{where} sends bytes, but this device computes; put it on nvlink, network or pcie")
    if not op.device.kind.computes and (op.flops != Rates() or op.mem_bytes != Rates()):
        raise PlanError(f"{where} computes, but this device only moves bytes; put it on gpu or cpu")
    if op.launches < 0:
        raise PlanError(f"{where} has launches = {op.launches}; it must be at least 0")


def unfold(graph: Graph, ranks: int) -> Graph:
    """The graph of `ranks` equal ranks, of which `graph` describes the one with rank 0.

    A collective waits for its inputs on all ranks and leaves each rank's link at once. Operator i of rank r is operator
    `i * ranks + r`. This is what a graph of one rank stands for; simulating that one gives the same times.
    Raises: PlanError: an operator of another rank than 0.
    """
    if any(op.device.rank for op in graph.operators):
        raise PlanError("a graph of several ranks cannot be unfolded; describe rank 0 alone")
    operators = [
        replace(
            op,
            device=replace(op.device, rank=rank),
            inputs=tuple(
                tensor * ranks + other
                for tensor in op.inputs
                for other in (range(ranks) if op.kind.is_collective else (rank,))
            ),
            outputs=tuple(tensor * ranks + rank for tensor in op.outputs),
        )
        for op in graph.operators
        for rank in range(ranks)
    ]
    tensors = [replace(tensor, rank=rank) for tensor in graph.tensors for rank in range(ranks)]
    edges = {(a * ranks + rank, b * ranks + rank) for a, b in graph.edges for rank in range(ranks)}
    return Graph(operators=tuple(operators), tensors=tuple(tensors), edges=frozenset(edges))
