"""What `mmtrain profile` runs: a job's layers as stages of their own, on batches that tell costs apart. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isqrt
from typing import Literal

from mmtrain.config.config import (
    ActivationCheckpointConfig,
    CheckpointConfig,
    Config,
    DitConfig,
    EncoderConfig,
    LoRAConfig,
    LRSchedulerConfig,
    MetricsConfig,
    ModelConfig,
    PlannerConfig,
    ProjectorConfig,
    ValidationConfig,
)
from mmtrain.modality.buckets import latent_channels, most_frames, video_geometry
from mmtrain.modality.metadata import ClipMeta, DocumentMeta, ImageMeta, IterationMeta, MicrobatchMeta
from mmtrain.planner.forecast.workloads import CLIP_SIDE, PIXELS_PER_LATENT
from mmtrain.planner.shrink import ENCODER_KEYS, inline_config
from mmtrain.spec.builders import model_spec
from mmtrain.spec.families import DITS, ENCODERS, LANGUAGES, dit_config, encoder_config, language_config
from mmtrain.spec.shapes import language_shape, vision_shape

LEAST_IMAGE_TEXT = 4
"""Tokens of text beside the images of a document."""

LEAST_CAPTION = 4
"""Tokens of the shortest captions of clips."""

Bucket = tuple[int, int, int]
"""Frames, height and width of the latents of a clip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How the layers of a job are put into stages while they are measured."""

    stages: Literal["layers", "modules"]
    """A stage for each layer, or for each module."""
    splits: bool
    """Whether backwards run in two halves."""
    mode: Literal["", "selective", "full"] = ""
    """`activation_checkpoint.mode`; empty: that of the job."""


REPEATS = {
    "selective": Cut(stages="layers", splits=False, mode="selective"),
    "recompute": Cut(stages="layers", splits=False, mode="full"),
}
"""Memory strategy -> the cut that shows what it adds to the plain one."""

CUTS = tuple(Cut(stages=stages, splits=splits) for stages in ("layers", "modules") for splits in (False, True))  # type: ignore[arg-type]


def probing_job(config: Config, *, num_blocks: int, cut: Cut, num_ranks: int = 1, folder: str) -> Config:
    """A job of the same layers on one pipeline rank, each kind of block `num_blocks` times at most, random weights.

    Widths, dtype, attention, recomputation, frozen parts and the tensor- and context-parallel degrees stay.

    Args:
        num_ranks: pipeline ranks after all; then one segment of each module.
        folder: of the files that a job writes.
    """
    model = _fewer_blocks(config.model, num_blocks)
    counts = {module.name: len(module.layers) for module in model_spec(model).modules}
    segments = counts if cut.stages == "layers" else dict.fromkeys(counts, 1)
    model = replace(
        model,
        encoder=model.encoder and replace(model.encoder, num_segments=segments["vision"]),
        language=replace(model.language, num_segments=segments["language"]),
        dit=model.dit and replace(model.dit, num_segments=segments["dit"]),
    )
    return replace(
        config,
        job=replace(config.job, dump_folder=folder),
        model=model,
        training=replace(config.training, global_batch_size=1, on_nonfinite="skip"),
        lr_scheduler=LRSchedulerConfig(warmup_steps=0),
        activation_checkpoint=(ActivationCheckpointConfig(mode=cut.mode) if cut.mode else config.activation_checkpoint),
        parallelism=replace(
            config.parallelism,
            pipeline_parallel_degree=num_ranks,
            data_parallel_shard_degree=1,
            data_parallel_replicate_degree=1,
            pipeline_parallel_schedule="ZB-H1" if cut.splits else "1F1B",
        ),
        planner=PlannerConfig(sub_microbatch=False),  # each microbatch is one work of a size of its own
        validation=ValidationConfig(),
        checkpoint=CheckpointConfig(),
        metrics=MetricsConfig(enable_tensorboard=False, progress_bar=False, peak_flops=1.0),
    )


def small_job(config: Config, *, folder: str) -> Config:
    """A job with fewer parameters to update: one block of the language model alone, trained even where it is frozen; of
    a text-to-video model a narrow DiT of one block, with a frozen text encoder.

    Args: folder: of the files that a job writes.
    """
    config = probing_job(config, num_blocks=1, cut=Cut(stages="modules", splits=False), folder=folder)
    if config.model.dit is not None:
        tp = config.parallelism.tensor_parallel_degree
        values = {**config.model.dit.config, "num_attention_heads": tp, "ffn_dim": tp}
        dit = replace(config.model.dit, config=values, trainable=True)
        text = replace(config.model.language, trainable=False)
        return replace(config, model=replace(config.model, dit=dit, language=text, vae=None, lora=LoRAConfig()))
    parallelism = replace(config.parallelism, encoder_tensor_parallel="shard", encoder_context_parallel="images")
    language = replace(config.model.language, trainable=config.model.language.trainable or True)
    model = replace(config.model, encoder=None, projector=ProjectorConfig(), language=language)
    return replace(config, model=model, parallelism=parallelism)


def _fewer_blocks(model: ModelConfig, num_blocks: int) -> ModelConfig:
    """The model with at most so many blocks of each kind, and inline configs."""
    family = language_shape(model).model_type
    values = language_config(model.language)
    values["num_hidden_layers"] = min(values["num_hidden_layers"], num_blocks)
    values.pop("layer_types", None)  # one entry a layer; those that are hosted all have one type
    config = inline_config(values, LANGUAGES[family])
    language = replace(model.language, pretrained="", config=config, pipeline_layout="")
    projector = replace(model.projector, pretrained="")
    return replace(
        model,
        encoder=model.encoder and _fewer_encoder_blocks(model, num_blocks),
        dit=model.dit and _fewer_dit_blocks(model.dit, num_blocks),
        vae=model.vae and replace(model.vae, weights="random"),
        language=language,
        projector=projector,
    )


def _fewer_encoder_blocks(model: ModelConfig, num_blocks: int) -> EncoderConfig:
    assert model.encoder is not None
    shape, values = vision_shape(model), encoder_config(model.encoder)
    full = [block for block in shape.full_blocks if block < shape.depth]
    depth = min(shape.depth, num_blocks)
    if shape.window:
        windowed = min(shape.depth - len(full), num_blocks)
        depth = windowed + min(len(full), num_blocks)
        values["fullatt_block_indexes"] = list(range(windowed, depth))
    values[ENCODER_KEYS[shape.model_type]["depth"]] = depth
    config = inline_config(values, ENCODERS[shape.model_type])
    return replace(model.encoder, pretrained="", config=config, pipeline_layout="")


def _fewer_dit_blocks(section: DitConfig, num_blocks: int) -> DitConfig:
    values = dit_config(section)
    values |= {"num_layers": min(values["num_layers"], num_blocks), "patch_size": list(values["patch_size"])}
    return replace(section, pretrained="", config=inline_config(values, DITS[values["model_type"]]), pipeline_layout="")


# --------------------------------------------------------------------------------------------- batches


def probing_iteration(config: Config) -> IterationMeta:
    """One microbatch for each size that layers are measured at, none above training.seq_len tokens.

    With an encoder: images of three sizes (or the encoder's one), as many as fit in growing numbers, with little
    or much text beside them, in one document or one each. Then text alone in one or four documents. So rows, attended
    pairs, image tokens and labels change apart from each other. Of a text-to-video job: see `_clips_iteration`.
    """
    if config.model.dit is not None:
        return _clips_iteration(config)
    limit = config.training.seq_len
    found: list[MicrobatchMeta] = []
    for grid, tokens in _images(config):
        for number in _numbers(limit, tokens + LEAST_IMAGE_TEXT):
            together, much = len(found) % 2 == 1, len(found) % 3 == 1
            text = limit - number * tokens if much else number * LEAST_IMAGE_TEXT
            found.append(_microbatch(len(found), grid, tokens, number, text, 1 if together else number))
    for parts, documents in ((8, 1), (4, 1), (2, 1), (1, 1), (2, 4), (1, 4)):
        length = max(documents * 2, limit // parts)
        found.append(_microbatch(len(found), (1, 1, 1), 0, 0, length, documents))
    return IterationMeta(microbatches=tuple(found))


def work_curve(config: Config) -> IterationMeta:
    """Microbatches of 1, 2, 3, ... images (or clips) of one size, the second largest of the probes, and little text.

    They tell how many images a vision work, or clips a DiT work, needs to run well. None without either.
    """
    if config.model.dit is not None:
        buckets = _buckets(config)
        bucket = buckets[min(1, len(buckets) - 1)]
        numbers = _some(_most_clips(config, bucket))
        text = min(config.training.seq_len, LEAST_CAPTION)
        return IterationMeta(microbatches=tuple(_clips(config, i, [bucket] * n, text) for i, n in enumerate(numbers)))
    images = _images(config)
    if not images:
        return IterationMeta(microbatches=())
    grid, tokens = images[min(1, len(images) - 1)]
    most = max(_numbers(config.training.seq_len, tokens + 1))
    made = [_microbatch(i, grid, tokens, n, n, n) for i, n in enumerate(_some(most))]
    return IterationMeta(microbatches=tuple(made))


def _some(most: int) -> list[int]:
    """Numbers up to the largest one, ever further apart."""
    return sorted({number for number in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, most) if number <= most})


def _images(config: Config) -> list[tuple[tuple[int, int, int], int]]:
    """(patches, tokens) of the images to measure with, the largest first: at most a quarter of a microbatch each."""
    if config.model.encoder is None:
        return []
    shape = vision_shape(config.model)
    if shape.fixed_grid is not None:
        t, h, w = shape.fixed_grid
        return [(shape.fixed_grid, t * h * w // shape.patches_per_token)]
    most = config.training.seq_len // 4
    if config.data.max_pixels:
        most = min(most, config.data.max_pixels // (shape.patch_size * shape.merge) ** 2)
    side = max(1, isqrt(most))
    sides = sorted({side, max(1, 3 * side // 4), max(1, side // 2)}, reverse=True)
    return [((1, s * shape.merge, s * shape.merge), s * s) for s in sides]


def _numbers(limit: int, tokens: int) -> list[int]:
    """1, 2, 4, ... and the most of `tokens` each that fit; 1 if none does."""
    return _doubled(max(1, limit // tokens))


def _doubled(most: int) -> list[int]:
    """1, 2, 4, ... and the largest one."""
    return sorted({min(2**k, most) for k in range(most.bit_length() + 1)})


def _microbatch(
    index: int, grid: tuple[int, int, int], tokens: int, number: int, text: int, documents: int
) -> MicrobatchMeta:
    """So many images at the start of documents, and text shared by these; 1/8, 1/2 or all of the text is labelled."""
    share = (8, 2, 1)[index % 3]
    made = []
    for d in range(documents):
        first, last = d * number // documents, (d + 1) * number // documents
        words = (d + 1) * text // documents - d * text // documents
        targets = max(1, words // share)
        length = (last - first) * tokens + words
        images = tuple(
            ImageMeta(sample=index * 1000 + d, index=i, grid=grid, num_tokens=tokens, start=i * tokens)
            for i in range(last - first)
        )
        made.append(
            DocumentMeta(
                sample=index * 1000 + d,
                num_tokens=length,
                num_targets=targets,
                images=images,
                answers=(targets,),
                prefix=length - targets,
            )
        )
    return MicrobatchMeta(documents=tuple(made))


# ------------------------------------------------------------------------------------------------ clips


def _clips_iteration(config: Config) -> IterationMeta:
    """One microbatch for each size that the layers of a text encoder and a DiT are measured at.

    A clip of the longest, a middle and the shortest bucket, each with a caption of all tokens that one may have, of a
    fourth, and of few; as many as a microbatch holds in growing numbers; and clips of all three together. So latent
    tokens, pairs of self- and of cross-attention, text tokens and clips change apart from each other.
    """
    limit = config.training.seq_len
    texts = sorted({limit, -(-limit // 4), min(limit, LEAST_CAPTION)}, reverse=True)
    buckets = _buckets(config)
    made = [([bucket], text) for bucket in buckets for text in texts]
    for size, bucket in enumerate(buckets):
        for place, number in enumerate(_doubled(_most_clips(config, bucket))[1:]):
            made.append(([bucket] * number, texts[(size + place) % len(texts)]))
    together = buckets
    while len(together) > config.data.max_clips or sum(frames for frames, *_ in together) > most_frames(config.data):
        together = together[1:]
    if len(together) > 1:
        made.append((together, texts[-1]))
    return IterationMeta(microbatches=tuple(_clips(config, i, *row) for i, row in enumerate(made)))


def _buckets(config: Config) -> list[Bucket]:
    """The buckets to measure with, the longest first: of three lengths, or as many as there are.

    Latents come in sizes that the config does not say; those of usual clips stand for them.
    """
    assert config.model.dit is not None
    data = config.data
    if latent_channels(config.model.dit) != 3 and config.model.vae is None:
        data = replace(data, video_area=min(data.video_area, (CLIP_SIDE // PIXELS_PER_LATENT) ** 2))
    geometry = video_geometry(config.model.dit, data, config.model.vae)
    lengths, sizes = geometry.frames, geometry.sizes
    chosen = dict.fromkeys((lengths[0], lengths[len(lengths) // 2], lengths[-1]))
    return [(frames, *sizes[i % len(sizes)]) for i, frames in enumerate(chosen)]


def _most_clips(config: Config, bucket: Bucket) -> int:
    """Clips of a bucket that a microbatch holds."""
    return max(1, min(config.data.max_clips, most_frames(config.data) // bucket[0]))


def _clips(config: Config, index: int, buckets: Sequence[Bucket], text: int) -> MicrobatchMeta:
    """Clips with captions of so many tokens each."""
    assert config.model.dit is not None
    geometry = video_geometry(config.model.dit, config.data, config.model.vae)
    clips = tuple(
        ClipMeta(
            sample=index * 1000 + i,
            frames=frames,
            height=height,
            width=width,
            num_tokens=geometry.num_tokens((frames, height, width)),
            num_text_tokens=text,
        )
        for i, (frames, height, width) in enumerate(geometry.latents(*bucket) for bucket in buckets)
    )
    return MicrobatchMeta(clips=clips)
