"""What a rank does between its actions, from measured timelines: seconds of a dispatch and of messages. Pure."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from mmtrain.costs.overheads import DISPATCH, Overheads
from mmtrain.costs.profile.fits import non_negative_least_squares
from mmtrain.schedule.action import COMPUTE, NOT_COMPUTE, RECEIVES, RESULT_OF, SENDS, WAITS, Action, Kind
from mmtrain.schedule.graph import Edge
from mmtrain.schedule.items import Result
from mmtrain.schedule.passes.lower import Program

_KEPT = 0.9
"""Part of the pauses that counts, the shortest: what else runs on the machine only adds time."""

Rows = Sequence[tuple[Action, float, float]]
"""The compute actions of a rank in its order, each with start and end."""


class Pause(NamedTuple):
    """The time before a compute action in which its rank did not wait for another one."""

    kind: Kind
    sends: int
    """Messages that were sent in it."""
    receives: int
    """Receives that were posted in it."""
    waits: int
    """Messages that the action takes."""
    seconds: float
    """The seconds since the end of the action before; if the rank was `late`, since the message had arrived."""
    late: bool
    """Whether its last message arrived after the end of the action before."""


def pauses(program: Program, rows: Sequence[Rows], transfer_s: Callable[[Edge], float]) -> Iterator[Pause]:
    """The pauses of one execution of a program on all pipeline ranks, without those before a rank's first action and
    before blocks.

    Args: rows: [pp_rank], on one clock. transfer_s: seconds of the transfer over an edge.
    """
    graph = program.graph
    ends: dict[Result, float] = {}
    for entry, _, end in (row for local_rows in rows for row in local_rows):
        for action in entry.parts:
            if action.kind in RESULT_OF:
                ends[RESULT_OF[action.kind], action.stage, graph.work_of(action)] = end
    for actions, local_rows in zip(program.actions, rows, strict=True):
        measured = iter(local_rows)
        sends = receives = waits = 0
        last: float | None = None
        for action in actions:
            if action.kind in NOT_COMPUTE:
                sends += action.kind in SENDS
                receives += action.kind in RECEIVES
                waits += action.kind in WAITS
                continue
            ran, start, end = next(measured)
            assert ran == action, "the rows are not those of the program"
            arrivals = [
                ends[result] + transfer_s(edge)
                for part in action.parts
                for result, edge in graph.needs(part.kind, part.stage, graph.work_of(part))
                if edge is not None and not graph.is_local(edge)
            ]
            if last is not None and action.kind in COMPUTE:
                late = max(arrivals, default=last) > last
                yield Pause(action.kind, sends, receives, waits, start - max([last, *arrivals]), late)
            sends = receives = waits = 0
            last = end


def overheads_between(observed: Sequence[Pause]) -> Overheads:
    """The overheads outside of actions that explain pauses best: least squares without the largest residuals.

    An action is charged what its rank pays for it anywhere; so is a message, although its receive is posted before.
    """
    in_time = [pause for pause in observed if not pause.late]
    if not in_time:
        return Overheads()
    table = np.array(
        [[p.kind is kind for kind in DISPATCH] + [p.sends, p.receives, p.waits] for p in in_time], np.float64
    )
    seconds = np.array([pause.seconds for pause in in_time])
    equal, group = np.unique(table, axis=0, return_inverse=True)
    medians = np.array([np.median(seconds[group.ravel() == i]) for i in range(len(equal))])
    rough = non_negative_least_squares(equal, medians)
    kept = np.argsort(seconds - table @ rough, kind="stable")[: max(1, round(_KEPT * len(seconds)))]
    weights = non_negative_least_squares(table[kept], seconds[kept]).tolist()
    send_s, receive_s = weights[4], weights[5] + weights[6]
    base = dict(zip(DISPATCH, weights[:4], strict=True))
    known = Overheads(**dict(zip(DISPATCH.values(), weights[:4], strict=True)), send_s=send_s, receive_s=receive_s)
    late = [p.seconds - base[p.kind] - send_s - p.waits * receive_s for p in observed if p.late]
    return replace(known, message_s=max(0.0, _shortest(late))) if late else known


def overheads_inside(excess: Sequence[tuple[Kind, float]]) -> Overheads:
    """The overheads inside of actions. Args: excess: kind of each action, and seconds beyond its compute."""
    by_field = {name: [seconds for k, seconds in excess if k is kind] for kind, name in DISPATCH.items()}
    return Overheads(**{name: max(0.0, _shortest(values)) for name, values in by_field.items() if values})


def _shortest(values: Sequence[float]) -> float:
    """The mean of the shortest values."""
    return float(np.mean(sorted(values)[: max(1, round(_KEPT * len(values)))]))
