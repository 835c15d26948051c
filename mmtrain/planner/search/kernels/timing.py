"""When the actions of a plan end, what waits for them and what a rank has to spare, as single changes need them."""

from typing import Any, NamedTuple

import numpy as np

from mmtrain.planner.search.kernels.arrays import ALONE, HELD, HELD_W, NEEDS_B, RANK, B, F, I, Instance, W, Workspace
from mmtrain.planner.search.kernels.compiler import inner, part, small, trailing_zeros

EPSILON = 1e-12
"""Relative error of sums of seconds, in other orders."""


class Timing(NamedTuple):
    """When the actions of a plan end, by their number; what a change has to visit; and how to take it back."""

    place: Any
    """[4 n] u4: place of an action in the order of its rank."""
    slot: Any
    """[4 n] i4: its place in `Workspace.sequence`; below 0: it has none yet."""
    took: Any
    """[4 n] f8: its seconds."""
    end: Any
    """[4 n] f8: when it ends, seconds."""
    pull: Any
    """[4 n] f8: by how much what is minimised grows with the end of each action, but for the makespan."""
    tail: Any
    """[4 n] f8: seconds from its end to the end of all that waits for it."""
    spare: Any
    """[R, m] f8: bytes up to the limit while each action of a rank runs; inf: there is no limit."""
    backward: Any
    """[n] u4: the action from which the gradient of a node leaves: its B or I; 0: there is none."""
    dirty: Any
    """[words] u8: bits by slot: what may end at another time; by slot from the last one: what may have another tail."""
    changed: Any
    """[3 n] u4: actions that end at another time."""
    before: Any
    """[3 n] f8: when they ended."""


@small
def signed(number: Any) -> Any:
    """An unsigned number as a signed one: of both, numba makes a float."""
    return np.int64(number)


@small
def growth_of(p: Instance, option: Any, action: Any) -> float:
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


@small
def passing_of(p: Instance, option: Any, action: Any) -> float:
    """Bytes that an action holds only while it runs: all of a forward without a backward."""
    return float(p.option[option, HELD] if p.node[action >> 2, NEEDS_B] == 0 else 0.0)


@part
def free_after(p: Instance, w: Workspace, t: Timing, rank: int, place: int) -> float:
    """Bytes up to the limit after the action at a place of a rank; below 0: before the first one."""
    if place < 0:
        return float(p.limit[rank] * (1 + EPSILON))
    action = w.order[rank, place]
    return float(t.spare[rank, place] + passing_of(p, w.option[action >> 2], action))


@part
def set_spare(p: Instance, w: Workspace, t: Timing, rank: int, low: int, high: int) -> None:
    """Sets what is spare at some places of a rank. Args: high: behind the last of them."""
    if p.limit[rank] < np.inf:
        free = free_after(p, w, t, rank, low - 1)
        for k in range(low, high):
            action = w.order[rank, k]
            free -= growth_of(p, w.option[action >> 2], action)
            t.spare[rank, k] = free - passing_of(p, w.option[action >> 2], action)


@small
def seconds_taken(p: Instance, option: Any, kind: Any) -> float:
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
    return start + t.took[action] if start >= 0.0 else -1.0


@small
def _tail(p: Instance, w: Workspace, t: Timing, action: Any) -> float:
    """Seconds from an action's end to the end of all that waits for it."""
    i, kind, tail = action >> 2, action & 3, 0.0
    rank, following = p.node[i, RANK], t.place[action] + 1
    if following < w.length[rank]:
        other = w.order[rank, following]
        tail = t.took[other] + t.tail[other]
    if kind == F:
        for e in range(p.outs_start[i], p.outs_start[i + 1]):
            target = 4 * p.outs[e, 0]
            tail = max(tail, p.outs_lag[e] + t.took[target] + t.tail[target])
    elif kind != W:
        for e in range(p.ins_start[i], p.ins_start[i + 1]):
            if p.ins[e, 1]:
                source = t.backward[p.ins[e, 0]]
                tail = max(tail, p.ins_lag[e] + t.took[source] + t.tail[source])
    return float(tail)


@small
def latest_end(w: Workspace, t: Timing) -> float:
    latest = 0.0
    for rank in range(w.time.size):
        if w.length[rank] > 0:
            latest = max(latest, t.end[w.order[rank, w.length[rank] - 1]])
    return latest


@inner
def time_all(p: Instance, w: Workspace, t: Timing) -> float:
    """The makespan of the orders in a workspace with its options, inf if they deadlock. Sets the timing, and the
    sequence of the actions."""
    at, done, num_actions = w.pending_span, 0, 0
    at[:] = 0
    t.end[:] = -1.0
    t.tail[:] = 0.0
    t.spare[:] = np.inf
    for rank in range(w.time.size):
        num_actions += w.length[rank]
        set_spare(p, w, t, rank, 0, w.length[rank])
        for k in range(w.length[rank]):
            action = w.order[rank, k]
            t.place[action] = k
            t.took[action] = seconds_taken(p, w.option[action >> 2], action & 3)
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
    sort(p, w, t)
    for slot in range(num_actions - 1, -1, -1):
        t.tail[w.sequence[slot]] = _tail(p, w, t, w.sequence[slot])
    return float(latest_end(w, t))


