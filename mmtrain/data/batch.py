"""The tensors of one step on one model replica."""

from collections import Counter
from dataclasses import dataclass, replace

from torch import Tensor

from mmtrain.data.metadata import IterationMeta, MicrobatchMeta
from mmtrain.errors import DataError

IGNORE_INDEX = -100
"""Label of a position that has no target."""


@dataclass(kw_only=True)
class Microbatch:
    """One packed sequence and its pictures.

    Shapes: T packed tokens; V image tokens among them; N pictures.
    """

    input_ids: Tensor
    """[T] int64."""
    position_ids: Tensor
    """[T] int64; restarts at 0 with each document."""
    labels: Tensor
    """[T] int64, already shifted: `labels[t]` is what should be predicted at position t, or IGNORE_INDEX."""
    image_slots: Tensor
    """[V] int64: rows of `input_ids` that image features fill, in the order of the pictures."""
    pixel_values: list[Tensor]
    """One tensor a picture, float32, that concatenate along dim 0: [patches, patch_dim] for packed
    native-resolution encoders, [1, channels, height, width] for encoders of a fixed size."""
    image_names: list[tuple[int, int]]
    """(sample, index) of each picture, which must be those of the metadata."""


@dataclass(kw_only=True)
class Batch:
    """All microbatches of one step on one model replica, in the order of the metadata."""

    microbatches: list[Microbatch]


def without_pictures(batch: Batch) -> Batch:
    """The batch as a rank needs it that has tokens to embed, but no pictures to encode."""
    return Batch(microbatches=[replace(m, pixel_values=[], image_names=[]) for m in batch.microbatches])


def check_batch(batch: Batch, meta: IterationMeta) -> None:
    """Refuses a batch that does not hold exactly what its metadata says: each picture once, in its place.

    Raises: DataError: naming the microbatch and the picture that is lost, doubled, moved or of a wrong size.
    """
    if len(batch.microbatches) != len(meta.microbatches):
        raise DataError(
            f"batch: {len(batch.microbatches)} microbatches, but the metadata names {len(meta.microbatches)}"
        )
    for index, (tensors, counts) in enumerate(zip(batch.microbatches, meta.microbatches, strict=True)):
        _check_microbatch(f"microbatch {index}", tensors, counts)


def _check_microbatch(where: str, tensors: Microbatch, meta: MicrobatchMeta) -> None:
    for name in ("input_ids", "position_ids", "labels"):
        if getattr(tensors, name).shape != (meta.num_tokens,):
            shape = tuple(getattr(tensors, name).shape)
            raise DataError(f"{where}: {name} has shape {shape}, but its documents have {meta.num_tokens} tokens")
    num_labels = int((tensors.labels != IGNORE_INDEX).sum())
    if num_labels != meta.num_targets:
        raise DataError(f"{where}: {num_labels} labelled positions, but the metadata names {meta.num_targets}")
    expected = [(image.sample, image.index) for image in meta.images]
    if tensors.image_names != expected:
        found, owed = Counter(tensors.image_names), Counter(expected)
        for verb, names in (("lost", owed - found), ("there once too often", found - owed)):
            for sample, index in names:
                raise DataError(f"{where}: image {index} of sample {sample} is {verb}")
        raise DataError(f"{where}: its images are in another order than their tokens: {tensors.image_names}")
    if len(tensors.pixel_values) != len(expected):
        raise DataError(f"{where}: {len(tensors.pixel_values)} pixel tensors for {len(expected)} images")
    for image, pixels in zip(meta.images, tensors.pixel_values, strict=True):
        rows = image.num_patches if pixels.dim() == 2 else 1
        if pixels.shape[0] != rows:
            raise DataError(f"{where}: {image.name} has {pixels.shape[0]} pixel rows; its grid {image.grid} has {rows}")
    _check_slots(where, tensors, meta)


def _check_slots(where: str, tensors: Microbatch, meta: MicrobatchMeta) -> None:
    """Each image's slots are one run inside of its own document."""
    slots = tensors.image_slots.tolist()
    at = document_start = 0
    for document in meta.documents:
        document_end = document_start + document.num_tokens
        for image in document.images:
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
