"""A small job of the same kind as a user's: what a check of its layout can run in seconds. Pure.

Kept: families, activation functions, biases, ratios of heads, tied and trainable flags, masks, what a DiT predicts and
in which patches, how modules are cut and divided, dtypes, data and tokenizer. Made smaller: depth, widths, images,
clips, sequence, batch, degrees.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mmtrain.config import config as config_module
from mmtrain.config.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    DitConfig,
    EncoderConfig,
    LanguageConfig,
    LoRAConfig,
    MetricsConfig,
    ModelConfig,
    ParallelismConfig,
    PlannerConfig,
    VaeConfig,
    ValidationConfig,
)
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.planner.partition.partition import Partition
from mmtrain.spec.families import (
    DITS,
    ENCODERS,
    LANGUAGES,
    VAES,
    Family,
    dit_config,
    encoder_config,
    language_config,
    vae_config,
)
from mmtrain.spec.shapes import DitShape, VisionShape, dit_shape, language_shape, vision_shape
from mmtrain.spec.vae_shapes import LatentScale, latent_scale

MOST_RANKS = 8
"""Processes above which degrees are lowered to 2."""

SEQ_LEN = 512
"""Tokens of a microbatch, unless two images need more."""

_HEAD_DIM = 16
_TIME_WIDTH = 32
_IMAGE_TOKENS = 16
_CLIP_SECONDS = 4.0
_CLIP_PATCHES = 64
"""Along the time of a clip whose frames are made small."""
_LATENT_PATCHES = 4
"""The same of a clip that comes as latents, which nobody resizes."""
_CLIPS = 4
"""Of a microbatch: two works of two."""
_LOWERED_FIRST = (
    "data_parallel_shard_degree",
    "data_parallel_replicate_degree",
    "context_parallel_degree",
    "pipeline_parallel_degree",
    "tensor_parallel_degree",
)

ENCODER_KEYS: Mapping[str, Mapping[str, str]] = {
    "qwen2_vl_vision": {"width": "embed_dim", "depth": "depth", "heads": "num_heads", "out": "hidden_size"},
    "qwen2_5_vl_vision": {
        "width": "hidden_size",
        "depth": "depth",
        "heads": "num_heads",
        "mlp": "intermediate_size",
        "out": "out_hidden_size",
    },
    "siglip_vision_model": {
        "width": "hidden_size",
        "depth": "num_hidden_layers",
        "heads": "num_attention_heads",
        "mlp": "intermediate_size",
    },
    "vit": {
        "width": "hidden_size",
        "depth": "num_hidden_layers",
        "heads": "num_attention_heads",
        "mlp": "intermediate_size",
    },
    "whisper_encoder": {
        "width": "d_model",
        "depth": "encoder_layers",
        "heads": "encoder_attention_heads",
        "mlp": "encoder_ffn_dim",
    },
}
"""What each encoder family calls its sizes; `out` is the width that its own merger makes."""

_DEPTH_LISTS = ("layer_types", "max_window_layers", "sliding_window")
"""Optional keys of language models that speak of single layers; what they say is refused or the default."""


@dataclass(frozen=True, kw_only=True)
class Shrunk:
    """A small job, and what of the layout had to change."""

    config: Config
    notes: tuple[str, ...]


def shrink(config: Config, *, seq_len: int = SEQ_LEN) -> Shrunk:
    """A job with the layout of `config` and a tiny model with random weights, on the same data.

    Args: seq_len: tokens of a microbatch, unless the config has fewer, or two images need more.
    Raises: ConfigError: the model's configs cannot be read, or the real model cannot be cut or divided so.
    """
    parallelism, notes = _fewer_ranks(config.parallelism)
    planner = IterationPlanner.of(config)  # which also refuses what the real model cannot be divided by
    model = _model(config, parallelism, planner)
    dp = parallelism.mesh_shape.dp
    per_replica = config.training.global_batch_size // config.parallelism.mesh_shape.dp
    training = replace(
        config.training,
        seq_len=min(config.training.seq_len, max(seq_len, 2 * _image_tokens(model) + seq_len // 2)),
        global_batch_size=dp * min(per_replica, max(2, 2 * parallelism.pipeline_parallel_degree)),
        attention_backend="auto",  # it runs on CPUs, which have one backend
    )
    small = replace(
        config,
        model=model,
        data=_data(config.data, model),
        training=training,
        parallelism=replace(parallelism, context_parallel_block_size=min(parallelism.context_parallel_block_size, 32)),
        planner=_planner(config.planner, planner.partition),
        validation=ValidationConfig(),
        checkpoint=CheckpointConfig(),
        metrics=MetricsConfig(enable_tensorboard=False, progress_bar=False, peak_flops=1.0),
    )
    config_module.check(small)
    return Shrunk(config=small, notes=notes)


def _fewer_ranks(section: ParallelismConfig) -> tuple[ParallelismConfig, tuple[str, ...]]:
    notes = []
    for name in _LOWERED_FIRST:
        degree, world = getattr(section, name), section.mesh_shape.world_size
        if world > MOST_RANKS and degree > 2:
            lowered: dict[str, Any] = {name: 2}
            section = replace(section, **lowered)
            notes.append(f"parallelism.{name} {degree} -> 2: the job has {world} ranks, more than {MOST_RANKS}")
    return section, tuple(notes)


# ---------------------------------------------------------------------------------------------- model


def _planner(section: PlannerConfig, partition: Partition) -> PlannerConfig:
    # A chain that the search chose is one again; the other numbers are in the model's sections.
    how = "mixed-latency" if partition.passes and section.partition == "search" else section.partition
    # A limit of the real model says nothing about this one.
    return replace(section, partition=how, activation_memory_gib=0.0, memory_limit="")


def _model(config: Config, parallelism: ParallelismConfig, planner: IterationPlanner) -> ModelConfig:
    model, tp = config.model, parallelism.tensor_parallel_degree
    partition, modules = planner.partition, [module.name for module in planner.spec.modules]
    if partition.passes:  # of a chain of all modules the language model's K counts passes
        segments = {**dict.fromkeys(modules, 0), "language": partition.passes}
        stages = dict.fromkeys(modules, partition.passes * parallelism.pipeline_parallel_degree)
    else:
        segments = {name: len(partition.of_module(name)) // partition.num_ranks for name in modules}
        stages = {name: count * parallelism.pipeline_parallel_degree for name, count in segments.items()}
    language = _language(model, tp, stages["language"])
    width = language["hidden_size"]
    projector = model.projector
    if projector.hidden_size:
        hidden = _scaled(projector.hidden_size, width, language_shape(model).width, tp)
        projector = replace(projector, hidden_size=hidden)
    encoder = model.encoder
    if encoder is not None:
        encoder_tp = 1 if parallelism.encoder_tensor_parallel == "data" else tp
        values = _encoder(encoder, vision_shape(model), encoder_tp, stages["vision"], width)
        size = encoder.sub_microbatch_size
        encoder = replace(
            encoder,
            pretrained="",
            config=values,
            num_segments=segments["vision"],
            pipeline_layout="",
            sub_microbatch_size=min(size, 2) or 2,  # so that the few images of a small microbatch are still divided
        )
    dit = model.dit
    if dit is not None:
        dit = replace(
            dit,
            pretrained="",
            config=_dit(dit, dit_shape(model), tp, stages["dit"], width),
            num_segments=segments["dit"],
            pipeline_layout="",
            sub_microbatch_size=min(dit.sub_microbatch_size, 2),
        )
    return replace(
        model,
        encoder=encoder,
        dit=dit,
        vae=model.vae and replace(model.vae, pretrained="", config=_vae(model.vae)),
        projector=replace(projector, pretrained=""),
        language=replace(
            model.language, pretrained="", config=language, num_segments=segments["language"], pipeline_layout=""
        ),
        lora=_lora(model.lora) if _has_adapters(model) else model.lora,
    )


def _has_adapters(model: ModelConfig) -> bool:
    return "lora" in (model.language.trainable, model.encoder.trainable if model.encoder else False)


def _lora(section: LoRAConfig) -> LoRAConfig:
    rank = min(section.rank, 4)
    return replace(section, rank=rank, alpha=section.alpha * rank / section.rank)


def _language(model: ModelConfig, tp: int, num_stages: int) -> dict[str, Any]:
    section: LanguageConfig = model.language
    shape, values = language_shape(model), language_config(section)
    kv_heads = min(shape.num_kv_heads, max(2, tp))
    heads = kv_heads * min(shape.num_heads // shape.num_kv_heads, 4)
    head_dim = min(shape.head_dim, _HEAD_DIM)
    width = heads * head_dim
    if values.get("head_dim"):  # the width is free of the heads
        width = min(shape.width, _scaled(width, shape.width, shape.num_heads * shape.head_dim, 8))
        values["head_dim"] = head_dim
    values |= {
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": _scaled(shape.mlp_width, width, shape.width, tp),
        "num_hidden_layers": min(shape.depth, max(2, num_stages)),
        "vocab_size": _scaled(shape.vocab_size, 1, 1, tp),  # the tokenizer is the user's
    }
    kept = {key: value for key, value in values.items() if key not in _DEPTH_LISTS}
    return inline_config(kept, LANGUAGES[shape.model_type])


def _encoder(
    section: EncoderConfig, shape: VisionShape, tp: int, num_stages: int, language_width: int
) -> dict[str, Any]:
    values, keys = encoder_config(section), ENCODER_KEYS[shape.model_type]
    heads = min(shape.num_heads, max(2, tp))
    width = heads * min(shape.width // shape.num_heads, _HEAD_DIM)
    depth = min(shape.depth, max(2, num_stages))
    values |= {keys["width"]: width, keys["depth"]: depth, keys["heads"]: heads}
    if "mlp" in keys:
        values[keys["mlp"]] = _scaled(shape.mlp_width, width, shape.width, tp)
    if "out" in keys:
        values[keys["out"]] = language_width
    if shape.window:
        values["window_size"] = min(shape.window, 2) * shape.patch_size * shape.merge
        full = [block for block in shape.full_blocks if block < shape.depth]
        values["fullatt_block_indexes"] = list(range(depth)) if len(full) == shape.depth else [depth - 1][: len(full)]
    return inline_config(values, ENCODERS[shape.model_type])


def _dit(section: DitConfig, shape: DitShape, tp: int, num_stages: int, text_width: int) -> dict[str, Any]:
    """Patches, channels and places stay, and so does what a clip of the data is to it."""
    heads = min(shape.num_heads, max(2, tp))
    head_dim = min(shape.width // shape.num_heads, _HEAD_DIM)
    values = dit_config(section) | {
        "num_attention_heads": heads,
        "attention_head_dim": head_dim,
        "ffn_dim": _scaled(shape.mlp_width, heads * head_dim, shape.width, tp),
        "num_layers": min(shape.depth, max(2, num_stages)),
        "text_dim": text_width,
        "freq_dim": min(shape.time_width, _TIME_WIDTH),
    }
    return inline_config(values | {"patch_size": list(shape.patch)}, DITS[shape.model_type])


def _vae(section: VaeConfig) -> dict[str, Any]:
    """Latents stay, and so does what a clip of the data is to the DiT."""
    values = vae_config(section)
    if values["model_type"] == "autoencoder_kl":
        levels = len(values["block_out_channels"])
        values |= {"block_out_channels": [8] * levels, "norm_num_groups": 4, "layers_per_block": 1}
    else:
        values |= {"base_dim": 8, "dim_mult": [1] * len(values["dim_mult"]), "num_res_blocks": 1}
    lists = {key: list(value) for key, value in values.items() if isinstance(value, tuple)}
    return inline_config(values | lists, VAES[values["model_type"]])


def inline_config(values: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """A config as one writes it into a TOML file: known keys with a value."""
    known = {"model_type", *family.defaults, *family.optional}
    return {key: value for key, value in values.items() if key in known and value is not None}


def _scaled(size: int, new: int, old: int, multiple: int) -> int:
    """size * new / old, rounded up to a multiple."""
    return -(-size * new // (old * multiple)) * multiple


# ----------------------------------------------------------------------------------------------- data


def _image_tokens(model: ModelConfig) -> int:
    """Tokens of one of the small job's images at most."""
    if model.encoder is None:
        return 0
    shape = vision_shape(model)
    if shape.fixed_grid is None:
        return _IMAGE_TOKENS
    t, h, w = shape.fixed_grid
    return t * h * w // shape.patches_per_token


