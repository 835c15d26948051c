"""Schedules of one chain that goes down the ranks and back up: orders of slots, which are then filled with works.

A *slot* is one action of a rank: its kind, its leg (0: the stage on the way down, 1: on the way up) and the number of
the microbatch. V-shaped schedules are lists of slots for ranks r = 0 .. P - 1 that hold stages r and 2P - 1 - r.
"""

import itertools
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import NamedTuple

from mmtrain.schedule.action import Action, Braid, Kind
from mmtrain.schedule.graph import WorkGraph
from mmtrain.schedule.library.list_schedule import ListScheduler, StageWork, rank_footprints
from mmtrain.schedule.library.memory import components
from mmtrain.schedule.library.one_f_one_b import module_order
from mmtrain.schedule.library.weights import worth_splitting
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import PlanningProblem

SlotTemplate = Callable[[int, int], list[list["Slot"]]]
"""A function (number of ranks, number of microbatches) -> slots of each rank."""


class Slot(NamedTuple):
    """One action of a V-shaped schedule."""

    kind: Kind
    leg: int
    microbatch: int
    braided: bool = False
    """Whether it may run as one block with the forward before it."""


def fill(problem: PlanningProblem, template: SlotTemplate, held: float, *, braided: bool = False) -> Plan:
    """The plan of a V-shaped schedule: its template if the modules are one V, else list scheduling within its memory.

    On one V (see `v_chunks`) a microbatch of the template is a component of the work graph: in most iterations the
    vision works and the language work of one microbatch. A slot has the actions of that component in one chunk: several
    where stages of two modules or several works meet, none where a module has no work or no backward, and B in place of
    I and W where those are not worth splitting. So as many activations of a chunk are held as in the template. A block
    is a sequence of braids and single actions that takes the least time.

    With several Vs, or modules that are placed in any other way, ranks run what can start, forwards and backwards
    alternating and Ws in between, as long as at most `held` microbatches of mean size are held, as in the template.

    Every (stage, work) takes its option 0; memory limits are ignored.

    Args: braided: run blocks as braids; False: as a forward and then a backward.
    """
    graph, chunks = problem.graph, v_chunks(problem.graph)
    if chunks is None:
        limits = rank_footprints(problem, held)
        return ListScheduler(problem, limits, soft=range(graph.num_ranks)).run(eager=True).plan
    component = components(graph)
    nodes: dict[tuple[int, int], list[StageWork]] = {}
    for stage, work in graph.nodes():
        nodes.setdefault((chunks[stage], component[work]), []).append((stage, work))
    orders = []
    for rank, slots in enumerate(template(graph.num_ranks, len({*component}))):
        order: list[Action] = []
        begin = 0  # of the actions of the slot before
        for slot in slots:
            chunk = rank if slot.leg == 0 else 2 * graph.num_ranks - 1 - rank
            actions = _actions(problem, slot.kind, nodes.get((chunk, slot.microbatch), []))
            if braided and slot.braided:
                order[begin:] = _block(problem, order[begin:], actions)
            else:
                begin = len(order)
                order += actions
        orders.append(tuple(order))
    return Plan(graph, tuple(orders))


def v_chunks(graph: WorkGraph) -> dict[int, int] | None:
    """The chunk of each stage, if the stages of all modules, one module after the other, are one V; else None.

    A V has chunks 0 .. 2P - 1: chunk c is on rank c on the way down and on rank 2P - 1 - c on the way up, and has at
    least one stage and at most one of each module. Data only go forward in it. If the modules are no V, those that have
    works may be one.
    """
    order, used = module_order(graph), {work.module for work in graph.works}
    chunks = _chunks(graph, order) or _chunks(graph, [module for module in order if module in used])
    if chunks is None:
        return None
    place = {stage: k for k, stage in enumerate(chunks)}
    goes_back = any(
        place[graph.stages(link.work)[link.source]] >= place[graph.stages(work)[link.target]]
        for work, links in enumerate(graph.links)
        for link in links
    )
    return None if goes_back else chunks


def _chunks(graph: WorkGraph, modules: Sequence[int]) -> dict[int, int] | None:
    """The chunk of each stage, in the order of data; None: the modules are no V."""
    P, rank, module = graph.num_ranks, graph.stage_rank, graph.module_of
    chain = [stage for index in modules for stage in graph.modules[index].stages]
    last = [stage for stage in chain if rank[stage] == P - 1]
    # On the last rank the way up begins where a module comes for the second time, if any does.
    again = (stage for k, stage in enumerate(last) if module[stage] in {module[other] for other in last[:k]})
    turn = chain.index(next(again, last[-1])) if last else 0
    chunks = {stage: rank[stage] if k < turn else 2 * P - 1 - rank[stage] for k, stage in enumerate(chain)}
    parts = [(chunk, module[stage]) for stage, chunk in chunks.items()]
    in_order = [*chunks.values()] == sorted(chunks.values()) and {*chunks.values()} == {*range(2 * P)}
    return chunks if in_order and len({*parts}) == len(parts) else None


