"""Schedules of one chain that goes down the ranks and back up: orders of slots, which are then filled with works.

A *slot* is one action of a rank: its kind, its leg (0: the stage on the way down, 1: on the way up) and the number of
the microbatch. V-shaped schedules are lists of slots for ranks r = 0 .. P - 1 that hold stages r and 2P - 1 - r.
"""

from collections.abc import Callable
from typing import NamedTuple

from mmtrain.schedule.action import Action, Braid, Kind
from mmtrain.schedule.graph import WorkGraph
from mmtrain.schedule.library.list_schedule import ListScheduler, rank_footprints
from mmtrain.schedule.library.weights import worth_splitting
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import PlanningProblem

Template = Callable[[int, int], list[list["Slot"]]]
"""(number of ranks, number of microbatches) -> slots of each rank."""


class Slot(NamedTuple):
    """One action of a V-shaped schedule."""

    kind: Kind
    leg: int
    microbatch: int
    braided: bool = False
    """Whether it may run as one block with the forward before it."""


def fill(problem: PlanningProblem, template: Template, held: float, *, braided: bool = False) -> Plan:
    """The plan of a V-shaped schedule: its template if the works are one V, else list scheduling within its memory.

    Works of a single module that is placed as a V take the slots of the template's microbatches, in their order. With
    several modules (each a V of its own, or placed in any other way) ranks run what can start, forwards and backwards
    alternating and Ws in between, as long as at most `held` microbatches of mean size are held, as in the template.

    Every (stage, work) takes its option 0; memory limits are ignored.

    Args: braided: run blocks as braids; False: as a forward and then a backward.
    """
    chain = v_chain(problem.graph)
    if chain is None:
        limits = rank_footprints(problem, held)
        return ListScheduler(problem, limits, soft=range(problem.graph.num_ranks)).run(eager=True).plan
    graph = problem.graph
    orders = []
    for rank, slots in enumerate(template(graph.num_ranks, len(graph.works))):
        order: list[Action] = []
        for slot in slots:
            stage = chain[rank if slot.leg == 0 else len(chain) - 1 - rank]
            work = graph.work_order[slot.microbatch]
            actions = _actions(problem, slot.kind, stage, work)
            if braided and slot.braided and actions:
                actions = [Braid.of(order.pop(), *actions)]
            order += actions
        orders.append(tuple(order))
    return Plan(graph, tuple(orders))


def v_chain(graph: WorkGraph) -> tuple[int, ...] | None:
    """The stages of the only module with works, if they go down the ranks once and back up; else None."""
    modules = {work.module for work in graph.works}
    if len(modules) != 1 or any(work.after for work in graph.works):
        return None
    chain = graph.modules[modules.pop()].stages
    down = list(range(graph.num_ranks))
    return chain if [graph.stage_rank[stage] for stage in chain] == down + down[::-1] else None


def _actions(problem: PlanningProblem, kind: Kind, stage: int, work: int) -> list[Action]:
    """The actions of a slot for a stage that may have no backward, or none that is worth splitting."""
    graph = problem.graph
    if kind is not Kind.F:
        if not graph.has_backward(stage, work):
            return []
        if kind is not Kind.B and not worth_splitting(problem.options(stage, work)[0]):
            return [graph.action(Kind.B, stage, work)] if kind is Kind.I else []
    return [graph.action(kind, stage, work)]


class Writer:
    """Writes the slots of one rank; each call takes the next microbatch of its kind and leg, if any remains."""

    def __init__(self, num_microbatches: int) -> None:
        self.slots: list[Slot] = []
        self._count = num_microbatches
        self._next = {(kind, leg): 0 for kind in (Kind.F, Kind.B) for leg in (0, 1)}
        self._waiting: list[tuple[int, int]] = []
        """(leg, microbatch) of the Ws that are due, oldest first."""

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
