"""The decoder: from priorities to orders.

Dual queues and alternation are DIP's (arXiv:2504.14145, section 5.2). Admission is not: forwards of a microbatch start
on a rank once all that it will hold there is reserved. Components reserve memory on the ranks in one order, so that the
one that holds memory on the last rank can finish, and each waits only for components that are further along: there is
no deadlock. Where a problem has no such order, the decoder exceeds the reservation, and the choice of options decides
whether the plan fits.
"""

from typing import Any

import numpy as np

from mmtrain.planner.search.kernels.arrays import (
    ALONE,
    BACKWARD,
    BACKWARD_FIRST,
    BRAID,
    COMPONENT,
    CONTENTION,
    COPY_IN,
    COPY_OUT,
    FORWARD,
    FORWARD_EXCHANGE,
    FORWARD_S,
    GAP,
    GROUP,
    HELD,
    HELD_W,
    INPUT_EXCHANGE,
    INPUT_S,
    KIND,
    MEMORY,
    MODULE,
    NEEDS_B,
    NEEDS_F,
    RANK,
    RESERVATION,
    SPLIT,
    SPLITS,
    WAIT,
    WEIGHT_ALONE_S,
    WEIGHT_S,
    B,
    F,
    I,
    Instance,
    W,
    Workspace,
)
from mmtrain.planner.search.kernels.compiler import inner, part, small, trailing_zeros

REACH = 8
"""Backwards that can start, the first in the order of priority, among which a forward looks for that of its block."""
LEAST_S = 1e-12
"""Seconds that a backward is taken to save in a block, at least."""


@inner
def assume(node: Any, first: Any, option: Any, state: Any, footprint: Any, load: Any, decoder: Any) -> None:
    """Sets the seconds and bytes that the decoder assumes."""
    footprint[:] = 0.0
    load[:] = 0.0
    modules = (decoder.size - MEMORY) >> 1
    for i in range(node.shape[0]):
        memory, speed = decoder[MEMORY + node[i, MODULE]], decoder[MEMORY + modules + node[i, MODULE]]
        fast, smallest = first[node[i, KIND]], first[node[i, KIND] + 1] - 1
        for column in range(4):
            state[i, column] = (1 - speed) * option[fast, column] + speed * option[smallest, column]
        state[i, HELD] = (1 - memory) * option[fast, HELD] + memory * option[smallest, HELD]
        state[i, HELD_W] = (1 - memory) * option[fast, HELD_W] + memory * option[smallest, HELD_W]
        load[0, node[i, RANK]] += state[i, 0]
        if node[i, NEEDS_B]:
            load[0, node[i, RANK]] += state[i, 1] + state[i, 2]
            footprint[node[i, RESERVATION]] += state[i, HELD]


@small
def _put(ready: Any, busy: Any, first: Any, queue: int, position: int) -> None:
    """Puts a position into a queue."""
    word = position >> 6
    ready[queue, word] |= np.uint64(1) << np.uint64(position & 63)
    busy[queue, word >> 6] |= np.uint64(1) << np.uint64(word & 63)
    first[queue] = min(first[queue], position)


@small
def _remove(ready: Any, busy: Any, first: Any, queue: int, position: int) -> None:
    """Removes a position from a queue and finds the first one that remains; there is always the last one."""
    word = position >> 6
    bits = ready[queue, word] & ~(np.uint64(1) << np.uint64(position & 63))
    ready[queue, word] = bits
    busy[queue, word >> 6] &= ~(np.uint64(bits == 0) << np.uint64(word & 63))
    page = 0
    while busy[queue, page] == 0:
        page += 1
    word = 64 * page + trailing_zeros(busy[queue, page])
    first[queue] = 64 * word + trailing_zeros(ready[queue, word])


@small
def _next(ready: Any, queue: int, position: int) -> int:
    """The next position in a queue; the given one is not the last."""
    position += 1
    word = position >> 6
    bits = ready[queue, word] >> np.uint64(position & 63)
    while bits == 0:
        word += 1
        position = 64 * word
        bits = ready[queue, word]
    return int(position + trailing_zeros(bits))


