"""When a rank may forget what it has sent, read off the program alone.

A transport tells a sender late (gloo: only if asked, by blocking) that its message has arrived. The
program knows earlier: if the receiver waits for our message and later sends something to us, then
whatever we wait for from that later message implies that ours has arrived.
"""

from bisect import bisect_right
from typing import TYPE_CHECKING

from mmtrain.schedule.action import SENDS, TRANSFERS, WAITS, Action, Kind
from mmtrain.schedule.graph import Edge

if TYPE_CHECKING:
    from mmtrain.schedule.lower import Program

Transfer = tuple[Edge, bool]
"""An edge, and whether the activation (True) or its gradient (False) moves over it."""

_FORWARD = frozenset({Kind.SEND_F, Kind.RECV_F, Kind.WAIT_F})


def transfer_of(program: "Program", action: Action) -> Transfer:
    """The edge and direction of a send, receive or wait."""
    graph = program.graph
    at_source = action.kind in (Kind.SEND_F, Kind.RECV_B, Kind.WAIT_B)
    source, target = (action.stage, action.peer) if at_source else (action.peer, action.stage)
    work = graph.work_of(action)
    edge = next(e for e in graph.outputs(source, work) if e.target == target)
    return edge, action.kind in _FORWARD


def releases(program: "Program", rank: int) -> dict[int, tuple[Transfer, ...]]:
    """Index of a wait in this rank's list -> sends of this rank that have surely arrived after it.

    Sends that nothing later acknowledges are absent; they end with the step.
    """
    waits: list[dict[Transfer, int]] = []
    sends: list[dict[int, list[tuple[int, Transfer]]]] = []
    for actions in program.actions:
        waited: dict[Transfer, int] = {}
        sent: dict[int, list[tuple[int, Transfer]]] = {}
        for index, action in enumerate(actions):
            if action.kind not in TRANSFERS:
                continue
            transfer = transfer_of(program, action)
            if action.kind in WAITS:
                waited[transfer] = index
            elif action.kind in SENDS:
                sent.setdefault(program.graph.stage_rank[action.peer], []).append((index, transfer))
        waits.append(waited)
        sends.append(sent)
    found: dict[int, list[Transfer]] = {}
    for peer, messages in sends[rank].items():
        replies = sends[peer].get(rank, [])
        indices = [index for index, _ in replies]
        for _, transfer in messages:
            after = bisect_right(indices, waits[peer][transfer])
            if after < len(replies):
                found.setdefault(waits[rank][replies[after][1]], []).append(transfer)
    return {index: tuple(transfers) for index, transfers in found.items()}
