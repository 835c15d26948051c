"""The choice of the samples of a step, and of the microbatch that each one goes to. Pure and deterministic.

The samples of all epochs form one endless sequence: each epoch is a permutation of the source drawn from (seed, epoch).
Each of several sources has such a sequence, and theirs are mixed: the source of each position is drawn from (seed,
position). A step packs samples first-fit into the `training.global_batch_size` bins, whose capacity is a number of
tokens, or of frames and clips. It ends at the first sample that fits no bin, with which the next step begins. In a job
of a number of epochs it ends with its epoch, too, and bins for which no sample remains are blank. The state is the
position. A step's bins do not depend on the layout (which only says the replica that each belongs to), so a job resumes
exactly with another number of replicas.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Protocol

import numpy as np

from mmtrain.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePosition:
    """The position in one of several sources."""

    name: str
    epoch: int = 0
    cursor: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderState:
    """The position of a loader, the same on all ranks and for any number of replicas."""

    seed: int
    """Seed of the order of samples."""
    epoch: int = 0
    """Number of complete passes over the source."""
    cursor: int = 0
    """Number of samples used of this epoch's order; of several sources, of the whole mixture."""
    sources: tuple[SourcePosition, ...] = ()
    """Epoch and cursor in each of several sources; empty of a job with one, or before its first sample."""
    num_samples: int = field(default=0, compare=False)
    """Samples of an epoch, which is no part of the position; 0: of a stream or of several sources, or before the first
    sample."""

    def __post_init__(self) -> None:
        of_sources = (number for at in self.sources for number in (at.epoch, at.cursor))
        if min(self.seed, self.epoch, self.cursor, self.num_samples, *of_sources) < 0:
            raise DataError(f"loader state {self.to_dict()}: its numbers are at least 0")

    @property
    def epochs(self) -> Fraction:
        """The epochs that are done, with the part of the present one; without that part where it is not known."""
        return self.epoch + (Fraction(self.cursor, self.num_samples) if self.num_samples else Fraction(0))

    def epoch_of(self, source: str) -> int:
        """Complete passes over a source. Args: source: its name; empty if the job has one."""
        return next((at.epoch for at in self.sources if at.name == source), self.epoch)

    def to_dict(self) -> dict[str, Any]:
        """The state as plain integers, for a checkpoint; those of several sources under their names."""
        sources = {at.name: {"epoch": at.epoch, "cursor": at.cursor} for at in self.sources}
        state = {"seed": self.seed, "epoch": self.epoch, "cursor": self.cursor}
        known = {"num_samples": self.num_samples} if self.num_samples else {}
        return state | ({"sources": sources} if sources else {}) | known

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "LoaderState":
        """The state of `to_dict`. Raises: DataError: a key is missing or not an integer."""
        try:
            seed, epoch, cursor = (int(values[name]) for name in ("seed", "epoch", "cursor"))
            num_samples = int(values.get("num_samples", 0))
            sources = tuple(
                SourcePosition(name=name, epoch=int(at["epoch"]), cursor=int(at["cursor"]))
                for name, at in dict(values.get("sources", {})).items()
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"loader state {dict(values)!r} is not of the form seed, epoch, cursor: {error}") from None
        return cls(seed=seed, epoch=epoch, cursor=cursor, sources=sources, num_samples=num_samples)


SampleSize = tuple[int, ...]
"""Size of a sample under each limit of a bin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BinLimit:
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
    """The state of the loader at which the next step starts."""
    blank: frozenset[int] = frozenset()
    """Bins for which there is no sample: each repeats one, of which the step takes neither content nor loss."""


class SampleOrder(Protocol):
    """The sample of a job's sources at each position of the endless sequence, as a number for each sample."""

    num_samples: int | None
    """All samples of one epoch; None for streams. A step has at most this many."""
    repeats: bool
    """Whether a step may read a source a third time."""

    def check(self, state: LoaderState) -> None:
        """Raises: DataError: the position is not one of these sources."""

    def source(self, state: LoaderState) -> int:
        """Index of the source that the sample at a position is of."""

    def sample(self, state: LoaderState) -> int:
        """The sample at a position, within the epoch of its source."""

    def ends(self, state: LoaderState) -> bool:
        """Whether the position is behind the last sample of the epoch of its source; False for a stream."""

    def after(self, state: LoaderState) -> LoaderState:
        """The position behind the sample of a position."""

    def next_epoch(self, state: LoaderState) -> LoaderState:
        """The position with the next epoch of its source."""


