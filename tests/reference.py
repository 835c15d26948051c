"""Small models and batches, and the one-process gradients that every layout must reproduce."""

import dataclasses
import math
import random
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn

from mmtrain.config.config import Config
from mmtrain.config.data import DataConfig, DiffusionConfig
from mmtrain.config.model import EncoderConfig, LanguageConfig, ModelConfig, ProjectorConfig
from mmtrain.config.planner import PlannerConfig
from mmtrain.config.sections import CommConfig, ParallelismConfig, TrainingConfig
from mmtrain.modality.metadata import ClipMeta, DocumentMeta, ImageMeta, IterationMeta, MicrobatchMeta
from mmtrain.models.batch import IGNORE_INDEX, Batch, ClipMicrobatch, Microbatch
from mmtrain.models.diffusion import ClipNoise
from mmtrain.models.reference import ReferenceModel
from mmtrain.models.spectrogram import row_patches
from mmtrain.spec.model_configs import encoder_config
from mmtrain.spec.model_shapes import dit_shape
from mmtrain.spec.spec import ModelSpec
from mmtrain.spec.vae_shapes import PIXEL_CHANNELS, LatentScale, latent_scale
from mmtrain.spec.vision_shapes import vision_shape
from mmtrain.spec.vocabulary import with_loss_chunks
from tests.models.towers import make_pairs
from tests.store import stored

Prepare = Callable[[nn.Module], None]

