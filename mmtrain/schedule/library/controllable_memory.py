"""V-half and V-min: V-shaped building blocks whose life span determines the memory.

A building block is the four Fs and Is of one microbatch on each rank, at fixed times in units of one action; the next
microbatch's block starts 6 units later (2 stages x 3 actions). The number of held activations is the time between
forward and backward over 6, so an earlier gradient means less memory.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from mmtrain.schedule.action import Kind
from mmtrain.schedule.engine import Engine
from mmtrain.schedule.graph import ModuleStages, Work, WorkGraph
from mmtrain.schedule.library.v_shape import Slot, fill
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import PlanningProblem

PERIOD = 6
"""Units from one microbatch's block to the next."""


class BlockUnits(NamedTuple):
    """Units between a block's actions: on the way from rank to rank (hops), and on one rank at the V's ends (turns)."""

    hops: tuple[int, int, int, int]
    """Forward down, forward up, gradient down, gradient up."""
    turns: tuple[int, int, int]
    """The units of three turns: forward down to up (last rank), forward up to gradient down (first), gradient down to
    up (last)."""


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


def _shortest(num_ranks: int) -> BlockUnits:
    # Every hop takes one unit. Where 3 divides P, actions of a rank would coincide without longer turns.
    return BlockUnits((1, 1, 1, 1), (3, 1, 3) if num_ranks % 3 == 0 else (1, 1, 1))


def _balanced(num_ranks: int) -> BlockUnits:
    # Down and up of a rank's stages take 3 units together, so that all ranks hold the same.
    return BlockUnits((1, 2, 1, 2), (1, 1, 1) if num_ranks % 2 else (4, 1, 4))


def _template(block: Callable[[int], BlockUnits], held: int) -> Callable[[int, int], list[list[Slot]]]:
    def slots(num_ranks: int, num_microbatches: int) -> list[list[Slot]]:
        sequences = [_sequence(block(num_ranks), num_ranks, r, num_microbatches) for r in range(num_ranks)]
        return with_weights(sequences, 2 * held)

    return slots


def _sequence(block: BlockUnits, P: int, rank: int, num_microbatches: int) -> list[Slot]:
    """Fs and Is of a rank in the order of their times."""
    (down, up, back_down, back_up), turns = block
    last, behind = P - 1, P - 1 - rank
    forward_down = down * rank
    forward_up = down * last + turns[0] + up * behind
    gradient_down = (down + up) * last + turns[0] + turns[1] + back_down * rank
    gradient_up = (down + up + back_down) * last + sum(turns) + back_up * behind
    times = [(forward_down, Kind.F, 0), (forward_up, Kind.F, 1), (gradient_down, Kind.I, 1), (gradient_up, Kind.I, 0)]
    slots = [(time + PERIOD * m, Slot(kind, leg, m)) for m in range(num_microbatches) for time, kind, leg in times]
    return [slot for _, slot in sorted(slots, key=lambda entry: entry[0])]


def with_weights(sequences: list[list[Slot]], limit: int) -> list[list[Slot]]:
    """The slots of each rank with Ws where the rank would idle or hold more than `limit` activations.

    All actions take one unit, so that the ranks run in lockstep.
    """
    P, num_microbatches = len(sequences), len(sequences[0]) // 4
    down = tuple(range(P))
    graph = WorkGraph(
        num_ranks=P,
        modules=(ModuleStages(name="v", stages=tuple(range(2 * P))),),
        stage_rank=down + down[::-1],
        works=tuple(Work(module=0, microbatch=m, sub_microbatch=0) for m in range(num_microbatches)),
        backward=((True,) * (2 * P),) * num_microbatches,
    )
    engine = Engine(graph.items)
    held, due = [0] * P, [deque[Slot]() for _ in range(P)]
    remaining = [deque(sequence) for sequence in sequences]
    written: list[list[Slot]] = [[] for _ in range(P)]
    for now in range(sum(map(len, sequences)) * 2):
        for rank in range(P):
            if remaining[rank] and not (remaining[rank][0].kind is Kind.F and held[rank] >= limit):
                slot = remaining[rank][0]
                stage = rank if slot.leg == 0 else 2 * P - 1 - rank
                item = graph.items.item(slot.kind, stage, slot.microbatch)
                if not engine.waiting[item] and engine.arrival[item] <= now:
                    engine.start(item, now + 1)
                    written[rank].append(remaining[rank].popleft())
                    if slot.kind is Kind.F:
                        held[rank] += 1
                    else:
                        due[rank].append(slot._replace(kind=Kind.W))
                    continue
            if due[rank]:
                written[rank].append(due[rank].popleft())
                held[rank] -= 1
        if not any(remaining) and not any(due):
            break
    assert not any(remaining), "a building block's times respect what its actions need"
    return written
