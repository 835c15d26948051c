"""The inner loops of the search, compiled by numba: orders, memory options and makespans from priorities.

All compiled functions are in this one file: numba keeps its cache by the file of the function that is called, and would
not see that one in another file has changed. Nothing here allocates in a loop or needs the GIL, so that searches run on
several threads, each with a `Workspace` of its own. What numbers something is unsigned, as numba looks at each signed
index whether it counts from the end. Each array that a function gets as a part of `p` or `w` costs time to compile.

Sources: dual queues and alternation are DIP's (arXiv:2504.14145, section 5.2). Admission is not: forwards of a
microbatch start on a rank once all that it will hold there is reserved. Ranks are entered in one order, so that whoever
holds the last one can finish, and what waits for memory waits for those further along: there is no deadlock. Where a
problem has no such order, the decoder goes over the reservation, and the choice of options decides whether it fits.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mmtrain.planner.search.numba_start import HAS_NUMBA

if HAS_NUMBA:
    from llvmlite import ir
    from numba import njit, types
    from numba.extending import intrinsic
else:  # nothing here is called then

    def njit(function: Any = None, **_: Any) -> Any:
        return function or njit

    intrinsic = njit

F, B, I, W = 0, 1, 2, 3
"""Kinds of actions; an action is the number 4 x node + kind."""
RANK, GROUP, CLUSTER, PLACE, NEEDS_F, NEEDS_B, KIND, SPLITS = range(8)
"""Columns of `Instance.node`."""
TOTAL, HELD, HELD_W, SLOPE, SLOPE_UP, LARGER = range(3, 9)
"""Columns of `Instance.option` behind the seconds of F, I and W; HELD and HELD_W also of `Workspace.state`."""
DOWN, UP = 0, 1
"""Columns of `Instance.hull`."""
BEGIN, END, BEGIN_W, END_W, FASTEST, SMALLEST, SAME_W = range(7)
"""Columns of `Workspace.span`."""
ANNEAL, EVALUATE, CHOOSE = 0, 1, 2
"""Modes of `run`."""


class Instance(NamedTuple):
    """A problem as arrays: n nodes, each one (stage, work); R ranks, G groups, C clusters, E edges, O options."""

    node: Any
    """[n, 8] u4: RANK, GROUP, CLUSTER, PLACE, NEEDS_F, NEEDS_B, KIND, SPLITS.

    A group has one priority; at most one node of it is on a rank. A cluster hangs together, mostly one microbatch; its
    memory is reserved at once. PLACE: CLUSTER x R + RANK, or C x R where there is no backward and nothing to reserve.
    NEEDS_F, NEEDS_B: results that forward and backward wait for; NEEDS_B is 0 where there is no backward. KIND: list of
    options. SPLITS: whether both halves of the backward take time.
    """
    node_at: Any
    """[R, G] u4: the node of a group on a rank, where there is one."""
    entries: Any
    """u4: the nodes that need nothing, ascending."""
    num_actions: int
    """Forwards and backwards."""
    of_cluster_start: Any
    """[C x R + 1] u4: slice of `of_cluster` with the nodes of a cluster on a rank."""
    of_cluster: Any
    """[n] u4"""
    ins_start: Any
    """[n + 1] u4: slice of the edges into a node."""
    ins: Any
    """[E, 2] u4: node that an edge comes from, and whether a gradient goes back over it."""
    ins_lag: Any
    """[E] f8: seconds of its transfer."""
    outs_start: Any
    outs: Any
    outs_lag: Any
    """The same for the edges out of a node."""
    first: Any
    """[lists + 1] i8: slice of the options of a list, the fastest first, none worse than another one in everything."""
    option: Any
    """[O, 9] f8: seconds of F, I and W; TOTAL of them; bytes HELD from F to the backward, HELD_W from I to W; SLOPE:
    seconds a byte on the way to the next smaller option on the convex hull of (bytes, seconds), inf: there is none;
    SLOPE_UP: from the next larger one, -inf: there is none; LARGER: the least bytes held of the faster options."""
    hull: Any
    """[O, 2] u4: DOWN, the next smaller option on the hull, and UP, the larger one, where they exist."""
    steepest: Any
    """[lists] f8: the greatest slope of a list, or 0."""
    same_w: Any
    """[lists] b1: whether each option holds as much for W as before."""
    limit: Any
    """[R] f8: bytes; inf: no limit."""
    room: Any
    """[R] f8: bytes that can be reserved: `limit` less what a forward without a backward takes for itself, and a
    trifle more."""


class Workspace(NamedTuple):
    """Memory of one thread."""

    state: Any
    """[n, 8] f8: seconds that the decoder assumes of F, I and W, bytes that it reserves (HELD until I, HELD_W until
    W)."""
    fed: Any
    """[n, 2] f8: when F and the backward have what they need so far."""
    footprint: Any
    """[C x R + 1] f8"""
    left: Any
    """[n, 2] u4: results that F and the backward still wait for."""
    ready: Any
    """[3 R, words + 1] u8: three queues of a rank: forwards with memory, forwards without, backwards; bits by priority.
    The last word has its lowest bit always set: all queues end there."""
    busy: Any
    """[3 R, pages] u8: which words of `ready` are not 0."""
    first: Any
    """[3 R] u4: the first position of each queue."""
    admitted: Any
    """[C x R + 1] u1: whether a cluster has its memory on a rank; the last one always has."""
    reserved: Any
    """[R] f8"""
    time: Any
    """[R] f8: when the rank has done what it was given."""
    tau: Any
    """[R] f8: when it could start its next action."""
    backward_next: Any
    """[R] u1: whether a backward's turn comes next."""
    pending_at: Any
    """[R, m] f8: arrival times to come, ascending, and inf; m: more than any rank has actions."""
    pending: Any
    """[R, m] u4: action of each."""
    pending_span: Any
    """[R, 2] u4: ends of both; the inf is at the second one."""
    weights: Any
    """[R, m] u4: queue of nodes whose W is due."""
    weights_span: Any
    """[R, 2] u4: its ends."""
    sequence: Any
    """[3 n] u4: all actions, each after those that it needs."""
    order: Any
    """[R, m] u4: actions of each rank."""
    length: Any
    """[R] u4"""
    ends: Any
    """[n, 2] f8: of F and of the backward's gradient."""
    option: Any
    """[n] u4: the chosen one of each node."""
    mine: Any
    """[n] u4: nodes of the rank whose options are chosen, in the order of their forwards."""
    place: Any
    """[n] u4: the place of a node in `mine`."""
    span: Any
    """[n, 7] u4 by the place: the rows in which a node holds bytes until I (BEGIN .. END) and until W (BEGIN_W ..
    END_W, none if that is below); FASTEST and SMALLEST of its options; SAME_W, of its list."""
    picks: Any
    """[3, n] u4 by the place: options: chosen ones, those of the last prices, those of the best prices."""
    active: Any
    """[n] u4: places of those that may hold bytes in a row."""
    looked_at: Any
    """[O, 2] i8: the last time that an option was looked at to be replaced, for what is held until I and until W."""
    rows: Any
    """[3, m] f8: price of a byte in each row, sums of the prices before it, bytes used in it."""
    last_price: Any
    """[R, m] f8: the prices of each rank's last order."""
    last_rows: Any
    """[R] i8: its rows; 0: there was none."""
    last_seconds: Any
    """[R] f8: what the chosen options took."""
    how: Any
    """[5] f8: a Decoder while it changes."""
    swap: Any
    """[4, G] u4: permutations while they change."""


