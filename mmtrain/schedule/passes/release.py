"""When a rank may free the buffers that it has sent, derived from the program.

A transport reports late (gloo: only by blocking) that a message has arrived. The program tells earlier: if the receiver
waits for our message and later sends us another one, then our message has arrived once we have waited for that one.
"""

from bisect import bisect_right
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mmtrain.schedule.action import SENDS, TRANSFERS, WAITS, Action, Kind
from mmtrain.schedule.graph import Edge

if TYPE_CHECKING:
    from mmtrain.schedule.passes.lower import Program

Transfer = tuple[Edge, bool]
"""An edge; True for its activation, False for the gradient."""
Edges = Mapping[tuple[int, int, int, int], Edge]
"""(source, target, microbatch, sub_microbatch) -> edge."""

_FORWARD = frozenset({Kind.SEND_F, Kind.RECV_F, Kind.WAIT_F})
_AT_SOURCE = frozenset({Kind.SEND_F, Kind.RECV_B, Kind.WAIT_B})


def transfers(program: "Program", rank: int) -> dict[int, Transfer]:
    """Index of a send, receive or wait in a rank's list -> its edge and direction."""
    edges = program.edges
    return {
        index: _transfer(edges, action)
        for index, action in enumerate(program.actions[rank])
        if action.kind in TRANSFERS
    }


def _transfer(edges: Edges, action: Action) -> Transfer:
    kind, stage, peer = action.kind, action.stage, action.peer
    ends = (stage, peer) if kind in _AT_SOURCE else (peer, stage)
    return edges[*ends, action.microbatch, action.sub_microbatch], kind in _FORWARD


def releases(
    program: "Program", rank: int, moved: Mapping[int, Transfer] | None = None
) -> dict[int, tuple[Transfer, ...]]:
    """Index of a wait in this rank's list -> sends of this rank that have arrived after it.

    Sends that no later message acknowledges are absent; they are freed at the end of the step.

    Args: moved: `transfers` of the rank; None: they are looked up here.
    """
    stage_rank = program.graph.stage_rank
    sent: dict[int, list[Transfer]] = {}
    waited: dict[Transfer, int] = {}
    for index, transfer in (transfers(program, rank) if moved is None else moved).items():
        action = program.actions[rank][index]
        if action.kind in SENDS:
            sent.setdefault(stage_rank[action.peer], []).append(transfer)
        elif action.kind in WAITS:
            waited[transfer] = index
    released: dict[int, list[Transfer]] = {}
    for peer, messages in sent.items():
        arrived: dict[Transfer, int] = {}
        replies: list[tuple[int, Transfer]] = []
        for index, action in enumerate(program.actions[peer]):
            if action.kind in WAITS and stage_rank[action.peer] == rank:
                arrived[_transfer(program.edges, action)] = index
            elif action.kind in SENDS and stage_rank[action.peer] == rank:
                replies.append((index, _transfer(program.edges, action)))
        indices = [index for index, _ in replies]
        for transfer in messages:
            after = bisect_right(indices, arrived[transfer])
            if after < len(replies):
                released.setdefault(waited[replies[after][1]], []).append(transfer)
    return {index: tuple(done) for index, done in released.items()}