def _actions(problem: PlanningProblem, kind: Kind, nodes: Sequence[StageWork]) -> list[Action]:
    """The actions of a slot, whose stages may have no backward, or none that is worth splitting."""
    graph = problem.graph
    if kind is Kind.F:
        return [graph.action(kind, *node) for node in nodes]
    actions = []
    for node in reversed(nodes):
        if not graph.has_backward(*node):
            continue
        if kind is Kind.B or worth_splitting(problem.options(*node)[0]):
            actions.append(graph.action(kind, *node))
        elif kind is Kind.I:
            actions.append(graph.action(Kind.B, *node))
    return actions


def _block(problem: PlanningProblem, forwards: Sequence[Action], backwards: Sequence[Action]) -> list[Action]:
    """Forwards and backwards as one block: each in its order, and pairs of both as braids where that saves most."""
    if len(forwards) == len(backwards) == 1:
        return [Braid.of(*forwards, *backwards)]
    best: dict[tuple[int, int], tuple[float, list[Action]]] = {}
    """For each (i, j), the least seconds of the first i forwards and j backwards, and their entries."""

    def then(i: int, j: int, *parts: Action) -> tuple[float, list[Action]]:
        seconds, entries = best[i, j]
        entry = Braid.of(*parts) if len(parts) > 1 else parts[0]
        cost = problem.entry_cost(entry, problem.graph.work_of(parts[0]), {})
        return seconds + cost.seconds, [*entries, entry]

    for i, j in itertools.product(range(len(forwards) + 1), range(len(backwards) + 1)):
        ends = [then(i - 1, j - 1, forwards[i - 1], backwards[j - 1])] if i and j else []
        ends += [then(i, j - 1, backwards[j - 1])] if j else []
        ends += [then(i - 1, j, forwards[i - 1])] if i else []
        best[i, j] = min(ends, key=itemgetter(0), default=(0.0, []))
    return best[len(forwards), len(backwards)][1]


class Writer:
    """Writes the slots of one rank; each call takes the next microbatch of its kind and leg, if any remains."""

    def __init__(self, num_microbatches: int) -> None:
        self.slots: list[Slot] = []
        self._count = num_microbatches
        self._next = {(kind, leg): 0 for kind in (Kind.F, Kind.B) for leg in (0, 1)}
        self._waiting: list[tuple[int, int]] = []
        """The Ws that are due, as (leg, microbatch), oldest first."""

    def done(self, kind: Kind, leg: int) -> int:
        """Number of microbatches whose F, or whose B or I, is written on a leg."""
        return self._next[kind, leg]

    @property
    def due(self) -> int:
        """Number of Ws that are due."""
        return len(self._waiting)

    def forward(self, leg: int) -> None:
        """F of the next microbatch on a leg."""
        self._take(Kind.F, Kind.F, leg)

    def backward(self, leg: int, *, split: bool = False) -> None:
        """B of the next microbatch on a leg; or its I, whose W is then due."""
        microbatch = self._take(Kind.B, Kind.I if split else Kind.B, leg)
        if split and microbatch is not None:
            self._waiting.append((leg, microbatch))

    def block(self, leg: int, kind: Kind, backward_leg: int | None = None) -> None:
        """F of the next microbatch on a leg, braided with the next B or I of a leg (default: the same) or the oldest W.

        If either of them has no microbatch left, or both the same, they are written one after the other.
        """
        first = len(self.slots)
        self.forward(leg)
        middle = len(self.slots)
        if kind is Kind.W:
            self.weight()
        else:
            self.backward(leg if backward_leg is None else backward_leg, split=kind is Kind.I)
        if first < middle < len(self.slots) and self.slots[first].microbatch != self.slots[middle].microbatch:
            self.slots[middle] = self.slots[middle]._replace(braided=True)

    def weight(self, leg: int | None = None) -> None:
        """The oldest W that is due (on that leg)."""
        for index, (other, microbatch) in enumerate(self._waiting):
            if leg in (None, other):
                del self._waiting[index]
                self.slots.append(Slot(Kind.W, other, microbatch))
                return

    def weights(self) -> None:
        """All W that are due, the way up first."""
        for leg, microbatch in sorted(self._waiting, key=lambda entry: -entry[0]):
            self.slots.append(Slot(Kind.W, leg, microbatch))
        self._waiting.clear()

    def _take(self, counted: Kind, kind: Kind, leg: int) -> int | None:
        microbatch = self._next[counted, leg]
        if microbatch == self._count:
            return None
        self._next[counted, leg] += 1
        self.slots.append(Slot(kind, leg, microbatch))
        return microbatch
