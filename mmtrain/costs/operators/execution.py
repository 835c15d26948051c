"""Simulation of an operator graph: when each operator runs, and the bytes held in memory. Pure.

An operator starts when its device has finished the operator before it and all its dependencies have finished. A tensor
is held from the start of the operator that makes it (an input: from 0) to the end of the last operator that reads it (a
persistent tensor: to the end). If one tensor is freed at the instant when another is made, it is freed first.

Source: PipeWeaver's SEMU, section 4.1; DIP, arXiv:2504.14145, section 6.1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mmtrain.costs.operators.latency import Floats, Latencies
from mmtrain.costs.operators.operator_graph import Device, Graph
from mmtrain.spec.work_size import ZERO_WORK, WorkSize


@dataclass(frozen=True, kw_only=True, eq=False)
class Simulation:
    """One simulated run of a graph."""

    graph: Graph
    size: WorkSize
    seconds: Floats
    """The duration of each operator."""
    start_s: Floats
    end_s: Floats

    @property
    def makespan_s(self) -> float:
        """Seconds until the last operator ends."""
        return float(self.end_s.max(initial=0.0))

    def busy_s(self, device: Device) -> float:
        """Seconds in which a device runs operators."""
        indices = [index for index, op in enumerate(self.graph.operators) if op.device == device]
        return float(self.seconds[indices].sum())

    @cached_property
    def lifetimes(self) -> tuple[tuple[float, float], ...]:
        """[tensor] -> (seconds, seconds): from when to when it is held."""
        producer = self.graph.producer
        born = [float(self.start_s[op]) if op >= 0 else 0.0 for op in producer]
        died = [float(self.end_s[op]) if op >= 0 else 0.0 for op in producer]
        for index, op in enumerate(self.graph.operators):
            for tensor in op.inputs:
                died[tensor] = max(died[tensor], float(self.end_s[index]))
        end_s = self.makespan_s
        return tuple(
            (b, end_s if tensor.persistent else d) for tensor, b, d in zip(self.graph.tensors, born, died, strict=True)
        )

    def memory(self, rank: int = 0) -> tuple[tuple[float, float], ...]:
        """The times at which the memory of a rank changes, ascending, and the bytes that it holds from then on."""
        events: dict[float, list[float]] = {}
        for tensor, (born, died) in zip(self.graph.tensors, self.lifetimes, strict=True):
            num_bytes = tensor.num_bytes(self.size)
            if tensor.rank != rank or not num_bytes or (died <= born and not tensor.persistent):
                continue
            events.setdefault(born, []).append(num_bytes)
            if not tensor.persistent:
                events.setdefault(died, []).append(-num_bytes)
        held_bytes, curve = 0.0, []
        for time in sorted(events):
            held_bytes += sum(sorted(events[time]))
            curve.append((time, held_bytes))
        return tuple(curve)

    def peak_bytes(self, rank: int = 0) -> float:
        """Peak bytes that a rank holds."""
        return max((held_bytes for _, held_bytes in self.memory(rank)), default=0.0)


def run(graph: Graph, seconds: Sequence[float]) -> list[float]:
    """[operator] -> seconds at which it ends; devices and input tensors are ready at 0. Args: seconds: [operator]."""
    previous_on_device, dependencies, ends = graph.before, graph.needs, [0.0] * len(seconds)
    for index in graph.order:
        previous = previous_on_device[index]
        start = ends[previous] if previous >= 0 else 0.0
        for dependency in dependencies[index]:
            if ends[dependency] > start:
                start = ends[dependency]
        ends[index] = start + seconds[index]
    return ends


def makespan_s(graph: Graph, seconds: Floats) -> float:
    """Seconds until the last operator ends. Args: seconds: [operator], multiples of `TICK_S`."""
    return float(seconds.sum()) if graph.is_serial else max(run(graph, seconds.tolist()), default=0.0)


def simulate(graph: Graph, latencies: Latencies, size: WorkSize = ZERO_WORK) -> Simulation:
    """The simulated run of a graph for works of a size; devices and input tensors are ready at 0."""
    seconds = latencies(graph, size)
    end = np.array(run(graph, seconds.tolist()), dtype=np.float64)
    return Simulation(graph=graph, size=size, seconds=seconds, start_s=end - seconds, end_s=end)
