"""Subgraphs that are simulated once and used many times: repeated layers, stages, microbatches. Pure.

When a subgraph's operators end depends on when its devices are free and its inputs there, by `max` and `+` alone. So
the end of each is the largest of (entry time + longest path from that entry): a matrix over the (max, +) semiring,
found once for each subgraph and size, and exact for any entry times. Times are multiples of `TICK_S`, so sums have no
rounding, and a simulation that reuses subgraphs is equal, bit by bit, to that of all operators (`flatten`).

A call of a subgraph is one node: it is evaluated when all that it waits for has been. `resume` takes over a simulation
and evaluates again only the calls whose entry times changed.

Source: PipeWeaver's SEMU, section 4.2 (spatial-temporal subgraph reuse, checkpoint and restore). Max-plus matrices:
Baccelli et al., Synchronization and Linearity, 1992.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import add
from typing import TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from mmtrain.costs.operators.execution import Simulation
from mmtrain.costs.operators.latency import Floats, Latencies
from mmtrain.errors import PlanError
from mmtrain.spec.work_size import ZERO_WORK, WorkSize
from subgraph_reuse.flat import flatten
from subgraph_reuse.nest import Leaf, Nest

NEVER = -np.inf
"""The entry time of what nothing waits for."""


class Reuse:
    """Remembers subgraphs' matrices over all simulations with the same latencies."""

    def __init__(self, latencies: Latencies) -> None:
        self.latencies = latencies
        self._known: WeakKeyDictionary[Leaf | Nest, dict[WorkSize, Floats]] = WeakKeyDictionary()
        self._rows: WeakKeyDictionary[Leaf | Nest, dict[WorkSize, list[list[float]]]] = WeakKeyDictionary()
        self._operators: WeakKeyDictionary[Leaf, dict[WorkSize, Floats]] = WeakKeyDictionary()

    def matrix(self, body: "Leaf | Nest", size: WorkSize) -> Floats:
        """[devices and outputs, devices and inputs] longest paths: when each device is free and each output there
        afterwards, after each device was free and each input there."""
        known = self._known.setdefault(body, {})
        if size not in known:
            known[size] = self._of_leaf(body, size) if isinstance(body, Leaf) else self._of_nest(body)
        return known[size]

    def operators(self, leaf: Leaf, size: WorkSize) -> Floats:
        """[operators, devices and inputs] longest paths to the end of each operator."""
        known = self._operators.setdefault(leaf, {})
        if size not in known:
            known[size] = self._paths(leaf, size)
        return known[size]

    def _paths(self, leaf: Leaf, size: WorkSize) -> Floats:
        graph = leaf.graph
        entry = {device: place for place, device in enumerate(graph.devices)}
        given = {tensor: len(entry) + place for place, tensor in enumerate(leaf.inputs)}
        paths = np.full((len(graph.operators), len(entry) + len(given)), NEVER)
        seconds = self.latencies(graph, size)
        for index in graph.order:
            op, row = graph.operators[index], paths[index]
            row[entry[op.device]] = 0.0
            for tensor in op.inputs:
                if tensor in given:
                    row[given[tensor]] = 0.0
            for need in {*graph.needs[index], graph.before[index]} - {-1}:
                np.maximum(row, paths[need], out=row)
            row += seconds[index]
        return paths

    def _of_leaf(self, leaf: Leaf, size: WorkSize) -> Floats:
        graph, paths = leaf.graph, self.operators(leaf, size)
        last = {op.device: index for index, op in enumerate(graph.operators)}
        rows = [paths[last[device]] for device in graph.devices]
        for tensor in leaf.outputs:
            if graph.producer[tensor] >= 0:
                rows.append(paths[graph.producer[tensor]])
            else:
                through = np.full(paths.shape[1], NEVER)
                if tensor in leaf.inputs:
                    through[len(graph.devices) + leaf.inputs.index(tensor)] = 0.0
                rows.append(through)
        return np.array(rows, dtype=np.float64).reshape(len(rows), paths.shape[1])

    def _of_nest(self, nest: Nest) -> Floats:
        columns = len(nest.devices) + nest.num_inputs
        first = list(np.where(np.eye(columns, dtype=bool), 0.0, NEVER))
        states: list[list[Floats]] = [[]] * len(nest.calls)
        for index in nest.order:
            call = nest.calls[index]
            entered = np.array(_entry(nest, index, states, first, np.maximum), dtype=np.float64)
            matrix = self.matrix(call.body, call.size)
            states[index] = list((matrix[:, :, None] + entered.reshape(-1, columns)).max(axis=1, initial=NEVER))
        rows = [states[call][place] if call >= 0 else first[place] for call, place in nest.exits]
        return np.array(rows, dtype=np.float64).reshape(len(rows), columns)

    def leave(self, body: "Leaf | Nest", size: WorkSize, entry: Sequence[float]) -> list[float]:
        """`matrix` for given entry times, in plain numbers: bodies have few devices and inputs."""
        known = self._rows.setdefault(body, {})
        if size not in known:
            known[size] = self.matrix(body, size).tolist()
        return [max(map(add, row, entry), default=NEVER) for row in known[size]]

    # ---------------------------------------------------------------------------------- simulation

    def simulate(self, nest: Nest) -> "NestRun":
        """Every call's times, all devices free and all inputs there at 0."""
        run = NestRun(self, nest, [[]] * len(nest.calls), [[]] * len(nest.calls), len(nest.calls))
        run.evaluate(nest.order)
        return run

    def resume(self, done: "NestRun", nest: Nest) -> "NestRun":
        """The simulation of a nest that has the calls of `done`, perhaps with more edges or sources, and perhaps more
        calls behind them; what they do not touch is taken over.

        Raises: PlanError: the first calls are others, or the nest has other inputs.
        """
        old = done.nest
        shared = len(old.calls)
        same = all(
            a.body is b.body and a.size == b.size and a.rank == b.rank
            for a, b in zip(old.calls, nest.calls, strict=False)
        )
        if len(nest.calls) < shared or not same or nest.num_inputs != old.num_inputs:
            raise PlanError("a simulation can only be resumed with more calls behind those it had, or more edges")
        added: list[list[float]] = [[]] * (len(nest.calls) - shared)
        run = NestRun(self, nest, [*done.entries, *added], [*done.states, *added])
        place = {index: position for position, index in enumerate(nest.order)}
        touched = {
            index
            for index, call in enumerate(nest.calls)
            if index >= shared or nest.wires[index] != old.wires[index] or call.after != old.calls[index].after
        }
        queue = [(place[index], index) for index in touched]
        heapq.heapify(queue)
        while queue:
            _, index = heapq.heappop(queue)
            for other in run.evaluate((index,)):
                for follower in set(nest.followers[other]) - touched:
                    touched.add(follower)
                    heapq.heappush(queue, (place[follower], follower))
        run.evaluated = len(touched)
        return run


