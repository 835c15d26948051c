"""Which samples of a replica's batch are processed together. Pure.

Rules fix it before the planner: microbatches are as full as they can be, and works as large as they must be to be
efficient. Smaller ones hold less, so that less is recomputed, and they fill the pipeline sooner. How small they should
be depends on the batch, the memory and the order, see `planner.joint`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mmtrain.modality.metadata import IterationMeta, MicrobatchMeta, without_deferral
from mmtrain.planner.assignment.dealing import microbatch_seconds
from mmtrain.planner.batching import SubMicrobatch
from mmtrain.planner.job import Job

Indices = tuple[tuple[int, ...], ...]
"""[microbatch] -> indices of a batch's samples, each in one microbatch."""


@dataclass(frozen=True, kw_only=True)
class Grouping:
    """The samples of each microbatch, and how many of their images or clips are one work."""

    microbatches: Indices = ()
    """Empty: as the batch has them."""
    sub_microbatch_size: SubMicrobatch
    """The size of sub-microbatches, as of a job."""


def grouped(meta: IterationMeta, microbatches: Indices) -> IterationMeta:
    """The metadata of a batch whose samples are in other microbatches, with which their images are encoded, too.

    Args: microbatches: empty: the batch stays as it is.
    """
    if not microbatches:
        return meta
    kept = without_deferral(meta, range(len(meta.microbatches)))
    samples = [sample for microbatch in kept.microbatches for sample in microbatch.samples]
    return replace(meta, microbatches=tuple(MicrobatchMeta.of(samples[i] for i in own) for own in microbatches))


@dataclass(frozen=True)
class Groupings:
    """Groupings of a batch, relative to the given one."""

    job: Job
    meta: IterationMeta

    def of(self, size: float, number: float) -> Grouping | None:
        """One of them; None: it is the given one, or the samples have no room in so few microbatches, or are fewer.

        Args: size: of works, a factor of the job's. number: of microbatches, a factor of the batch's.
        """
        microbatches: Indices | None = ()
        if number != 1:
            microbatches = self._in_microbatches(round(number * len(self.meta.microbatches)))
        scaled = self._scaled(size)
        if microbatches is None or (not microbatches and scaled == self.job.sub_microbatch_size):
            return None
        return Grouping(microbatches=microbatches, sub_microbatch_size=scaled)

    def _scaled(self, factor: float) -> SubMicrobatch:
        """The job's sizes times a factor; a work of all units of a microbatch counts as the largest one, if works may
        be parts of it (`planner.search.sub_microbatch`)."""
        size = self.job.sub_microbatch_size
        if factor == 1 or not self.job.section.search.sub_microbatch:
            return size
        largest = max(max(len(one.images), len(one.clips)) for one in self.meta.microbatches)
        if not largest:  # of text alone
            return size
        if isinstance(size, Mapping):
            return {name: max(1, round(factor * (own or largest))) for name, own in size.items()}
        return max(1, round(factor * (size or largest)))

    def _in_microbatches(self, count: int) -> Indices | None:
        """The samples in a number of microbatches: the one that takes longest first, to the microbatch with least."""
        seconds, tokens = self._samples
        if not 0 < count <= len(seconds):
            return None
        most = np.array([_tokens(microbatch) for microbatch in self.meta.microbatches]).max(axis=0)
        busy, used = np.zeros(count), np.zeros((count, tokens.shape[1]), np.int64)
        members: list[list[int]] = [[] for _ in range(count)]
        for i in np.argsort(-seconds, kind="stable").tolist():
            free = (used + tokens[i] <= most).all(axis=1)
            if not free.any():
                return None
            index = int(np.where(free, busy, np.inf).argmin())
            members[index].append(i)
            busy[index] += seconds[i]
            used[index] += tokens[i]
        return tuple(tuple(sorted(own)) for own in members)

    @cached_property
    def _samples(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """[sample] -> seconds on all pipeline ranks by itself, and its tokens under each limit of a microbatch."""
        count = sum(len(microbatch.samples) for microbatch in self.meta.microbatches)
        alone = grouped(self.meta, tuple((i,) for i in range(count)))
        tokens = np.array([_tokens(one) for one in alone.microbatches])
        return microbatch_seconds(self.job, alone).sum(axis=1), tokens


def _tokens(microbatch: MicrobatchMeta) -> tuple[int, int]:
    """What limits bound in one way or another; no microbatch gets more of either than one of the batch has."""
    return microbatch.num_tokens + microbatch.num_text_tokens, microbatch.num_video_tokens
