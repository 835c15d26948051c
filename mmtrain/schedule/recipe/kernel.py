"""The rules of `rank_policy` for numba: a whole run of a recipe, on arrays, 13 to 17 times as fast.

`run` repeats `Engine.run`, the choices of `ranks.Ranks` and the admission of `library.memory.Memory`, as numba compiles
none of them; tests hold both runs equal. `compiled` returns the compiled one.
"""

import heapq
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

from mmtrain.schedule.numba_start import load_numba

F, B, W = 0, 1, 2
"""Slots of items; B stands for B and I."""
BACKWARD_FIRST, FORWARD_FIRST, ALTERNATE = 0, 1, 2
BREADTH, DEPTH, OLDEST = 0, 1, 2
WAITING, READY, STARTED = 0, 1, 2
SLACK = 1 + 1e-9
"""Rounding errors that a limit allows."""


class State(NamedTuple):
    """What a run reads and changes: arrays of int64 and float64.

    N nodes, S stages, C components, L pools. A row (slot, stage) is slot * S + stage; a side (rank, slot) is
    2 * rank + slot.
    """

    waiting: Any
    """[item] -> how many of the results that it needs have not been started."""
    arrival: Any
    """[item] -> when those that have been started have arrived on its rank."""
    dependents: Any
    """Items that wait for item i: entries of_item[i] .. of_item[i + 1] - 1."""
    delay: Any
    """[entry of dependents] -> seconds of the transfer."""
    of_item: Any
    seconds: Any
    """[item] -> its seconds."""
    rank_of: Any
    """[item] -> its rank."""
    status: Any
    """[item] -> WAITING, READY (all that it needs has arrived) or STARTED."""
    age: Any
    """[item of F or B] -> position among all of its slot, oldest first."""
    stage: Any
    """[node] -> its stage."""
    component: Any
    """[node] -> its component."""
    microbatch: Any
    """[node] -> index of its microbatch among those of the iteration."""
    has_backward: Any
    """[node] -> whether it has a backward."""
    split: Any
    """[node] -> whether its backward is I and W."""
    queue: Any
    """Items of row (slot, stage), oldest first: entries first[row] .. first[row + 1] - 1, not started from `at`."""
    first: Any
    at: Any
    num_ready: Any
    """[row] -> how many of it are READY."""
    remaining: Any
    """[row] -> how many of it have not been started."""
    stages: Any
    """Stages of a rank, front layers first: entries first_stage[rank] .. first_stage[rank + 1] - 1."""
    first_stage: Any
    due: Any
    """Ws of a rank in the order in which they became ready: entries first_due[rank] .. last_due[rank] - 1."""
    first_due: Any
    last_due: Any
    instructions: Any
    """Registered instructions of a rank: entries first_instruction[rank] .. first_instruction[rank + 1] - 1."""
    first_instruction: Any
    preferred: Any
    """[rank] -> BACKWARD_FIRST, FORWARD_FIRST or ALTERNATE."""
    unit: Any
    """[side] -> how many of one slot run in a row before the rank chooses the slot anew."""
    order: Any
    """[side] -> BREADTH, DEPTH or OLDEST."""
    every: Any
    """[side] -> how many of one stage run in a row; 0: no such rule."""
    waits: Any
    """[side] -> whether `every` counts microbatches of the iteration and waits for its stage; else it goes on to the
    next stage that can run."""
    cursor: Any
    """[side] -> position, in the direction of traversal, of the stage that `every` is at."""
    served: Any
    """[side] -> how many of that stage have run in a row."""
    last: Any
    """[rank] -> slot of its last F or B; -1: none."""
    in_a_row: Any
    """[rank] -> how many of that slot have run in a row."""
    pool: Any
    """[level * N + node] -> pool; -1: none."""
    amount: Any
    """[level * N + node] -> what an F takes from its pool."""
    kept: Any
    """[level * N + node] -> what is still held after an I."""
    limit: Any
    """[pool] -> its limit."""
    total: Any
    """[pool] -> held by all components."""
    held: Any
    """[pool * C + component]"""
    to_hold: Any
    """[pool * C + component] -> what its F that have not been started will hold."""
    forwards: Any
    """[pool * C + component] -> how many F have not been started."""
    passing: Any
    """F without a backward of (pool, component): entries first_passing[pool * C + component] and on, as level * N +
    node, the largest amount first."""
    first_passing: Any
    busy: Any
    """[rank] -> whether it runs an action."""
    awake: Any
    """[rank] -> whether it decides at this time."""
    begun: Any
    """The items in the order of their start."""
    ends: Any
    """[item] -> end of its action."""
    sizes: Any
    """Number of nodes, stages, components, levels, and items to start."""