class Decoder(NamedTuple):
    """How priorities become orders."""

    memory: float
    """0 .. 1: memory is reserved for the fastest option .. the smallest one. So it decides how much is in flight."""
    speed: float
    """0 .. 1: actions are thought to take as long as with the fastest option .. with the smallest one."""
    gap: float
    """A weight half starts if the rank would wait for at least this part of its time."""
    backward_first: bool
    """Whether backwards always go before forwards; else they alternate."""
    split: bool
    """Whether backwards are two halves."""


_FLAGS: dict[str, Any] = {
    "nogil": True,
    "no_cfunc_wrapper": True,
    "no_cpython_wrapper": True,
    "_nrt": False,
    "error_model": "numpy",
}


def _kernel(*, inner: bool) -> Callable[[Any], Any]:
    """Compiles a function without the GIL and without counting references, and keeps the result on disk if there is a
    place for it.

    Args: inner: called by kernels alone; wrappers for Python would take half of the time to compile.
    """

    def compiled(function: Any) -> Any:
        flags = {**_FLAGS, "no_cpython_wrapper": inner}
        try:
            return njit(cache=True, **flags)(function)
        except RuntimeError:  # neither beside this file nor at home can anything be written
            return njit(**flags)(function)

    return compiled


_compiled, _inner = _kernel(inner=False), _kernel(inner=True)
_small = njit(forceinline=True, **_FLAGS)
"""Never a call: that would pass dozens of values for its arrays."""
_part = njit(inline="always")
"""Of the one kernel that calls it."""


@intrinsic
def _trailing_zeros(typing: Any, bits: Any) -> Any:
    """Zeros below the lowest set bit of a 64-bit word that is not 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), generate


# ---------------------------------------------------------------------------------------------- orders


@_inner
def assume(node: Any, first: Any, option: Any, state: Any, footprint: Any, memory: float, speed: float) -> None:
    """Sets what the decoder assumes of seconds and bytes."""
    footprint[:] = 0.0
    for i in range(node.shape[0]):
        fast, small = first[node[i, KIND]], first[node[i, KIND] + 1] - 1
        for half in range(3):
            state[i, half] = (1 - speed) * option[fast, half] + speed * option[small, half]
        state[i, HELD] = (1 - memory) * option[fast, HELD] + memory * option[small, HELD]
        state[i, HELD_W] = (1 - memory) * option[fast, HELD_W] + memory * option[small, HELD_W]
        if node[i, NEEDS_B]:
            footprint[node[i, PLACE]] += state[i, HELD]


@_small
def _put(ready: Any, busy: Any, first: Any, queue: int, position: int) -> None:
    """Puts a position into a queue."""
    word = position >> 6
    ready[queue, word] |= np.uint64(1) << np.uint64(position & 63)
    busy[queue, word >> 6] |= np.uint64(1) << np.uint64(word & 63)
    first[queue] = min(first[queue], position)


@_small
def _take(ready: Any, busy: Any, first: Any, queue: int, position: int) -> None:
    """Takes a position out of a queue and finds the first one that is left; there is always the last one."""
    word = position >> 6
    bits = ready[queue, word] & ~(np.uint64(1) << np.uint64(position & 63))
    ready[queue, word] = bits
    busy[queue, word >> 6] &= ~(np.uint64(bits == 0) << np.uint64(word & 63))
    page = 0
    while busy[queue, page] == 0:
        page += 1
    word = 64 * page + _trailing_zeros(busy[queue, page])
    first[queue] = 64 * word + _trailing_zeros(ready[queue, word])


@_small
def _has_room(footprint: Any, reserved: Any, room: Any, place: int, rank: int) -> bool:
    """Whether a cluster can reserve its memory on a rank; what is larger than all of it comes alone."""
    amount = footprint[place]
    return bool(amount <= room[rank] - reserved[rank] or reserved[rank] <= 1e-9 * amount)


@_small
def _insert(pending_at: Any, pending: Any, pending_span: Any, rank: int, action: int, arrival: float) -> None:
    """Puts an action into a rank's list of those that have not arrived yet."""
    place = pending_span[rank, 1]
    pending_span[rank, 1] = place + 1
    pending_at[rank, place + 1] = np.inf
    begin = pending_span[rank, 0]
    while place > begin and pending_at[rank, place - 1] > arrival:
        pending_at[rank, place] = pending_at[rank, place - 1]
        pending[rank, place] = pending[rank, place - 1]
        place -= 1
    pending_at[rank, place] = arrival
    pending[rank, place] = action


