"""Annealing on the orders and options of a finished plan, without a decoder.

A decoder's plans start what is admitted and can start, and options are chosen for the seconds of each rank. The best
plan may let a rank idle, or give a rank that nobody waits for slower options. Moves here shift one action in its rank's
order, or change one option; what deadlocks or does not fit is not accepted. Such a try costs a fraction of a decoded
one.
"""

from typing import Any, NamedTuple

import numpy as np

from mmtrain.planner.search.kernels.arrays import (
    ALONE,
    HELD,
    HELD_W,
    KIND,
    NEEDS_B,
    RANK,
    B,
    F,
    I,
    Instance,
    W,
    Workspace,
)
from mmtrain.planner.search.kernels.compiler import entry, inner, part, small
from mmtrain.planner.search.kernels.random_numbers import below, uniform

BUSY = 0.02
"""Weight of the mean busy seconds of a rank beside the makespan: of plans as long, one with faster options has room for
further moves."""
NO_SLOT = 2**32 - 1
REACH = 8
"""Places by which most moves shift an action."""


class Timing(NamedTuple):
    """When the actions of a plan end, by their number; what a change has to visit; and how to take it back."""

    place: Any
    """[4 n] u4: place of an action in the order of its rank."""
    slot: Any
    """[4 n] u4: its place in `Workspace.sequence`."""
    end: Any
    """[4 n] f8"""
    backward: Any
    """[n] u4: the action from which the gradient of a node leaves: its B or I; 0: there is none."""
    dirty: Any
    """[3 n] u1 by slot: what may end at another time."""
    changed: Any
    """[3 n] u4: actions that do."""
    before: Any
    """[3 n] f8: when they ended."""


@small
def _growth(p: Instance, option: Any, action: Any) -> float:
    """Bytes that an action leaves held, less those that it frees."""
    kind = action & 3
    if p.node[action >> 2, NEEDS_B] == 0:
        return 0.0
    if kind == F:
        return float(p.option[option, HELD])
    if kind == B:
        return float(-p.option[option, HELD])
    if kind == I:
        return float(p.option[option, HELD_W] - p.option[option, HELD])
    return float(-p.option[option, HELD_W])


@part
def _fits(p: Instance, w: Workspace, rank: int) -> bool:
    """Whether a rank's order with its options keeps the limit."""
    held, fits = 0.0, True
    if p.room[rank] < np.inf:
        for k in range(w.length[rank]):
            action = w.order[rank, k]
            held += _growth(p, w.option[action >> 2], action)
            fits = fits and held <= p.room[rank]
    return fits


@small
def _seconds(p: Instance, option: Any, kind: Any) -> float:
    if kind == F:
        return float(p.option[option, 0])
    if kind == W:
        return float(p.option[option, ALONE])
    return float(p.option[option, 1] + (p.option[option, 2] if kind == B else 0.0))


@small
def _end(p: Instance, w: Workspace, t: Timing, action: Any) -> float:
    """When an action ends, from those that it waits for; -1: one of them has no time yet."""
    i, kind, start = action >> 2, action & 3, 0.0
    rank, place = p.node[i, RANK], t.place[action]
    if place > 0:
        start = t.end[w.order[rank, place - 1]]
    if kind == F:
        for e in range(p.ins_start[i], p.ins_start[i + 1]):
            sent = t.end[4 * p.ins[e, 0]]
            start = max(start, sent + p.ins_lag[e]) if sent >= 0.0 and start >= 0.0 else -1.0
    elif kind != W:
        for e in range(p.outs_start[i], p.outs_start[i + 1]):
            if p.outs[e, 1]:
                sent = t.end[t.backward[p.outs[e, 0]]]
                start = max(start, sent + p.outs_lag[e]) if sent >= 0.0 and start >= 0.0 else -1.0
    return start + _seconds(p, w.option[i], kind) if start >= 0.0 else -1.0


@small
def _latest(w: Workspace, t: Timing) -> float:
    latest = 0.0
    for rank in range(w.time.size):
        if w.length[rank] > 0:
            latest = max(latest, t.end[w.order[rank, w.length[rank] - 1]])
    return latest


