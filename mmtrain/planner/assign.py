"""Which sample of a step runs in which microbatch of which replica. Pure: integers and explicit keys of ties, so that
every process that knows the same costs gets the same assignment.

Sources: Entrain (Jang, Efficient Multimodal Model Training at Scale, dissertation, University of Michigan, 2026,
algorithm 4); DistTrain, arXiv:2408.04275, section 5.
"""

import hashlib
import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Protocol

from mmtrain.config.assignment import LEVELS, Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCost:
    """What one sample of a step costs."""

    encoder_ns: int
    """Nanoseconds of forward and backward of all modules before the language model; 0: it has nothing for them."""
    language_ns: int
    """Nanoseconds of forward and backward of the language model; above 0."""
    size: tuple[int, ...] = ()
    """Its size under each limit of a microbatch."""

    @property
    def total_ns(self) -> int:
        """Nanoseconds of all modules."""
        return self.encoder_ns + self.language_ns


@dataclass(frozen=True, slots=True)
class AssignedMicrobatch:
    """One microbatch: indices of the step's samples, whose encoder work it does."""

    samples: tuple[int, ...]
    """In order; never empty."""
    deferred: tuple[int, ...] = ()
    """Those of `samples` whose language work the replica's next microbatch does; never all of them."""


Status = Literal["assigned", "whole bins", "first-fit"]


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The microbatches of all replicas."""

    replicas: tuple[tuple[AssignedMicrobatch, ...], ...]
    """[replica][microbatch], in the order of execution. With `fewer_microbatches` replicas may have unequal numbers."""
    status: Status = "assigned"
    """`first-fit`: the policy could not place all samples within the limits, so these are the bins as given. `whole
    bins`: `balanced` deals those bins to replicas, and exchanges samples only while it refines."""
    message: str = ""
    """Why the status is not `assigned`, in one sentence."""
    evaluations: int = 0
    """Makespans that the refinement asked for."""

    @cached_property
    def digest(self) -> str:
        """A hash of the microbatches, by which processes compare their assignments."""
        text = repr([[(one.samples, one.deferred) for one in microbatches] for microbatches in self.replicas])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def language_samples(microbatches: Sequence[AssignedMicrobatch]) -> tuple[tuple[int, ...], ...]:
    """[microbatch] of a replica -> the samples whose language work it does: those deferred to it, then its own."""
    arriving: tuple[int, ...] = ()
    of_language: list[tuple[int, ...]] = []
    for own in microbatches:
        of_language.append((*arriving, *(i for i in own.samples if i not in own.deferred)))
        arriving = own.deferred
    return tuple(of_language)


Judge = Callable[[Sequence[AssignedMicrobatch]], float]
"""The makespan of one replica's microbatches, in any unit."""


def assign(
    policy: Policy,
    samples: Sequence[SampleCost],
    bins: Sequence[Sequence[int]],
    *,
    num_replicas: int,
    capacity: tuple[int, ...] = (),
    defer: bool = False,
    fewer_microbatches: bool = False,
    levels: int = LEVELS,
    num_ranks: int = 1,
    judge: Judge | None = None,
    evaluations: int = 0,
    seed: int = 0,
) -> Assignment:
    """The microbatches of a step's samples under a policy.

    A policy that cannot place the samples within the capacity, or leaves a microbatch empty, gives the bins as they
    are, with a status that says so.

    Args:
        policy: see [assignment]; `none`: the bins as they are.
        samples: the step's samples.
        bins: indices of `samples` in each bin of first-fit, each in one; replica r of R has the bins r, r + R, ...
        num_replicas: data-parallel replicas; they divide the number of bins.
        capacity: most of a microbatch under each limit. It holds for the samples of a microbatch, and for those whose
            language work it does.
        defer: microbatches may leave language work to the next one, with `entrain`.
        fewer_microbatches: `entrain` may use fewer microbatches than there are bins (the thesis's K_eff).
        levels: steps into which the language work of a microbatch is divided when subsets of it are summed.
        num_ranks: pipeline ranks, for `disttrain`.
        judge: for `balanced`, gives the makespan of one replica; the slowest one counts. None: no refinement.
        evaluations: calls of `judge`, at most.
        seed: of the refinement.
    """
    assert len(bins) % num_replicas == 0 and sorted(i for own in bins for i in own) == list(range(len(samples)))
    assert all(len(sample.size) == len(capacity) for sample in samples if capacity)
    step = _Step(samples, bins, num_replicas, capacity)
    try:
        if policy == "entrain":
            return _entrain(step, defer=defer, fewer=fewer_microbatches, levels=levels)
        if policy == "disttrain":
            return _disttrain(step, num_ranks)
    except _NoRoomError as full:
        return replace(step.first_fit, status="first-fit", message=f"{policy}: {full}; first-fit's bins are kept")
    if policy == "none":
        return step.first_fit
    start = _longest_first(step)
    return start if judge is None else _refined(step, start, judge, evaluations, seed)


