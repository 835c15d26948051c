"""Which samples form a step, and which of its microbatches each one goes to. Pure and deterministic.

The samples of all epochs form one endless sequence: each epoch is a permutation of the source drawn
from (seed, epoch). A step takes samples from that sequence and first-fits them into the
`training.global_batch_size` bins, each of which holds so many tokens, or so many frames and clips;
it closes at the first sample that fits no bin, which then opens the next step. Nothing is carried
over but the position, so the state is three integers, and since a step's bins are the same for
every number of replicas (bin g belongs to replica g % dp), a job continues exactly with another
number of replicas.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mmtrain.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderState:
    """Where a loader stands: three integers, the same on all ranks and for any number of replicas."""

    seed: int
    """Seed of the order of samples."""
    epoch: int = 0
    """Passes over the source that are complete."""
    cursor: int = 0
    """Samples of this epoch's order that are used up."""

    def __post_init__(self) -> None:
        if min(self.seed, self.epoch, self.cursor) < 0:
            raise DataError(f"loader state {self.to_dict()}: its three numbers are at least 0")

    def to_dict(self) -> dict[str, int]:
        """The state as plain integers, for a checkpoint."""
        return {"seed": self.seed, "epoch": self.epoch, "cursor": self.cursor}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "LoaderState":
        """The state that `to_dict` wrote.

        Raises: DataError: a key is missing or not an integer.
        """
        try:
            seed, epoch, cursor = (int(values[name]) for name in ("seed", "epoch", "cursor"))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"loader state {dict(values)!r} is not of the form seed, epoch, cursor: {error}") from None
        return cls(seed=seed, epoch=epoch, cursor=cursor)


Size = tuple[int, ...]
"""What a sample takes of each limit of a bin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One of the things of which a bin holds only so many."""

    most: int
    """Of all samples of a bin together."""
    unit: str
    """What is counted, in the plural: tokens, frames, clips."""
    key: str
    """The setting behind it, with its value, for errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """A sample that a step leaves out, and why."""

    sample: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The samples of one step of all replicas."""

    bins: tuple[tuple[int, ...], ...]
    """Samples of each microbatch, in order; none is empty."""
    dropped: tuple[Dropped, ...]
    """Samples that were passed over."""
    state: LoaderState
    """Where the next step starts."""


class EpochOrder:
    """The order of the samples of each epoch of a source.

    Args:
        num_samples: samples in the source; None for a stream, whose order is its own.
        shuffle: a new permutation each epoch instead of the source's order.
    """

    def __init__(self, num_samples: int | None, *, shuffle: bool) -> None:
        assert not (shuffle and num_samples is None), "a stream has no permutation"
        self.num_samples = num_samples
        self.shuffle = shuffle
        self._drawn: tuple[int, int] | None = None
        self._permutation = np.empty(0, np.int64)

    def sample(self, state: LoaderState) -> int:
        """Index of the sample at a position that lies inside of its epoch."""
        if not self.shuffle:
            return state.cursor
        if self._drawn != (state.seed, state.epoch):
            assert self.num_samples is not None
            # A counter-based generator keyed by (seed, epoch): any epoch is drawn without those before it.
            bits = np.random.Philox(np.random.SeedSequence((state.seed, state.epoch)))
            self._permutation = np.random.Generator(bits).permutation(self.num_samples)
            self._drawn = (state.seed, state.epoch)
        return int(self._permutation[state.cursor])

    def ends(self, state: LoaderState) -> bool:
        """Whether the position is behind the last sample of its epoch (never known of a stream)."""
        return self.num_samples is not None and state.cursor >= self.num_samples


def plan_step(
    state: LoaderState,
    order: EpochOrder,
    size: Callable[[int], Size | Dropped | None],
    *,
    num_bins: int,
    limits: tuple[Limit, ...],
) -> StepPlan:
    """The bins of the step that starts at `state`, and the state after it.

    A step may cross the border of two epochs, but takes no more samples than an epoch has: a source that is
    smaller than one step is not repeated to fill it. Two epochs have different orders, so a sample may
    stand on both sides of a border.

    Args:
        size: of a sample, a number for each limit (1 .. most), or why it is left out, or None behind a stream's end.
        num_bins: microbatches of the step over all replicas.
        limits: capacity of one microbatch; a sample goes to the first one that has room under all of them.
    Raises: DataError: the source has too few usable samples to put one into each bin.
    """
    if order.num_samples is not None and state.cursor > order.num_samples:
        raise DataError(
            f"loader state: cursor {state.cursor} is behind the source's {order.num_samples} samples; the "
            "source has changed since that state was saved: bring back the old one or start without the state"
        )
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    full = tuple(limit.most for limit in limits)
    room = [full] * num_bins
    used: set[int] = set()
    dropped: dict[int, Dropped] = {}
    borders = looked_at = 0
    while True:
        found = None if order.ends(state) else size(sample := order.sample(state))
        if found is None:
            borders += 1
            if borders == 2:  # a stream that is smaller than one step
                break
            state = replace(state, epoch=state.epoch + 1, cursor=0)
            continue
        if looked_at == order.num_samples:
            break
        if isinstance(found, Dropped):
            dropped[sample] = found
        else:
            assert len(found) == len(full) and min(found) > 0 and _fits(found, full), (sample, found, limits)
            place = next((b for b in range(num_bins) if _fits(found, room[b])), None)
            if place is None:
                break
            bins[place].append(sample)
            room[place] = tuple(left - taken for left, taken in zip(room[place], found, strict=True))
            used.add(sample)
        looked_at += 1
        state = replace(state, cursor=state.cursor + 1)
    if not used:
        reason = next((f"; for example {d.reason}" for d in dropped.values()), "")
        raise DataError(f"the source has no usable sample: {len(dropped)} were left out{reason}")
    if not all(bins):
        left = map(sum, zip(*room, strict=True))
        has = " and ".join(f"{num_bins * limit.most - n} {limit.unit}" for limit, n in zip(limits, left, strict=True))
        raise DataError(
            f"the source has too few samples: its {len(used)} usable ones have {has} and fill "
            f"{sum(map(bool, bins))} of training.global_batch_size = {num_bins} microbatches of "
            f"{' and '.join(limit.key for limit in limits)}; lower one of these or add samples"
        )
    return StepPlan(bins=tuple(map(tuple, bins)), dropped=tuple(dropped.values()), state=state)


def _fits(size: Size, room: Size) -> bool:
    return all(taken <= left for taken, left in zip(size, room, strict=True))


def bins_of_replica(num_bins: int, dp_rank: int, dp_degree: int) -> Iterator[int]:
    """The bins of one replica, in order: dp_rank, dp_rank + dp_degree, ..."""
    return iter(range(dp_rank, num_bins, dp_degree))
