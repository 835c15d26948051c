"""Annealing on the orders and options of a finished plan, without a decoder.

A decoder's plans start what is admitted and can start, and options are chosen for the seconds of each rank. The best
plan may let a rank idle, or give a rank that nobody waits for slower options. Moves here shift one action in its rank's
order, or change one option; what deadlocks or does not fit is not accepted. Such a try costs a fraction of a decoded
one.
"""

from typing import Any

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
from mmtrain.planner.search.kernels.compiler import entry, part, small
from mmtrain.planner.search.kernels.random_numbers import below, uniform
from mmtrain.planner.search.kernels.timing import (
    EPSILON,
    Timing,
    free_after,
    growth_of,
    latest_end,
    mark,
    mark_sources,
    passing_of,
    propagate,
    propagate_tails,
    seconds_taken,
    set_spare,
    signed,
    sort,
    take_back,
    time_all,
)

BUSY = 0.02
"""Weight of the mean busy seconds of a rank beside the makespan: of plans as long, one with faster options has room for
further moves."""
AREA = 0.015
"""Weight of the mean bytes x seconds of a rank, as a part of its limit: what holds less lets others be faster."""
REACH, FAR = 8, 0.05
"""Places by which most moves shift an action, and the part of them that shift it anywhere."""
HOLDERS, DRAWS = 128, 4
"""Places back, and how many of them are looked at, for a node that may make room with a smaller option."""


@part
def _may_pass(p: Instance, w: Workspace, t: Timing, rank: int, source: int, target: int) -> bool:
    """Whether an action of a rank may go to another place: it passes no other one of its node, and nothing in the
    sequence that it needs or that needs it."""
    action, passed = w.order[rank, source], t.slot[w.order[rank, target]]
    i, kind, may = action >> 2, action & 3, True
    for k in range(min(source, target), max(source, target) + 1):
        may = may and (k == source or w.order[rank, k] >> 2 != i)
    if target > source:
        if kind == F:
            for e in range(p.outs_start[i], p.outs_start[i + 1]):
                may = may and t.slot[4 * p.outs[e, 0]] > passed
        elif kind != W:
            for e in range(p.ins_start[i], p.ins_start[i + 1]):
                may = may and (p.ins[e, 1] == 0 or t.slot[t.backward[p.ins[e, 0]]] > passed)
    elif kind == F:
        for e in range(p.ins_start[i], p.ins_start[i + 1]):
            may = may and t.slot[4 * p.ins[e, 0]] < passed
    elif kind != W:
        for e in range(p.outs_start[i], p.outs_start[i + 1]):
            may = may and (p.outs[e, 1] == 0 or t.slot[t.backward[p.outs[e, 0]]] < passed)
    return bool(may)


@part
def _tightest(t: Timing, rank: int, begin: int, end: int) -> int:
    """The place of a rank, of some, with the least to spare. Args: end: behind the last of them; above `begin`."""
    tightest = begin
    for k in range(begin + 1, end):
        if t.spare[rank, k] < t.spare[rank, tightest]:
            tightest = k
    return tightest


@part
def _lacks_shifted(
    p: Instance, w: Workspace, t: Timing, rank: int, source: int, target: int
) -> tuple[int, float]:  # fmt: skip
    """The place where a rank lacks most bytes if an action goes to another place, and how many (at most 0: none)."""
    action = w.order[rank, source]
    growth, passing = growth_of(p, w.option[action >> 2], action), passing_of(p, w.option[action >> 2], action)
    if target > source:
        place = _tightest(t, rank, source + 1, target + 1)
        lacks, own = -growth - t.spare[rank, place], passing - free_after(p, w, t, rank, target)
        return (target, own) if own > lacks else (place, lacks)
    place = _tightest(t, rank, target, source)
    lacks, own = growth - t.spare[rank, place], growth + passing - free_after(p, w, t, rank, target - 1)
    return (max(0, target - 1), own) if own > lacks else (place, lacks)


@part
def _shift(w: Workspace, t: Timing, rank: int, source: int, target: int, slot: int) -> None:
    """Moves an action of a rank to another place of its order, and to another slot."""
    action = w.order[rank, source]
    step = 1 if target > source else -1
    for place in range(source, target, step):
        other = w.order[rank, place + step]
        w.order[rank, place] = other
        t.place[other] = place
    w.order[rank, target] = action
    t.place[action] = target
    for k in range(int(t.slot[action]), slot, step):
        other = w.sequence[k + step]
        w.sequence[k] = other
        t.slot[other] = k
    w.sequence[slot] = action
    t.slot[action] = slot


