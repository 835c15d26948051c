"""The operator graph: operators on devices, the tensors that they read and write, and their dependencies. Pure.

An operator depends on the operators that make its inputs, and on those of extra edges. Each device runs its operators
one at a time, in the order of the graph, like a CUDA stream or a link.

Source: DIP, arXiv:2504.14145, section 6.1; PipeWeaver's SEMU, section 4.1.
"""

import heapq
from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

from mmtrain.errors import PlanError
from mmtrain.spec.work_size import ZERO_RATES, Rates


class DeviceKind(StrEnum):
    """The kinds of devices that run operators: two that compute, three that move bytes."""

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
    """The kind of an operator, which determines its efficiency factors."""

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
    """The action to which an operator belongs: F, I or W of the schedule."""

    FORWARD = "forward"
    BACKWARD_INPUT = "backward_input"
    BACKWARD_WEIGHT = "backward_weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductShape:
    """The sizes of a product, on which a device's efficiency depends.

    For a matrix product: [m, k] x [k, n]. For attention: m queries, n attended pairs over all queries, k the width of a
    head.
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
    """The rank in whose memory it is."""
    persistent: bool = False
    """Held from the start to the end (parameters, gradients); other tensors from the start of the operator that makes
    them to the end of the last operator that reads them."""


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
    """FLOPs of products only (a multiply-add is 2); other arithmetic is hidden by memory accesses."""
    mem_bytes: Rates = ZERO_RATES
    """Read from and written to the device's memory."""
    net_bytes: Rates = ZERO_RATES
    """Bytes that each rank sends."""
    shape: ProductShape | None = None
    """Sizes of a product; None: it runs at the full rate of its kind."""
    launches: int = 1
    """Kernels or messages, each of which has a fixed cost."""
    each_call: bool = False
    """Whether it runs for one group of equal clips after another (`WorkSize.calls`): amounts are sums over all of them,
    but launches, `fixed` amounts and the shape of a product are those of one call."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Graph:
    """Operators in the order in which they are issued, and the tensors between them.

    Raises: PlanError: a tensor does not exist or is made by two operators, an operator sends bytes on a device that
        computes or computes on one that does not, or dependencies and device orders form a cycle.
    """

    operators: tuple[Operator, ...]
    tensors: tuple[TensorNode, ...] = ()
    edges: frozenset[tuple[int, int]] = field(default_factory=frozenset)
    """Pairs (a, b): operator b waits for operator a, in addition to what tensors say."""

    def __post_init__(self) -> None:
        for index, op in enumerate(self.operators):
            _check_operator(index, op, len(self.tensors))
        for source, target in self.edges:
            if not (0 <= source < len(self.operators) and 0 <= target < len(self.operators)):
                raise PlanError(
                    f"edge {source} -> {target}: the graph has operators 0..{len(self.operators) - 1}; name two of them"
                )
        _ = self.producer, self.order

    @cached_property
    def producer(self) -> tuple[int, ...]:
        """[tensor] -> the operator that makes it; -1: it is an input. Raises: PlanError: two operators make it."""
        producers = [-1] * len(self.tensors)
        for index, op in enumerate(self.operators):
            for tensor in op.outputs:
                if producers[tensor] >= 0:
                    earlier = self.operators[producers[tensor]].name
                    raise PlanError(
                        f"tensor {tensor} ({self.tensors[tensor].name}) is made by {earlier} and again by {op.name}; "
                        "make a new tensor"
                    )
                producers[tensor] = index
        return tuple(producers)

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """All devices, each once."""
        return tuple(sorted({op.device for op in self.operators}))

    @cached_property
    def needs(self) -> tuple[tuple[int, ...], ...]:
        """[operator] -> operators that must end before it starts, without those of its device's order."""
        dependencies = [
            {self.producer[tensor] for tensor in op.inputs if self.producer[tensor] >= 0} for op in self.operators
        ]
        for source, target in self.edges:
            dependencies[target].add(source)
        return tuple(tuple(sorted(source)) for source in dependencies)

    @cached_property
    def before(self) -> tuple[int, ...]:
        """[operator] -> the operator issued before it on its device; -1: it is the first."""
        last_on_device: dict[Device, int] = {}
        previous = []
        for index, op in enumerate(self.operators):
            previous.append(last_on_device.get(op.device, -1))
            last_on_device[op.device] = index
        return tuple(previous)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """All operators in an order that respects dependencies and device orders; the lowest index first.

        Raises: PlanError: dependencies and device orders form a cycle.
        """
        waits = [{*needs, previous} - {-1} for needs, previous in zip(self.needs, self.before, strict=True)]
        order, stuck = topological(waits)
        if stuck:
            op = self.operators[stuck[0]]
            missing = ", ".join(self.operators[dependency].name for dependency in sorted(waits[stuck[0]] & set(stuck)))
            raise PlanError(
                f"operator {stuck[0]} ({op.name} on {op.device.kind} {op.device.rank}) waits forever for {missing}: "
                "needs and device orders form a cycle; issue it later, or remove an edge"
            )
        return order

    @cached_property
    def is_serial(self) -> bool:
        """Whether each operator waits for the one issued before it, so that no two run at the same time."""
        dependencies = enumerate(zip(self.needs, self.before, strict=True))
        return all(index == 0 or index - 1 in (*needs, previous) for index, (needs, previous) in dependencies)

    def only(self, phase: Phase) -> "Graph":
        """The operators of one phase and the tensors that they read or write; tensors of other phases are inputs."""
        indices = {old: new for new, old in enumerate(i for i, op in enumerate(self.operators) if op.phase is phase)}
        chosen = [self.operators[index] for index in indices]
        touched = sorted({tensor for op in chosen for tensor in (*op.inputs, *op.outputs)})
        tensor_index = {old: new for new, old in enumerate(touched)}
        operators = [
            replace(
                op,
                inputs=tuple(tensor_index[t] for t in op.inputs),
                outputs=tuple(tensor_index[t] for t in op.outputs),
            )
            for op in chosen
        ]
        return Graph(
            operators=tuple(operators),
            tensors=tuple(self.tensors[t] for t in touched),
            edges=frozenset((indices[a], indices[b]) for a, b in self.edges if a in indices and b in indices),
        )


def topological(waits: Sequence[Set[int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The indices in an order in which each comes after those it waits for, the lowest first; and those behind a
    cycle."""
    if all(dependency < index for index, dependencies in enumerate(waits) for dependency in dependencies):
        return tuple(range(len(waits))), ()
    followers: list[list[int]] = [[] for _ in waits]
    missing = [len(dependencies) for dependencies in waits]
    for index, dependencies in enumerate(waits):
        for dependency in dependencies:
            followers[dependency].append(index)
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