@small
def _has_room(footprint: Any, reserved: Any, room: Any, reservation: int, rank: int) -> bool:
    """Whether a component can reserve its memory on a rank; one larger than the whole room is admitted alone."""
    amount = footprint[reservation]
    return bool(amount <= room[rank] - reserved[rank] or reserved[rank] <= 1e-9 * amount)


@small
def _insert(pending_at: Any, pending: Any, pending_span: Any, rank: int, action: int, arrival: float) -> None:
    """Puts an action into a rank's list of those that have not arrived yet."""
    index = pending_span[rank, 1]
    pending_span[rank, 1] = index + 1
    pending_at[rank, index + 1] = np.inf
    begin = pending_span[rank, 0]
    while index > begin and pending_at[rank, index - 1] > arrival:
        pending_at[rank, index] = pending_at[rank, index - 1]
        pending[rank, index] = pending[rank, index - 1]
        index -= 1
    pending_at[rank, index] = arrival
    pending[rank, index] = action


@small
def _overlapped_s(compute_s: float, exchange_s: float, contention: float) -> float:
    return max(compute_s, exchange_s) + contention * min(compute_s, exchange_s)


@small
def block_s(load: Any, forward: int, backward: int, kind: int) -> float:
    """Seconds of a block of F and B or W with the given options, by the rule of `Load`."""
    contention = max(load[forward, CONTENTION], load[backward, CONTENTION])
    exchange_s, input_s, weight_s = load[forward, FORWARD_EXCHANGE], load[backward, INPUT_S], load[backward, WEIGHT_S]
    input_exchange_s, copies_s = load[backward, INPUT_EXCHANGE], max(load[forward, COPY_OUT], load[backward, COPY_IN])
    if kind == W:
        input_s, input_exchange_s, weight_s = 0.0, 0.0, load[backward, WEIGHT_ALONE_S]
        copies_s = load[forward, COPY_OUT]
    under_forward = min(max(exchange_s - input_s, 0.0), weight_s)
    compute_s = load[forward, FORWARD_S] + (weight_s - under_forward)
    first_s = _overlapped_s(input_s + under_forward, exchange_s, contention)
    return float(max(first_s + _overlapped_s(compute_s, input_exchange_s, contention), copies_s))


@small
def _saved_s(p: Instance, w: Workspace, decoder: Any, forward: Any, backward: Any, kind: int) -> float:
    """Seconds that the decoder assumes a block of two nodes to save, with the mean speed of their modules."""
    one, other = p.node[forward, KIND], p.node[backward, KIND]
    speeds = MEMORY + ((decoder.size - MEMORY) >> 1)
    speed = 0.5 * (decoder[speeds + p.node[forward, MODULE]] + decoder[speeds + p.node[backward, MODULE]])
    fast_s = block_s(p.load, p.first[one], p.first[other], kind)
    slow_s = block_s(p.load, p.first[one + 1] - 1, p.first[other + 1] - 1, kind)
    alone_s = w.state[forward, 0] + seconds_of(w.state, backward, kind)
    return float(alone_s - ((1 - speed) * fast_s + speed * slow_s))


@small
def seconds_of(seconds: Any, i: Any, kind: int) -> float:
    """Seconds of a B or W. Args: seconds: [i, 4] of F, I, W in B and W alone."""
    return float(seconds[i, ALONE] if kind == W else seconds[i, 1] + seconds[i, 2])


@small
def latest(time: Any) -> float:
    latest = 0.0
    for rank in range(time.size):
        latest = max(latest, time[rank])
    return latest