@_inner
def decode(p: Instance, w: Workspace, at: Any, group_at: Any, how: Decoder, stay: Any) -> tuple[float, bool]:
    """The orders of all ranks from priorities.

    The rank that can start first is served: by the first backward or forward in the order of priority, in turns if both
    are there. Weight halves fill what time is left.

    Args: at: [2, G] u4 position of each group among forwards and among backwards, the first is served first.
        group_at: [2, G] u4 its inverse.
        stay: [2, G, R, 2] u4: when each group came into a rank's queue of forwards or of backwards, and when it was
            taken out, by the number of actions before. Where there is nothing to queue it is left as it is.
    Returns: (the makespan with the assumed seconds, or inf; whether `stay` tells where the order of two groups counts).
    """
    # Names of their own for all arrays, as reads from a tuple in a loop cost much where references are counted.
    fixed, node_at, room, entries = p.node, p.node_at, p.room, p.entries
    members_start, members = p.of_cluster_start, p.of_cluster
    ins_start, ins, ins_lag = p.ins_start, p.ins, p.ins_lag
    outs_start, outs, outs_lag = p.outs_start, p.outs, p.outs_lag
    state, fed, footprint, left = w.state, w.fed, w.footprint, w.left
    ready, busy, first, admitted, reserved, time, tau = w.ready, w.busy, w.first, w.admitted, w.reserved, w.time, w.tau
    backward_next, pending_at, pending, pending_span = w.backward_next, w.pending_at, w.pending, w.pending_span
    weights, weights_span, sequence, order, length = w.weights, w.weights_span, w.sequence, w.order, w.length
    at_f, at_b, group_f, group_b = at[0], at[1], group_at[0], group_at[1]
    num_ranks, num_words = room.size, ready.shape[1] - 1
    none = 64 * num_words  # the position behind all others, which is never taken out
    ready[:] = 0
    busy[:] = 0
    for queue in range(3 * num_ranks):
        first[queue] = none
        _put(ready, busy, first, queue, none)
    admitted[:] = 0
    admitted[admitted.size - 1] = 1
    reserved[:] = 0.0
    time[:] = 0.0
    tau[:] = 0.0
    backward_next[:] = how.backward_first
    pending_at[:, 0] = np.inf
    pending_span[:] = 0
    weights_span[:] = 0
    length[:] = 0
    fed[:] = 0.0
    for node in range(fixed.shape[0]):
        left[node, 0], left[node, 1] = fixed[node, NEEDS_F], fixed[node, NEEDS_B]
    for i in range(entries.size):
        node = entries[i]
        waits = 1 - admitted[fixed[node, PLACE]]
        _put(ready, busy, first, 3 * fixed[node, RANK] + waits, at_f[fixed[node, GROUP]])
        stay[0, fixed[node, GROUP], fixed[node, RANK], 0] = 0
    remaining = p.num_actions
    done = 0
    told = True
    while True:
        served, now = 0, np.inf
        for other in range(num_ranks):
            if tau[other] < now:
                served, now = other, tau[other]
        if now == np.inf:
            if remaining == 0:
                break
            position = none  # of the first forward that waits for memory: it goes over the reservation
            for other in range(num_ranks):
                if first[3 * other + 1] < position:
                    served, position = other, first[3 * other + 1]
            if position == none:
                return np.inf, False
            told = False  # groups of different ranks were compared
            reserved[served] = 0.0
            now = time[served]
        rank: Any = np.uint32(served)
        queue = 3 * rank
        # What has arrived by now goes into its queue.
        arrived = pending_span[rank, 0]
        while pending_at[rank, arrived] <= now:
            action = pending[rank, arrived]
            node = action >> 2
            backward = action & 1
            waits = max(2 * backward, 1 - admitted[fixed[node, PLACE]])
            _put(ready, busy, first, queue + waits, at[backward, fixed[node, GROUP]])
            stay[backward, fixed[node, GROUP], rank, 0] = done
            arrived += 1
        pending_span[rank, 0] = arrived
        # The forward that is next.
        position, waits = first[queue], 0
        if first[queue + 1] < position:
            place = fixed[node_at[rank, group_f[first[queue + 1]]], PLACE]
            if _has_room(footprint, reserved, room, place, rank):
                position, waits = first[queue + 1], 1
        end = time[rank]
        backward = first[queue + 2]
        if (backward < none) & ((position == none) | (backward_next[rank] > 0)):
            node = node_at[rank, group_b[backward]]
            _take(ready, busy, first, queue + 2, backward)
            stay[1, group_b[backward], rank, 1] = done
            end = max(end, fed[node, 1]) + state[node, 1]
            reserved[rank] -= state[node, HELD]
            # Halves only where what W needs has room: with recomputation it is more than was held until then.
            if how.split and fixed[node, SPLITS] and reserved[rank] + state[node, HELD_W] <= room[rank]:
                action = 4 * node + I
                weights[rank, weights_span[rank, 1]] = node
                weights_span[rank, 1] += 1
                reserved[rank] += state[node, HELD_W]
            else:
                action = 4 * node + B
                end += state[node, 2]
            backward_next[rank] = how.backward_first
            remaining -= 1
            time[rank] = end
            for e in range(ins_start[node], ins_start[node + 1]):
                if ins[e, 1]:
                    target = ins[e, 0]
                    arrival = max(end + ins_lag[e], fed[target, 1])
                    fed[target, 1] = arrival
                    left[target, 1] -= 1
                    if left[target, 1] == 0:
                        there = fixed[target, RANK]
                        if arrival > time[there]:
                            _insert(pending_at, pending, pending_span, there, 4 * target + B, arrival)
                            # What is there already, the rank would have started before; weight halves may fill
                            # the time.
                            tau[there] = min(tau[there], arrival)
                        else:
                            _put(ready, busy, first, 3 * there + 2, at_b[fixed[target, GROUP]])
                            stay[1, fixed[target, GROUP], there, 0] = done
                            tau[there] = time[there]
        elif position < none:
            node = node_at[rank, group_f[position]]
            _take(ready, busy, first, queue + waits, position)
            stay[0, group_f[position], rank, 1] = done
            if waits:
                place = fixed[node, PLACE]
                admitted[place] = 1
                reserved[rank] += footprint[place]
                for i in range(members_start[place], members_start[place + 1]):
                    position = at_f[fixed[members[i], GROUP]]
                    if ready[queue + 1, position >> 6] >> np.uint64(position & 63) & np.uint64(1):
                        _take(ready, busy, first, queue + 1, position)
                        _put(ready, busy, first, queue, position)
            action = 4 * node + F
            end = max(end, fed[node, 0]) + state[node, 0]
            backward_next[rank] = 1
            remaining -= 1
            time[rank] = end
            for e in range(outs_start[node], outs_start[node + 1]):
                target = outs[e, 0]
                arrival = max(end + outs_lag[e], fed[target, 0])
                fed[target, 0] = arrival
                left[target, 0] -= 1
                if left[target, 0] == 0:
                    there, place = fixed[target, RANK], fixed[target, PLACE]
                    if arrival > time[there]:
                        _insert(pending_at, pending, pending_span, there, 4 * target + F, arrival)
                        tau[there] = min(tau[there], arrival)
                    else:
                        waits = 1 - admitted[place]
                        _put(ready, busy, first, 3 * there + waits, at_f[fixed[target, GROUP]])
                        stay[0, fixed[target, GROUP], there, 0] = done
                        if waits == 0 or _has_room(footprint, reserved, room, place, there):
                            tau[there] = time[there]
            # Its own backward; where that still waits for a gradient, this is long before.
            left[node, 1] -= 1
            if left[node, 1] == 0:
                fed[node, 1] = end
                _put(ready, busy, first, queue + 2, at_b[fixed[node, GROUP]])
                stay[1, fixed[node, GROUP], rank, 0] = done
        elif weights_span[rank, 0] < weights_span[rank, 1]:
            node = weights[rank, weights_span[rank, 0]]
            weights_span[rank, 0] += 1
            action = 4 * node + W
            end += state[node, 2]
            time[rank] = end
            reserved[rank] -= state[node, HELD_W]
        else:  # what arrived still waits for memory
            tau[rank] = pending_at[rank, pending_span[rank, 0]]
            continue
        sequence[done] = action
        order[rank, length[rank]] = action
        length[rank] += 1
        done += 1
        # When the rank could start its next action.
        if min(first[queue], first[queue + 2]) < none:
            tau[rank] = end
            continue
        if first[queue + 1] < none:
            place = fixed[node_at[rank, group_f[first[queue + 1]]], PLACE]
            if _has_room(footprint, reserved, room, place, rank):
                tau[rank] = end
                continue
        arrival = pending_at[rank, pending_span[rank, 0]]
        tau[rank] = arrival
        head = weights_span[rank, 0]
        if head < weights_span[rank, 1] and arrival - end >= how.gap * state[weights[rank, head], 2]:
            tau[rank] = end
    makespan = 0.0
    for other in range(num_ranks):
        makespan = max(makespan, time[other])
    return makespan, told


