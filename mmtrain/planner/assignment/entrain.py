"""Entrain's hierarchical assignment. Pure.

Source: Jang, Efficient Multimodal Model Training at Scale, dissertation, University of Michigan, 2026, algorithm 4.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mmtrain.planner.assignment.assignment import AssignedMicrobatch, Assignment, SampleCost
from mmtrain.planner.assignment.filling import AssignmentInput, FilledLoad, NoRoomError, falling, fill


def entrain(step: AssignmentInput, *, defer: bool, fewer: bool, levels: int) -> Assignment:
    """Algorithm 4. What it leaves open: the upper half by language work is the coarse set; of an odd number of
    microbatches the middle one counts as underloaded; samples without encoder work, which cannot change an encoder
    load, go to the microbatch with the least language work."""
    replicas = step.replicas()
    key = lambda load, _: (load.language_ns * step.pace(load.index), load.index)  # noqa: E731
    fill(step, falling(step, range(len(step.samples))), replicas, key)
    return Assignment(
        replicas=tuple(
            _paired(step, _strata(step, replica, fewer), levels)
            if defer
            else tuple(AssignedMicrobatch(tuple(own)) for own in _strata(step, replica, fewer))
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


def _strata(step: AssignmentInput, replica: FilledLoad, fewer: bool) -> list[list[int]]:
    """The samples of each microbatch of a replica: coarse, then fine ones, each to the least encoder load (4.5.1)."""
    costs, members, count = step.samples, replica.samples, step.counts[replica.index]
    if fewer:
        count = min(len(members), effective_microbatches(count, [costs[i].encoder_ns for i in members]))
    coarse = set(sorted(members, key=lambda i: (-costs[i].language_ns, i))[: len(members) // 2])
    loads = step.microbatches(count)
    for stratum in (coarse, set(members) - coarse):
        fill(step, falling(step, stratum), loads, _least_encoder)
    if not all(load.samples for load in loads):
        raise NoRoomError(f"a replica has {len(members)} samples for {count} microbatches")
    return [load.samples for load in loads]


def _least_encoder(load: FilledLoad, cost: SampleCost) -> tuple[int, ...]:
    first = (load.encoder_ns, load.language_ns) if cost.encoder_ns else (load.language_ns, load.encoder_ns)
    return (*first, load.index)


def _paired(step: AssignmentInput, microbatches: list[list[int]], levels: int) -> tuple[AssignedMicrobatch, ...]:
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
