"""When each operator of a graph runs, and what is held in memory meanwhile. Pure.

An operator starts once its device has ended the one before it and all that it needs has ended. A tensor is held from
the start of the operator that makes it to the end of the last one that reads it; one that is there from the start, from
then on; a persistent one to the end. Of two tensors, one freed when the other is made, the first goes first.

Source: PipeWeaver's SEMU, section 4.1; DIP, arXiv:2504.14145, section 6.1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mmtrain.planner.operators.graph import Device, Graph
from mmtrain.planner.operators.latency import Floats, Latencies
from mmtrain.spec.spec import ZERO_WORK, WorkSize


@dataclass(frozen=True, kw_only=True, eq=False)
class Simulation:
    """One run of a graph."""

    graph: Graph
    size: WorkSize
    seconds: Floats
    """[operator] how long it takes."""
    start_s: Floats
    end_s: Floats

    @property
    def makespan_s(self) -> float:
        """When the last operator ends."""
        return float(self.end_s.max(initial=0.0))

    def busy_s(self, device: Device) -> float:
        """Seconds in which a device runs something."""
        mine = [index for index, op in enumerate(self.graph.operators) if op.device == device]
        return float(self.seconds[mine].sum())

    @cached_property
    def lifetimes(self) -> tuple[tuple[float, float], ...]:
        """[tensor] -> from when to when it is held."""
        made = self.graph.producer
        born = [float(self.start_s[op]) if op >= 0 else 0.0 for op in made]
        died = [float(self.end_s[op]) if op >= 0 else 0.0 for op in made]
        for index, op in enumerate(self.graph.operators):
            for tensor in op.inputs:
                died[tensor] = max(died[tensor], float(self.end_s[index]))
        last = self.makespan_s
        return tuple(
            (b, last if tensor.persistent else d) for tensor, b, d in zip(self.graph.tensors, born, died, strict=True)
        )

    def memory(self, rank: int = 0) -> tuple[tuple[float, float], ...]:
        """(seconds, bytes that a rank holds from then on), by time."""
        events: dict[float, list[float]] = {}
        for tensor, (born, died) in zip(self.graph.tensors, self.lifetimes, strict=True):
            amount = tensor.num_bytes(self.size)
            if tensor.rank != rank or not amount or (died <= born and not tensor.persistent):
                continue
            events.setdefault(born, []).append(amount)
            if not tensor.persistent:
                events.setdefault(died, []).append(-amount)
        held, out = 0.0, []
        for time in sorted(events):
            held += sum(sorted(events[time]))
            out.append((time, held))
        return tuple(out)

    def peak_bytes(self, rank: int = 0) -> float:
        """Most bytes that a rank holds at once."""
        return max((held for _, held in self.memory(rank)), default=0.0)


def run(graph: Graph, seconds: Sequence[float]) -> list[float]:
    """[operator] -> when it ends, all devices free and all given tensors there at 0. Args: seconds: of each."""
    before, needs, ends = graph.before, graph.needs, [0.0] * len(seconds)
    for index in graph.order:
        previous = before[index]
        start = ends[previous] if previous >= 0 else 0.0
        for need in needs[index]:
            if ends[need] > start:
                start = ends[need]
        ends[index] = start + seconds[index]
    return ends


def makespan_s(graph: Graph, seconds: Floats) -> float:
    """When the last operator ends, without when the others do. Args: seconds: of each, multiples of `TICK_S`."""
    return float(seconds.sum()) if graph.is_serial else max(run(graph, seconds.tolist()), default=0.0)


def simulate(graph: Graph, latencies: Latencies, size: WorkSize = ZERO_WORK) -> Simulation:
    """Start and end of every operator, all devices free and all given tensors there at 0."""
    seconds = latencies(graph, size)
    end = np.array(run(graph, seconds.tolist()), dtype=np.float64)
    return Simulation(graph=graph, size=size, seconds=seconds, start_s=end - seconds, end_s=end)