@_inner
def replay(p: Instance, w: Workspace) -> float:
    """The makespan of the decoded orders with the chosen options."""
    fixed, seconds, time, ends = p.node, p.option, w.time, w.ends
    ins_start, ins, ins_lag = p.ins_start, p.ins, p.ins_lag
    outs_start, outs, outs_lag = p.outs_start, p.outs, p.outs_lag
    sequence, options, num_actions = w.sequence, w.option, 0
    for rank in range(time.size):
        num_actions += w.length[rank]
        time[rank] = 0.0
    for i in range(num_actions):
        node, kind = sequence[i] >> 2, sequence[i] & 3
        rank, option = fixed[node, RANK], options[node]
        start = time[rank]
        if kind == F:
            for e in range(ins_start[node], ins_start[node + 1]):
                start = max(start, ends[ins[e, 0], 0] + ins_lag[e])
            start += seconds[option, 0]
            ends[node, 0] = start
        elif kind == W:
            start += seconds[option, 2]
        else:
            for e in range(outs_start[node], outs_start[node + 1]):
                if outs[e, 1]:
                    start = max(start, ends[outs[e, 0], 1] + outs_lag[e])
            start += seconds[option, 1]
            if kind == B:
                start += seconds[option, 2]
            ends[node, 1] = start
        time[rank] = start
    makespan = 0.0
    for rank in range(time.size):
        makespan = max(makespan, time[rank])
    return makespan


