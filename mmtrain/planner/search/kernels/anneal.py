"""Simulated annealing on the orders of groups and on the decoder, and the one entry to all kernels."""

from typing import Any

import numpy as np

from mmtrain.planner.search.kernels.arrays import (
    BACKWARD,
    BACKWARD_FIRST,
    BRAID,
    FORWARD,
    GAP,
    MEMORY,
    SPLIT,
    WAIT,
    Chain,
    Instance,
    Workspace,
)
from mmtrain.planner.search.kernels.compiler import entry, inner, part
from mmtrain.planner.search.kernels.decode import assume, decode
from mmtrain.planner.search.kernels.memory import choose_all
from mmtrain.planner.search.kernels.random_numbers import below, uniform
from mmtrain.planner.search.kernels.replay import cost_of, join

ANNEAL, EVALUATE, CHOOSE, JOIN, COST = range(5)
"""Modes of `run`."""


@inner
def _save(group_at: Any, swap: Any, direction: int, low: int, high: int) -> None:
    """Saves a part of one direction's order before it changes."""
    for position in range(low, high):
        swap[2 + direction, position] = group_at[direction, position]


@inner
def _shift(at: Any, group_at: Any, source: int, target: int) -> None:
    """Moves the group at one position to another one; those between move by one."""
    group = group_at[source]
    step = 1 if target > source else -1
    for position in range(source, target, step):
        group_at[position] = group_at[position + step]
        at[group_at[position]] = position
    group_at[target] = group
    at[group] = target


@inner
def _move_component(component_of: Any, at: Any, group_at: Any, swap: Any, component: int, target: int) -> None:
    """Moves all groups of a component, in their order, to a position."""
    num_groups, kept, moved = at.size, 0, 0
    for position in range(num_groups):
        group = group_at[position]
        if component_of[group] == component:
            swap[1, moved] = group
            moved += 1
        else:
            swap[0, kept] = group
            kept += 1
    target = min(target, kept)
    index = 0
    for i in range(kept + 1):
        if i == target:
            for j in range(moved):
                group_at[index] = swap[1, j]
                at[swap[1, j]] = index
                index += 1
        if i < kept:
            group_at[index] = swap[0, i]
            at[swap[0, i]] = index
            index += 1


@inner
def _change_decoder(decoder: Any, state: Any, can_split: bool, can_braid: bool) -> None:
    """One random step of one parameter; of a module's assumption, or of that of all modules alike."""
    which = below(state, 5 + int(can_split) + int(can_braid))
    if which < 2:
        modules = (decoder.size - MEMORY) >> 1
        module, step = below(state, modules + 1), 0.3 * (uniform(state) - 0.5)
        for i in range(modules):
            if (module == modules) | (module == i):
                at = MEMORY + which * modules + i
                decoder[at] = min(1.0, max(0.0, decoder[at] + step))
    elif which == 2:
        decoder[GAP] = 0.25 * int(5 * uniform(state))
    elif which == 3:
        decoder[WAIT] = 0.25 * int(5 * uniform(state))
    elif which == 4:
        decoder[BACKWARD_FIRST] = 1.0 - decoder[BACKWARD_FIRST]
    else:
        switch = SPLIT if which == 5 and can_split else BRAID
        decoder[switch] = 1.0 - decoder[switch]


@part
def _decides(queued: Any, at: Any, old: Any, low: int, high: int, component_of: Any, component: int) -> bool:
    """Whether a move can change what is decoded: two groups whose order it changes were in a queue at the same time.

    Args: queued: [G, R, 2] of one direction. at: [G] positions after the move. old: the group at each position before.
        low, high: positions between which groups have moved. component: the one that was moved; -1: a group at one of
        the ends was, or both.
    """
    for i in range(low, high):
        one = old[i]
        if i > low and i < high - 1 and component_of[one] != component:
            continue
        for j in range(low, high):
            other = old[j]
            if (i < j) == (at[one] < at[other]):
                continue
            for rank in range(queued.shape[1]):
                since = max(queued[one, rank, 0], queued[other, rank, 0])
                if since <= min(queued[one, rank, 1], queued[other, rank, 1]):
                    return True
    return False


@part
def _decodes_alike(
    w: Workspace, chain: Chain, component_of: Any, begin: int, end: int, low: int, high: int, component: int
) -> bool:
    """Whether a move is known to change no plan. Args: as `_propose` returns them."""
    current, same = chain.current[0], chain.current[1] > 0
    for i in range(chain.decoder.size):
        same = same and chain.decoder[i] == w.old_decoder[i]
    for d in range(begin, end):
        queued, at, old = chain.queued[current, d], chain.at[d], w.swap[2 + d]
        same = same and not _decides(queued, at, old, low, high, component_of, component)
    return bool(same)