class _NoRoomError(Exception):
    """A sample that no microbatch has room for, or a microbatch without a sample."""


@dataclass(frozen=True)
class _Step:
    """The arguments of `assign` that all policies read."""

    samples: Sequence[SampleCost]
    bins: Sequence[Sequence[int]]
    num_replicas: int
    capacity: tuple[int, ...]

    @property
    def num_microbatches(self) -> int:
        """Of a replica."""
        return len(self.bins) // self.num_replicas

    @property
    def first_fit(self) -> Assignment:
        """The bins as given."""
        return _assignment(self.bins[r :: self.num_replicas] for r in range(self.num_replicas))

    def loads(self, count: int, times: int = 1) -> "list[_Load]":
        """Empty loads. Args: times: microbatches that each stands for."""
        return [_Load(index, [times * most for most in self.capacity]) for index in range(count)]

    def fits(self, members: Iterable[int]) -> bool:
        """Whether some samples are within the capacity of one microbatch."""
        sizes = zip(*(self.samples[i].size for i in members), strict=True)
        return not self.capacity or all(sum(of) <= most for of, most in zip(sizes, self.capacity, strict=True))

    def language_ns(self, members: Iterable[int]) -> int:
        """The language work of some samples."""
        return sum(self.samples[i].language_ns for i in members)


def _assignment(replicas: Iterable[Iterable[Iterable[int]]]) -> Assignment:
    """An assignment without deferral. Args: replicas: [replica][microbatch] -> samples."""
    made = (tuple(AssignedMicrobatch(tuple(own)) for own in microbatches) for microbatches in replicas)
    return Assignment(replicas=tuple(made))


class _Load:
    """The samples of a replica or microbatch while it is filled."""

    __slots__ = ("encoder_ns", "index", "language_ns", "room", "samples")

    def __init__(self, index: int, room: list[int]) -> None:
        self.index, self.room = index, room
        self.samples: list[int] = []
        self.encoder_ns = self.language_ns = 0

    @property
    def total_ns(self) -> int:
        return self.encoder_ns + self.language_ns

    def has_room(self, cost: SampleCost) -> bool:
        return all(size <= room for size, room in zip(cost.size, self.room, strict=False))

    def add(self, sample: int, cost: SampleCost) -> None:
        self.samples.append(sample)
        self.encoder_ns += cost.encoder_ns
        self.language_ns += cost.language_ns
        self.room = [room - size for room, size in zip(self.room, cost.size, strict=False)]


class _Key(Protocol):
    """Sort key of a load that may get a sample; the least one gets it."""

    def __call__(self, load: _Load, cost: SampleCost, /) -> tuple[int, ...]: ...


def _fill(step: _Step, order: Iterable[int], loads: list[_Load], key: _Key) -> None:
    """Adds samples, one after the other, to the load with room and the least key."""
    for i in order:
        cost = step.samples[i]
        options = [load for load in loads if load.has_room(cost)]
        if not options:
            raise _NoRoomError(f"sample {i} of size {', '.join(map(str, cost.size))} has no room")
        min(options, key=lambda load: key(load, cost)).add(i, cost)


def _falling(step: _Step, members: Iterable[int]) -> list[int]:
    """Samples by encoder work, then by language work, most first."""
    costs = step.samples
    return sorted(members, key=lambda i: (-costs[i].encoder_ns, -costs[i].language_ns, i))


# ---------------------------------------------------------------------------------------------- Entrain