def admits(t: Any, node: int, promise: int) -> bool:
    """Whether the limits admit a forward. Args: promise: whether a way to the end must remain for all components."""
    N, C = t.sizes[0], t.sizes[2]
    for level in range(t.sizes[3]):
        pool = t.pool[level * N + node]
        if pool < 0:
            continue
        amount, limit = t.amount[level * N + node], t.limit[pool] * SLACK
        if t.total[pool] + amount > limit:
            return False
        if not promise or not t.has_backward[node]:
            continue
        behind = t.total[pool]  # held by this component and younger ones
        for component in range(t.component[node] + 1):
            at = pool * C + component
            if t.forwards[at]:
                more = t.to_hold[at] if component < t.component[node] else 0.0
                for i in range(t.first_passing[at], t.first_passing[at + 1]):
                    if t.status[t.passing[i] % N] != STARTED:
                        more = max(more, t.amount[t.passing[i]])
                        break
                if behind + amount + more > limit:
                    return False
            behind -= t.held[at]
    return True


def ready_of_stage(t: Any, slot: int, stage: int, promise: int) -> int:
    """The oldest item of a row that may start now; -1: none."""
    row = slot * t.sizes[1] + stage
    remaining, i = t.num_ready[row], t.at[row]
    while remaining > 0:
        item = t.queue[i]
        if t.status[item] == READY:
            if slot == B or admits(t, item, promise):
                return item  # type: ignore[no-any-return]
            remaining -= 1
        i += 1
    return -1


def head(t: Any, rank: int, slot: int, promise: int) -> int:
    """The F or B that the rank's traversal of stages selects; -1: none."""
    side, low, high = 2 * rank + slot, t.first_stage[rank], t.first_stage[rank + 1]
    if t.order[side] == OLDEST:
        best = -1
        for i in range(low, high):
            item = ready_of_stage(t, slot, t.stages[i], promise)
            if item >= 0 and (best < 0 or t.age[item] < t.age[best]):
                best = item
        return best
    if t.waits[side]:
        return head_of_group(t, rank, slot, promise)  # type: ignore[no-any-return]
    count = high - low
    begin = t.cursor[side]
    if t.every[side] and t.served[side] >= t.every[side]:
        begin += 1
    for i in range(count):
        position = (begin + i) % count
        stage = t.stages[low + position if t.order[side] == BREADTH else high - 1 - position]
        item = ready_of_stage(t, slot, stage, promise)
        if item >= 0:
            return item
    return -1


def head_of_group(t: Any, rank: int, slot: int, promise: int) -> int:
    """The F or B of the stage whose turn it is, the first that has not run all of the oldest group of `every`
    microbatches; -1: it waits."""
    side, low, high = 2 * rank + slot, t.first_stage[rank], t.first_stage[rank + 1]
    turn = oldest = -1
    for i in range(high - low):
        stage = t.stages[low + i if t.order[side] == BREADTH else high - 1 - i]
        row = slot * t.sizes[1] + stage
        if t.remaining[row]:
            group = t.microbatch[t.queue[t.at[row]] % t.sizes[0]] // t.every[side]
            if turn < 0 or group < oldest:
                turn, oldest = stage, group
    item = ready_of_stage(t, slot, turn, promise) if turn >= 0 else -1
    return item if item >= 0 and t.microbatch[item % t.sizes[0]] // t.every[side] == oldest else -1


def choose(t: Any, rank: int, promise: int) -> int:
    """What an idle rank starts now; -1: nothing. Args: promise: as of `admits`."""
    for i in range(t.first_instruction[rank], t.first_instruction[rank + 1]):
        if t.status[t.instructions[i]] == READY:
            return t.instructions[i]  # type: ignore[no-any-return]
    last = t.last[rank]
    if last >= 0 and t.in_a_row[rank] < t.unit[2 * rank + last]:
        item = head(t, rank, last, promise)
        if item >= 0:
            return item
    slot = B if t.preferred[rank] == BACKWARD_FIRST or (t.preferred[rank] == ALTERNATE and last == F) else F
    item = head(t, rank, slot, promise)
    if item < 0:
        item = head(t, rank, 1 - slot, promise)
    return item if item >= 0 else weight(t, rank)


