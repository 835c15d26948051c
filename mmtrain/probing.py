"""What `mmtrain profile` runs: a job's layers as stages of their own, on batches that tell costs apart. Pure."""

from dataclasses import dataclass, replace
from math import isqrt
from typing import Literal

from mmtrain.config import (
    ActivationCheckpointConfig,
    CheckpointConfig,
    Config,
    EncoderConfig,
    LRSchedulerConfig,
    MetricsConfig,
    ModelConfig,
    PlannerConfig,
    ProjectorConfig,
    ValidationConfig,
)
from mmtrain.data.metadata import DocumentMeta, ImageMeta, IterationMeta, MicrobatchMeta
from mmtrain.models.families import ENCODERS, LANGUAGES, encoder_config, language_config
from mmtrain.models.shapes import language_shape, vision_shape
from mmtrain.models.spec_builders import model_spec
from mmtrain.shrink import ENCODER_KEYS, inline_config

LEAST_PICTURE_TEXT = 4
"""Tokens of text beside the pictures of a document."""


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
    encoder = model.encoder and replace(model.encoder, num_segments=segments["vision"])
    return replace(
        config,
        job=replace(config.job, dump_folder=folder),
        model=replace(model, encoder=encoder, language=replace(model.language, num_segments=segments["language"])),
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
    """One block of the language model alone, trained even where it is frozen: it has fewer parameters to update.

    Args: folder: of the files that a job writes.
    """
    config = probing_job(config, num_blocks=1, cut=Cut(stages="modules", splits=False), folder=folder)
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
    language = replace(model.language, pretrained="", config=inline_config(values, LANGUAGES[family]))
    projector = replace(model.projector, pretrained="")
    return replace(
        model,
        encoder=model.encoder and _fewer_encoder_blocks(model, num_blocks),
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
    return replace(model.encoder, pretrained="", config=inline_config(values, ENCODERS[shape.model_type]))


# --------------------------------------------------------------------------------------------- batches


def probing_iteration(config: Config) -> IterationMeta:
    """One microbatch for each size that layers are measured at, none above training.seq_len tokens.

    With an encoder: pictures of three sizes (or the encoder's one), as many as fit in growing numbers, with little
    or much text beside them, in one document or one each. Then text alone in one or four documents. So rows, attended
    pairs, image tokens and labels change apart from each other.
    """
    limit = config.training.seq_len
    found: list[MicrobatchMeta] = []
    for grid, tokens in _pictures(config):
        for number in _numbers(limit, tokens + LEAST_PICTURE_TEXT):
            together, much = len(found) % 2 == 1, len(found) % 3 == 1
            text = limit - number * tokens if much else number * LEAST_PICTURE_TEXT
            found.append(_microbatch(len(found), grid, tokens, number, text, 1 if together else number))
    for parts, documents in ((8, 1), (4, 1), (2, 1), (1, 1), (2, 4), (1, 4)):
        length = max(documents * 2, limit // parts)
        found.append(_microbatch(len(found), (1, 1, 1), 0, 0, length, documents))
    return IterationMeta(microbatches=tuple(found))


def picture_curve(config: Config) -> IterationMeta:
    """Microbatches of 1, 2, 3, ... pictures of one size (the second largest of the probes) and little text.

    They tell how many pictures a vision work needs to run well.
    """
    pictures = _pictures(config)
    if not pictures:
        return IterationMeta(microbatches=())
    grid, tokens = pictures[min(1, len(pictures) - 1)]
    most = max(_numbers(config.training.seq_len, tokens + 1))
    numbers = sorted({number for number in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, most) if number <= most})
    return IterationMeta(microbatches=tuple(_microbatch(i, grid, tokens, n, n, n) for i, n in enumerate(numbers)))


def _pictures(config: Config) -> list[tuple[tuple[int, int, int], int]]:
    """(patches, tokens) of the pictures to measure with, the largest first: at most a quarter of a microbatch each."""
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
    most = max(1, limit // tokens)
    return sorted({min(2**k, most) for k in range(most.bit_length() + 1)})


def _microbatch(
    index: int, grid: tuple[int, int, int], tokens: int, number: int, text: int, documents: int
) -> MicrobatchMeta:
    """So many pictures at the start of documents, and text shared by these; 1/8, 1/2 or all of the text is labelled."""
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