class EpochOrder:
    """The order of the samples of each epoch of a source.

    Args:
        num_samples: samples in the source; None for a stream, which has its own order.
        shuffle: a new permutation each epoch instead of the source's order.
    """

    repeats = False

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

    def check(self, state: LoaderState) -> None:
        """Raises: DataError: the position is behind the end of the source, or one in several sources."""
        if state.sources:
            names = ", ".join(source.name for source in state.sources)
            raise DataError(
                f"loader state: it is a position in the sources {names}, but the job has one source; set data.sources "
                "as it was, or start a new run in another job.dump_folder"
            )
        if self.num_samples is not None and state.cursor > self.num_samples:
            raise DataError(
                f"loader state: cursor {state.cursor} is behind the source's {self.num_samples} samples; the "
                "source has changed since that state was saved: bring back the old one or start without the state"
            )

    def source(self, state: LoaderState) -> int:
        """Zero, since there is one source."""
        return 0

    def after(self, state: LoaderState) -> LoaderState:
        """The position one sample later."""
        return replace(state, cursor=state.cursor + 1, num_samples=self.num_samples or 0)

    def next_epoch(self, state: LoaderState) -> LoaderState:
        """The start of the next epoch."""
        return replace(state, epoch=state.epoch + 1, cursor=0, num_samples=self.num_samples or 0)


class MixedOrder:
    """The order of the samples of several sources: the source of each position is drawn, and each source has epochs of
    its own, in an order of its own. Sample i of source s of S has the number i * S + s.

    The source of position k depends on (seed, k, weights) alone, so it can be drawn without those before it.

    Args:
        names: of the sources; a source's order depends on its name, not on the other sources.
        weights: share of each of the samples, relative to the others; above 0.
        num_samples: of each source; None for streams.
    Raises: DataError: a source has no sample.
    """

    def __init__(
        self, names: Sequence[str], weights: Sequence[float], num_samples: Sequence[int | None], *, shuffle: bool
    ) -> None:
        for name, count in zip(names, num_samples, strict=True):
            if count == 0:
                raise DataError(f"source {name!r} has no sample; remove it from data.sources")
        self.names = tuple(names)
        self.num_samples = None if None in num_samples else sum(count or 0 for count in num_samples)
        self.repeats = self.num_samples is not None
        self._orders = [EpochOrder(count, shuffle=shuffle) for count in num_samples]
        shares = np.cumsum(weights)
        self._shares = shares / shares[-1]
        self._drawn: tuple[int, int] | None = None
        self._sources = np.empty(0, np.int64)

    def check(self, state: LoaderState) -> None:
        """Raises: DataError: a position is behind the end of its source."""
        for which, order in enumerate(self._orders):
            order.check(self._local(state, which))

    def source(self, state: LoaderState) -> int:
        """Index of the source that position `state.cursor` of the mixture is of."""
        block, position = divmod(state.cursor, _BLOCK)
        if self._drawn != (state.seed, block):
            # The bits of a generator keyed by (seed, block), of which numpy promises that they stay the same. The 1
            # tells them from those of `EpochOrder`.
            bits = np.random.Philox(np.random.SeedSequence((state.seed, block, 1))).random_raw(_BLOCK)
            uniform = (bits >> np.uint64(11)) * 2.0**-53
            self._sources = np.searchsorted(self._shares, uniform, side="right")
            self._drawn = (state.seed, block)
        return int(self._sources[position])

    def sample(self, state: LoaderState) -> int:
        """The number of the sample at a position."""
        which = self.source(state)
        return self._orders[which].sample(self._local(state, which)) * len(self._orders) + which

    def ends(self, state: LoaderState) -> bool:
        """Whether the source of the position has no sample left in its epoch."""
        which = self.source(state)
        return self._orders[which].ends(self._local(state, which))

    def after(self, state: LoaderState) -> LoaderState:
        """The position behind its sample: the source has used one sample more."""
        which = self.source(state)
        moved = self._moved(state, which, self._orders[which].after(self._local(state, which)))
        return replace(moved, cursor=state.cursor + 1)

    def next_epoch(self, state: LoaderState) -> LoaderState:
        """The same position of the mixture, with the next epoch of its source."""
        which = self.source(state)
        return self._moved(state, which, self._orders[which].next_epoch(self._local(state, which)))

    def _local(self, state: LoaderState, which: int) -> LoaderState:
        """The position in one source, as of a loader of this source alone with a seed of its own."""
        name = self.names[which]
        at = next((source for source in state.sources if source.name == name), SourcePosition(name=name))
        seed = int.from_bytes(hashlib.sha256(f"{state.seed} {name}".encode()).digest()[:8])
        return LoaderState(seed=seed, epoch=at.epoch, cursor=at.cursor)

    def _moved(self, state: LoaderState, which: int, local: LoaderState) -> LoaderState:
        """The state with another position in one source."""
        known = {source.name: source for source in state.sources}
        known[self.names[which]] = SourcePosition(name=self.names[which], epoch=local.epoch, cursor=local.cursor)
        return replace(state, sources=tuple(known.get(name, SourcePosition(name=name)) for name in self.names))


_BLOCK = 1024
"""Positions whose sources are drawn at once; a change would change the order of every mixture."""