@part
def _has_inputs(p: Instance, t: Timing, action: Any) -> bool:
    """Whether all that an action needs from other ranks has a slot already."""
    i, kind, has = action >> 2, action & 3, True
    if kind == F:
        for e in range(p.ins_start[i], p.ins_start[i + 1]):
            has = has and t.slot[4 * p.ins[e, 0]] >= 0
    elif kind != W:
        for e in range(p.outs_start[i], p.outs_start[i + 1]):
            has = has and (p.outs[e, 1] == 0 or t.slot[t.backward[p.outs[e, 0]]] >= 0)
    return bool(has)


@part
def sort(p: Instance, w: Workspace, t: Timing) -> None:
    """Sets the sequence to the order of the actions' ends, of several that end at once each after those it needs."""
    at = w.pending_span
    at[:] = 0
    t.slot[:] = -1
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
def mark(t: Timing, slot: int) -> None:
    """Has a slot visited."""
    t.dirty[slot >> 6] |= np.uint64(1) << np.uint64(slot & 63)


@inner
def propagate(
    p: Instance, w: Workspace, t: Timing, first: int, last: int, behind: int, limit: float
) -> tuple[int, bool]:
    """Times the marked actions anew, and those that they change.

    Args: first, last: the slots that are marked. behind: the last slot of what has changed: tails after it are right.
        limit: of the makespan.
    Returns: (how many end at another time; whether the makespan exceeds the limit, where the rest is not timed).
    """
    num_changed, word = 0, first >> 6
    while word <= last >> 6:
        bits = t.dirty[word]
        if bits == 0:
            word += 1
            continue
        t.dirty[word] = bits & (bits - np.uint64(1))
        slot = 64 * word + trailing_zeros(bits)
        action = w.sequence[slot]
        i, kind, end = action >> 2, action & 3, _end(p, w, t, action)
        if end == t.end[action]:
            continue
        t.changed[num_changed], t.before[num_changed] = action, t.end[action]
        num_changed += 1
        t.end[action] = end
        if slot > behind and end + t.tail[action] > limit:
            for k in range(word, (last >> 6) + 1):
                t.dirty[k] = 0
            return num_changed, True
        rank, following = p.node[i, RANK], t.place[action] + 1
        if following < w.length[rank]:
            slot = t.slot[w.order[rank, following]]
            mark(t, slot)
            last = max(last, slot)
        if kind == F:
            for e in range(p.outs_start[i], p.outs_start[i + 1]):
                slot = t.slot[4 * p.outs[e, 0]]
                mark(t, slot)
                last = max(last, slot)
        elif kind != W:
            for e in range(p.ins_start[i], p.ins_start[i + 1]):
                if p.ins[e, 1]:
                    slot = t.slot[t.backward[p.ins[e, 0]]]
                    mark(t, slot)
                    last = max(last, slot)
    return num_changed, latest_end(w, t) > limit


@small
def mark_sources(p: Instance, w: Workspace, t: Timing, action: Any, last: int) -> int:
    """Has those visited, from the last slot, that an action waits for; the last to visit."""
    i, kind, place, behind = action >> 2, action & 3, t.place[action], 64 * t.dirty.size - 1
    if place > 0:
        slot = behind - t.slot[w.order[p.node[i, RANK], place - 1]]
        mark(t, slot)
        last = max(last, slot)
    if kind == F:
        for e in range(p.ins_start[i], p.ins_start[i + 1]):
            slot = behind - t.slot[4 * p.ins[e, 0]]
            mark(t, slot)
            last = max(last, slot)
    elif kind != W:
        for e in range(p.outs_start[i], p.outs_start[i + 1]):
            if p.outs[e, 1]:
                slot = behind - t.slot[t.backward[p.outs[e, 0]]]
                mark(t, slot)
                last = max(last, slot)
    return last


@inner
def propagate_tails(p: Instance, w: Workspace, t: Timing, first: int, last: int) -> None:
    """Sets the tails of the marked actions, and of those that they change. Args: first, last: from the last slot."""
    word, behind = first >> 6, 64 * t.dirty.size - 1
    while word <= last >> 6:
        bits = t.dirty[word]
        if bits == 0:
            word += 1
            continue
        t.dirty[word] = bits & (bits - np.uint64(1))
        action = w.sequence[behind - (64 * word + trailing_zeros(bits))]
        tail = _tail(p, w, t, action)
        if tail != t.tail[action]:
            t.tail[action] = tail
            last = mark_sources(p, w, t, action, last)


@part
def take_back(t: Timing, num_changed: int) -> None:
    for k in range(num_changed - 1, -1, -1):
        t.end[t.changed[k]] = t.before[k]