@inner
def _time_all(p: Instance, w: Workspace, t: Timing) -> float:
    """The makespan of the orders in a workspace with its options, inf if they deadlock. Sets the timing, and the
    sequence of the actions."""
    at, done, num_actions = w.pending_span, 0, 0
    at[:] = 0
    t.end[:] = -1.0
    for rank in range(w.time.size):
        num_actions += w.length[rank]
        for k in range(w.length[rank]):
            action = w.order[rank, k]
            t.place[action] = k
            if action & 3 == B or action & 3 == I:
                t.backward[action >> 2] = action
    before = -1
    while before < done:
        before = done
        for rank in range(w.time.size):
            while at[rank, 0] < w.length[rank]:
                action = w.order[rank, at[rank, 0]]
                end = _end(p, w, t, action)
                if end < 0.0:
                    break
                t.end[action] = end
                at[rank, 0] += 1
                done += 1
    if done < num_actions:
        return np.inf
    _sort(p, w, t)
    return float(_latest(w, t))


@part
def _has_inputs(p: Instance, t: Timing, action: Any) -> bool:
    """Whether all that an action needs from other ranks has a slot already."""
    i, kind, has = action >> 2, action & 3, True
    if kind == F:
        for e in range(p.ins_start[i], p.ins_start[i + 1]):
            has = has and t.slot[4 * p.ins[e, 0]] != NO_SLOT
    elif kind != W:
        for e in range(p.outs_start[i], p.outs_start[i + 1]):
            has = has and (p.outs[e, 1] == 0 or t.slot[t.backward[p.outs[e, 0]]] != NO_SLOT)
    return bool(has)


@part
def _sort(p: Instance, w: Workspace, t: Timing) -> None:
    """Sets the sequence to the order of the actions' ends, of several that end at once each after those it needs."""
    at = w.pending_span
    at[:] = 0
    t.slot[:] = NO_SLOT
    slot = 0
    while True:
        first, least = -1, np.inf
        for rank in range(w.time.size):
            if at[rank, 0] < w.length[rank]:
                action = w.order[rank, at[rank, 0]]
                if t.end[action] < least and _has_inputs(p, t, action):
                    first, least = rank, t.end[action]
        if first < 0:
            break
        action = w.order[first, at[first, 0]]
        at[first, 0] += 1
        w.sequence[slot] = action
        t.slot[action] = slot
        slot += 1


@small
def _mark(t: Timing, action: Any, last: int) -> int:
    """Has an action visited; the last slot to visit."""
    t.dirty[t.slot[action]] = 1
    return int(max(last, t.slot[action]))


@inner
def _propagate(p: Instance, w: Workspace, t: Timing, slot: int, last: int) -> int:
    """Times the marked actions anew, and those that they change; how many have changed.

    Args: slot, last: of the first and of the last that is marked.
    """
    num_changed = 0
    while slot <= last:
        if t.dirty[slot]:
            t.dirty[slot] = 0
            action = w.sequence[slot]
            i, kind, end = action >> 2, action & 3, _end(p, w, t, action)
            if end != t.end[action]:
                t.changed[num_changed], t.before[num_changed] = action, t.end[action]
                num_changed += 1
                t.end[action] = end
                rank, following = p.node[i, RANK], t.place[action] + 1
                if following < w.length[rank]:
                    last = _mark(t, w.order[rank, following], last)
                if kind == F:
                    for e in range(p.outs_start[i], p.outs_start[i + 1]):
                        last = _mark(t, 4 * p.outs[e, 0], last)
                elif kind != W:
                    for e in range(p.ins_start[i], p.ins_start[i + 1]):
                        if p.ins[e, 1]:
                            last = _mark(t, t.backward[p.ins[e, 0]], last)
        slot += 1
    return num_changed


@part
def _take_back(t: Timing, num_changed: int) -> None:
    for k in range(num_changed - 1, -1, -1):
        t.end[t.changed[k]] = t.before[k]


@part
def _move(w: Workspace, t: Timing, rank: int, source: int, target: int) -> bool:
    """Moves an action of a rank to another place of its order, and in the sequence those that it passes to the slots of
    the others; whether it passes no other action of its node."""
    action, allowed = w.order[rank, source], True
    slot = t.slot[action]
    step = 1 if target > source else -1
    for place in range(source, target, step):
        other = w.order[rank, place + step]
        w.order[rank, place] = other
        t.place[other] = place
        freed = t.slot[other]
        t.slot[other] = slot
        w.sequence[slot] = other
        slot = freed
        allowed = allowed and other >> 2 != action >> 2
    w.order[rank, target] = action
    t.place[action] = target
    t.slot[action] = slot
    w.sequence[slot] = action
    return allowed


