"""V-half and V-min: V-shaped building blocks whose life span decides the memory.

A building block is the four forwards and input halves of one microbatch on each rank, at fixed times in units of one
action; the next microbatch's block starts 6 units later (2 stages x 3 actions). Activations held are the time between
forward and backward over 6, so the sooner a block's gradient comes back, the less is held.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from mmtrain.schedule.action import Kind
from mmtrain.schedule.library.v_shape import Slot, fill
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import PlanningProblem

PERIOD = 6
"""Units from one microbatch's block to the next."""


class Block(NamedTuple):
    """Units between a block's actions: on the way from rank to rank (hops), and on one rank at the V's ends (turns)."""

    hops: tuple[int, int, int, int]
    """Forward down, forward up, gradient down, gradient up."""
    turns: tuple[int, int, int]
    """From forward down to up (last rank), forward up to gradient down (first), gradient down to up (last)."""


def v_min(problem: PlanningProblem) -> Plan:
    """The plan of least memory: about a third of 1F1B's activations, for about two thirds of its bubble.

    On one V with F = I = W at most (P + 4) // 3 microbatches are held and no rank idles longer than 4P - 5 units of
    one action (1F1B: P and 6P - 6). See `v_shape.fill` for several modules.

    Source: Qi et al., Pipeline Parallelism with Controllable Memory, arXiv:2405.15362 (V-Min).
    """
    held = (problem.graph.num_ranks + 4) // 3
    return fill(problem, _template(_shortest, held), held)


def v_half(problem: PlanningProblem) -> Plan:
    """The plan of half of 1F1B's activations, for less than half of its bubble.

    On one V with F = I = W at most (P + 2) // 2 microbatches are held, and with 2P of them or more no rank idles longer
    than 3P units of one action (1F1B: P and 6P - 6). See `v_shape.fill` for several modules.

    Source: Qi et al., Pipeline Parallelism with Controllable Memory, arXiv:2405.15362 (V-Half).
    """
    held = (problem.graph.num_ranks + 2) // 2
    return fill(problem, _template(_balanced, held), held)


def _shortest(num_ranks: int) -> Block:
    # Every hop takes one unit. Where 3 divides P, actions of a rank would fall on each other without longer turns.
    return Block((1, 1, 1, 1), (3, 1, 3) if num_ranks % 3 == 0 else (1, 1, 1))


def _balanced(num_ranks: int) -> Block:
    # Down and up of a rank's stages take 3 units together, so that all ranks hold the same.
    return Block((1, 2, 1, 2), (1, 1, 1) if num_ranks % 2 else (4, 1, 4))


def _template(block: Callable[[int], Block], held: int) -> Callable[[int, int], list[list[Slot]]]:
    def slots(num_ranks: int, num_microbatches: int) -> list[list[Slot]]:
        sequences = [_sequence(block(num_ranks), num_ranks, r, num_microbatches) for r in range(num_ranks)]
        return with_weights(sequences, 2 * held)

    return slots


def _sequence(block: Block, P: int, rank: int, num_microbatches: int) -> list[Slot]:
    """Forwards and input halves of a rank in the order of their times."""
    (down, up, back_down, back_up), turns = block
    last, behind = P - 1, P - 1 - rank
    forward_down = down * rank
    forward_up = down * last + turns[0] + up * behind
    gradient_down = (down + up) * last + turns[0] + turns[1] + back_down * rank
    gradient_up = (down + up + back_down) * last + sum(turns) + back_up * behind
    times = [(forward_down, Kind.F, 0), (forward_up, Kind.F, 1), (gradient_down, Kind.I, 1), (gradient_up, Kind.I, 0)]
    found = [(time + PERIOD * m, Slot(kind, leg, m)) for m in range(num_microbatches) for time, kind, leg in times]
    return [slot for _, slot in sorted(found, key=lambda entry: entry[0])]


def with_weights(sequences: list[list[Slot]], limit: int) -> list[list[Slot]]:
    """The slots of each rank with weight halves where the rank would idle or hold more than `limit` activations.

    All actions take one unit, so that the ranks move in step.
    """
    P = len(sequences)
    ended: set[tuple[int, Slot]] = set()  # (rank, slot)
    held, place = [0] * P, [0] * P
    due: list[deque[Slot]] = [deque() for _ in range(P)]
    written: list[list[Slot]] = [[] for _ in range(P)]
    while any(place[rank] < len(sequences[rank]) or due[rank] for rank in range(P)):
        now = []
        for rank in range(P):
            head = sequences[rank][place[rank]] if place[rank] < len(sequences[rank]) else None
            full = head is not None and head.kind is Kind.F and held[rank] >= limit
            if head and not full and all(needed in ended for needed in _needs(head, rank, P)):
                place[rank] += 1
                now.append((rank, head))
            elif due[rank]:
                now.append((rank, due[rank].popleft()))
        assert now, "a building block's times respect what its actions need"
        for rank, slot in now:
            written[rank].append(slot)
            ended.add((rank, slot))
            if slot.kind is Kind.I:
                due[rank].append(Slot(Kind.W, slot.leg, slot.microbatch))
            else:
                held[rank] += 1 if slot.kind is Kind.F else -1
    return written


def _needs(slot: Slot, rank: int, P: int) -> list[tuple[int, Slot]]:
    """(rank, slot) of what must have ended before a forward or an input half of one V."""
    if slot.kind is Kind.F:
        before = rank - 1 if slot.leg == 0 else rank + 1
        if before < 0:
            return []
        return [(before, slot) if before < P else (rank, Slot(Kind.F, 0, slot.microbatch))]
    own = [(rank, Slot(Kind.F, slot.leg, slot.microbatch))]
    behind = rank + 1 if slot.leg == 0 else rank - 1
    if behind < 0:
        return own
    return [*own, (behind, slot) if behind < P else (rank, Slot(Kind.I, 1, slot.microbatch))]