# ---------------------------------------------------------------------------------------------- memory options


@_inner
def _lay_rows(
    order: Any, length: int, fixed: Any, first: Any, same_w: Any, place: Any, mine: Any, span: Any
) -> tuple[int, int]:
    """Lists the nodes of a rank with the rows in which each holds bytes; (rows, nodes).

    A row is a moment at which something was added and something is freed next: no other moment holds more.
    """
    row, shrunk, count = 0, False, 0
    for step in range(length):
        node, kind = order[step] >> 2, order[step] & 3
        if kind == F:
            if shrunk:
                row, shrunk = row + 1, False
            options = fixed[node, KIND]
            span[count, BEGIN], span[count, END], span[count, BEGIN_W], span[count, END_W] = row, row, 1, 0
            span[count, FASTEST], span[count, SMALLEST] = first[options], first[options + 1] - 1
            span[count, SAME_W] = same_w[options]
            shrunk = fixed[node, NEEDS_B] == 0
            mine[count], place[node] = node, count
            count += 1
            continue
        i = place[node]
        if kind == B:
            span[i, END] = row
            shrunk = True
        elif span[i, SAME_W]:
            if kind == W:
                span[i, END] = row
                shrunk = True
        elif kind == I:
            span[i, END] = row
            row, shrunk = row + 1, False
            span[i, BEGIN_W] = row
        else:
            span[i, END_W] = row
            shrunk = True
    return row + 1, count


@_inner
def _sum_usage(usage: Any, num_rows: int) -> float:
    """Makes bytes held in each row of what is added and freed there; the most in any."""
    most, running = 0.0, 0.0
    for row in range(num_rows):
        running += usage[row]
        usage[row] = running
        most = max(most, running)
    return most


@_inner
def _count_usage(span: Any, count: int, num_rows: int, chosen: Any, options: Any, usage: Any) -> float:
    """Sets the bytes held in each row; the most in any."""
    for row in range(num_rows + 1):
        usage[row] = 0.0
    for i in range(count):
        amount = options[chosen[i], HELD]
        usage[span[i, BEGIN]] += amount
        usage[span[i, END] + 1] -= amount
        if span[i, BEGIN_W] <= span[i, END_W]:
            amount = options[chosen[i], HELD_W]
            usage[span[i, BEGIN_W]] += amount
            usage[span[i, END_W] + 1] -= amount
    return float(_sum_usage(usage, num_rows))


@_inner
def _respond(
    options: Any,
    hull: Any,
    span: Any,
    count: int,
    num_rows: int,
    chosen: Any,
    usage: Any,
    prefix: Any,
    uniform: float,
) -> tuple[float, float]:
    """Sets each node's option with the least seconds + price x bytes, and the usage of the rows.

    Args: chosen: where to look first. uniform: the price of a byte of every node; below 0: that of its rows, whose sums
        are in `prefix`.
    Returns: (sum of what the nodes pay, most bytes in a row).
    """
    for row in range(num_rows + 1):
        usage[row] = 0.0
    value = 0.0
    for i in range(count):
        begin, end, option = span[i, BEGIN], span[i, END], chosen[i]
        price = prefix[end + 1] - prefix[begin] if uniform < 0 else uniform
        if span[i, SAME_W]:
            while options[option, SLOPE] < price:
                option = hull[option, DOWN]
            while options[option, SLOPE_UP] >= price:
                option = hull[option, UP]
            value += options[option, TOTAL] + price * options[option, HELD]
        else:
            begin_w, end_w, price_w = span[i, BEGIN_W], span[i, END_W], 0.0
            if begin_w <= end_w:
                price_w = prefix[end_w + 1] - prefix[begin_w] if uniform < 0 else uniform
            least = np.inf
            for other in range(span[i, FASTEST], span[i, SMALLEST] + 1):
                cost = options[other, TOTAL] + price * options[other, HELD] + price_w * options[other, HELD_W]
                if cost < least:
                    option, least = other, cost
            value += least
            if begin_w <= end_w:
                usage[begin_w] += options[option, HELD_W]
                usage[end_w + 1] -= options[option, HELD_W]
        chosen[i] = option
        amount = options[option, HELD]
        usage[begin] += amount
        usage[end + 1] -= amount
    return value, _sum_usage(usage, num_rows)


@_inner
def _move(span: Any, usage: Any, options: Any, i: int, old: int, new: int) -> None:
    """Changes the usage of all rows of a node for another option."""
    more, more_w = options[new, HELD] - options[old, HELD], options[new, HELD_W] - options[old, HELD_W]
    for row in range(span[i, BEGIN], span[i, END] + 1):
        usage[row] += more
    for row in range(span[i, BEGIN_W], span[i, END_W] + 1):
        usage[row] += more_w


