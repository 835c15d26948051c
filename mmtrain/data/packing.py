"""Which samples form a step, and which of its microbatches each one goes to. Pure and deterministic.

The samples of all epochs form one endless sequence: each epoch is a permutation of the source drawn from (seed, epoch).
A step packs samples of that sequence first-fit into the `training.global_batch_size` bins, whose capacity is a number
of tokens, or of frames and clips. It ends at the first sample that fits no bin, with which the next step begins. The
state is the position, three integers. A step's bins do not depend on the number of replicas (bin g belongs to replica g
% dp), so a job resumes exactly with another number of replicas.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mmtrain.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderState:
    """The position of a loader: three integers, the same on all ranks and for any number of replicas."""

    seed: int
    """Seed of the order of samples."""
    epoch: int = 0
    """Number of complete passes over the source."""
    cursor: int = 0
    """Number of samples used of this epoch's order."""

    def __post_init__(self) -> None:
        if min(self.seed, self.epoch, self.cursor) < 0:
            raise DataError(f"loader state {self.to_dict()}: its three numbers are at least 0")

    def to_dict(self) -> dict[str, int]:
        """The state as plain integers, for a checkpoint."""
        return {"seed": self.seed, "epoch": self.epoch, "cursor": self.cursor}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "LoaderState":
        """The state of `to_dict`. Raises: DataError: a key is missing or not an integer."""
        try:
            seed, epoch, cursor = (int(values[name]) for name in ("seed", "epoch", "cursor"))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"loader state {dict(values)!r} is not of the form seed, epoch, cursor: {error}") from None
        return cls(seed=seed, epoch=epoch, cursor=cursor)


Size = tuple[int, ...]
"""Size of a sample under each limit of a bin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One capacity of a bin."""

    most: int
    """Capacity of a bin."""
    unit: str
    """Unit in the plural: tokens, frames, clips."""
    key: str
    """The config key that sets it, with its value, for errors."""


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
    """Samples that were left out."""
    state: LoaderState
    """Where the next step starts."""


class EpochOrder:
    """The order of the samples of each epoch of a source.

    Args:
        num_samples: samples in the source; None for a stream, which has its own order.
        shuffle: a new permutation each epoch instead of the source's order.
    """

    def __init__(self, num_samples: int | None, *, shuffle: bool) -> None:
        assert not (shuffle and num_samples is None), "a stream has no permutation"
        self.num_samples = num_samples
        self.shuffle = shuffle
        self._drawn: tuple[int, int] | None = None
        self._permutation = np.empty(0, np.int64)

    def sample(self, state: LoaderState) -> int:
        """Index of the sample at a position within its epoch."""
        if not self.shuffle:
            return state.cursor
        if self._drawn != (state.seed, state.epoch):
            assert self.num_samples is not None
            # A counter-based generator keyed by (seed, epoch): any epoch can be drawn without those before it.
            bits = np.random.Philox(np.random.SeedSequence((state.seed, state.epoch)))
            self._permutation = np.random.Generator(bits).permutation(self.num_samples)
            self._drawn = (state.seed, state.epoch)
        return int(self._permutation[state.cursor])

    def ends(self, state: LoaderState) -> bool:
        """Whether the position is behind the last sample of its epoch; False for a stream."""
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

    A step may span two epochs, but has at most as many samples as an epoch: a source that is smaller than one step is
    not repeated to fill it. A sample may occur in both epochs of such a step.

    Args:
        size: sample -> a number for each limit (1 .. most), or why it is left out, or None behind the end of a stream.
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
    dropped: dict[int, Dropped] = {}
    epoch_ends = num_read = 0
    while True:
        item = None if order.ends(state) else size(sample := order.sample(state))
        if item is None:
            epoch_ends += 1
            if epoch_ends == 2:  # a stream that is smaller than one step
                break
            state = replace(state, epoch=state.epoch + 1, cursor=0)
            continue
        if num_read == order.num_samples:
            break
        if isinstance(item, Dropped):
            dropped[sample] = item
        else:
            assert len(item) == len(full) and min(item) > 0 and _fits(item, full), (sample, item, limits)
            index = next((b for b in range(num_bins) if _fits(item, room[b])), None)
            if index is None:
                break
            bins[index].append(sample)
            room[index] = tuple(free - used for free, used in zip(room[index], item, strict=True))
        num_read += 1
        state = replace(state, cursor=state.cursor + 1)
    if not all(bins):
        raise _too_few(bins, room, limits, dropped)
    return StepPlan(bins=tuple(map(tuple, bins)), dropped=tuple(dropped.values()), state=state)


def _too_few(
    bins: list[list[int]], room: list[Size], limits: tuple[Limit, ...], dropped: dict[int, Dropped]
) -> DataError:
    """The error of a source that cannot fill each bin. Args: room: what remains of each bin under each limit."""
    num_bins, num_used = len(bins), len({sample for samples in bins for sample in samples})
    if not num_used:
        reason = next((f"; for example {d.reason}" for d in dropped.values()), "")
        return DataError(f"the source has no usable sample: {len(dropped)} were left out{reason}")
    free = map(sum, zip(*room, strict=True))
    has = " and ".join(f"{num_bins * limit.most - n} {limit.unit}" for limit, n in zip(limits, free, strict=True))
    return DataError(
        f"the source has too few samples: its {num_used} usable ones have {has} and fill {sum(map(bool, bins))} of "
        f"training.global_batch_size = {num_bins} microbatches of {' and '.join(limit.key for limit in limits)}; lower "
        "one of these or add samples"
    )


def _fits(size: Size, room: Size) -> bool:
    return all(used <= free for used, free in zip(size, room, strict=True))


def bins_of_replica(num_bins: int, dp_rank: int, dp_degree: int) -> Iterator[int]:
    """The bins of one replica, in order: dp_rank, dp_rank + dp_degree, ..."""
    return iter(range(dp_rank, num_bins, dp_degree))
