"""Batches of noise: tensors in the shapes of given metadata, for measurements without data."""

from collections.abc import Mapping

import torch
from torch import Tensor

from mmtrain.config.model import ModelConfig
from mmtrain.families.shapes import VisionShape
from mmtrain.modality.buckets import latent_channels
from mmtrain.modality.metadata import ImageMeta, IterationMeta, MicrobatchMeta
from mmtrain.models.batch import IGNORE_INDEX, Batch, ClipMicrobatch, Microbatch
from mmtrain.models.spectrogram import row_patches
from mmtrain.spec.model_shapes import language_shape
from mmtrain.spec.vae_shapes import PIXEL_CHANNELS, LatentScale, latent_scale
from mmtrain.spec.vision_shapes import vision_shape


def noise_batch(model: ModelConfig, meta: IterationMeta, seed: int) -> Batch:
    """Random pixels or latents, tokens and labels in the shapes of the metadata; the last tokens of each document
    are labelled."""
    generator = torch.Generator().manual_seed(seed)
    vocab_size = language_shape(model).vocab_size
    if model.dit is not None:
        channels, scale = latent_channels(model.dit), LatentScale()
        if model.vae is not None:
            channels, scale = PIXEL_CHANNELS, latent_scale(model.vae)
        return Batch(
            clips=[_clips(microbatch, vocab_size, channels, scale, generator) for microbatch in meta.microbatches]
        )
    shapes = {name: vision_shape(model, name) for name in model.encoders}
    return Batch(
        microbatches=[_microbatch(microbatch, vocab_size, shapes, generator) for microbatch in meta.microbatches]
    )


def _microbatch(
    meta: MicrobatchMeta, vocab_size: int, shapes: Mapping[str, VisionShape], generator: torch.Generator
) -> Microbatch:
    """Args: shapes: encoder -> its sizes."""
    labels = torch.full((meta.num_tokens,), IGNORE_INDEX)
    slots: list[int] = []
    start = 0
    for document in meta.documents:
        end = start + document.num_tokens
        labels[end - document.num_targets : end] = torch.randint(
            vocab_size, (document.num_targets,), generator=generator
        )
        for image in document.images:
            slots += range(start + image.start, start + image.start + image.num_tokens)
        start = end
    return Microbatch(
        input_ids=torch.randint(vocab_size, (meta.num_tokens,), generator=generator),
        labels=labels,
        image_slots=torch.tensor(slots, dtype=torch.int64),
        pixel_values=[_pixels(image, shapes[image.module], generator) for image in meta.images],
        image_names=[image.key for image in meta.images],
    )


def _clips(
    meta: MicrobatchMeta, vocab_size: int, channels: int, scale: LatentScale, generator: torch.Generator
) -> ClipMicrobatch:
    return ClipMicrobatch(
        text_ids=torch.randint(vocab_size, (meta.num_text_tokens,), generator=generator),
        latents=[torch.randn(channels, *scale.pixels(clip.bucket), generator=generator) for clip in meta.clips],
        clip_names=[(clip.sample, clip.index) for clip in meta.clips],
    )


def _pixels(image: ImageMeta, shape: VisionShape, generator: torch.Generator) -> Tensor:
    if shape.packed and shape.one_row:  # rows read frames of their neighbours
        return row_patches(torch.randn(shape.mel_bins, 2 * shape.max_rows, generator=generator), image.num_patches)
    if shape.packed:
        return torch.randn(image.num_patches, shape.patch_dim, generator=generator)
    if shape.one_row:  # a spectrogram, whose number of frames the encoder halves
        return torch.randn(1, shape.patch_dim // 2, 2 * image.num_patches, generator=generator)
    _, h, w = image.grid
    side = shape.patch_size
    return torch.randn(1, shape.patch_dim // side**2, h * side, w * side, generator=generator)