@dataclass(eq=False)
class NestRun:
    """When each call of a nest began and ended: what `resume` starts from."""

    reuse: Reuse
    nest: Nest
    entries: list[list[float]]
    """[call] -> when each of its devices is free, and each of its inputs there."""
    states: list[list[float]]
    """[call] -> when each of its devices is free, and each of its outputs there, afterwards."""
    evaluated: int = 0
    """Calls that were evaluated, and not taken over."""

    def evaluate(self, calls: Iterable[int]) -> list[int]:
        """Those of the calls whose times changed, now that what they wait for is known."""
        nest, changed = self.nest, []
        first = [0.0] * (len(nest.devices) + nest.num_inputs)
        for index in calls:
            call = nest.calls[index]
            self.entries[index] = entry = _entry(nest, index, self.states, first, max)
            state = self.reuse.leave(call.body, call.size, entry)
            if state != self.states[index]:
                self.states[index] = state
                changed.append(index)
        return changed

    def end_s(self, index: int) -> float:
        """When a call has ended as a whole."""
        return max(self.states[index][: len(self.nest.calls[index].devices)], default=0.0)

    @property
    def makespan_s(self) -> float:
        """When the last call has ended."""
        return max((self.end_s(index) for index in range(len(self.nest.calls))), default=0.0)

    def operators(self) -> Simulation:
        """Every operator's times on the flat graph, each leaf's at once."""
        flat, seconds = flatten(self.nest, self.reuse.latencies)
        ends = np.concatenate([np.empty(0), *self._ends(self.nest, self.entries)])
        return Simulation(graph=flat, size=ZERO_WORK, seconds=seconds, start_s=ends - seconds, end_s=ends)

    def _ends(self, nest: Nest, entries: Sequence[Sequence[float]]) -> Iterator[Floats]:
        """The ends of the operators of each leaf, in the order of `flatten`."""
        for call, entry in zip(nest.calls, entries, strict=True):
            if isinstance(call.body, Leaf):
                yield (self.reuse.operators(call.body, call.size) + np.array(entry)).max(axis=1, initial=NEVER)
                continue
            inner = call.body
            states: list[list[float]] = [[]] * len(inner.calls)
            within: list[list[float]] = [[]] * len(inner.calls)
            for index in inner.order:
                within[index] = _entry(inner, index, states, entry, max)
                states[index] = self.reuse.leave(inner.calls[index].body, inner.calls[index].size, within[index])
            yield from self._ends(inner, within)


Time = TypeVar("Time", float, Floats)
"""One entry time, or one for each of several columns."""


def _entry(
    nest: Nest,
    index: int,
    states: Sequence[Sequence[Time]],
    first: Sequence[Time],
    maximum: Callable[[Time, Time], Time],
) -> list[Time]:
    """When each device of a call is free and each input there. Args: first: the same for the nest."""
    call = nest.calls[index]
    entry = [states[other][place] if other >= 0 else first[place] for other, place in nest.wires[index]]
    for other in call.after:
        for end in states[other][: len(nest.calls[other].devices)]:
            entry[: len(call.devices)] = [maximum(time, end) for time in entry[: len(call.devices)]]
    return entry