@small
def _span(p: Instance, t: Timing, i: Any) -> tuple[int, int, int]:
    """The places of a rank from which and before which a node holds bytes until I or B, and before which until W."""
    begin, end = signed(t.place[4 * i]), signed(t.place[4 * i]) + 1
    if p.node[i, NEEDS_B] > 0:
        end = signed(t.place[t.backward[i]])
    return begin, end, signed(t.place[4 * i + W]) if t.backward[i] & 3 == I else end


@part
def _lacks_changed(p: Instance, w: Workspace, t: Timing, i: Any, option: Any) -> tuple[int, float]:
    """The place where a rank lacks most bytes with another option of a node, and how many (at most 0: none)."""
    (begin, end, last), rank = _span(p, t, i), p.node[i, RANK]
    more = p.option[option, HELD] - p.option[w.option[i], HELD]
    more_w = p.option[option, HELD_W] - p.option[w.option[i], HELD_W]
    place, lacks = begin, 0.0
    if more > 0.0:
        place = _tightest(t, rank, begin, end)
        lacks = more - t.spare[rank, place]
    if more_w > 0.0 and last > end:
        later = _tightest(t, rank, end, last)
        if more_w - t.spare[rank, later] > lacks:
            return later, more_w - t.spare[rank, later]
    return place, lacks


@part
def _holder(p: Instance, w: Workspace, t: Timing, rank: int, place: int, but: Any, random: Any) -> Any:
    """A node, by chance, that holds bytes at a place of a rank; -1: none was drawn. Args: but: not this one."""
    for _ in range(DRAWS):
        action = w.order[rank, place - below(random, min(place + 1, HOLDERS))]
        i = action >> 2
        if action & 3 == F and i != but and p.node[i, NEEDS_B] > 0 and t.place[t.backward[i]] > place:
            return signed(i)
    return signed(-1)


@part
def _smaller(p: Instance, w: Workspace, i: Any, lacks: float) -> Any:
    """The fastest option of a node that holds less than its own by some bytes; -1: there is none."""
    for option in range(signed(w.option[i]) + 1, p.first[p.node[i, KIND] + 1]):
        if p.option[w.option[i], HELD] - p.option[option, HELD] >= lacks:
            return option
    return signed(-1)


@part
def _hold(p: Instance, w: Workspace, t: Timing, i: Any, option: Any) -> None:
    """Sets what a node's rank has to spare with another option of it."""
    (begin, end, last), rank = _span(p, t, i), p.node[i, RANK]
    more = p.option[option, HELD] - p.option[w.option[i], HELD]
    more_w = p.option[option, HELD_W] - p.option[w.option[i], HELD_W]
    for k in range(begin, end):
        t.spare[rank, k] -= more
    for k in range(end, last):
        t.spare[rank, k] -= more_w


@small
def _area(t: Timing, i: Any) -> float:
    """The bytes x seconds of a node, weighted."""
    area = t.pull[4 * i] * t.end[4 * i]
    if t.backward[i] > 0:
        area += t.pull[t.backward[i]] * t.end[t.backward[i]]
        if t.backward[i] & 3 == I:
            area += t.pull[4 * i + W] * t.end[4 * i + W]
    return float(area)


@small
def _set_pull(p: Instance, t: Timing, i: Any, option: Any) -> None:
    """Sets by how much the bytes x seconds of a node with an option grow with the ends of its actions."""
    scale = AREA / (p.limit.size * p.limit[p.node[i, RANK]])
    t.pull[4 * i] = 0.0
    if t.backward[i] > 0:
        t.pull[4 * i] = -p.option[option, HELD] * scale
        t.pull[t.backward[i]] = p.option[option, HELD] * scale
        if t.backward[i] & 3 == I:
            t.pull[t.backward[i]] -= p.option[option, HELD_W] * scale
            t.pull[4 * i + W] = p.option[option, HELD_W] * scale


@part
def _set_option(p: Instance, w: Workspace, t: Timing, i: Any, option: Any) -> None:
    """Gives a node an option, and its actions their seconds."""
    w.option[i] = option
    _set_pull(p, t, i, option)
    t.took[4 * i] = seconds_taken(p, option, F)
    if t.backward[i] > 0:
        t.took[t.backward[i]] = seconds_taken(p, option, t.backward[i] & 3)
        t.took[4 * i + W] = seconds_taken(p, option, W)


