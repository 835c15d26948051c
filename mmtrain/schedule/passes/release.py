"""When a rank may free the buffers that it has sent, derived from the program.

A transport reports late (gloo: only by blocking) that a message has arrived. The program tells earlier: if the receiver
waits for our message and later sends us another one, then our message has arrived once we have waited for that one.
"""

from bisect import bisect_right
from typing import TYPE_CHECKING

from mmtrain.schedule.action import SENDS, TRANSFERS, WAITS, Kind
from mmtrain.schedule.graph import Edge

if TYPE_CHECKING:
    from mmtrain.schedule.passes.lower import Program

Transfer = tuple[Edge, bool]
"""An edge; True for its activation, False for the gradient."""

_FORWARD = frozenset({Kind.SEND_F, Kind.RECV_F, Kind.WAIT_F})
_AT_SOURCE = frozenset({Kind.SEND_F, Kind.RECV_B, Kind.WAIT_B})


def transfers(program: "Program", rank: int) -> dict[int, Transfer]:
    """Index of a send, receive or wait in a rank's list -> its edge and direction."""
    graph = program.graph
    edges: dict[tuple[int, int, int, int], Edge] = {}
    for stage, work in graph.nodes():
        key = (graph.works[work].microbatch, graph.works[work].sub_microbatch)
        for edge in graph.outputs(stage, work):
            edges[stage, edge.target, *key] = edge
    by_index = {}
    for index, action in enumerate(program.actions[rank]):
        if action.kind in TRANSFERS:
            stage, peer = action.stage, action.peer
            source, target = (stage, peer) if action.kind in _AT_SOURCE else (peer, stage)
            edge = edges[source, target, action.microbatch, action.sub_microbatch]
            by_index[index] = (edge, action.kind in _FORWARD)
    return by_index


def releases(program: "Program", rank: int) -> dict[int, tuple[Transfer, ...]]:
    """Index of a wait in this rank's list -> sends of this rank that have arrived after it.

    Sends that no later message acknowledges are absent; they are freed at the end of the step.
    """
    stage_rank = program.graph.stage_rank
    local = transfers(program, rank)
    sent: dict[int, list[Transfer]] = {}
    waited: dict[Transfer, int] = {}
    for index, transfer in local.items():
        action = program.actions[rank][index]
        if action.kind in SENDS:
            sent.setdefault(stage_rank[action.peer], []).append(transfer)
        elif action.kind in WAITS:
            waited[transfer] = index
    released: dict[int, list[Transfer]] = {}
    for peer, messages in sent.items():
        arrived: dict[Transfer, int] = {}
        replies: list[tuple[int, Transfer]] = []
        for index, transfer in transfers(program, peer).items():
            action = program.actions[peer][index]
            if stage_rank[action.peer] != rank:
                continue
            if action.kind in WAITS:
                arrived[transfer] = index
            elif action.kind in SENDS:
                replies.append((index, transfer))
        indices = [index for index, _ in replies]
        for transfer in messages:
            after = bisect_right(indices, arrived[transfer])
            if after < len(replies):
                released.setdefault(waited[replies[after][1]], []).append(transfer)
    return {index: tuple(done) for index, done in released.items()}
