"""Metadata of one iteration: the counts of a batch, on which planning depends. Pure; no pixels, no token ids.

Every pp_rank of a model replica holds an equal value, so each builds the same works and the same plan from it.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, pairwise

from mmtrain.errors import DataError


def sample_name(sample: int, source: str) -> str:
    """The name of a sample in messages. Args: source: name of its source; empty if the job has one."""
    return f"sample {sample} of {source}" if source else f"sample {sample}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageMeta:
    """One image, video or window of a sound, as its encoder reads it; or one patch in time of a video that has text
    between these. Sound is one row of patches."""

    module: str = "vision"
    """The encoder that reads it."""
    sample: int
    """Index of its record in the data source."""
    index: int
    """The index of the item among the images of that record and, counted behind them, its videos and sounds."""
    frame: int | None = None
    """The index in time, if the item is one patch in time of a video, or a window of a sound."""
    grid: tuple[int, int, int]
    """Patches (time, height, width); time is 1 for an image."""
    num_tokens: int
    """Number of its tokens in the language model, after the spatial merge; 0: no text has it, and its encoder makes one
    embedding of it."""
    start: int = 0
    """Index of its first token in its document."""
    source: str = ""
    """Name of its source; empty if the job has one."""
    seconds: float = 0.0
    """For a video, the seconds from one patch to the next in time; 0: it is an image."""
    time_step: float = 1.0
    """Positions from one patch to the next in time, before rounding, in a model with positions on three axes."""
    sound_s: float = 0.0
    """The seconds of a window of a sound, without silence; 0: it is no sound."""

    @property
    def is_sound(self) -> bool:
        """Whether it is a window of a sound."""
        return self.sound_s > 0

    @property
    def is_video(self) -> bool:
        """Whether it is a video, if only of one patch in time."""
        return self.seconds > 0

    @property
    def key(self) -> tuple[int, ...]:
        """The sample, the index, and the frame if there is one, by which a batch is compared with its metadata."""
        return (self.sample, self.index) if self.frame is None else (self.sample, self.index, self.frame)

    @property
    def num_features(self) -> int:
        """Number of rows that its encoder makes."""
        return self.num_tokens or 1

    @property
    def num_patches(self) -> int:
        """Number of its rows in the encoder."""
        t, h, w = self.grid
        return t * h * w

    @property
    def token_grid(self) -> tuple[int, int, int]:
        """Tokens (time, height, width) after the spatial merge; audio, one row of patches, is merged only along it."""
        t, h, w = self.grid
        if h == 1:
            return t, 1, self.num_tokens // t
        merge = math.isqrt(t * h * w // self.num_tokens)
        return t, h // merge, w // merge

    @property
    def name(self) -> str:
        """The name of the item in error messages."""
        content = "video" if self.is_video else "image" if self.module == "vision" else self.module
        part = "" if self.frame is None else f"frame {self.frame} of " if self.is_video else f"window {self.frame} of "
        return f"{part}{content} {self.index} of {sample_name(self.sample, self.source)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentMeta:
    """One sample inside of a packed microbatch."""

    sample: int
    """Index of its record in the data source."""
    num_tokens: int
    """Number of tokens, those of images and videos included."""
    num_targets: int
    """Number of labelled positions."""
    images: tuple[ImageMeta, ...]
    """Images and videos, patches in time of videos, and windows of sounds, in the order of their tokens."""
    grade: str = ""
    """Difficulty in the record, for accuracy by grade; empty if there is none."""
    answers: tuple[int, ...] = ()
    """Number of labelled positions of each answer, in order; the sum is `num_targets`. An answer is right if all of its
    positions are predicted correctly."""
    prefix: int = 0
    """Number of tokens before the first token of the first answer; 0 without an answer."""
    source: str = ""
    """Name of its source; empty if the job has one."""
    deferred: bool = False
    """Whether encoders read its images with the microbatch before its own, see `check_deferral`."""

    def numbered(self, sample: int) -> "DocumentMeta":
        """The document, with its images, as of another sample."""
        return replace(self, sample=sample, images=tuple(replace(image, sample=sample) for image in self.images))

    @property
    def of_placeholders(self) -> tuple[tuple[ImageMeta, ...], ...]:
        """The images of each placeholder: an image, a video, all patches in time of a video or windows of a sound."""
        return tuple(tuple(group) for _, group in groupby(self.images, key=lambda image: (image.module, image.index)))

    @property
    def name(self) -> str:
        """The name of the document in error messages."""
        return f"the document of {sample_name(self.sample, self.source)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipMeta:
    """One video clip and its caption, as a text-to-video model reads them."""

    sample: int
    """Index of its record in the data source."""
    index: int = 0
    """Number of earlier clips of that index in the step: those of other sources, or, after the end of an epoch, of the
    same record. (sample, index) is unique in a step."""
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
    """Whether its content could not be read and is replaced with zeros, which keep the step's shape without a loss."""
    source: str = ""
    """Name of its source; empty if the job has one."""

    @property
    def bucket(self) -> tuple[int, int, int]:
        """Frames, height and width of the latents; clips of one bucket can be stacked to a batch [N, C, F, H, W]."""
        return self.frames, self.height, self.width

    def numbered(self, sample: int) -> "ClipMeta":
        """The clip as of another sample."""
        return replace(self, sample=sample)

    def grid(self, patch: tuple[int, int, int]) -> tuple[int, int, int]:
        """Number of patches (frames, height, width). Args: patch: frames, rows and columns of one patch."""
        return self.frames // patch[0], self.height // patch[1], self.width // patch[2]

    @property
    def num_targets(self) -> int:
        """Number of latent tokens with a loss."""
        return 0 if self.blank else self.num_tokens

    @property
    def name(self) -> str:
        """The name of the clip in error messages."""
        return f"the clip of {sample_name(self.sample, self.source)}" + (
            f" (occurrence {self.index})" if self.index else ""
        )