@part
def _reset(p: Instance, w: Workspace, at: Any, backward_first: bool, queued: Any, none: int) -> None:
    """Empties the workspace, and queues the nodes that need nothing. Args: none: the position behind all others."""
    node = p.node
    w.ready[:] = 0
    w.busy[:] = 0
    for queue in range(w.first.size):
        w.first[queue] = none
        _put(w.ready, w.busy, w.first, queue, none)
    w.admitted[:] = 0
    w.admitted[w.admitted.size - 1] = 1
    w.reserved[:] = 0.0
    w.time[:] = 0.0
    w.next_start[:] = 0.0
    w.backward_next[:] = backward_first
    w.pending_at[:, 0] = np.inf
    w.pending_span[:] = 0
    w.weights_span[:] = 0
    w.length[:] = 0
    w.inputs_s[:] = 0.0
    w.joined[:] = 0
    w.braided[:] = 0
    w.joinable[:] = 1
    for rank in range(w.time.size):
        w.load[1, rank] = w.load[0, rank]
    for i in range(node.shape[0]):
        w.missing[i, FORWARD], w.missing[i, BACKWARD] = node[i, NEEDS_F], node[i, NEEDS_B]
    for k in range(p.entries.size):
        i = p.entries[k]
        waits = 1 - w.admitted[node[i, RESERVATION]]
        _put(w.ready, w.busy, w.first, 3 * node[i, RANK] + waits, at[FORWARD, node[i, GROUP]])
        queued[FORWARD, node[i, GROUP], node[i, RANK], 0] = 0


@part
def _receive(p: Instance, w: Workspace, at: Any, rank: Any, now: float, queued: Any, done: int) -> None:
    """Moves the actions whose inputs have arrived by now into their queues."""
    node, pending_at, pending, admitted = p.node, w.pending_at, w.pending, w.admitted
    arrived = w.pending_span[rank, 0]
    while pending_at[rank, arrived] <= now:
        action = pending[rank, arrived]
        i, direction = action >> 2, action & 1
        waits = max(2 * direction, 1 - admitted[node[i, RESERVATION]])
        _put(w.ready, w.busy, w.first, 3 * rank + waits, at[direction, node[i, GROUP]])
        queued[direction, node[i, GROUP], rank, 0] = done
        arrived += 1
    w.pending_span[rank, 0] = arrived


@part
def _next_forward(p: Instance, w: Workspace, group_at: Any, rank: Any) -> tuple[int, int]:
    """The position of a rank's next forward, and whether its memory must be reserved first."""
    first, queue = w.first, 3 * rank
    position, waits = first[queue], 0
    if first[queue + 1] < position:
        reservation = p.node[p.node_at[rank, group_at[FORWARD, first[queue + 1]]], RESERVATION]
        if _has_room(w.footprint, w.reserved, p.room, reservation, rank):
            position, waits = first[queue + 1], 1
    return position, waits


@part
def _run_forward(
    p: Instance, w: Workspace, at: Any, group_at: Any, rank: Any, position: int, waits: int, block_end: float,
    queued: Any, done: int,
) -> Any:  # fmt: skip
    """Runs a forward; the action.

    Args: position: of its group. waits: whether its memory must be reserved. block_end: of its block; 0: it has none.
    """
    node, outs, missing, inputs_s, time, next_start = p.node, p.outs, w.missing, w.inputs_s, w.time, w.next_start
    ready, busy, first, queue = w.ready, w.busy, w.first, 3 * rank
    i = p.node_at[rank, group_at[FORWARD, position]]
    _remove(ready, busy, first, queue + waits, position)
    queued[FORWARD, group_at[FORWARD, position], rank, 1] = done
    if waits:
        reservation = node[i, RESERVATION]
        w.admitted[reservation] = 1
        w.reserved[rank] += w.footprint[reservation]
        for k in range(p.members_start[reservation], p.members_start[reservation + 1]):
            other = at[FORWARD, node[p.members[k], GROUP]]
            if ready[queue + 1, other >> 6] >> np.uint64(other & 63) & np.uint64(1):
                _remove(ready, busy, first, queue + 1, other)
                _put(ready, busy, first, queue, other)
    end = max(block_end, max(time[rank], inputs_s[i, FORWARD]) + w.state[i, 0])
    w.backward_next[rank] = 1
    time[rank] = end
    w.load[1, rank] -= w.state[i, 0]
    for e in range(p.outs_start[i], p.outs_start[i + 1]):
        target = outs[e, 0]
        arrival = max(end + p.outs_lag[e], inputs_s[target, FORWARD])
        inputs_s[target, FORWARD] = arrival
        missing[target, FORWARD] -= 1
        if missing[target, FORWARD] == 0:
            other_rank, reservation = node[target, RANK], node[target, RESERVATION]
            if arrival > time[other_rank]:
                _insert(w.pending_at, w.pending, w.pending_span, other_rank, 4 * target + F, arrival)
                next_start[other_rank] = min(next_start[other_rank], arrival)
            else:
                unadmitted = 1 - w.admitted[reservation]
                _put(ready, busy, first, 3 * other_rank + unadmitted, at[FORWARD, node[target, GROUP]])
                queued[FORWARD, node[target, GROUP], other_rank, 0] = done
                if unadmitted == 0 or _has_room(w.footprint, w.reserved, p.room, reservation, other_rank):
                    next_start[other_rank] = time[other_rank]
    # Its own backward; where that still waits for a gradient, it does so long after this.
    missing[i, BACKWARD] -= 1
    if missing[i, BACKWARD] == 0:
        inputs_s[i, BACKWARD] = end
        _put(ready, busy, first, queue + 2, at[BACKWARD, node[i, GROUP]])
        queued[BACKWARD, node[i, GROUP], rank, 0] = done
    return 4 * i + F