@part
def _keep(w: Workspace, best_order: Any, best_option: Any, best_length: Any) -> None:
    for rank in range(w.time.size):
        best_length[rank] = w.length[rank]
        for place in range(w.length[rank]):
            best_order[rank, place] = w.order[rank, place]
    for i in range(w.option.size):
        best_option[i] = w.option[i]


@part
def _busy(p: Instance, option: Any, whole: bool) -> float:
    """Seconds of all actions of a node with an option."""
    row = p.option[option]
    return float(row[0] + row[1] + (row[2] if whole else row[ALONE]))


@part
def _least(p: Instance, w: Workspace, t: Timing, i: Any, option: Any) -> float:
    """A bound of the makespan with another option of a node: of the paths through those of its actions that take
    longer."""
    less, least = 0.0, 0.0
    for kind in range(4):
        action = 4 * i + kind
        if kind == F or action == t.backward[i] or (kind == W and t.backward[i] & 3 == I):
            more = seconds_taken(p, option, kind) - t.took[action]
            less += min(0.0, more)
            if more > 0.0:
                least = max(least, t.end[action] + t.tail[action] + more)
    return least + less


@part
def _mark_node(p: Instance, t: Timing, i: Any, first: int, last: int) -> tuple[int, int]:
    """Has the actions of a node visited; the first and the last slot to visit."""
    slot = int(t.slot[4 * i])
    mark(t, slot)
    first, last = min(first, slot), max(last, slot)
    if t.backward[i] > 0:
        slot = int(t.slot[t.backward[i]])
        mark(t, slot)
        last = max(last, slot)
        if t.backward[i] & 3 == I:
            slot = int(t.slot[4 * i + W])
            mark(t, slot)
            last = max(last, slot)
    return first, last


@part
def _mark_sources_of_node(p: Instance, w: Workspace, t: Timing, i: Any, first: int, last: int) -> tuple[int, int]:
    """Has those visited, from the last slot, that the actions of a node wait for; the first and the last to visit."""
    action = 4 * i
    if t.backward[i] > 0:
        action = t.backward[i]
        last = mark_sources(p, w, t, action, last)
        if t.backward[i] & 3 == I:
            action = 4 * i + W
            last = mark_sources(p, w, t, action, last)
    return min(first, 64 * t.dirty.size - 1 - int(t.slot[action])), mark_sources(p, w, t, 4 * i, last)