def plan_step(
    state: LoaderState,
    order: SampleOrder,
    size: Callable[[int], SampleSize | Dropped | None],
    *,
    num_bins: int,
    limits: tuple[BinLimit, ...],
    num_samples: int = 0,
    may_be_short: bool = False,
    epochs: Fraction | None = None,
    split: str = "the source",
) -> StepPlan:
    """The bins of the step that starts at `state`, and the state after it.

    A step may span two epochs (a sample may occur in both), but a source that is smaller than one step is not repeated
    to fill it. Of several sources it has at most as many samples as they have together, so one may be repeated in it.

    Args:
        size: sample -> a number for each limit (1 .. most), or why it is left out, or None behind the end of a stream.
        num_bins: microbatches of the step over all replicas.
        limits: capacity of one microbatch; a sample goes to the first one that has room under all of them.
        num_samples: after which the step ends, if not earlier; 0: no such number. With one, bins need not fill up, and
            a sample goes to the one that has most room under the first limit.
        may_be_short: bins without a sample are blank.
        epochs: of the job, whose steps end with their epoch (and may be short there); None: see above.
        split: what the samples are of, for errors.
    Raises: DataError: the source has too few usable samples to put one into each bin, or none if it may be short.
    """
    order.check(state)
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    room = [full := tuple(limit.most for limit in limits)] * num_bins
    dropped: dict[int, Dropped] = {}
    epoch_ends, num_read, num_used = Counter[int](), 0, 0
    end = step_end(state, order, epochs)
    while not (is_last := _position(state, order) >= end) and (epochs is not None or not 0 < num_samples <= num_used):
        item = None if order.ends(state) else size(sample := order.sample(state))
        if item is None:
            epoch_ends[source := order.source(state)] += 1
            if epoch_ends[source] == 2 and not order.repeats:  # a stream that is smaller than one step
                break
            state = order.next_epoch(state)
            continue
        if num_read == order.num_samples:
            break
        if isinstance(item, Dropped):
            dropped[sample] = item
        else:
            assert len(item) == len(full) and min(item) > 0 and _fits(item, full), (sample, item, limits)
            index = _bin_of(item, room, roomiest=num_samples > 0)
            if index is None or 0 < num_samples <= num_used:  # the next step has a usable sample
                break
            bins[index].append(sample)
            room[index] = tuple(free - used for free, used in zip(room[index], item, strict=True))
            num_used += 1
        num_read += 1
        state = order.after(state)
    blank = frozenset(index for index in range(num_bins) if not bins[index])
    if blank and not ((may_be_short or is_last) and num_used):
        raise _too_few(split, bins, room, limits, dropped)
    filled = (tuple(samples or bins[0][:1]) for samples in bins)
    return StepPlan(bins=tuple(filled), dropped=tuple(dropped.values()), state=state, blank=blank)


def _position(state: LoaderState, order: SampleOrder) -> int:
    """Samples of all epochs up to a position in one source."""
    return state.epoch * (order.num_samples or 0) + state.cursor


def step_end(state: LoaderState, order: SampleOrder, epochs: Fraction | None) -> float:
    """Samples of all epochs up to the end of the epoch that the next sample is of, or of the job.

    Args: state: where a step starts. epochs: of the job; None: steps do not end with an epoch.
    Raises: DataError: the epochs before were of another number of samples.
    """
    if epochs is None or not order.num_samples:
        return math.inf
    if state.num_samples not in (0, order.num_samples):
        raise DataError(
            f"loader state: the source had {state.num_samples} samples when it was saved and has {order.num_samples} "
            "now, so its epoch cannot be completed; bring back the old one, or start a new run in another "
            "job.dump_folder"
        )
    done, count = _position(state, order), order.num_samples
    return min((done // count + 1) * count, math.ceil(epochs * count))


def _too_few(
    split: str, bins: list[list[int]], room: list[SampleSize], limits: tuple[BinLimit, ...], dropped: dict[int, Dropped]
) -> DataError:
    """The error of a source that cannot fill each bin. Args: room: what remains of each bin under each limit."""
    num_bins, num_used = len(bins), len({sample for samples in bins for sample in samples})
    if not num_used:
        reason = next((f"; for example {d.reason}" for d in dropped.values()), "")
        return DataError(f"{split} has no usable sample: {len(dropped)} were left out{reason}")
    free = map(sum, zip(*room, strict=True))
    has = " and ".join(f"{num_bins * limit.most - n} {limit.unit}" for limit, n in zip(limits, free, strict=True))
    return DataError(
        f"{split} has too few samples: its {num_used} usable ones have {has} and fill {sum(map(bool, bins))} of "
        f"training.global_batch_size = {num_bins} microbatches of {' and '.join(limit.key for limit in limits)}; lower "
        "one of these or add samples"
    )


def _bin_of(size: SampleSize, room: list[SampleSize], *, roomiest: bool) -> int | None:
    """The first bin with room for a sample, or the one with most room under the first limit; None: it fits no bin."""
    with_room = (index for index, free in enumerate(room) if _fits(size, free))
    return max(with_room, key=lambda index: room[index][0], default=None) if roomiest else next(with_room, None)


def _fits(size: SampleSize, room: SampleSize) -> bool:
    return all(used <= free for used, free in zip(size, room, strict=True))


def bins_of_replica(num_bins: int, dp_rank: int, dp_degree: int) -> Iterator[int]:
    """The bins of one replica, in order: dp_rank, dp_rank + dp_degree, ..."""
    return iter(range(dp_rank, num_bins, dp_degree))
