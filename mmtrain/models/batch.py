"""The tensors of one step on one model replica."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple, NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor

from mmtrain.errors import DataError
from mmtrain.modality.metadata import IterationMeta, MicrobatchMeta
from mmtrain.modality.submesh import Indices
from mmtrain.spec.vae_shapes import PIXEL_CHANNELS, LatentScale

T = TypeVar("T")
IGNORE_INDEX = -100
"""Label of a position that has no target."""


def document_positions(lengths: Iterable[int]) -> Tensor:
    """[T] int64: the position of each packed token in its document. Args: lengths: tokens of each document."""
    return torch.cat([torch.arange(length) for length in lengths])


def labelled_tokens(labels: Iterable[Tensor]) -> list[Indices]:
    """[microbatch] -> the indices of its tokens with a label, ascending. Args: labels: [T] of each microbatch, on the
    host."""
    return [np.flatnonzero(of_tokens.numpy() != IGNORE_INDEX) for of_tokens in labels]


def head_arguments(labels: Tensor) -> dict[str, Tensor]:
    """`labelled` and `targets` of a head. Args: labels: [T] of all its tokens, on the host."""
    labelled = torch.from_numpy(labelled_tokens([labels])[0])
    return {"labelled": labelled, "targets": labels[labelled]}


@dataclass(kw_only=True)
class Microbatch:
    """One packed sequence, and its images, videos and sounds.

    Shapes: T packed tokens; V tokens of images, videos and sounds among them.
    """

    input_ids: Tensor
    """The token ids, [T] int64."""
    labels: Tensor
    """[T] int64, already shifted: `labels[t]` is the target of position t, or IGNORE_INDEX."""
    image_slots: Tensor
    """[V] int64: rows of `input_ids` that features of images, videos and sounds fill, in their order."""
    pixel_values: list[Tensor]
    """One tensor an image, video or window of a sound, float32. Those of one encoder concatenate along dim 0: [patches,
    patch_dim] for packed native-resolution encoders, [1, channels, height, width] for encoders of a fixed size, [1, mel
    bins, frames] for sound."""
    image_names: list[tuple[int, ...]]
    """`ImageMeta.key` of each of them, which must be those of the metadata."""


class OfModule(NamedTuple):
    """What one encoder reads of a microbatch."""

    pixels: list[Tensor]
    """The pixels of each of its images; empty where the rank has none to encode."""
    grids: tuple[tuple[int, int, int], ...]
    slots: Tensor
    """[V] int64: rows of `input_ids` that its features fill."""


def by_module(tensors: Microbatch, meta: MicrobatchMeta) -> dict[str, OfModule]:
    """Encoder -> what it reads of a microbatch, of those that read any of it, in the order of their tokens."""
    slots = tensors.image_slots.split([image.num_tokens for image in meta.images])
    modules = list(dict.fromkeys(image.module for image in meta.images))
    if len(modules) == 1:
        return {modules[0]: OfModule(tensors.pixel_values, tuple(i.grid for i in meta.images), tensors.image_slots)}
    found: dict[str, OfModule] = {}
    for module in modules:
        own = [number for number, image in enumerate(meta.images) if image.module == module]
        found[module] = OfModule(
            [tensors.pixel_values[number] for number in own] if tensors.pixel_values else [],
            tuple(meta.images[number].grid for number in own),
            torch.cat([slots[number] for number in own]),
        )
    return found


@dataclass(kw_only=True)
class ClipMicrobatch:
    """Video clips and their captions. Noise, timesteps and dropped captions are not part of it: the rank that needs
    them draws them, see `mmtrain.modality.buckets.clip_seed`.

    Shapes: T tokens of all captions; C latent channels; F, H, W frames, rows and columns of one clip's latents.
    """

    text_ids: Tensor
    """[T] int64: the captions one after another, in the order of the clips; their lengths are in the metadata."""
    latents: list[Tensor]
    """[C, F, H, W] float32 of each clip. Clips of one bucket have equal shapes. Of a job with a VAE, which makes the
    latents, the pixels: [3, frames, height, width] between -1 and 1."""
    clip_names: list[tuple[int, int]]
    """The (sample, index) of each clip, which must be those of the metadata."""


@dataclass(kw_only=True)
class Batch:
    """All microbatches of one step on one model replica, in the order of the metadata."""

    microbatches: list[Microbatch] = field(default_factory=list)
    clips: list[ClipMicrobatch] = field(default_factory=list)
    """The microbatches of a text-to-video job; one of the two lists is empty."""


def without_images(batch: Batch) -> Batch:
    """The batch as a rank needs it that has tokens to embed, but no images to encode, and no clips to take in."""
    return Batch(
        microbatches=[replace(m, pixel_values=[], image_names=[]) for m in batch.microbatches],
        clips=[replace(m, latents=[], clip_names=[]) for m in batch.clips],
    )


def regrouped_rows(
    rows: Sequence[Tensor], lengths: Sequence[Sequence[int]], microbatches: Sequence[Sequence[int]]
) -> list[Tensor]:
    """The rows of samples, packed into other microbatches.

    Args:
        rows: [T, ..] of each microbatch.
        lengths: [microbatch] -> rows of each of its samples.
        microbatches: [microbatch] -> the samples that it gets, by their indices in the whole batch.
    """
    parts = [part for own, counts in zip(rows, lengths, strict=True) for part in own.split(list(counts))]
    return [torch.cat([parts[i] for i in members]) for members in microbatches]


def regrouped(batch: Batch, meta: IterationMeta, microbatches: Sequence[Sequence[int]]) -> Batch:
    """A batch, or what a rank needs of it, with its samples in other microbatches. Images and clips are not copied.

    Args: meta: of the batch as it is. microbatches: as of `regrouped_rows`.
    """
    if batch.clips:
        lengths = [own.text_lengths for own in meta.microbatches]
        text = regrouped_rows([own.text_ids for own in batch.clips], lengths, microbatches)
        latents = [one for own in batch.clips for one in own.latents]
        clip_names = [one for own in batch.clips for one in own.clip_names]
        return Batch(
            clips=[
                ClipMicrobatch(text_ids=ids, latents=_those(latents, members), clip_names=_those(clip_names, members))
                for ids, members in zip(text, microbatches, strict=True)
            ]
        )
    lengths = [own.lengths for own in meta.microbatches]
    input_ids = regrouped_rows([own.input_ids for own in batch.microbatches], lengths, microbatches)
    labels = regrouped_rows([own.labels for own in batch.microbatches], lengths, microbatches)
    documents = [document for own in meta.microbatches for document in own.documents]
    counts = [sum(image.num_tokens for image in document.images) for document in documents]
    starts = [sum(own[:i]) for own in lengths for i in range(len(own))]
    slots = torch.cat([own.image_slots for own in batch.microbatches]).split(counts)
    images = list(accumulate((len(document.images) for document in documents), initial=0))
    pixels = [one for own in batch.microbatches for one in own.pixel_values]
    names = [one for own in batch.microbatches for one in own.image_names]
    made = []
    for ids, targets, members in zip(input_ids, labels, microbatches, strict=True):
        own_starts = accumulate((documents[i].num_tokens for i in members), initial=0)
        own_images = [image for i in members for image in range(images[i], images[i + 1])]
        made.append(
            Microbatch(
                input_ids=ids,
                labels=targets,
                image_slots=torch.cat(
                    [slots[i] - starts[i] + start for i, start in zip(members, own_starts, strict=False)]
                ),
                pixel_values=_those(pixels, own_images),
                image_names=_those(names, own_images),
            )
        )
    return Batch(microbatches=made)


def _those(values: list[T], indices: Iterable[int]) -> list[T]:
    """Some of the values; none where a rank has none."""
    return [values[i] for i in indices] if values else []


def with_other_captions(batch: Batch, meta: IterationMeta) -> tuple[Batch, IterationMeta]:
    """The clips of a replica's batch, each with the caption of the next one: a control that shows how much captions
    help."""
    captions = [
        caption
        for tensors, counts in zip(batch.clips, meta.microbatches, strict=True)
        for caption in tensors.text_ids.split(list(counts.text_lengths))
    ]
    captions = captions[1:] + captions[:1]
    clips, metas, next_caption = [], [], 0
    for tensors, counts in zip(batch.clips, meta.microbatches, strict=True):
        new_captions = captions[next_caption : next_caption + len(counts.clips)]
        next_caption += len(new_captions)
        clips.append(replace(tensors, text_ids=torch.cat(new_captions)))
        renamed = (
            replace(clip, num_text_tokens=len(text)) for clip, text in zip(counts.clips, new_captions, strict=True)
        )
        metas.append(MicrobatchMeta(clips=tuple(renamed)))
    return Batch(clips=clips), replace(meta, microbatches=tuple(metas))


def check_batch(batch: Batch, meta: IterationMeta, vae: LatentScale | None = None) -> None:
    """Refuses a batch that does not hold exactly what its metadata says: each image and clip once, at its position.

    Args: vae: size in pixels of one latent position, of a job with a VAE.
    Raises: DataError: naming the microbatch and the image or clip that is lost, doubled, moved or of a wrong size.
    """
    number = len(batch.microbatches) + len(batch.clips)
    if number != len(meta.microbatches):
        raise DataError(f"batch: {number} microbatches, but the metadata names {len(meta.microbatches)}")
    microbatches: list[Microbatch | ClipMicrobatch] = [*batch.microbatches, *batch.clips]
    for index, (tensors, counts) in enumerate(zip(microbatches, meta.microbatches, strict=True)):
        where = f"microbatch {index}"
        if isinstance(tensors, ClipMicrobatch):
            _check_clips(where, tensors, counts, vae)
        else:
            _check_microbatch(where, tensors, counts)


def _check_clips(where: str, tensors: ClipMicrobatch, meta: MicrobatchMeta, vae: LatentScale | None) -> None:
    expected = [(clip.sample, clip.index) for clip in meta.clips]
    if tensors.clip_names != expected:
        _name_difference(where, "clip", tensors.clip_names, expected)
    if tensors.text_ids.shape != (meta.num_text_tokens,):
        raise DataError(
            f"{where}: text_ids has shape {tuple(tensors.text_ids.shape)}, but its captions have "
            f"{meta.num_text_tokens} tokens"
        )
    if len(tensors.latents) != len(expected):
        raise DataError(f"{where}: {len(tensors.latents)} latent tensors for {len(expected)} clips")
    for clip, latents in zip(meta.clips, tensors.latents, strict=True):
        shape = tuple(latents.shape)
        if vae is None and shape[1:] != clip.bucket:
            raise DataError(
                f"{where}: {clip.name} has latents of shape {shape}; its bucket is {clip.bucket} (frames, height, "
                "width)"
            )
        if vae is not None and shape != (expected_shape := (PIXEL_CHANNELS, *vae.pixels(clip.bucket))):
            raise DataError(
                f"{where}: {clip.name} has pixels of shape {shape}; its latents {clip.bucket} (frames, height, width) "
                f"are made of {expected_shape}"
            )


def _check_microbatch(where: str, tensors: Microbatch, meta: MicrobatchMeta) -> None:
    for name in ("input_ids", "labels"):
        if getattr(tensors, name).shape != (meta.num_tokens,):
            shape = tuple(getattr(tensors, name).shape)
            raise DataError(f"{where}: {name} has shape {shape}, but its documents have {meta.num_tokens} tokens")
    num_labels = int((tensors.labels != IGNORE_INDEX).sum())
    if num_labels != meta.num_targets:
        raise DataError(f"{where}: {num_labels} labelled positions, but the metadata names {meta.num_targets}")
    expected = [image.key for image in meta.images]  # a key twice: the sample is there again, or of another source
    if tensors.image_names != expected:
        called = {image.key: image.name for image in meta.images}
        _name_difference(where, "image", tensors.image_names, expected, called)
    if len(tensors.pixel_values) != len(expected):
        raise DataError(f"{where}: {len(tensors.pixel_values)} pixel tensors for {len(expected)} images")
    for image, pixels in zip(meta.images, tensors.pixel_values, strict=True):
        rows = image.num_patches if pixels.dim() == 2 else 1
        if pixels.shape[0] != rows:
            raise DataError(f"{where}: {image.name} has {pixels.shape[0]} pixel rows; its grid {image.grid} has {rows}")
    _check_slots(where, tensors, meta)


def _name_difference(
    where: str,
    content: str,
    names: Sequence[tuple[int, ...]],
    expected: Sequence[tuple[int, ...]],
    called: Mapping[tuple[int, ...], str] = MappingProxyType({}),
) -> NoReturn:
    """Args: called: name in errors of those that are not called as their content, index and sample.

    Raises: DataError: the image or clip by which the names differ from those of the metadata.
    """
    counts, expected_counts = Counter(names), Counter(expected)
    for verb, different in (("lost", expected_counts - counts), ("there once too often", counts - expected_counts)):
        for key in different:
            sample, index, *frame = key
            part = f"frame {frame[0]} of {content}" if frame else content
            raise DataError(f"{where}: {called.get(key, f'{part} {index} of sample {sample}')} is {verb}")
    order = "their tokens" if content == "image" else "their captions"
    raise DataError(f"{where}: its {content}s are in another order than {order}: {names}")


def _check_slots(where: str, tensors: Microbatch, meta: MicrobatchMeta) -> None:
    """Each image's slots are one run inside of its own document."""
    slots = tensors.image_slots.tolist()
    at = document_start = 0
    for document in meta.documents:
        document_end = document_start + document.num_tokens
        for image in document.images:
            if not image.num_tokens:
                continue
            run = slots[at : at + image.num_tokens]
            whole = len(run) == image.num_tokens and run == list(range(run[0], run[0] + len(run)))
            if not whole or not document_start <= run[0] <= run[-1] < document_end:
                raise DataError(
                    f"{where}: {image.name} needs {image.num_tokens} image tokens in one run inside of its "
                    f"document ({document_start} .. {document_end - 1}), but its slots are {_brief(run)}"
                )
            at += image.num_tokens
        document_start = document_end
    if at != len(slots):
        raise DataError(f"{where}: {len(slots)} image tokens, but its images fill {at}")


def _brief(values: list[int]) -> str:
    return str(values) if len(values) <= 4 else f"[{values[0]}, {values[1]}, .., {values[-1]}] ({len(values)} of them)"