@part
def _in_sequence(p: Instance, w: Workspace, t: Timing, rank: int, low: int, high: int) -> bool:
    """Whether the actions at some places of a rank are in slots behind those that they need, and before those that need
    them."""
    right = True
    for k in range(low, high + 1):
        action = w.order[rank, k]
        i, kind, slot = action >> 2, action & 3, t.slot[action]
        if kind == F:
            for e in range(p.ins_start[i], p.ins_start[i + 1]):
                right = right and t.slot[4 * p.ins[e, 0]] < slot
            for e in range(p.outs_start[i], p.outs_start[i + 1]):
                right = right and t.slot[4 * p.outs[e, 0]] > slot
        elif kind != W:
            for e in range(p.outs_start[i], p.outs_start[i + 1]):
                right = right and (p.outs[e, 1] == 0 or t.slot[t.backward[p.outs[e, 0]]] < slot)
            for e in range(p.ins_start[i], p.ins_start[i + 1]):
                right = right and (p.ins[e, 1] == 0 or t.slot[t.backward[p.ins[e, 0]]] > slot)
    return right


@part
def _keep(w: Workspace, best_order: Any, best_option: Any) -> None:
    for rank in range(w.time.size):
        for place in range(w.length[rank]):
            best_order[rank, place] = w.order[rank, place]
    for i in range(w.option.size):
        best_option[i] = w.option[i]


@part
def _busy(p: Instance, w: Workspace, i: Any, whole: bool) -> float:
    """Seconds of all actions of a node."""
    row = p.option[w.option[i]]
    return float(row[0] + row[1] + (row[2] if whole else row[ALONE]))


@entry
def polish(
    p: Instance, w: Workspace, t: Timing, best_order: Any, best_option: Any, best: float, random: Any, tries: int,
    hot: float, cold: float,
) -> float:  # fmt: skip
    """Anneals the plan in a workspace, which has no blocks and no joined backwards; the makespan of the best.

    Args: best_order, best_option: as `Workspace.order` and `option`: the best plan before, and after it. best: its
        makespan. random: [1] u8 state of the generator. hot, cold: temperature at the start and at the end, as a part
        of the makespan.
    """
    num_ranks, num_nodes = w.time.size, p.node.shape[0]
    makespan, busy = _time_all(p, w, t), 0.0
    for i in range(num_nodes):
        busy += _busy(p, w, i, t.backward[i] & 3 == B)
    for number in range(tries):
        cost = makespan + BUSY * busy / num_ranks
        most = cost - hot * (cold / hot) ** (number / tries) * best * np.log(1.0 - uniform(random))
        if uniform(random) < 0.5:
            i = below(random, num_nodes)
            rank, listed = p.node[i, RANK], p.node[i, KIND]
            first, count = p.first[listed], p.first[listed + 1] - p.first[listed]
            if count < 2:
                continue
            before, whole = w.option[i], t.backward[i] & 3 == B
            busy_then = busy - _busy(p, w, i, whole)
            w.option[i] = first + (before - first + 1 + below(random, count - 1)) % count
            busy_then += _busy(p, w, i, whole)
            if not _fits(p, w, rank):
                w.option[i] = before
                continue
            slot, last = int(t.slot[4 * i]), _mark(t, 4 * i, 0)
            if t.backward[i] > 0:
                last = _mark(t, t.backward[i], last)
                if not whole:
                    last = _mark(t, 4 * i + W, last)
            num_changed = _propagate(p, w, t, slot, last)
            makespan_then = _latest(w, t)
            if makespan_then + BUSY * busy_then / num_ranks > most:
                w.option[i] = before
                _take_back(t, num_changed)
                continue
            busy = busy_then
        else:
            rank = below(random, num_ranks)
            length = int(w.length[rank])
            if length < 2:
                continue
            source, reach = below(random, length), length if uniform(random) < 0.1 else REACH
            far = 1 + below(random, reach)
            target = source + far if uniform(random) < 0.5 else source - far
            target = min(length - 1, max(0, target))
            low, high = min(source, target), max(source, target)
            if not (_move(w, t, rank, source, target) and _fits(p, w, rank)):
                _move(w, t, rank, target, source)
                continue
            if _in_sequence(p, w, t, rank, low, high):
                slot, last = int(t.slot[w.order[rank, low]]), 0
                for k in range(low, min(high + 2, length)):
                    last = _mark(t, w.order[rank, k], last)
                num_changed = _propagate(p, w, t, slot, last)
                makespan_then = _latest(w, t)
                if makespan_then + BUSY * busy / num_ranks > most:
                    _take_back(t, num_changed)
                    _move(w, t, rank, target, source)
                    continue
            else:
                _move(w, t, rank, target, source)
                continue
        makespan = makespan_then
        if makespan < best:
            best = makespan
            _keep(w, best_order, best_option)
    return float(best)