@part
def _run_backward(
    p: Instance, w: Workspace, at: Any, group_at: Any, decoder: Any, rank: Any, position: int, block_end: float,
    queued: Any, done: int,
) -> Any:  # fmt: skip
    """Runs a backward, or its I; the action.

    Args: position: of its group. block_end: of its block, which the rank has ended; 0: it has none.
    """
    node, ins, missing, inputs_s, time, next_start = p.node, p.ins, w.missing, w.inputs_s, w.time, w.next_start
    ready, busy, first, reserved, queue = w.ready, w.busy, w.first, w.reserved, 3 * rank
    i = p.node_at[rank, group_at[BACKWARD, position]]
    _remove(ready, busy, first, queue + 2, position)
    queued[BACKWARD, group_at[BACKWARD, position], rank, 1] = done
    end = max(time[rank], inputs_s[i, BACKWARD]) + w.state[i, 1]
    w.load[1, rank] -= w.state[i, 1]
    reserved[rank] -= w.state[i, HELD]
    # Split only where what W needs has room: with recomputation it is more than was held until then.
    has_room = reserved[rank] + w.state[i, HELD_W] <= p.room[rank]
    if block_end == 0.0 and decoder[SPLIT] > 0.0 and node[i, SPLITS] and has_room:
        action = 4 * i + I
        w.weights[rank, w.weights_span[rank, 1]] = i
        w.weights_span[rank, 1] += 1
        reserved[rank] += w.state[i, HELD_W]
    else:
        action = 4 * i + B
        end += w.state[i, 2]
        w.load[1, rank] -= w.state[i, 2]
    if block_end > 0.0:
        end = block_end
    w.backward_next[rank] = decoder[BACKWARD_FIRST] > 0.0
    time[rank] = end
    for e in range(p.ins_start[i], p.ins_start[i + 1]):
        if ins[e, 1]:
            target = ins[e, 0]
            arrival = max(end + p.ins_lag[e], inputs_s[target, BACKWARD])
            inputs_s[target, BACKWARD] = arrival
            missing[target, BACKWARD] -= 1
            if missing[target, BACKWARD] == 0:
                other_rank = node[target, RANK]
                if arrival > time[other_rank]:
                    _insert(w.pending_at, w.pending, w.pending_span, other_rank, 4 * target + B, arrival)
                    # The rank would have started before whatever is queued already; a W may fill the time.
                    next_start[other_rank] = min(next_start[other_rank], arrival)
                else:
                    _put(ready, busy, first, 3 * other_rank + 2, at[BACKWARD, node[target, GROUP]])
                    queued[BACKWARD, node[target, GROUP], other_rank, 0] = done
                    next_start[other_rank] = time[other_rank]
    return action