def weight(t: Any, rank: int) -> int:
    """The W that has been due longest on a rank and may start; -1: none."""
    while t.first_due[rank] < t.last_due[rank] and t.status[t.due[t.first_due[rank]]] == STARTED:
        t.first_due[rank] += 1
    for i in range(t.first_due[rank], t.last_due[rank]):
        if t.status[t.due[i]] == READY:
            return t.due[i]  # type: ignore[no-any-return]
    return -1


def start(t: Any, events: Any, item: int, now: float, count: int) -> int:
    """Starts an action, by the rule of `Engine.start`; returns the number of events so far."""
    N = t.sizes[0]
    slot, node = item // N, item % N
    t.status[item] = STARTED
    t.busy[t.rank_of[item]] = 1
    if slot < W:
        leave_queue(t, slot, node)
    if slot == F:
        occupy(t, node)
    end = t.ends[item] = now + t.seconds[item]
    heapq.heappush(events, (end, count, item, 1))
    count += 1
    for i in range(t.of_item[item], t.of_item[item + 1]):
        dependent = t.dependents[i]
        t.waiting[dependent] -= 1
        t.arrival[dependent] = max(t.arrival[dependent], end + t.delay[i])
        if not t.waiting[dependent] and (dependent // N != W or t.split[dependent % N]):
            heapq.heappush(events, (t.arrival[dependent], count, dependent, 0))
            count += 1
    return count


def leave_queue(t: Any, slot: int, node: int) -> None:
    """Takes a started F or B out of its queue, and moves the traversal of its rank on."""
    rank, stage = t.rank_of[node], t.stage[node]
    row, side, low, high = slot * t.sizes[1] + stage, 2 * rank + slot, t.first_stage[rank], t.first_stage[rank + 1]
    t.num_ready[row] -= 1
    t.remaining[row] -= 1
    while t.at[row] < t.first[row + 1] and t.status[t.queue[t.at[row]]] == STARTED:
        t.at[row] += 1
    t.in_a_row[rank] = t.in_a_row[rank] + 1 if t.last[rank] == slot else 1
    t.last[rank] = slot
    for i in range(low, high if t.every[side] else low):
        if t.stages[i] == stage:
            position = i - low if t.order[side] == BREADTH else high - 1 - i
            same = position == t.cursor[side] and t.served[side] < t.every[side]
            t.served[side] = t.served[side] + 1 if same else 1
            t.cursor[side] = position


def occupy(t: Any, node: int) -> None:
    """A forward takes from its pools what it holds until its backward has ended."""
    N = t.sizes[0]
    for level in range(t.sizes[3]):
        pool = t.pool[level * N + node]
        if pool >= 0:
            at = pool * t.sizes[2] + t.component[node]
            t.forwards[at] -= 1
            if t.has_backward[node]:
                t.to_hold[at] -= t.amount[level * N + node]
                hold(t, level, node, t.amount[level * N + node])


def hold(t: Any, level: int, node: int, amount: float) -> None:
    """Adds to what is held in a node's pool of a level."""
    pool = t.pool[level * t.sizes[0] + node]
    t.total[pool] += amount
    t.held[pool * t.sizes[2] + t.component[node]] += amount


def arrive(t: Any, item: int) -> None:
    """All that an item needs has arrived."""
    slot, node = item // t.sizes[0], item % t.sizes[0]
    t.status[item] = READY
    rank = t.rank_of[item]
    t.awake[rank] = 1
    if slot < W:
        t.num_ready[slot * t.sizes[1] + t.stage[node]] += 1
    elif slot == W:
        t.due[t.last_due[rank]] = item
        t.last_due[rank] += 1


def finish(t: Any, item: int) -> None:
    """An action ends: its rank is idle, and its limits have room again."""
    N = t.sizes[0]
    slot, node, rank = item // N, item % N, t.rank_of[item]
    t.busy[rank] = 0
    t.awake[rank] = 1
    if slot in (B, W):
        for level in range(t.sizes[3]):
            if t.pool[level * N + node] >= 0:
                amount, kept = t.amount[level * N + node], t.kept[level * N + node]
                hold(t, level, node, -kept if slot == W else kept - amount if t.split[node] else -amount)


def run(t: Any) -> int:
    """Runs all actions; returns how many started, fewer than `sizes` says where the recipe gets stuck."""
    events, count, now, begun = [(0.0, 0, 0, 0)], 0, 0.0, 0
    events.pop()
    for item in range(len(t.waiting)):
        if not t.waiting[item] and item // t.sizes[0] not in (B, W):
            heapq.heappush(events, (0.0, count, item, 0))
            count += 1
    ranks = len(t.busy)
    while True:
        while len(events) > 0 and events[0][0] <= now:
            _, _, item, ends = heapq.heappop(events)
            if ends:
                finish(t, item)
            else:
                arrive(t, item)
        for rank in range(ranks):
            if t.awake[rank] and not t.busy[rank]:
                item = choose(t, rank, 1)
                if item >= 0:
                    count = start(t, events, item, now, count)
                    t.begun[begun] = item
                    begun += 1
            t.awake[rank] = 0
        if len(events) == 0:
            if begun == t.sizes[4]:
                return begun
            # Nothing keeps the promise (a stage without a backward behind one that has one): what fits now may start.
            item = -1
            for rank in range(ranks):
                if item < 0:
                    item = choose(t, rank, 0)
            if item < 0:
                return begun
            count = start(t, events, item, now, count)
            t.begun[begun] = item
            begun += 1
        now = events[0][0]


class Costs(NamedTuple):
    """Seconds and bytes of actions, as `simulate` counts them. The first four arrays are as in `State`."""

    dependents: Any
    of_item: Any
    rank_of: Any
    delay: Any
    seconds: Any
    """[item] -> its seconds."""
    needed_bytes: Any
    """[item] -> while it runs, in addition to what was held before it."""
    growth_bytes: Any
    """[item] -> what it allocates, less what it frees."""


STARTS, ENDS, BUSY, PEAK = range(4)
"""Rows of what `measure` finds: seconds of a rank's first start, of its last end and of its actions; bytes."""


def measure(c: Any, begun: Any, arrival: Any, found: Any) -> None:
    """Computes when the actions of a plan run, and what each rank holds, as `simulate` does.

    Args:
        begun: items in an order in which they could run one after the other.
        arrival: [item], zeros.
        found: [4, rank] -> what `STARTS` and so on name; infinite starts, and zeros.
    """
    held = [0.0 for _ in found[0]]
    for item in begun:
        rank = c.rank_of[item]
        begin = max(arrival[item], found[ENDS, rank])
        end = found[ENDS, rank] = begin + c.seconds[item]
        found[STARTS, rank] = min(found[STARTS, rank], begin)
        found[BUSY, rank] += end - begin
        during = held[rank] + c.needed_bytes[item]
        held[rank] += c.growth_bytes[item]
        found[PEAK, rank] = max(found[PEAK, rank], during, held[rank])
        for i in range(c.of_item[item], c.of_item[item + 1]):
            arrival[c.dependents[i]] = max(arrival[c.dependents[i]], end + c.delay[i])


KERNELS = (
    admits, ready_of_stage, head_of_group, head, weight, choose, hold, occupy, leave_queue, start, arrive, finish, run,
    measure,
)  # fmt: skip


class Entries(NamedTuple):
    """What callers run, compiled or as it is."""

    run: Callable[[State], int]
    measure: Callable[[Costs, Any, Any, Any], None]


@cache
def compiled() -> Entries:
    """The compiled entries. numba compiles them at their first call, or loads them from its cache on disk.

    numba itself loads here: a caller that runs few recipes does not wait for it.
    """
    import numba

    load_numba()
    scope, flags = dict(globals()), {"nogil": True, "error_model": "numpy"}
    # Inlined, as a call would copy the values of all arrays. Only what keeps a list counts references.
    inner = {"forceinline": True, "no_cfunc_wrapper": True, "no_cpython_wrapper": True}
    for function in KERNELS:
        name = function.__name__
        given = flags if name in Entries._fields else flags | inner | {"_nrt": name == "start"}
        source = FunctionType(function.__code__, scope, name)
        try:
            scope[name] = numba.njit(cache=True, **given)(source)
        except RuntimeError:  # neither the folder of this file nor the user's cache folder can be written
            scope[name] = numba.njit(**given)(source)
    return Entries(scope["run"], scope["measure"])


def is_cached() -> bool:
    """Whether numba's cache on disk has the kernel; else the first run compiles it, for 11 s of CPU time."""
    file = getattr(compiled().run._cache, "_cache_file", None)  # type: ignore[attr-defined]
    return file is not None and bool(file._load_index())