def _entrain(step: _Step, *, defer: bool, fewer: bool, levels: int) -> Assignment:
    """Algorithm 4. What it leaves open: the upper half by language work is the coarse set; of an odd number of
    microbatches the middle one counts as underloaded; samples without encoder work, which cannot change an encoder
    load, go to the microbatch with the least language work."""
    replicas = step.loads(step.num_replicas, step.num_microbatches)
    _fill(step, _falling(step, range(len(step.samples))), replicas, lambda load, _: (load.language_ns, load.index))
    return Assignment(
        replicas=tuple(
            _paired(step, _strata(step, replica.samples, fewer), levels)
            if defer
            else tuple(AssignedMicrobatch(tuple(own)) for own in _strata(step, replica.samples, fewer))
            for replica in replicas
        )
    )


def effective_microbatches(num_microbatches: int, encoder_ns: Sequence[int]) -> int:
    """The thesis's K_eff: so few microbatches that each can have the encoder work of the heaviest sample.

    Args: encoder_ns: of each sample of the replica.
    Source: section 4.5.1, algorithm 4, line 3.
    """
    most = max(encoder_ns, default=0)
    return min(num_microbatches, sum(encoder_ns) // most) if most else num_microbatches


def _strata(step: _Step, members: Sequence[int], fewer: bool) -> list[list[int]]:
    """The samples of each microbatch of a replica: coarse, then fine ones, each to the least encoder load (4.5.1)."""
    costs, count = step.samples, step.num_microbatches
    if fewer:
        count = min(len(members), effective_microbatches(count, [costs[i].encoder_ns for i in members]))
    coarse = set(sorted(members, key=lambda i: (-costs[i].language_ns, i))[: len(members) // 2])
    loads = step.loads(count)
    for stratum in (coarse, set(members) - coarse):
        _fill(step, _falling(step, stratum), loads, _least_encoder)
    if not all(load.samples for load in loads):
        raise _NoRoomError(f"a replica has {len(members)} samples for {count} microbatches")
    return [load.samples for load in loads]


def _least_encoder(load: _Load, cost: SampleCost) -> tuple[int, ...]:
    first = (load.encoder_ns, load.language_ns) if cost.encoder_ns else (load.language_ns, load.encoder_ns)
    return (*first, load.index)


def _paired(step: _Step, microbatches: list[list[int]], levels: int) -> tuple[AssignedMicrobatch, ...]:
    """Microbatches in pairs, the overloaded one before the underloaded one to which it defers (4.5.2)."""
    work = [step.language_ns(own) for own in microbatches]
    order = sorted(range(len(work)), key=lambda m: (-work[m], m))
    over, under = order[: len(order) // 2], order[len(order) // 2 :]
    sums = {i: SubsetSums([step.samples[s].language_ns for s in microbatches[i]], levels) for i in over}

    def deferred(i: int, j: int) -> tuple[int, ...]:
        own = microbatches[i]
        chosen = tuple(own[position] for position in sums[i].nearest_half(work[i] - work[j]))
        return chosen if step.fits((*microbatches[j], *chosen)) else ()

    subsets = {(i, j): deferred(i, j) for i in over for j in under}
    moved = {pair: step.language_ns(subset) for pair, subset in subsets.items()}
    bottleneck = [[max(work[i] - moved[i, j], work[j] + moved[i, j]) for j in under] for i in over]
    least = max((work[j] for j in under), default=0)
    match = bottleneck_match(bottleneck, [work[i] for i in over], least)
    placed: list[AssignedMicrobatch] = []
    for position, i in enumerate(over):
        j = under[match.partner[position]]
        # Rounded sums may ask for all samples of i; the pair would then take longer than i alone, and does not defer.
        placed.append(AssignedMicrobatch(tuple(microbatches[i]), subsets[i, j] if match.defers[position] else ()))
        placed.append(AssignedMicrobatch(tuple(microbatches[j])))
    alone = [j for p, j in enumerate(under) if p not in match.partner]
    return (*placed, *(AssignedMicrobatch(tuple(microbatches[j])) for j in alone))


class SubsetSums:
    """All sums of subsets of some weights, rounded to `levels` steps of their total.

    Source: section 4.5.2, "Optimal deferral set calculation": a table over (weights, rounded sum).
    """

    def __init__(self, weights: Sequence[int], levels: int) -> None:
        self._unit = max(1, -(-sum(weights) // levels))
        self._steps = [(weight + self._unit // 2) // self._unit for weight in weights]
        self._reached = [1]  # [number of first weights] -> bit s: some of them have the sum s
        for steps in self._steps:
            self._reached.append(self._reached[-1] | self._reached[-1] << steps)

    def nearest_half(self, difference: int) -> tuple[int, ...]:
        """The weights, as ascending positions, whose sum is nearest to half of a difference; the smaller sum of two.

        Args: difference: of the loads of two microbatches, not negative, in the unit of the weights.
        """
        fourfold = (4 * difference + self._unit) // (2 * self._unit)  # 4 x the wanted sum, in steps
        half, reached = fourfold // 4, self._reached[-1]
        below = (reached & ((1 << half + 1) - 1)).bit_length() - 1
        higher = reached >> half + 1
        total = below
        if higher:
            above = half + (higher & -higher).bit_length()
            if abs(4 * above - fourfold) < abs(4 * below - fourfold):
                total = above
        chosen = []
        for position in reversed(range(len(self._steps))):
            if not self._reached[position] >> total & 1:
                chosen.append(position)
                total -= self._steps[position]
        return tuple(reversed(chosen))


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A matching of overloaded with underloaded microbatches."""

    threshold: int
    """T*: the least time within which every microbatch can do its language work."""
    partner: tuple[int, ...]
    """[overloaded] -> the underloaded one that follows it."""
    defers: tuple[bool, ...]
    """[overloaded] -> whether it defers to its partner; it does if it cannot do its work within T* alone."""


def bottleneck_match(pairs: Sequence[Sequence[int]], alone: Sequence[int], least: int = 0) -> Match:
    """The matching with the least bottleneck.

    Args:
        pairs: V: [overloaded][underloaded] -> the longer language work of the two after deferral; at least as many
            underloaded ones.
        alone: L: [overloaded] -> its language work without deferral.
        least: the largest language work of an underloaded one, which no deferral shortens.
    Source: section 4.5.2, "Bottleneck matching optimization".
    """
    options = sorted({least, *alone, *(value for row in pairs for value in row if value >= least)})
    options = [value for value in options if value >= least]
    low, high = 0, len(options) - 1  # the largest one is feasible: nobody is critical
    while low < high:
        middle = (low + high) // 2
        if _critical_match(pairs, alone, options[middle]) is None:
            low = middle + 1
        else:
            high = middle
    threshold = options[low] if options else 0
    partner = _critical_match(pairs, alone, threshold) or {}
    free = iter(sorted(set(range(len(pairs[0]) if pairs else 0)) - set(partner.values())))
    return Match(
        threshold=threshold,
        partner=tuple(partner[i] if i in partner else next(free) for i in range(len(alone))),
        defers=tuple(i in partner for i in range(len(alone))),
    )


def _critical_match(pairs: Sequence[Sequence[int]], alone: Sequence[int], threshold: int) -> dict[int, int] | None:
    """Overloaded -> underloaded for all that exceed the threshold alone; None: there is no such matching."""
    owner: dict[int, int] = {}

    def augment(i: int, seen: set[int]) -> bool:
        for j, value in enumerate(pairs[i]):
            if value <= threshold and j not in seen:
                seen.add(j)
                if j not in owner or augment(owner[j], seen):
                    owner[j] = i
                    return True
        return False

    if not all(augment(i, set()) for i, work in enumerate(alone) if work > threshold):
        return None
    return {i: j for j, i in owner.items()}


# -------------------------------------------------------------------------------------------- DistTrain


def _disttrain(step: _Step, num_ranks: int) -> Assignment:
    """DistTrain's two reorderings: samples over replicas, longest encoder work first to the least encoder load; then
    the microbatches of each replica, of equal numbers of samples in the order of the step.

    The microbatch of least encoder work comes first, so that later stages start early, and those of least work except
    for it come last, where the encoder has nothing more to fill. Between them each position takes the microbatch whose
    encoder work is closest to the language work that is done meanwhile, num_ranks - 1 positions earlier.
    """
    replicas, count = step.loads(step.num_replicas, step.num_microbatches), step.num_microbatches
    _fill(
        step,
        _falling(step, range(len(step.samples))),
        replicas,
        lambda load, cost: (
            (len(load.samples), load.index) if not cost.encoder_ns else (load.encoder_ns, len(load.samples), load.index)
        ),
    )
    return _assignment([_reordered(step, _runs(step, sorted(own.samples), count), num_ranks) for own in replicas])


def _runs(step: _Step, members: list[int], count: int) -> list[list[int]]:
    """Samples in consecutive microbatches of equal numbers."""
    ends = [len(members) * m // count for m in range(count + 1)]
    runs = [members[low:high] for low, high in itertools.pairwise(ends)]
    if not all(runs):
        raise _NoRoomError(f"a replica has {len(members)} samples for {count} microbatches")
    for m, run in enumerate(runs):
        if not step.fits(run):
            raise _NoRoomError(f"microbatch {m} of {len(run)} samples exceeds its capacity")
    return runs


def _reordered(step: _Step, microbatches: list[list[int]], num_ranks: int) -> list[list[int]]:
    work = [sum(step.samples[i].encoder_ns for i in own) for own in microbatches]
    rising = sorted(range(len(microbatches)), key=lambda m: (work[m], m))
    last = rising[1:num_ranks]
    middle, order, depth = rising[num_ranks:], rising[:1], max(1, num_ranks - 1)
    while middle:
        meanwhile = step.language_ns(microbatches[order[max(0, len(order) - depth)]])
        order.append(min(middle, key=lambda m: (abs(work[m] - meanwhile), m)))
        middle.remove(order[-1])
    return [microbatches[m] for m in (*order, *reversed(last))]


# --------------------------------------------------------------------------------------------- balanced


def _longest_first(step: _Step) -> Assignment:
    """Longest processing time first by total work: to the replica with least, there to the microbatch with least."""
    replicas = step.loads(step.num_replicas, step.num_microbatches)
    microbatches = [step.loads(step.num_microbatches) for _ in replicas]
    costs = step.samples
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i].total_ns, i)):
        for replica in sorted(replicas, key=lambda load: (load.total_ns, load.index)):
            options = [load for load in microbatches[replica.index] if load.has_room(costs[i])]
            if options:
                min(options, key=lambda load: (load.total_ns, load.index)).add(i, costs[i])
                replica.add(i, costs[i])
                break
        else:
            return _dealt_bins(step, f"sample {i} of size {', '.join(map(str, costs[i].size))} has no room")
    if not all(load.samples for of_replica in microbatches for load in of_replica):
        return _dealt_bins(step, f"there are {len(costs)} samples for {len(step.bins)} microbatches")
    return _assignment([[load.samples for load in of_replica] for of_replica in microbatches])


def _dealt_bins(step: _Step, why: str) -> Assignment:
    """First-fit's bins, longest first to the replica with the least work that has not all of its microbatches yet."""
    totals = [sum(step.samples[i].total_ns for i in own) for own in step.bins]
    work = [0] * step.num_replicas
    dealt: list[list[int]] = [[] for _ in work]
    for b in sorted(range(len(totals)), key=lambda b: (-totals[b], b)):
        replica = min(
            (r for r in range(len(work)) if len(dealt[r]) < step.num_microbatches), key=lambda r: (work[r], r)
        )
        dealt[replica].append(b)
        work[replica] += totals[b]
    made = _assignment([[step.bins[b] for b in sorted(own)] for own in dealt])
    return replace(made, status="whole bins", message=f"balanced: {why}; whole bins of first-fit are dealt to replicas")


_TRIES = 20
"""Moves that are drawn for each evaluation, at most; those that break the capacity cost none."""


def _refined(step: _Step, start: Assignment, judge: Judge, evaluations: int, seed: int) -> Assignment:
    """Hill climbing: exchanges of samples, or of the positions of microbatches, that make the slowest replica faster.

    A sample leaves the slowest replica only for less work in return. An exchange is kept if the makespans, longest
    first, become less.
    """
    rng = random.Random(seed)
    now = list(start.replicas)
    if evaluations < len(now):
        return start
    seconds, used = [judge(own) for own in now], len(now)
    for _ in range(_TRIES * evaluations):
        slow = max(range(len(now)), key=lambda r: (seconds[r], -r))
        other = rng.randrange(len(now))
        changed = _exchanged(step, now, slow, other, rng)
        if changed is None:
            continue
        if used + len(changed) > evaluations:
            break
        times = {r: judge(own) for r, own in changed.items()}
        used += len(changed)
        after = [times.get(r, s) for r, s in enumerate(seconds)]
        if sorted(after, reverse=True) < sorted(seconds, reverse=True):
            seconds = after
            for r, own in changed.items():
                now[r] = own
    return replace(start, replicas=tuple(now), evaluations=used)


def _exchanged(
    step: _Step, now: list[tuple[AssignedMicrobatch, ...]], slow: int, other: int, rng: random.Random
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