@entry
def polish(
    p: Instance, w: Workspace, t: Timing, best_order: Any, best_option: Any, best_length: Any, best: float,
    random: Any, tries: int, hot: float, cold: float,
) -> float:  # fmt: skip
    """Anneals the plan in a workspace, which has no blocks and no joined backwards; the makespan of the best.

    Where a change does not fit, another node of the rank makes room with the fastest option that is small enough.

    Args: best_order, best_option, best_length: as in `Workspace`: the best plan before, and after it. best: its
        makespan. random: [1] u8 state of the generator. hot, cold: temperature at the start and at the end, as a part
        of the makespan.
    """
    num_ranks, num_nodes = w.time.size, p.node.shape[0]
    makespan, busy, num_actions = time_all(p, w, t), 0.0, 0
    for rank in range(num_ranks):
        num_actions += w.length[rank]
    for i in range(num_nodes):
        _set_pull(p, t, i, w.option[i])
        busy += _busy(p, w.option[i], t.backward[i] & 3 == B)
    last_slot = 64 * t.dirty.size - 1
    for number in range(tries):
        if number % num_actions == num_actions - 1:
            sort(p, w, t)
        cost = makespan + BUSY * busy / num_ranks
        most = cost - hot * (cold / hot) ** (number / tries) * best * np.log(1.0 - uniform(random))
        shifts, source, target = uniform(random) < 0.5, 0, 0
        if shifts:
            rank = below(random, num_ranks)
            length = signed(w.length[rank])
            if length < 2:
                continue
            source, reach = below(random, length), length if uniform(random) < FAR else REACH
            far = 1 + below(random, reach)
            target = source + far if uniform(random) < 0.5 else source - far
            target = min(length - 1, max(0, target))
            if target == source or not _may_pass(p, w, t, rank, source, target):
                continue
            i = signed(w.order[rank, source] >> 2)
            option = signed(w.option[i])
            place, lacks = _lacks_shifted(p, w, t, rank, source, target)
        else:
            i = below(random, num_nodes)
            rank, listed = signed(p.node[i, RANK]), p.node[i, KIND]
            first, count = p.first[listed], p.first[listed + 1] - p.first[listed]
            if count < 2:
                continue
            option = first + (signed(w.option[i]) - first + 1 + below(random, count - 1)) % count
            place, lacks = _lacks_changed(p, w, t, i, option)
        other, option_then = signed(-1), signed(-1)
        if lacks > 0.0:
            other = _holder(p, w, t, rank, place, i, random)
            if other >= 0:
                option_then = _smaller(p, w, other, lacks)
            if option_then < 0:
                continue
        before, whole, busy_then = signed(w.option[i]), t.backward[i] & 3 == B, busy
        busy_then += _busy(p, option, whole) - _busy(p, before, whole)
        option_before = signed(0)
        area_before = 0.0
        if other >= 0:
            area_before += _area(t, other)
        if not shifts:
            area_before += _area(t, i)
        if other >= 0:
            option_before, whole = signed(w.option[other]), t.backward[other] & 3 == B
            busy_then += _busy(p, option_then, whole) - _busy(p, option_before, whole)
        limit = most - BUSY * busy_then / num_ranks + EPSILON * makespan
        if other >= 0:
            if _least(p, w, t, other, option_then) > limit:
                continue
            _hold(p, w, t, other, option_then)
            _set_option(p, w, t, other, option_then)
            if shifts:
                place, lacks = _lacks_shifted(p, w, t, rank, source, target)
            else:
                place, lacks = _lacks_changed(p, w, t, i, option)
            if lacks > 0.0:
                _hold(p, w, t, other, option_before)
                _set_option(p, w, t, other, option_before)
                continue
        elif not shifts and _least(p, w, t, i, option) > limit:
            continue
        # What has changed is marked.
        begin, behind, slot = last_slot, 0, 0
        low, high = min(source, target), max(source, target)
        if shifts:
            slot = int(t.slot[w.order[rank, source]])
            _shift(w, t, rank, source, target, int(t.slot[w.order[rank, target]]))
            begin, behind = int(t.slot[w.order[rank, low]]), int(t.slot[w.order[rank, high]])
            for k in range(low, high + 1):
                mark(t, int(t.slot[w.order[rank, k]]))
        else:
            _hold(p, w, t, i, option)
            _set_option(p, w, t, i, option)
            begin, behind = _mark_node(p, t, i, begin, behind)
        if other >= 0:
            begin, behind = _mark_node(p, t, other, begin, behind)
        last = behind
        if shifts and high + 1 < w.length[rank]:
            last = max(last, int(t.slot[w.order[rank, high + 1]]))
            mark(t, int(t.slot[w.order[rank, high + 1]]))
        more_area = 0.0
        if not shifts:
            more_area += _area(t, i)
        if other >= 0:
            more_area += _area(t, other)
        more_area -= area_before
        num_changed, exceeds = propagate(p, w, t, begin, last, behind, limit)
        if not exceeds:
            for k in range(num_changed):
                more_area += t.pull[t.changed[k]] * (t.end[t.changed[k]] - t.before[k])
            exceeds = latest_end(w, t) + more_area > limit
        if exceeds:
            take_back(t, num_changed)
            if shifts:
                _shift(w, t, rank, target, source, slot)
            else:
                _hold(p, w, t, i, before)
                _set_option(p, w, t, i, before)
            if other >= 0:
                _hold(p, w, t, other, option_before)
                _set_option(p, w, t, other, option_before)
            continue
        busy, makespan = busy_then, latest_end(w, t)
        begin, last = last_slot, 0
        if shifts:
            set_spare(p, w, t, rank, low, high + 1)
            begin = last_slot - int(t.slot[w.order[rank, high]])
            for k in range(max(0, low - 1), high + 1):
                last = max(last, last_slot - int(t.slot[w.order[rank, k]]))
                mark(t, last_slot - int(t.slot[w.order[rank, k]]))
        else:
            begin, last = _mark_sources_of_node(p, w, t, i, begin, last)
        if other >= 0:
            begin, last = _mark_sources_of_node(p, w, t, other, begin, last)
        propagate_tails(p, w, t, begin, last)
        if makespan < best:
            best = makespan
            _keep(w, best_order, best_option, best_length)
    return float(best)