@dataclass(frozen=True, kw_only=True)
class MicrobatchMeta:
    """One microbatch: the documents of one packed sequence, in order; in a text-to-video job the clips instead."""

    documents: tuple[DocumentMeta, ...] = ()
    clips: tuple[ClipMeta, ...] = ()

    @classmethod
    def of(cls, samples: Iterable[DocumentMeta | ClipMeta]) -> "MicrobatchMeta":
        """The microbatch of some samples, in their order."""
        own = tuple(samples)
        return cls(
            documents=tuple(one for one in own if isinstance(one, DocumentMeta)),
            clips=tuple(one for one in own if isinstance(one, ClipMeta)),
        )

    @property
    def samples(self) -> tuple[DocumentMeta | ClipMeta, ...]:
        """The documents or clips, in order."""
        return (*self.documents, *self.clips)

    @cached_property
    def images(self) -> tuple[ImageMeta, ...]:
        """All images and videos, in the order of their tokens."""
        return tuple(image for document in self.documents for image in document.images)

    @cached_property
    def deferred(self) -> tuple[DocumentMeta, ...]:
        """The documents whose images are encoded with the microbatch before."""
        return tuple(document for document in self.documents if document.deferred)

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of all documents; there is no padding."""
        return sum(document.num_tokens for document in self.documents)

    @cached_property
    def num_targets(self) -> int:
        """Number of labelled positions; of clips, of latent tokens with a loss."""
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
        """The indices in `clips` of the clips of each bucket (frames, height, width), ordered by their first clip."""
        positions: dict[tuple[int, int, int], list[int]] = {}
        for position, clip in enumerate(self.clips):
            positions.setdefault(clip.bucket, []).append(position)
        return {bucket: tuple(indices) for bucket, indices in positions.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignmentMeta:
    """How the samples of a step were assigned to the microbatches of all replicas (`[assignment]`)."""

    digest: str
    """Hash of the microbatches of all replicas, which all replicas must agree on."""
    reason: str = ""
    """Why the policy could not place the samples, so that first-fit did; empty: it could."""
    seconds: float = field(default=0.0, compare=False)
    """The seconds that the assignment took."""


@dataclass(frozen=True, kw_only=True)
class IterationMeta:
    """All microbatches of one step on one model replica."""

    microbatches: tuple[MicrobatchMeta, ...]
    num_skipped: int = 0
    """Samples that were skipped while this batch was made (`data.on_error`, `data.too_long`). Exactly one data-parallel
    replica counts each of them, so the sum over replicas is the true number."""
    num_blank: int = 0
    """Microbatches without a sample, each of which has one document or clip without content and without a loss."""
    assignment: AssignmentMeta | None = None
    """None: the first microbatch with room has each sample."""

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of all microbatches."""
        return sum(m.num_tokens for m in self.microbatches)

    @cached_property
    def num_samples(self) -> int:
        """Documents or clips of all microbatches, but for those of blank ones."""
        return sum(len(m.documents) + len(m.clips) for m in self.microbatches) - self.num_blank

    @cached_property
    def num_targets(self) -> int:
        """Labelled positions of all microbatches; of clips, latent tokens with a loss."""
        return sum(m.num_targets for m in self.microbatches)

    @cached_property
    def num_all_tokens(self) -> int:
        """Tokens of documents, captions and latents."""
        return self.num_tokens + self.num_text_tokens + self.num_video_tokens

    @cached_property
    def num_images(self) -> int:
        """Images and videos of all microbatches, of whichever encoder."""
        return sum(not image.is_sound for m in self.microbatches for image in m.images)

    @cached_property
    def num_sounds(self) -> int:
        """Sounds of all microbatches."""
        return sum(image.is_sound and not image.frame for m in self.microbatches for image in m.images)

    @cached_property
    def sound_s(self) -> float:
        """Seconds of all sounds, without the silence that fills their windows."""
        return sum((image.sound_s for m in self.microbatches for image in m.images), 0.0)

    @cached_property
    def num_patches(self) -> int:
        """Encoder rows of all images and videos."""
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

    @cached_property
    def num_deferred(self) -> int:
        """Documents whose images are encoded with the microbatch before."""
        return sum(len(m.deferred) for m in self.microbatches)


