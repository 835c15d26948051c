"""Counts of one iteration: all that planning may know of a batch. Pure; no pixel, no token id.

Every pp_rank of a model replica holds an equal value, so each can build the same works and the
same plan from it.
"""

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageMeta:
    """One image as the encoder will see it."""

    sample: int
    """Index of its record in the data source."""
    index: int
    """Its place among the images of that record."""
    grid: tuple[int, int, int]
    """Patches (time, height, width); time is 1 for a still image."""
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

    @property
    def name(self) -> str:
        """How errors call it."""
        return f"the document of sample {self.sample}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipMeta:
    """One video clip and its caption, as a text-to-video model will see them."""

    sample: int
    """Index of its record in the data source."""
    index: int = 0
    """How often that record stands before it in the step: 0 but behind the border of two epochs, which may repeat a
    sample. (sample, index) names a clip of a step exactly once."""
    frames: int
    """Latent frames."""
    height: int
    """Rows of one latent frame."""
    width: int
    """Columns of one latent frame."""
    num_tokens: int
    """Tokens of the latents, after patching."""
    num_text_tokens: int
    """Tokens of the caption."""
    blank: bool = False
    """Zeros in place of content that could not be read: it is there for the shape of the step and has no loss."""

    @property
    def bucket(self) -> tuple[int, int, int]:
        """Frames, height and width: clips of equal buckets can be stacked to one dense batch [N, C, F, H, W]."""
        return self.frames, self.height, self.width

    def grid(self, patch: tuple[int, int, int]) -> tuple[int, int, int]:
        """Patches (frames, height, width), of patches of so many frames, rows and columns."""
        return self.frames // patch[0], self.height // patch[1], self.width // patch[2]

    @property
    def num_targets(self) -> int:
        """Latent tokens that have a loss."""
        return 0 if self.blank else self.num_tokens

    @property
    def name(self) -> str:
        """How errors call it."""
        return f"the clip of sample {self.sample}" + (f" (occurrence {self.index})" if self.index else "")


@dataclass(frozen=True, kw_only=True)
class MicrobatchMeta:
    """One packed sequence: its documents, in order. Or, of a text-to-video job, clips; then it has no document."""

    documents: tuple[DocumentMeta, ...] = ()
    clips: tuple[ClipMeta, ...] = ()

    @cached_property
    def images(self) -> tuple[ImageMeta, ...]:
        """All images, in the order of their tokens."""
        return tuple(image for document in self.documents for image in document.images)

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of all documents; no padding is counted, since there is none."""
        return sum(document.num_tokens for document in self.documents)

    @cached_property
    def num_targets(self) -> int:
        """Positions that have a label; of clips, latent tokens that have a loss."""
        return sum(document.num_targets for document in self.documents) + sum(clip.num_targets for clip in self.clips)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each document."""
        return tuple(document.num_tokens for document in self.documents)

    @cached_property
    def text_lengths(self) -> tuple[int, ...]:
        """Tokens of each clip's caption."""
        return tuple(clip.num_text_tokens for clip in self.clips)

    @cached_property
    def num_text_tokens(self) -> int:
        """Tokens of all captions."""
        return sum(self.text_lengths)

    @cached_property
    def num_video_tokens(self) -> int:
        """Latent tokens of all clips."""
        return sum(clip.num_tokens for clip in self.clips)

    @cached_property
    def num_frames(self) -> int:
        """Latent frames of all clips."""
        return sum(clip.frames for clip in self.clips)

    @cached_property
    def buckets(self) -> dict[tuple[int, int, int], tuple[int, ...]]:
        """(frames, height, width) -> places in `clips` of those that can be one dense batch; buckets in the order of
        their first clip."""
        places: dict[tuple[int, int, int], list[int]] = {}
        for place, clip in enumerate(self.clips):
            places.setdefault(clip.bucket, []).append(place)
        return {bucket: tuple(found) for bucket, found in places.items()}


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
        """Labelled positions of all microbatches; of clips, latent tokens that have a loss."""
        return sum(m.num_targets for m in self.microbatches)

    @cached_property
    def num_all_tokens(self) -> int:
        """Tokens of documents, captions and latents."""
        return self.num_tokens + self.num_text_tokens + self.num_video_tokens

    @cached_property
    def num_images(self) -> int:
        """Images of all microbatches."""
        return sum(len(m.images) for m in self.microbatches)

    @cached_property
    def num_patches(self) -> int:
        """Encoder rows of all images."""
        return sum(image.num_patches for m in self.microbatches for image in m.images)

    @cached_property
    def num_clips(self) -> int:
        """Video clips of all microbatches."""
        return sum(len(m.clips) for m in self.microbatches)

    @cached_property
    def num_frames(self) -> int:
        """Latent frames of all clips."""
        return sum(m.num_frames for m in self.microbatches)

    @cached_property
    def num_video_tokens(self) -> int:
        """Latent tokens of all clips."""
        return sum(m.num_video_tokens for m in self.microbatches)

    @cached_property
    def num_text_tokens(self) -> int:
        """Tokens of all captions."""
        return sum(m.num_text_tokens for m in self.microbatches)
