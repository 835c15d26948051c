"""The actions after which a rank may free the buffers that it has sent, derived from the program.

A transport reports late (gloo: only by blocking) that a message has arrived. The program tells earlier: if the receiver
waits for our message and later sends us another one, then our message has arrived once we have waited for that one.
"""

from bisect import bisect_right
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mmtrain.errors import PlanError
from mmtrain.schedule.action import SENDS, TRANSFERS, WAITS, Action, Kind
from mmtrain.schedule.graph import Edge, WorkGraph

if TYPE_CHECKING:
    from mmtrain.schedule.passes.lower import Program

Transfer = tuple[Edge, bool]
"""An edge; True for its activation, False for the gradient."""
TransferName = tuple[int, int, int, int, bool]
"""The name of a transfer in a program: source and target stage, microbatch, sub_microbatch, whether forward."""

_FORWARD = frozenset({Kind.SEND_F, Kind.RECV_F, Kind.WAIT_F})
_AT_SOURCE = frozenset({Kind.SEND_F, Kind.RECV_B, Kind.WAIT_B})


def transfers(program: "Program", rank: int) -> dict[int, Transfer]:
    """Index of a send, receive or wait in a rank's list -> its edge and direction.

    Raises: PlanError: an action names a work or an edge that the graph does not have.
    """
    return {
        index: _transfer(program.graph, action)
        for index, action in enumerate(program.actions[rank])
        if action.kind in TRANSFERS
    }


def _message(action: Action) -> TransferName:
    kind, stage, peer = action.kind, action.stage, action.peer
    ends = (stage, peer) if kind in _AT_SOURCE else (peer, stage)
    return *ends, action.microbatch, action.sub_microbatch, kind in _FORWARD


def _transfer(graph: WorkGraph, action: Action) -> Transfer:
    source, target, _, _, forward = _message(action)
    for edge in graph.outputs(source, graph.work_of(action)):
        if edge.target == target:
            return edge, forward
    raise PlanError(
        f"action {action}: stage {source} makes nothing for stage {target} in this work; drop the transfer, or join "
        "the stages in the graph"
    )


def releases(
    program: "Program", rank: int, moved: Mapping[int, Transfer] | None = None
) -> dict[int, tuple[Transfer, ...]]:
    """Index of a wait in this rank's list -> sends of this rank that have arrived after it.

    Sends that no later message acknowledges are absent; they are freed at the end of the step.

    Args: moved: `transfers` of the rank; None: they are looked up here.
    """
    stage_rank = program.graph.stage_rank
    sent: dict[int, list[tuple[TransferName, Transfer]]] = {}
    waited: dict[TransferName, int] = {}
    for index, transfer in (transfers(program, rank) if moved is None else moved).items():
        action = program.actions[rank][index]
        if action.kind in SENDS:
            sent.setdefault(stage_rank[action.peer], []).append((_message(action), transfer))
        elif action.kind in WAITS:
            waited[_message(action)] = index
    released: dict[int, list[Transfer]] = {}
    for peer, messages in sent.items():
        arrived: dict[TransferName, int] = {}
        replies: list[tuple[int, TransferName]] = []
        for index, action in enumerate(program.actions[peer]):
            if action.kind in WAITS and stage_rank[action.peer] == rank:
                arrived[_message(action)] = index
            elif action.kind in SENDS and stage_rank[action.peer] == rank:
                replies.append((index, _message(action)))
        indices = [index for index, _ in replies]
        for message, transfer in messages:
            after = bisect_right(indices, arrived[message])
            if after < len(replies):
                released.setdefault(waited[replies[after][1]], []).append(transfer)
    return {index: tuple(done) for index, done in released.items()}