@part
def _propose(
    w: Workspace, chain: Chain, component_of: Any, can_split: bool, can_braid: bool, reorder: bool
) -> tuple[int, int, int, int, int, bool]:
    """Changes a chain by one random move, and saves what it was in the workspace.

    Returns: (first direction and end of the directions, low and high position of the part of the order that changes;
        the component that was moved, or -1; whether the decoder changes).
    """
    num_groups, state = component_of.size, chain.random
    for i in range(chain.decoder.size):
        w.old_decoder[i] = chain.decoder[i]
    begin, end, low, high, component, changed = FORWARD, BACKWARD + 1, 0, 0, -1, False
    dice = uniform(state)
    if num_groups < 2 or not reorder or dice < 0.06:
        _change_decoder(chain.decoder, state, can_split, can_braid)
        changed = True
    elif dice < 0.2:
        component, target = component_of[below(state, num_groups)], below(state, num_groups)
        high = num_groups
        for direction in range(2):
            _save(chain.group_at, w.swap, direction, low, high)
            _move_component(component_of, chain.at[direction], chain.group_at[direction], w.swap, component, target)
    else:
        begin, source = int(2 * uniform(state)), below(state, num_groups)
        end = begin + 1
        reach = num_groups if uniform(state) < 0.5 else max(2, num_groups // 16)
        far = 1 + below(state, reach)
        target = source + far if uniform(state) < 0.5 else source - far
        target = min(num_groups - 1, max(0, target))
        low, high = min(source, target), max(source, target) + 1
        _save(chain.group_at, w.swap, begin, low, high)
        at, group_at = chain.at[begin], chain.group_at[begin]
        if uniform(state) < 0.5:
            _shift(at, group_at, source, target)
        else:
            first, second = group_at[source], group_at[target]
            group_at[source], group_at[target] = second, first
            at[first], at[second] = target, source
    return begin, end, low, high, component, changed


@part
def _copy_best(chain: Chain, cost: float) -> None:
    """Keeps the current state as the best one."""
    chain.cost[1] = cost
    for i in range(chain.decoder.size):
        chain.best_decoder[i] = chain.decoder[i]
    for group in range(chain.at.shape[1]):
        for direction in range(2):
            chain.best_at[direction, group] = chain.at[direction, group]


@part
def _evaluate(
    p: Instance, w: Workspace, chain: Chain, mode: int, iterations: int, factors: Any, most: float
) -> tuple[float, bool]:
    """(cost of a chain's priorities as `run` returns it, or inf where it is known to be above `most`; whether the last
    row of `queued` is conclusive)."""
    cost, conclusive, decoder = 0.0, False, chain.decoder
    if mode != CHOOSE:
        # With the fastest options orders take as long as with any others, or less.
        limit = most if factors.shape[0] == 0 else np.inf
        for i in range(MEMORY + ((decoder.size - MEMORY) >> 1), decoder.size):
            if decoder[i] > 0.0:
                limit = np.inf
        cost, conclusive = decode(p, w, chain.at, chain.group_at, decoder, chain.queued[1 - chain.current[0]], limit)
    if cost < np.inf:
        cost = choose_all(p, w, iterations)
        if cost < np.inf and mode != CHOOSE:
            cost = cost_of(p, w, factors)
    return cost, conclusive


@entry
def run(
    p: Instance,
    w: Workspace,
    chain: Chain,
    component_of: Any,
    mode: int,
    evaluations: int,
    hot: float,
    cold: float,
    iterations: int,
    can_split: bool,
    can_braid: bool,
    reorder: bool,
    factors: Any,
) -> float:
    """The one entry to the kernels, so that each part is compiled once.

    `ANNEAL`: some evaluations of simulated annealing. A move swaps two groups or shifts one, among forwards or among
    backwards, half of the moves to a near position; or shifts a component among both; or changes the decoder. Many
    moves change the order of groups that are never queued together: they decode to the same plan, at the same cost.
    `EVALUATE`: the cost of the plan that the chain's priorities decode to; inf: it does not fit.
    `CHOOSE`: options for the orders that the workspace holds; how far they are above a bound, or inf.
    `JOIN`: whole backwards where the workspace's plan has no use for split ones; its cost.
    `COST`: the cost of the workspace's plan.

    Args: component_of: [G] component of each group. hot, cold: temperature at the start and at the end, as a part of
        the best makespan. iterations: of the choice of options. can_split, can_braid, reorder: whether backwards
        may be split, blocks be formed and orders change. factors: [D, n, 3] f8: draws of factors of the
        seconds of F, I and W; D = 0: the cost of a plan is its makespan, else the mean of its makespans.
    """
    if mode == COST:
        return float(cost_of(p, w, factors))
    if mode == JOIN:
        return float(join(p, w, factors))
    w.last_rows[:] = 0  # the result depends on the other evaluations of this call alone
    decoder, old_decoder = chain.decoder, w.old_decoder
    changed, cost, most = True, np.inf, np.inf
    begin, end, low, high, component = 0, 2, 0, 0, -1
    for number in range(evaluations):
        same = False
        if mode == ANNEAL:
            begin, end, low, high, component, decodes = _propose(w, chain, component_of, can_split, can_braid, reorder)
            changed = changed or decodes
            same = _decodes_alike(w, chain, component_of, begin, end, low, high, component)
            temperature = hot * (cold / hot) ** (number / evaluations) * chain.cost[1]
            most = chain.cost[0] - temperature * np.log(1.0 - uniform(chain.random))
        if same:
            continue
        if changed:
            assume(p.node, p.first, p.option, w.state, w.footprint, w.load, decoder)
            changed = False
        cost, conclusive = _evaluate(p, w, chain, mode, iterations, factors, most)
        if mode != ANNEAL:
            break
        if cost <= most:
            chain.cost[0] = cost
            chain.current[0], chain.current[1] = 1 - chain.current[0], conclusive
            if cost < chain.cost[1]:
                _copy_best(chain, cost)
            continue
        for i in range(decoder.size):
            changed = changed or decoder[i] != old_decoder[i]
            decoder[i] = old_decoder[i]
        for d in range(begin, end):
            for position in range(low, high):
                group = w.swap[2 + d, position]
                chain.group_at[d, position] = group
                chain.at[d, group] = position
    return cost