@part
def _waits_until(p: Instance, w: Workspace, wait: float, group_at: Any, rank: Any, position: int, now: float) -> float:
    """When the inputs of a backward arrive for which a rank's next forward waits; 0: there is none.

    Args: wait: of the decoder. position: of the forward's group.
    """
    if wait == 0.0:
        return 0.0
    last = now + wait * w.state[p.node_at[rank, group_at[FORWARD, position]], 0]
    at = w.pending_span[rank, 0]
    while w.pending_at[rank, at] <= last:
        if w.pending[rank, at] & 1:
            return float(w.pending_at[rank, at])
        at += 1
    return 0.0


@part
def _run_weight(w: Workspace, rank: Any, block_end: float) -> Any:
    """Runs the first W that is due on a rank; the action. Args: block_end: of its block; 0: it has none."""
    i = w.weights[rank, w.weights_span[rank, 0]]
    w.weights_span[rank, 0] += 1
    w.time[rank] = block_end if block_end > 0.0 else w.time[rank] + w.state[i, ALONE]
    w.load[1, rank] -= w.state[i, 2]  # at least: as a part of a whole backward it would not take longer
    w.reserved[rank] -= w.state[i, HELD_W]
    return 4 * i + W


@small
def _fills(w: Workspace, gap: float, rank: Any, idle_s: float) -> bool:
    """Whether a W is due that may run while the rank would otherwise be idle."""
    head = w.weights_span[rank, 0]
    return bool(head < w.weights_span[rank, 1] and idle_s >= gap * w.state[w.weights[rank, head], ALONE])


@part
def _next_start(p: Instance, w: Workspace, group_at: Any, gap: float, rank: Any, none: int) -> Any:
    """When a rank that has just run an action could start the next one."""
    first, end, queue = w.first, w.time[rank], 3 * rank
    if min(first[queue], first[queue + 2]) < none:
        return end
    if first[queue + 1] < none:
        reservation = p.node[p.node_at[rank, group_at[FORWARD, first[queue + 1]]], RESERVATION]
        if _has_room(w.footprint, w.reserved, p.room, reservation, rank):
            return end
    arrival = w.pending_at[rank, w.pending_span[rank, 0]]
    return end if _fills(w, gap, rank, arrival - end) else arrival


@part
def _partner(
    p: Instance, w: Workspace, decoder: Any, group_at: Any, rank: Any, f: Any, backward: int, none: int
) -> int:
    """The B or W that a forward runs with as one block; 0: none.

    Of the first backwards that can start it is the one that saves most for what it usually saves: a backward of much
    compute is left to a forward of many exchanges. Where none can start, it is the first W.

    Args: backward: position of the first backward that can start; `none`: there is none.
    """
    best, most, position = 0, 0.0, backward
    for _ in range(REACH):
        if position < none:
            i = p.node_at[rank, group_at[BACKWARD, position]]
            usual_s = max(p.usual_s[rank, p.node[i, KIND]], LEAST_S)
            saved = _saved_s(p, w, decoder, f, i, B) / usual_s
            if saved > most and p.node[f, COMPONENT] != p.node[i, COMPONENT]:
                best, most = 4 * i + B, saved
            position = _next(w.ready, 3 * rank + 2, position)
    if backward == none and w.weights_span[rank, 0] < w.weights_span[rank, 1]:
        i = w.weights[rank, w.weights_span[rank, 0]]
        if _saved_s(p, w, decoder, f, i, W) > 0.0 and p.node[f, COMPONENT] != p.node[i, COMPONENT]:
            best = 4 * i + W
    return best