VOCAB = 96
ENCODERS = {
    "qwen2_vl_vision": {
        "model_type": "qwen2_vl_vision", "depth": 6, "embed_dim": 32, "hidden_size": 48, "num_heads": 4,
        "mlp_ratio": 2, "patch_size": 4, "temporal_patch_size": 1, "in_channels": 3, "spatial_merge_size": 2,
    },
    "qwen2_5_vl_vision": {
        "model_type": "qwen2_5_vl_vision", "depth": 6, "hidden_size": 32, "out_hidden_size": 48, "num_heads": 4,
        "intermediate_size": 40, "patch_size": 4, "temporal_patch_size": 1, "in_channels": 3, "spatial_merge_size": 2,
        "window_size": 16, "fullatt_block_indexes": [1, 4],
    },
    "siglip_vision_model": {
        "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6,
        "num_attention_heads": 4, "image_size": 16, "patch_size": 4,
    },
    "siglip2_vision_model": {
        "model_type": "siglip2_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_patches": 25, "patch_size": 4,
    },
    "clip_vision_model": {
        "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6,
        "num_attention_heads": 4, "image_size": 16, "patch_size": 4,
    },
    "vit": {
        "model_type": "vit", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6,
        "num_attention_heads": 4, "image_size": 16, "patch_size": 4, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
    "whisper_encoder": {
        "model_type": "whisper_encoder", "d_model": 32, "encoder_ffn_dim": 64, "encoder_layers": 6,
        "encoder_attention_heads": 4, "num_mel_bins": 10, "max_source_positions": 12,
    },
    "qwen2_audio_encoder": {
        "model_type": "qwen2_audio_encoder", "d_model": 32, "encoder_ffn_dim": 64, "encoder_layers": 6,
        "encoder_attention_heads": 4, "num_mel_bins": 10, "max_source_positions": 12,
    },
}  # fmt: skip
_POOLED = ("qwen2_audio_encoder",)
"""Encoders whose features no projector merges."""
LANGUAGES = {
    name: {
        "model_type": name, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 256,
    }
    for name in ("qwen2", "llama", "qwen3", "mistral")
}  # fmt: skip
LANGUAGES["qwen3"] |= {"head_dim": 16}


def model_config(
    encoder: str | None = "qwen2_vl_vision",
    language: str = "qwen2",
    *,
    tied: bool = False,
    frozen: tuple[str, ...] = (),
    segments: tuple[int, int] = (1, 1),
    projector: str = "mlp",
    key_heads: int = 2,
    others: Mapping[str, str] = MappingProxyType({}),
) -> ModelConfig:
    """A tiny model.

    Args: frozen: of encoder, projector, language and `others`. segments: K of vision and language. others: further
    encoders by their names.
    """
    return ModelConfig(
        modules={
            name: EncoderConfig(
                config=ENCODERS[kind],
                kind="audio" if "num_mel_bins" in ENCODERS[kind] else "images",
                trainable=name not in frozen,
                num_segments=segments[0],
                projector=ProjectorConfig(
                    kind="linear" if kind in _POOLED else "mlp",
                    spatial_merge=1 if kind in _POOLED else 2,
                    trainable=f"{name}_projector" not in frozen,
                ),
            )
            for name, kind in others.items()
        },
        encoder=None
        if encoder is None
        else EncoderConfig(config=ENCODERS[encoder], trainable="encoder" not in frozen, num_segments=segments[0]),
        projector=ProjectorConfig(
            kind=projector, spatial_merge=int(encoder in _POOLED), trainable="projector" not in frozen
        ),
        language=LanguageConfig(
            config=LANGUAGES[language] | {"tie_word_embeddings": tied, "num_key_value_heads": key_heads},
            trainable="language" not in frozen,
            num_segments=segments[1],
        ),
    )


def two_grids(model: ModelConfig) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Patches of two items of [model.encoder], of different sizes where it takes any."""
    shape = vision_shape(model)
    if shape.any_size:
        return (1, 4, 4), (1, 4, 6)
    return shape.full_grid, ((1, 1, 8) if shape.packed else shape.full_grid)


NOISE = ClipNoise(DiffusionConfig(caption_dropout=0.3), 7, 1, null_token=0)
"""The random choices for the clips of every batch: some captions are hidden."""


def make_clips(model: ModelConfig, counts: list[int], seed: int) -> tuple[Batch, IterationMeta]:
    """A batch of random clips; the first one is blank, and every second has the sizes of the one before.

    Args: counts: [microbatch] -> clips.
    """
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    shape, microbatches, metas = dit_shape(model), [], []
    scale = latent_scale(model.vae) if model.vae else LatentScale()
    channels = PIXEL_CHANNELS if model.vae else shape.in_channels
    for index, count in enumerate(counts):
        clips = []
        for number in range(count):
            if number % 2 == 0:
                patches = rng.randint(1, 3), rng.randint(1, 3), rng.randint(1, 3)
                length = rng.randint(1, 9)
            frames, height, width = (n * side for n, side in zip(patches, shape.patch, strict=True))
            clips.append(
                ClipMeta(
                    sample=1000 * seed + 100 * index + number, frames=frames, height=height, width=width,
                    num_tokens=math.prod(patches), num_text_tokens=length,
                    blank=index == number == 0,
                )
            )  # fmt: skip
        meta = MicrobatchMeta(clips=tuple(clips))
        metas.append(meta)
        microbatches.append(
            ClipMicrobatch(
                text_ids=torch.randint(1, VOCAB, (meta.num_text_tokens,), generator=generator),
                latents=[torch.randn(channels, *scale.pixels(clip.bucket), generator=generator) for clip in clips],
                clip_names=[(clip.sample, clip.index) for clip in clips],
            )
        )
    return Batch(clips=microbatches), IterationMeta(microbatches=tuple(metas))


def make_batch(model: ModelConfig, images: list[list[int | str]], seed: int) -> tuple[Batch, IterationMeta]:
    """A batch of random documents. Args: images: [microbatch] -> images in each of its documents: a number, or a letter
    for each, i for an image and v for a video of up to four patches in time; a or m for one of the encoder `audio` or
    `maps`; with < before them, they are encoded with the microbatch before; with ~ before them, the document has no
    label.

    For a text-to-video model, clips, for two towers pairs: as many as documents.
    """
    if model.dit is not None:
        return make_clips(model, [len(counts) for counts in images], seed)
    if model.reads_pairs:
        return make_pairs(model, [len(counts) for counts in images], seed)
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    packed = model.encoder is not None and vision_shape(model).packed
    captioned = model.encoder is not None and encoder_config(model.encoder)["model_type"] == "qwen3_vl_vision"
    microbatches, metas, sample = [], [], 100 * seed
    for counts in images:
        ids, labels, slots, pixels, documents = [], [], [], [], []
        start = 0
        for count in counts:
            sample += 1
            metas_of_images = []
            deferred, labelled = str(count).startswith("<"), not str(count).startswith("~")
            count = count.lstrip("<~") if isinstance(count, str) else count
            length = rng.randint(5, 12)
            where = length - 3  # images stand before the last three tokens
            for index, kind in enumerate("i" * count if isinstance(count, int) else count):
                module = {"a": "audio", "m": "maps"}.get(kind, "vision")
                image, values = _image(model, sample, index, where, rng, generator, module, video=kind == "v")
                for part in _patches_in_time(image) if kind == "v" and captioned else [image]:
                    gap = 0 if part.frame is None else 1 + part.frame % 2  # tokens of text before it
                    metas_of_images.append(dataclasses.replace(part, start=where + gap))
                    slots += range(start + where + gap, start + where + gap + part.num_tokens)
                    where += gap + part.num_tokens
                    length += gap + part.num_tokens
                pixels += (
                    values.split([p.num_patches for p in metas_of_images if p.index == index])
                    if packed and module == "vision"
                    else [values]
                )
            ids.append(torch.randint(0, VOCAB, (length,), generator=generator))
            label = torch.full((length,), IGNORE_INDEX)
            if labelled:
                label[-3:-1] = torch.randint(0, VOCAB, (2,), generator=generator)
            labels.append(label)
            documents.append(
                DocumentMeta(
                    sample=sample,
                    num_tokens=length,
                    num_targets=2 * labelled,
                    images=tuple(metas_of_images),
                    answers=(2,) * labelled,
                    prefix=(length - 2) * labelled,
                    deferred=deferred,
                )
            )
            start += length
        meta = MicrobatchMeta(documents=tuple(documents))
        metas.append(meta)
        microbatches.append(
            Microbatch(
                input_ids=torch.cat(ids),
                labels=torch.cat(labels),
                image_slots=torch.tensor(slots, dtype=torch.int64),
                pixel_values=pixels,
                image_names=[i.key for i in meta.images],
            )
        )
    return Batch(microbatches=microbatches), IterationMeta(microbatches=tuple(metas))


def _patches_in_time(video: ImageMeta) -> list[ImageMeta]:
    """Each patch in time of a video as an item of its own."""
    t, h, w = video.grid
    return [dataclasses.replace(video, frame=i, grid=(1, h, w), num_tokens=video.num_tokens // t) for i in range(t)]


def _image(
    model: ModelConfig,
    sample: int,
    index: int,
    start: int,
    rng: random.Random,
    generator: torch.Generator,
    module: str = "vision",
    *,
    video: bool = False,
) -> tuple[ImageMeta, Tensor]:
    image, values = _of_module(model, module, sample, index, start, rng, generator, video=video)
    return dataclasses.replace(image, module=module), values


def _of_module(
    model: ModelConfig,
    module: str,
    sample: int,
    index: int,
    start: int,
    rng: random.Random,
    generator: torch.Generator,
    *,
    video: bool,
) -> tuple[ImageMeta, Tensor]:
    shape = vision_shape(model, module)
    merge = shape.merge
    if shape.one_row and shape.packed:
        rows = rng.randint(2, 12)
        values = row_patches(torch.randn(shape.mel_bins, 2 * shape.max_rows, generator=generator), rows)
        image = ImageMeta(sample=sample, index=index, grid=(1, 1, rows), num_tokens=rows // 2, start=start)
        return image, values
    if shape.one_row:
        values = torch.randn(1, 10, 24, generator=generator)
        return ImageMeta(sample=sample, index=index, grid=(1, 1, 12), num_tokens=12 // merge, start=start), values
    if shape.packed:
        h, w = merge * rng.randint(1, 3), merge * rng.randint(1, 3)
        values = torch.randn(h * w, 3 * 4 * 4, generator=generator)
    else:
        h = w = 4
        values = torch.randn(1, 3, 16, 16, generator=generator)
    num_tokens = h * w // merge**2 + shape.keeps_class_token
    if video:
        t, seconds = rng.randint(1, 4), 0.25 * rng.randint(1, 6)
        values = torch.cat([values, torch.randn((t - 1) * h * w, values.shape[1], generator=generator)])
        positions = encoder_config(model.encoders[module]).get("tokens_per_second")
        timing = {"seconds": seconds, "time_step": positions * seconds if positions else 1.0}
        count = t * num_tokens
        return ImageMeta(sample=sample, index=index, grid=(t, h, w), num_tokens=count, start=start, **timing), values
    image = ImageMeta(sample=sample, index=index, grid=(1, h, w), num_tokens=num_tokens, start=start)
    return image, values


def reference_gradients(
    model: ModelConfig,
    spec: ModelSpec,
    batches: list[tuple[Batch, IterationMeta]],
    *,
    seed: int,
    prepare: Prepare | None = None,
) -> tuple[float, dict[str, Tensor]]:
    """(loss, name -> gradient) of the one-process model; the loss is normalised by all targets of all batches.

    Computed once in a run of the tests, for all layouts and ranks.

    Args:
        batches: as of `make_batch`, whose metadata name the seeds of their values.
        prepare: changes the values of a chunk.
    """
    key = repr((model, [meta for _, meta in batches], seed, prepare and (prepare.__module__, prepare.__qualname__)))
    found: tuple[float, dict[str, Tensor]] = stored(
        key, lambda: _reference_gradients(model, spec, batches, seed=seed, prepare=prepare)
    )
    return found


def _reference_gradients(
    model: ModelConfig,
    spec: ModelSpec,
    batches: list[tuple[Batch, IterationMeta]],
    *,
    seed: int,
    prepare: Prepare | None,
) -> tuple[float, dict[str, Tensor]]:
    reference = ReferenceModel(model, spec, seed=seed)
    for chunk in reference.chunks.values() if prepare else ():
        prepare(chunk)
    num_targets = sum(reference.loss.num_values(meta) for _, meta in batches)
    loss = torch.stack([reference.loss_sum(batch, meta, NOISE) for batch, meta in batches]).sum() / num_targets
    if loss.requires_grad:
        loss.backward()
    weights = {name: p for name, p in reference.weights().items() if p.requires_grad}
    return loss.item(), {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in weights.items()}


TRAINING = TrainingConfig(steps=1, seq_len=64, global_batch_size=4)
PLANNER = PlannerConfig()
COMM = CommConfig()


def in_chunks(spec: ModelSpec, model: ModelConfig, training: TrainingConfig | int, tp: int = 1) -> ModelSpec:
    """The spec of a model with its heads in pieces. Args: training: that of the job, or its `loss_chunk_tokens`."""
    if isinstance(training, int):
        training = dataclasses.replace(TRAINING, loss_chunk_tokens=training)
    degrees = ParallelismConfig(tensor_parallel_degree=tp)
    return with_loss_chunks(
        spec, Config(model=model, data=DataConfig(source="nowhere"), training=training, parallelism=degrees)
    )


def with_sub_microbatches(model: ModelConfig, size: int) -> ModelConfig:
    """The model with works of encoders of at most `size` images."""
    sized = {name: dataclasses.replace(x, sub_microbatch_size=size) for name, x in model.encoders.items()}
    return model.with_modules(sized)
