"""Counts of one iteration: all that planning may know of a batch. Pure; no pixel, no token id.

Every pp_rank of a model replica holds an equal value, so each can build the same works and the
same plan from it.
"""

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageMeta:
    """One picture as the encoder will see it."""

    sample: int
    """Index of its record in the data source."""
    index: int
    """Its place among the pictures of that record."""
    grid: tuple[int, int, int]
    """Patches (time, height, width); time is 1 for a still picture."""
    num_tokens: int
    """Rows that it fills among the language model's tokens, after the spatial merge."""
    start: int = 0
    """Place of its first token in its document."""

    @property
    def num_patches(self) -> int:
        """Rows that the encoder's layers work on."""
        t, h, w = self.grid
        return t * h * w

    @property
    def name(self) -> str:
        """How errors call it."""
        return f"image {self.index} of sample {self.sample}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentMeta:
    """One sample inside of a packed microbatch."""

    sample: int
    """Index of its record in the data source."""
    num_tokens: int
    """Tokens, image tokens included."""
    num_targets: int
    """Positions that have a label."""
    images: tuple[ImageMeta, ...]
    """In the order of their tokens."""
    grade: str = ""
    """Difficulty named by the record, for accuracy by grade; empty where there is none."""
    answers: tuple[int, ...] = ()
    """Labelled positions of each answer, in order; they add up to `num_targets`. An answer is right when
    all of its positions are predicted right."""
    prefix: int = 0
    """Tokens before the first token of the first answer; 0 without an answer."""


@dataclass(frozen=True, kw_only=True)
class MicrobatchMeta:
    """One packed sequence: its documents, in order."""

    documents: tuple[DocumentMeta, ...]

    @cached_property
    def images(self) -> tuple[ImageMeta, ...]:
        """All pictures, in the order of their tokens."""
        return tuple(image for document in self.documents for image in document.images)

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of all documents; no padding is counted, since there is none."""
        return sum(document.num_tokens for document in self.documents)

    @cached_property
    def num_targets(self) -> int:
        """Positions that have a label."""
        return sum(document.num_targets for document in self.documents)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each document."""
        return tuple(document.num_tokens for document in self.documents)


@dataclass(frozen=True, kw_only=True)
class IterationMeta:
    """All microbatches of one step on one model replica."""

    microbatches: tuple[MicrobatchMeta, ...]
    num_skipped: int = 0
    """Samples that were dropped while this batch was made (`data.on_error`, `data.too_long`). Each dropped
    sample is counted by one data-parallel replica only, so that the sum over replicas is the true number."""

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of all microbatches."""
        return sum(m.num_tokens for m in self.microbatches)

    @cached_property
    def num_targets(self) -> int:
        """Labelled positions of all microbatches."""
        return sum(m.num_targets for m in self.microbatches)

    @cached_property
    def num_images(self) -> int:
        """Pictures of all microbatches."""
        return sum(len(m.images) for m in self.microbatches)

    @cached_property
    def num_patches(self) -> int:
        """Encoder rows of all pictures."""
        return sum(image.num_patches for m in self.microbatches for image in m.images)
