"""Equal seconds of replicas and microbatches, then what makes the slowest replica faster. Pure."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from mmtrain.planner.assignment.assignment import AssignedMicrobatch, Assignment, MakespanOf
from mmtrain.planner.assignment.filling import AssignmentInput, NoRoomError, assignment_of, fill


def longest_first(step: AssignmentInput) -> Assignment:
    """Longest processing time first by total work: to the replica with least, there to the microbatch with least."""
    replicas = step.replicas()
    microbatches = [step.microbatches(count) for count in step.counts]
    costs = step.samples
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i].total_ns, i)):
        for replica in sorted(replicas, key=lambda load: (load.total_ns * step.pace(load.index), load.index)):
            options = [load for load in microbatches[replica.index] if load.has_room(costs[i])]
            if options:
                min(options, key=lambda load: (load.total_ns, load.index)).add(i, costs[i])
                replica.add(i, costs[i])
                break
        else:
            return _dealt_bins(step, f"sample {i} of size {', '.join(map(str, costs[i].size))} has no room")
    if not all(load.samples for of_replica in microbatches for load in of_replica):
        return _dealt_bins(step, f"there are {len(costs)} samples for {len(step.bins)} microbatches")
    return assignment_of([[load.samples for load in of_replica] for of_replica in microbatches])


def _dealt_bins(step: AssignmentInput, why: str) -> Assignment:
    """First-fit's bins, longest first to the replica with the least work that has not all of its microbatches yet."""
    totals = [sum(step.samples[i].total_ns for i in own) for own in step.bins]
    work = [0] * len(step.counts)
    dealt: list[list[int]] = [[] for _ in work]
    for b in sorted(range(len(totals)), key=lambda b: (-totals[b], b)):
        replica = min(
            (r for r in range(len(work)) if len(dealt[r]) < step.counts[r]), key=lambda r: (work[r] * step.pace(r), r)
        )
        dealt[replica].append(b)
        work[replica] += totals[b]
    made = assignment_of([[step.bins[b] for b in sorted(own)] for own in dealt])
    return replace(made, status="whole bins", message=f"balanced: {why}; whole bins of first-fit are dealt to replicas")


_EIGHTHS = (7, 6, 5, 4)
"""The smaller numbers of microbatches that are tried, in eighths of the number."""
_TRIES = 20
"""Moves that are drawn for each evaluation, at most; those that break the capacity cost none."""


def refined(
    step: AssignmentInput, start: Assignment, judge: MakespanOf, evaluations: int, seed: int, *, fewer: bool = False
) -> Assignment:
    """Fewer microbatches where they make a replica faster, then hill climbing: exchanges of samples, or of the
    positions of microbatches, that make the slowest replica faster.

    A sample leaves the slowest replica only for less work in return. An exchange is kept if the makespans, longest
    first, become less.

    Args: fewer: a replica may have fewer microbatches than it starts with.
    """
    rng = random.Random(seed)
    now = list(start.replicas)
    if evaluations < len(now):
        return start
    seconds, used = [judge(r, own) for r, own in enumerate(now)], len(now)
    for place, r in product(range(len(_EIGHTHS) if fewer else 0), range(len(now))):
        counts = sorted({eighths * step.counts[r] // 8 for eighths in _EIGHTHS}, reverse=True)
        larger = _in_microbatches(step, start.replicas[r], counts[place]) if place < len(counts) else None
        if larger is not None and used < evaluations:
            time, used = judge(r, larger), used + 1
            if time < seconds[r]:
                now[r], seconds[r] = larger, time
    for _ in range(_TRIES * evaluations):
        slow = max(range(len(now)), key=lambda r: (seconds[r], -r))
        other = rng.randrange(len(now))
        changed = _exchanged(step, now, slow, other, rng)
        if changed is None:
            continue
        if used + len(changed) > evaluations:
            break
        times = {r: judge(r, own) for r, own in changed.items()}
        used += len(changed)
        after = [times.get(r, s) for r, s in enumerate(seconds)]
        if sorted(after, reverse=True) < sorted(seconds, reverse=True):
            seconds = after
            for r, own in changed.items():
                now[r] = own
    return replace(start, replicas=tuple(now), evaluations=used)


def _in_microbatches(
    step: AssignmentInput, microbatches: Sequence[AssignedMicrobatch], count: int
) -> tuple[AssignedMicrobatch, ...] | None:
    """The samples of a replica in another number of microbatches, longest first; None: they have no room."""
    members, loads = [i for own in microbatches for i in own.samples], step.microbatches(count)
    order = sorted(members, key=lambda i: (-step.samples[i].total_ns, i))
    try:
        fill(step, order, loads, lambda load, _: (load.total_ns, load.index))
    except NoRoomError:
        return None
    return tuple(AssignedMicrobatch(tuple(load.samples)) for load in loads)


def _exchanged(
    step: AssignmentInput, now: list[tuple[AssignedMicrobatch, ...]], slow: int, other: int, rng: random.Random
) -> dict[int, tuple[AssignedMicrobatch, ...]] | None:
    """Replica -> its microbatches after one drawn exchange; None: the exchange is void or breaks a rule."""
    a, b, kind = rng.randrange(len(now[slow])), rng.randrange(len(now[other])), rng.random()
    if slow == other and a == b:
        return None
    if slow == other and kind < 1 / 3:
        order = list(now[slow])
        order[a], order[b] = order[b], order[a]
        return {slow: tuple(order)}
    given, got = list(now[slow][a].samples), list(now[other][b].samples)
    x, y = rng.choice(given), rng.choice(got)
    given.remove(x)
    got.append(x)
    if kind < 2 / 3:
        got.remove(y)
        given.append(y)
        if slow != other and step.samples[y].total_ns >= step.samples[x].total_ns:
            return None
    if not given or not step.fits(given) or not step.fits(got):
        return None
    changed = {r: list(now[r]) for r in (slow, other)}
    changed[slow][a], changed[other][b] = AssignedMicrobatch(tuple(given)), AssignedMicrobatch(tuple(got))
    return {r: tuple(own) for r, own in changed.items()}