@_inner
def _repair(
    span: Any,
    count: int,
    num_rows: int,
    chosen: Any,
    options: Any,
    usage: Any,
    active: Any,
    looked_at: Any,
    limit: float,
) -> float:
    """Makes options fit: smaller ones where rows are over the limit, then faster ones where there is room.

    The seconds of all nodes together, or inf if the smallest do not fit.
    """
    _count_usage(span, count, num_rows, chosen, options, usage)
    num_active, begun, look = 0, 0, 0
    none: Any = np.int64(-1)  # a plain -1 would be a type of its own
    looked_at[:] = 0
    for row in range(num_rows):
        while begun < count and span[begun, BEGIN] <= row:
            active[num_active] = begun
            begun, num_active = begun + 1, num_active + 1
        if usage[row] <= limit:
            continue
        kept = 0
        for k in range(num_active):
            if max(span[active[k], END], span[active[k], END_W]) >= row:
                active[kept] = active[k]
                kept += 1
        num_active = kept
        while usage[row] > limit:
            best, best_new, least = none, none, np.inf
            over = usage[row] - limit
            look += 1
            for k in range(num_active):
                i = active[k]
                old = chosen[i]
                column = HELD if span[i, END] >= row else HELD_W
                if looked_at[old, column - HELD] == look:  # of what is equal the first is taken
                    continue
                looked_at[old, column - HELD] = look
                for new in range(old + 1, span[i, SMALLEST] + 1):
                    saved = options[old, column] - options[new, column]
                    # Rows before this one fit already: what a node held in them may not grow.
                    if saved > 0 and (column == HELD or options[new, HELD] <= options[old, HELD]):
                        cost = (options[new, TOTAL] - options[old, TOTAL]) / min(saved, over)
                        if cost < least:
                            best, best_new, least = i, new, cost
            if best < 0:
                return np.inf
            _move(span, usage, options, best, chosen[best], best_new)
            chosen[best] = best_new
    seconds, full = 0.0, 0  # a row without room for one of the nodes, and probably for the next one
    for i in range(count):
        old = chosen[i]
        if old > span[i, FASTEST]:
            # Where the least bytes that a faster option has more do not fit, nothing does.
            most_left = limit - (options[old, LARGER] - options[old, HELD])
            if span[i, BEGIN] <= full <= span[i, END] and usage[full] > most_left:
                seconds += options[old, TOTAL]
                continue
            most, most_w = 0.0, 0.0
            for row in range(span[i, BEGIN], span[i, END] + 1):
                most = max(most, usage[row])
                if most > most_left:
                    full = row
                    break
            if most > most_left:
                seconds += options[old, TOTAL]
                continue
            for row in range(span[i, BEGIN_W], span[i, END_W] + 1):
                most_w = max(most_w, usage[row])
            room, room_w = limit - most + options[old, HELD], limit - most_w + options[old, HELD_W]
            for new in range(span[i, FASTEST], old):
                if options[new, HELD] <= room and options[new, HELD_W] <= room_w:
                    _move(span, usage, options, i, old, new)
                    chosen[i] = new
                    break
        seconds += options[chosen[i], TOTAL]
    return seconds


