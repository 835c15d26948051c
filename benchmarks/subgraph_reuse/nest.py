"""Graphs made of calls of subgraphs, which may be made of calls themselves. Pure.

A layer is described once and called as often as there are layers, on any rank and for works of any size; so is a stage
made of layers. A call begins operator by operator, each when what it reads is there and its device is free; what the
call is said to come `after` must have ended as a whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from mmtrain.costs.operators.operator_graph import Device, Graph, topological
from mmtrain.errors import PlanError
from mmtrain.spec.work_size import ZERO_WORK, WorkSize

Source = tuple[int, int]
"""(call, which of its outputs); (-1, which input) for what enters the nest itself."""


@dataclass(frozen=True, eq=False)
class Leaf:
    """A graph of operators as a subgraph."""

    graph: Graph
    inputs: tuple[int, ...] = ()
    """Tensors that come from outside; nothing in the graph makes them."""
    outputs: tuple[int, ...] = ()
    """Tensors that others may read."""

    def __post_init__(self) -> None:
        made = [tensor for tensor in self.inputs if self.graph.producer[tensor] >= 0]
        if made:
            raise PlanError(f"tensor {made[0]} is an input of a subgraph that makes it; name another")

    @property
    def devices(self) -> tuple[Device, ...]:
        """Those that it uses, as seen from rank 0."""
        return self.graph.devices

    @property
    def num_inputs(self) -> int:
        """Tensors that come from outside."""
        return len(self.inputs)

    @property
    def num_outputs(self) -> int:
        """Tensors that others may read."""
        return len(self.outputs)


@dataclass(frozen=True, eq=False)
class Call:
    """One use of a subgraph."""

    body: "Leaf | Nest"
    sources: tuple[Source, ...] = ()
    """Where each of its inputs comes from."""
    size: WorkSize = ZERO_WORK
    """Of the work, where the body is a leaf; the calls of a nest have their own."""
    rank: int = 0
    """Added to the ranks of all its devices."""
    after: tuple[int, ...] = ()
    """Calls that must have ended, as a whole, before it begins."""

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """Those that it uses."""
        return tuple(Device(device.kind, device.rank + self.rank) for device in self.body.devices)


@dataclass(frozen=True, eq=False)
class Nest:
    """A subgraph made of calls, in the order in which they are issued.

    Raises: PlanError: a source or call that does not exist, or calls that wait for each other in a circle.
    """

    calls: tuple[Call, ...]
    num_inputs: int = 0
    outputs: tuple[Source, ...] = ()

    def __post_init__(self) -> None:
        for index, call in enumerate(self.calls):
            if len(call.sources) != call.body.num_inputs:
                raise PlanError(
                    f"call {index} names {len(call.sources)} sources for {call.body.num_inputs} inputs; name one each"
                )
            for source in call.sources:
                self._check(source, f"call {index}", index)
            if any(not 0 <= other < len(self.calls) for other in call.after):
                raise PlanError(f"call {index} waits for calls {call.after}; there are 0..{len(self.calls) - 1}")
        for source in self.outputs:
            self._check(source, "an output", len(self.calls))
        _ = self.order

    def _check(self, source: Source, where: str, before: int) -> None:
        call, port = source
        limit = self.calls[call].body.num_outputs if 0 <= call < before else self.num_inputs if call == -1 else 0
        if not 0 <= port < limit:
            raise PlanError(f"{where} reads {source}; name (earlier call, its output) or (-1, input of the nest)")

    @property
    def num_outputs(self) -> int:
        """Tensors that others may read."""
        return len(self.outputs)

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """Those that any call uses, as seen from rank 0."""
        return tuple(sorted({device for call in self.calls for device in call.devices}))

    @cached_property
    def order(self) -> tuple[int, ...]:
        """All calls, each after what it waits for."""
        order, stuck = topological(self._waits)
        if stuck:
            raise PlanError(
                f"calls {stuck} wait for each other, and a call begins as a whole; issue them in another order, or "
                "cut a subgraph in two"
            )
        return order

    @cached_property
    def _waits(self) -> tuple[frozenset[int], ...]:
        return tuple(
            frozenset({*(call for call, _ in wires), *call.after} - {-1})
            for call, wires in zip(self.calls, self.wires, strict=True)
        )

    @cached_property
    def wires(self) -> tuple[tuple[Source, ...], ...]:
        """[call] -> where the entry time of each of its devices and inputs comes from: (call, place among its devices
        and outputs), or (-1, place among those of the nest)."""
        last: dict[Device, Source] = {device: (-1, place) for place, device in enumerate(self.devices)}
        found = []
        for index, call in enumerate(self.calls):
            found.append((*(last[device] for device in call.devices), *map(self._place, call.sources)))
            last.update({device: (index, place) for place, device in enumerate(call.devices)})
        return tuple(found)

    @cached_property
    def exits(self) -> tuple[Source, ...]:
        """Where the times come from at which the nest's devices are free and its outputs there."""
        last = {
            device: (index, place) for index, call in enumerate(self.calls) for place, device in enumerate(call.devices)
        }
        return (*(last[device] for device in self.devices), *map(self._place, self.outputs))

    def _place(self, source: Source) -> Source:
        call, port = source
        return call, port + len(self.devices if call < 0 else self.calls[call].devices)

    @cached_property
    def followers(self) -> tuple[tuple[int, ...], ...]:
        """[call] -> calls that wait for it."""
        found: list[list[int]] = [[] for _ in self.calls]
        for index, waits in enumerate(self._waits):
            for other in waits:
                found[other].append(index)
        return tuple(map(tuple, found))

    def with_edges(self, edges: Sequence[tuple[int, int]]) -> "Nest":
        """The nest in which call b also waits for call a, for each (a, b). Raises: PlanError: a circle."""
        calls = list(self.calls)
        for before, after in edges:
            calls[after] = replace(calls[after], after=(*calls[after].after, before))
        return replace(self, calls=tuple(calls))


def chain(unit: Nest, count: int) -> Nest:
    """`count` uses of a subgraph, each reading the outputs of the one before, such as equal layers.

    It is made of halves that are made of halves, so that about log2(count) matrices stand for all of it.
    Raises: PlanError: a count below 1, or another number of outputs than of inputs.
    """
    if count < 1 or unit.num_inputs != unit.num_outputs:
        raise PlanError(
            f"a chain of {count} subgraphs with {unit.num_inputs} inputs and {unit.num_outputs} outputs; the count is "
            "at least 1, and each output is an input of the next"
        )
    if count == 1:
        return unit
    half, ports = chain(unit, count // 2), range(unit.num_inputs)
    calls = [Call(body, tuple((place - 1, port) for port in ports)) for place, body in enumerate((half, half))]
    if count % 2:
        calls.append(Call(unit, tuple((1, port) for port in ports)))
    return Nest(tuple(calls), unit.num_inputs, tuple((len(calls) - 1, port) for port in ports))
