"""A rank's actions as its runtime executes them: each with what its handler needs, in an order that stages can run."""

from collections.abc import Sequence
from dataclasses import dataclass

from mmtrain.errors import PlanError
from mmtrain.parallel.stage import ModalityStage
from mmtrain.schedule.action import Action, Kind
from mmtrain.schedule.graph import Edge
from mmtrain.schedule.passes.release import Transfer


@dataclass(slots=True)
class BoundAction:
    """An action with all that its handler needs, looked up once when the program is loaded."""

    action: Action
    stage: ModalityStage
    """The stage of the action; that of the first one of a block."""
    parts: tuple["BoundAction", ...] = ()
    """The passes of a compute action: of a block both, else itself alone."""
    work: int = -1
    """The work of a compute action."""
    transfer: Transfer | None = None
    """What a send or receive moves."""
    waits: tuple[tuple[Transfer, tuple[Transfer, ...]], ...] = ()
    """Messages that must have arrived before a compute action, each with the sends whose arrival follows from it."""
    prefetched: tuple[tuple[ModalityStage, int], ...] = ()
    """Stages and works of the backwards in the next compute action: their offloaded activations come back during this
    one."""
    makes_loss: bool = False
    """Whether the output of a forward is the loss."""
    moves: tuple[tuple[Edge, ModalityStage], ...] = ()
    """Edges of a result to other stages of this rank."""


def in_turns(action: Action, rank: int, index: int) -> tuple[Action, ...]:
    """The passes of a compute action. Raises: PlanError: a block is not a forward and then a B, I or W."""
    first, *others = (part.kind for part in action.parts)
    if others and (first is not Kind.F or len(others) > 1 or others[0] is Kind.F):
        raise PlanError(f"rank {rank}, step {index}: {action} cannot run in turns; braid one F and then one B, I or W")
    return action.parts


_BEFORE = {Kind.F: None, Kind.B: Kind.F, Kind.I: Kind.F, Kind.W: Kind.I}
"""Compute kind -> the kind that the same stage runs before it for the same work."""


def split_works(computes: Sequence[tuple[int, BoundAction]], rank: int) -> dict[int, list[int]]:
    """Stage of a rank -> its works whose backward is split.

    Args: computes: the compute actions of the rank, each with its index in the program.
    Raises: PlanError: those of a stage and work are not F, then perhaps B, or I and then W.
    """
    works: dict[int, list[int]] = {}
    last: dict[tuple[int, int], Action] = {}
    for index, bound in computes:
        for part in bound.parts:
            action, node = part.action, (part.action.stage, part.work)
            before = last[node].kind if node in last else None
            if before is not _BEFORE[action.kind]:
                raise PlanError(
                    f"rank {rank}, step {index}: {action} comes after {last.get(node, 'nothing')}; a stage runs F of a "
                    "work, then B, or I and then W"
                )
            last[node] = action
            if action.kind is Kind.I:
                works.setdefault(node[0], []).append(node[1])
    for action in last.values():
        if action.kind is Kind.I:
            raise PlanError(f"rank {rank}: no W comes after {action}; a backward is B, or I and then W")
    return works