def check_deferral(meta: IterationMeta) -> None:
    """Checks that deferral joins no more than two microbatches, in the order in which features are used.

    Of a pair of microbatches i and i + 1, images of some documents are encoded with i, and all that the language model
    does of these documents is in i + 1. These documents come first in i + 1.

    Raises: DataError: the first microbatch, or both of two neighbours, have deferred documents; a deferred document has
        no image, or comes after one that is not deferred.
    Source: Entrain (Jang, Efficient Multimodal Model Training at Scale, dissertation, University of Michigan, 2026,
        sections 4.5.2 and 4.5.3).
    """
    for index, microbatch in enumerate(meta.microbatches):
        where = f"microbatch {index}"
        for before, document in pairwise((None, *microbatch.documents)):
            if document is None or not document.deferred:
                continue
            if not document.images:
                raise DataError(
                    f"{where}: {document.name} is deferred, but it has no image, and only encoders work ahead; defer "
                    "documents with images"
                )
            if before is not None and not before.deferred:
                raise DataError(
                    f"{where}: {document.name} is deferred, but comes after {before.name}, which is not; put deferred "
                    "documents first"
                )
    if meta.microbatches and meta.microbatches[0].deferred:
        raise DataError(
            f"microbatch 0: {meta.microbatches[0].deferred[0].name} is deferred, but there is no microbatch before it; "
            "defer to a later microbatch"
        )
    for index, (one, other) in enumerate(pairwise(meta.microbatches)):
        if one.deferred and other.deferred:
            raise DataError(
                f"microbatches {index} and {index + 1} both have deferred documents, which would join more than two "
                "microbatches; defer from one to the next in pairs"
            )


def without_deferral(meta: IterationMeta, microbatches: Collection[int]) -> IterationMeta:
    """The metadata with no document of some microbatches deferred. Args: microbatches: their indices."""
    return replace(
        meta,
        microbatches=tuple(
            replace(m, documents=tuple(replace(document, deferred=False) for document in m.documents))
            if index in microbatches
            else m
            for index, m in enumerate(meta.microbatches)
        ),
    )