@inner
def decode(
    p: Instance, w: Workspace, at: Any, group_at: Any, decoder: Any, queued: Any, limit: float
) -> tuple[float, bool]:
    """The orders of all ranks from priorities.

    The rank that can start first is served: by the first backward or forward in the order of priority, in turns if both
    are ready, or in one block. Ws fill the remaining time.

    Args: at: [2, G] u4 position of each group among forwards and among backwards, the first is served first.
        group_at: [2, G] u4 its inverse.
        queued: [2, G, R, 2] u4, set: when each group came into a rank's queue of forwards or of backwards, and when it
            was removed, by the number of actions before. Unchanged where there is nothing to queue.
        limit: of the makespan in seconds; decoding ends where a rank cannot keep it.
    Returns: (the makespan with the assumed seconds, or inf if it is above the limit or there is none; whether `queued`
        is conclusive: the order of two groups matters only if they were in a queue at the same time).
    """
    first, next_start, weights_span = w.first, w.next_start, w.weights_span
    num_ranks, none = p.room.size, 64 * (w.ready.shape[1] - 1)
    limit *= 1 + 1e-9  # of rounding
    if decoder[BRAID] > 0.0:
        limit = np.inf  # what remains may take less, in blocks
    _reset(p, w, at, decoder[BACKWARD_FIRST] > 0.0, queued, none)
    remaining, done, conclusive = p.num_actions, 0, True
    while True:
        served, now = 0, np.inf
        for other in range(num_ranks):
            if next_start[other] < now:
                served, now = other, next_start[other]
        if now == np.inf:
            if remaining == 0:
                break
            position = none  # of the first forward that waits for memory: it exceeds the reservation
            for other in range(num_ranks):
                if first[3 * other + 1] < position:
                    served, position = other, first[3 * other + 1]
            if position == none:
                return np.inf, False
            conclusive = False  # groups of different ranks were compared
            w.reserved[served] = 0.0
            now = w.time[served]
        rank: Any = np.uint32(served)
        _receive(p, w, at, rank, now, queued, done)
        position, waits = _next_forward(p, w, group_at, rank)
        backward = first[3 * rank + 2]
        block_end, partner = 0.0, 0
        if decoder[BRAID] > 0.0 and position < none:
            f = p.node_at[rank, group_at[FORWARD, position]]
            partner = _partner(p, w, decoder, group_at, rank, f, backward, none)
            if partner > 0:
                saved_s = _saved_s(p, w, decoder, f, partner >> 2, partner & 3)
                block_end = now + w.state[f, 0] + seconds_of(w.state, partner >> 2, partner & 3) - saved_s
                w.sequence[done] = _run_forward(p, w, at, group_at, rank, position, waits, block_end, queued, done)
                w.order[rank, w.length[rank]] = w.sequence[done]
                w.length[rank] += 1
                w.braided[f] = 1 + partner
                w.joinable[partner >> 2] = 0
                remaining, done = remaining - 1, done + 1
        if partner > 0 and partner & 3 == W:
            action = _run_weight(w, rank, block_end)
        elif partner > 0:
            backward = at[BACKWARD, p.node[partner >> 2, GROUP]]
            action = _run_backward(p, w, at, group_at, decoder, rank, backward, block_end, queued, done)
            remaining -= 1
        elif (backward < none) & ((position == none) | (w.backward_next[rank] > 0)):
            action = _run_backward(p, w, at, group_at, decoder, rank, backward, 0.0, queued, done)
            remaining -= 1
        elif position < none:
            until = _waits_until(p, w, decoder[WAIT], group_at, rank, position, now)
            if until > 0.0 and not _fills(w, decoder[GAP], rank, until - now):
                next_start[rank] = until
                continue
            if until > 0.0:
                action = _run_weight(w, rank, 0.0)
            else:
                action = _run_forward(p, w, at, group_at, rank, position, waits, 0.0, queued, done)
                remaining -= 1
        elif weights_span[rank, 0] < weights_span[rank, 1]:
            action = _run_weight(w, rank, 0.0)
        else:  # what arrived still waits for memory
            next_start[rank] = w.pending_at[rank, w.pending_span[rank, 0]]
            continue
        w.sequence[done] = action
        w.order[rank, w.length[rank]] = action
        w.length[rank] += 1
        done += 1
        if w.time[rank] + w.load[1, rank] > limit:
            return np.inf, False
        next_start[rank] = _next_start(p, w, group_at, decoder[GAP], rank, none)
    return latest(w.time), conclusive
