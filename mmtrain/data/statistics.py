"""Statistics of the samples of a split: how long they are, and which do not fit or cannot be read."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from mmtrain.config.config import Config
from mmtrain.data.packing import LoaderState
from mmtrain.data.processor import Document
from mmtrain.data.step_maker import made_of, samples_of
from mmtrain.errors import DataError
from mmtrain.modality.metadata import sample_name

MOST_SAMPLES = 2000
"""Samples that are looked at unless told otherwise, spread evenly over the split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Statistics of some samples of a split."""

    num_samples: int | None
    """The samples in the split; None: it is a stream."""
    lengths: tuple[int, ...]
    """Tokens of each sample that was looked at and could be read, rising."""
    with_media: int
    """The number of them with an image, video or sound."""
    unreadable: int
    """Samples that could not be read."""
    reason: str = ""
    """Why the first of these could not be read."""

    @property
    def looked_at(self) -> int:
        """Samples."""
        return len(self.lengths) + self.unreadable

    @property
    def mean(self) -> float:
        """Tokens of a sample, on average; 0 if none could be read."""
        return sum(self.lengths) / len(self.lengths) if self.lengths else 0.0

    def too_long(self, seq_len: int) -> int:
        """Samples with more tokens than that."""
        return sum(length > seq_len for length in self.lengths)

    def fits(self, seq_len: int) -> int:
        """Samples of at most that many tokens."""
        return len(self.lengths) - self.too_long(seq_len)

    def lines(self, seq_len: int) -> list[str]:
        """What to tell the user. Args: seq_len: tokens that a sample may have."""
        total = "a stream" if self.num_samples is None else f"{self.num_samples:,} samples"
        looked = "" if self.looked_at == self.num_samples else f", of which {self.looked_at:,} were looked at"
        lines = [f"{total}{looked}: {self.with_media:,} with images, videos or sounds"]
        if self.lengths:
            middle = self.lengths[len(self.lengths) // 2]
            least, most = self.lengths[0], self.lengths[-1]
            lines.append(f"tokens a sample: {least:,} to {most:,}, median {middle:,}, mean {self.mean:,.0f}")
            lines.append(f"too long for {seq_len:,} tokens: {self.too_long(seq_len):,} of {len(self.lengths):,}")
        if self.unreadable:
            lines.append(f"cannot be read: {self.unreadable:,} of {self.looked_at:,}; the first: {self.reason}")
        return lines


def statistics(config: Config, split: str, most: int = MOST_SAMPLES) -> Statistics:
    """Statistics of a split of a job's data, from token counts and headers alone; policies for bad samples do not
    matter.

    Args: most: samples to look at, of each source.
    Raises: ConfigError: the data, tokenizer or image processor cannot be opened.
    """
    samples, start = samples_of(config, split), LoaderState(seed=config.debug.seed)
    lengths: list[int] = []
    with_media = unreadable = 0
    reason = ""
    for number in spread(samples.sources.num_samples, most):
        try:
            name = sample_name(*samples.sources.sample(number))
            measured = made_of(name, partial(samples.measured, number, start))
        except DataError as error:
            unreadable, reason = unreadable + 1, reason or str(error)
            continue
        if measured is None:  # behind the end of a stream
            break
        lengths.append(samples.num_text_tokens(measured))
        if isinstance(measured, Document):
            with_media += bool(measured.raw_images)
    counts = samples.sources.num_samples
    return Statistics(
        num_samples=None if None in counts else sum(count or 0 for count in counts),
        lengths=tuple(sorted(lengths)),
        with_media=with_media,
        unreadable=unreadable,
        reason=reason,
    )


def spread(counts: Sequence[int | None], most: int) -> Iterator[int]:
    """Numbers of samples, at most so many of each source: spread evenly over it, or the first ones of a stream.

    Args: counts: samples of each source; None of a stream.
    """
    for which, count in enumerate(counts):
        indices = np.arange(most) if count is None else np.unique(np.linspace(0, count - 1, min(most, count)).round())
        yield from (int(index) * len(counts) + which for index in indices if count != 0)