@_part
def choose(p: Instance, w: Workspace, rank: int, iterations: int) -> tuple[float, float]:
    """Chooses the options of a rank's nodes: least seconds together, every row within the limit.

    Lagrangian relaxation of the rows' limits: with a price for a byte in each row, each node has its cheapest option
    for itself; prices follow the subgradient. The prices' options, made to fit, are the answer; what the relaxation
    costs is a bound.

    Returns: (seconds of all nodes, a bound that no choice beats); (inf, inf) if the smallest options do not fit.
    """
    fixed, order, options, hull, span, mine = p.node, w.order[rank], p.option, p.hull, w.span, w.mine
    chosen, trial, best = w.picks[0], w.picks[1], w.picks[2]
    price, prefix, usage = w.rows[0], w.rows[1], w.rows[2]
    active, looked_at = w.active, w.looked_at
    if p.limit[rank] == np.inf:
        for step in range(w.length[rank]):
            node = order[step] >> 2
            w.option[node] = p.first[fixed[node, KIND]]
        return 0.0, 0.0
    num_rows, count = _lay_rows(order, w.length[rank], fixed, p.first, p.same_w, w.place, mine, span)
    fastest, dearest = 0.0, 0.0
    for i in range(count):
        chosen[i] = trial[i] = best[i] = span[i, FASTEST]
        w.option[mine[i]] = span[i, FASTEST]
        fastest += options[chosen[i], TOTAL]
        dearest = max(dearest, p.steepest[fixed[mine[i], KIND]])
    limit = p.limit[rank] * (1 + 1e-12)
    if _count_usage(span, count, num_rows, chosen, options, usage) <= limit:
        return fastest, fastest
    bound, scale, stale, seconds = fastest, 1.0, 0, np.inf
    last_price, last_rows = w.last_price[rank], w.last_rows[rank]
    if last_rows and limit > 0:
        # The last order of this rank was much like this one: its prices nearly fit, and its seconds are to be expected.
        expected, iterations = w.last_seconds[rank], (iterations + 2) // 3
        for row in range(num_rows):
            price[row] = last_price[row * last_rows // num_rows]
    else:
        low, high = 0.0, 1.01 * dearest  # one price for all bytes, nearly the lowest that fits
        for _ in range(10):
            middle = 0.5 * (low + high)
            if _respond(options, hull, span, count, num_rows, chosen, usage, prefix, middle)[1] <= limit:
                high = middle
            else:
                low = middle
        _respond(options, hull, span, count, num_rows, chosen, usage, prefix, high)
        seconds = _repair(span, count, num_rows, chosen, options, usage, active, looked_at, limit)
        if seconds == np.inf or limit <= 0:  # without a byte, no price says so
            for i in range(count):
                w.option[mine[i]] = chosen[i]
            return seconds, fastest
        expected = seconds
        for row in range(num_rows):
            price[row] = 0.0
    prefix[0] = 0.0
    for row in range(num_rows):
        prefix[row + 1] = prefix[row] + price[row]
    for iteration in range(iterations + 1):
        value = _respond(options, hull, span, count, num_rows, trial, usage, prefix, -1.0)[0] - prefix[num_rows] * limit
        if value > bound or iteration == 0:
            bound, stale = max(bound, value), 0
            for i in range(count):
                best[i] = trial[i]
            for row in range(num_rows):
                last_price[row] = price[row]
        else:
            stale += 1
            if stale == 3:
                scale, stale = 0.5 * scale, 0
        # A step of Polyak's size along the subgradient.
        norm = 0.0
        for row in range(num_rows):
            over = usage[row] / limit - 1
            usage[row] = over
            norm += over * over if over > 0 or price[row] > 0 else 0.0
        if norm <= 0 or (seconds < np.inf and seconds - bound <= 1e-9 * seconds):
            break
        step = scale * max(expected - bound, 1e-4 * expected) / norm / limit
        for row in range(num_rows):
            price[row] = max(0.0, price[row] + step * usage[row])
            prefix[row + 1] = prefix[row] + price[row]
    found = _repair(span, count, num_rows, best, options, usage, active, looked_at, limit)
    if min(found, seconds) == np.inf:  # by small steps from the prices' options nothing fits
        for i in range(count):
            chosen[i] = span[i, SMALLEST]
        seconds = _repair(span, count, num_rows, chosen, options, usage, active, looked_at, limit)
    for i in range(count):
        w.option[mine[i]] = best[i] if found < seconds else chosen[i]
    seconds = min(found, seconds)
    if seconds < np.inf:
        w.last_rows[rank], w.last_seconds[rank] = num_rows, seconds
    return seconds, bound


@_inner
def choose_all(p: Instance, w: Workspace, iterations: int) -> float:
    """Chooses the options of all ranks; how much more seconds they take than a bound on them, or inf: none fit."""
    over = 0.0
    for rank in range(p.limit.size):
        seconds, bound = choose(p, w, rank, iterations)
        if seconds == np.inf:
            return np.inf
        over = max(over, seconds / bound - 1 if bound > 0 else 0.0)
    return over


# ---------------------------------------------------------------------------------------------- annealing


class Chain(NamedTuple):
    """One chain of simulated annealing, as arrays that the kernel changes."""

    at: Any
    """[2, G] u4: position of each group among forwards and among backwards, where the chain stands."""
    group_at: Any
    """[2, G] u4: its inverse."""
    how: Any
    """[5] f8: a Decoder."""
    best_at: Any
    best_how: Any
    """The same of the best plan so far."""
    cost: Any
    """[2] f8: where the chain stands, and the best."""
    random: Any
    """[1] u8: state of the generator; not 0."""
    stay: Any
    """[2, 2, G, R, 2] u4: see `decode`; of where the chain stands, and of what was decoded last. Where there is
    nothing to queue (no node, or no backward) it begins at the largest number and ends at 0: it meets nobody."""
    here: Any
    """[2] u1: which of both is where the chain stands, and whether it tells anything."""


@_inner
def _uniform(state: Any) -> float:
    """The next number in [0, 1) (xorshift64*)."""
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return float((x * np.uint64(2685821657736338717)) >> np.uint64(11)) / 9007199254740992.0


@_inner
def _below(state: Any, count: int) -> int:
    return min(count - 1, int(_uniform(state) * count))


@_inner
def _copy(group_at: Any, swap: Any, half: int, low: int, high: int) -> None:
    """Keeps a part of one half's order before it changes."""
    for position in range(low, high):
        swap[2 + half, position] = group_at[half, position]


@_inner
def _shift(at: Any, group_at: Any, source: int, target: int) -> None:
    """Moves the group at one position to another one; those between move by one."""
    group = group_at[source]
    step = 1 if target > source else -1
    for position in range(source, target, step):
        group_at[position] = group_at[position + step]
        at[group_at[position]] = position
    group_at[target] = group
    at[group] = target


@_inner
def _move_cluster(cluster_of: Any, at: Any, group_at: Any, swap: Any, cluster: int, target: int) -> None:
    """Moves all groups of a cluster, in their order, to a position."""
    num_groups, kept, moved = at.size, 0, 0
    for position in range(num_groups):
        group = group_at[position]
        if cluster_of[group] == cluster:
            swap[1, moved] = group
            moved += 1
        else:
            swap[0, kept] = group
            kept += 1
    target = min(target, kept)
    place = 0
    for i in range(kept + 1):
        if i == target:
            for j in range(moved):
                group_at[place] = swap[1, j]
                at[swap[1, j]] = place
                place += 1
        if i < kept:
            group_at[place] = swap[0, i]
            at[swap[0, i]] = place
            place += 1


@_inner
def _change_decoder(how: Any, state: Any, can_split: bool) -> None:
    """One random step of one parameter."""
    which = _below(state, 5 if can_split else 4)
    if which < 2:
        how[which] = min(1.0, max(0.0, how[which] + 0.3 * (_uniform(state) - 0.5)))
    elif which == 2:
        how[2] = 0.25 * int(5 * _uniform(state))
    else:
        how[which] = 1.0 - how[which]


@_part
def _decides(stay: Any, at: Any, old: Any, low: int, high: int, cluster_of: Any, cluster: int) -> bool:
    """Whether a move can change what is decoded: two groups whose order it changes were in a queue at the same time.

    Args: stay: [G, R, 2] of one half. at: [G] positions after the move. old: the group at each position before. low,
        high: positions between which groups have moved. cluster: the one that has; -1: one of the ends has, or both.
    """
    for i in range(low, high):
        one = old[i]
        if i > low and i < high - 1 and cluster_of[one] != cluster:
            continue
        for j in range(low, high):
            other = old[j]
            if (i < j) == (at[one] < at[other]):
                continue
            for rank in range(stay.shape[1]):
                since = max(stay[one, rank, 0], stay[other, rank, 0])
                if since <= min(stay[one, rank, 1], stay[other, rank, 1]):
                    return True
    return False


@_compiled
def run(
    p: Instance,
    w: Workspace,
    chain: Chain,
    cluster_of: Any,
    mode: int,
    evaluations: int,
    hot: float,
    cold: float,
    iterations: int,
    can_split: bool,
    reorder: bool,
) -> float:
    """The one entry of these kernels, so that each part is compiled once.

    `ANNEAL`: some evaluations of simulated annealing. A move swaps two groups or shifts one, among forwards or among
    backwards, half of them to a near place; or shifts a cluster among both; or changes the decoder. Many moves change
    the order of groups that never wait together: they decode to the same plan, which costs what it did.
    `EVALUATE`: the makespan of the plan that the chain's priorities decode to; inf: it does not fit.
    `CHOOSE`: options for the orders that the workspace holds; how far they are above a bound, or inf.

    Args: cluster_of: [G] cluster of each group. hot, cold: temperature at the start and at the end, of the best
        makespan. iterations: of the choice of options. can_split, reorder: whether backwards may be split and orders
        change.
    """
    for rank in range(p.limit.size):
        w.last_rows[rank] = 0  # what an evaluation comes to depends on the others of this call alone
    num_groups = cluster_of.size
    state, how = chain.random, chain.how
    old_how = w.how
    changed = True
    cost = np.inf
    halves, low, high, cluster = (0, 2), 0, 0, -1
    for number in range(evaluations):
        if mode == ANNEAL:
            for i in range(how.size):
                old_how[i] = how[i]
            halves, low, high, cluster = (0, 2), 0, 0, -1  # the part of the order that changes
            dice = _uniform(state)
            if num_groups < 2 or not reorder or dice < 0.06:
                _change_decoder(how, state, can_split)
                changed = True
            elif dice < 0.2:
                cluster, target = cluster_of[_below(state, num_groups)], _below(state, num_groups)
                low, high = 0, num_groups
                for half in range(2):
                    _copy(chain.group_at, w.swap, half, low, high)
                for half in range(2):
                    _move_cluster(cluster_of, chain.at[half], chain.group_at[half], w.swap, cluster, target)
            else:
                half, source = int(2 * _uniform(state)), _below(state, num_groups)
                reach = num_groups if _uniform(state) < 0.5 else max(2, num_groups // 16)
                far = 1 + _below(state, reach)
                target = source + far if _uniform(state) < 0.5 else source - far
                target = min(num_groups - 1, max(0, target))
                halves, low, high = (half, half + 1), min(source, target), max(source, target) + 1
                _copy(chain.group_at, w.swap, half, low, high)
                at, group_at = chain.at[half], chain.group_at[half]
                if _uniform(state) < 0.5:
                    _shift(at, group_at, source, target)
                else:
                    first, second = group_at[source], group_at[target]
                    group_at[source], group_at[target] = second, first
                    at[first], at[second] = target, source
        here, same = chain.here[0], mode == ANNEAL and chain.here[1] > 0
        for i in range(how.size):
            same = same and how[i] == old_how[i]
        for half in range(halves[0], halves[1]):
            same = same and not _decides(
                chain.stay[here, half], chain.at[half], w.swap[2 + half], low, high, cluster_of, cluster
            )
        if same:
            _uniform(state)  # as if it had been decoded; only the prices that options are chosen from stay behind
            continue
        if changed:
            assume(p.node, p.first, p.option, w.state, w.footprint, how[0], how[1])
            changed = False
        cost, told = 0.0, False
        if mode != CHOOSE:
            decoder = Decoder(how[0], how[1], how[2], how[3] > 0.5, how[4] > 0.5)
            cost, told = decode(p, w, chain.at, chain.group_at, decoder, chain.stay[1 - here])
        if cost < np.inf:
            cost = choose_all(p, w, iterations)
            if cost < np.inf and mode != CHOOSE:
                cost = replay(p, w)
        if mode != ANNEAL:
            break
        temperature = hot * (cold / hot) ** (number / evaluations) * chain.cost[1]
        if cost <= chain.cost[0] - temperature * np.log(1.0 - _uniform(state)):
            chain.cost[0] = cost
            chain.here[0], chain.here[1] = 1 - here, told
            if cost < chain.cost[1]:
                chain.cost[1] = cost
                for i in range(how.size):
                    chain.best_how[i] = how[i]
                for group in range(num_groups):
                    chain.best_at[0, group], chain.best_at[1, group] = chain.at[0, group], chain.at[1, group]
            continue
        for i in range(how.size):
            changed = changed or how[i] != old_how[i]
            how[i] = old_how[i]
        for half in range(halves[0], halves[1]):
            for position in range(low, high):
                group = w.swap[2 + half, position]
                chain.group_at[half, position] = group
                chain.at[half, group] = position
    return cost