def _data(section: DataConfig, model: ModelConfig) -> DataConfig:
    section = replace(section, num_workers=0, too_long="truncate" if model.encoder is None else "skip")
    if model.dit is not None:
        return _clips(section, dit_shape(model), latent_scale(model.vae) if model.vae else None)
    if model.encoder is None or vision_shape(model).fixed_grid is not None:
        return section
    shape = vision_shape(model)
    token = (shape.patch_size * shape.merge) ** 2
    most = min(section.max_pixels or _IMAGE_TOKENS * token, _IMAGE_TOKENS * token)
    return replace(section, max_pixels=most, min_pixels=min(token, most))


def _clips(section: DataConfig, shape: DitShape, vae: LatentScale | None) -> DataConfig:
    """Fewer, shorter and smaller clips, of as many frames a second; those of a few seconds still differ in length."""
    frames, rows, columns = shape.patch
    patches = _CLIP_PATCHES if shape.in_channels == 3 or vae else _LATENT_PATCHES
    if vae is not None:
        frames, rows, columns = vae.pixels(shape.patch)
    longest = max(frames / section.fps, min(_CLIP_SECONDS, patches * frames / section.fps))
    seconds = min(section.max_seconds, longest)
    return replace(
        section,
        max_seconds=seconds,
        max_total_seconds=min(section.max_total_seconds, 2 * seconds),
        max_clips=min(section.max_clips, _CLIPS),
        video_area=min(section.video_area, _IMAGE_TOKENS * rows * columns),
        video_frames=[],
    )
