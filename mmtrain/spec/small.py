"""Small models of the same families: narrow ones, and ones with few blocks. Pure; no weights."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mmtrain.config.model import (
    DitConfig,
    EncoderConfig,
    LoRAConfig,
    ModelConfig,
    ModuleConfig,
    ProjectorConfig,
    VaeConfig,
    section_of,
)
from mmtrain.families.catalogue import DITS, ENCODERS, LANGUAGES, PROJECTORS, VAES
from mmtrain.families.family import Language, Network
from mmtrain.spec.composites import projector_act, selected_features
from mmtrain.spec.model_configs import dit_config, encoder_config, language_config, vae_config
from mmtrain.spec.model_shapes import dit_shape, language_shape
from mmtrain.spec.vision_shapes import vision_shape

_HEAD_DIM = 16
_TIME_WIDTH = 32

_DEPTH_LISTS = ("layer_types", "max_window_layers", "sliding_window")
"""Optional keys of language models for single layers; only their default values are supported."""


def with_segments(model: ModelConfig, segments: Mapping[str, int]) -> ModelConfig:
    """The model with other numbers of segments. Args: segments: module -> `num_segments`."""
    return model.with_modules(
        {name: replace(section, num_segments=segments[name]) for name, section in model.cut_modules.items()}
    )


# ---------------------------------------------------------------------------------------------- narrow


def narrow_model(
    model: ModelConfig, *, tp: Mapping[str, int], stages: Mapping[str, int], segments: Mapping[str, int]
) -> ModelConfig:
    """A tiny model with inline configs and random weights, cut and divided like the real one.

    Unchanged: families, activation functions, biases, ratios of heads, prediction and patches of a DiT.

    Args:
        tp: module -> ranks that divide its layers.
        stages: module -> number of chunks.
        segments: module -> `num_segments`.
    """
    language = _narrow_language(model, tp["language"], stages["language"])
    width = language["hidden_size"]
    configs = {"language": language}
    for name in model.encoders:
        configs[name] = _narrow_encoder(model, name, tp[name], stages[name], language)
    if model.encoder is not None and model.reads_pairs:
        of_images, of_captions = ENCODERS[configs["vision"]["model_type"]], LANGUAGES[language["model_type"]]
        language[of_captions.embedding] = configs["vision"][of_images.embedding]
    if model.dit is not None:
        configs["dit"] = _narrow_dit(model, tp["dit"], stages["dit"], width)
    if model.vae is not None:
        configs["vae"] = _narrow_vae(model.vae)

    def narrow_projector(section: ProjectorConfig) -> ProjectorConfig:
        if not section.hidden_size:
            return _without_source(section)
        hidden = _scaled(section.hidden_size, width, language_shape(model).width, tp["language"])
        return _without_source(replace(section, hidden_size=hidden))

    def inline(section: ModuleConfig, name: str) -> ModuleConfig:
        small = _inline(section, configs[name], segments, name)
        if isinstance(small, EncoderConfig) and small.projector is not None:
            return replace(small, projector=narrow_projector(small.projector))
        return small

    projectors = map(model.projector_of, model.encoders)
    adapted = any(section.trainable == "lora" for section in (*model.cut_modules.values(), *projectors))
    return replace(
        model.with_modules({name: inline(section, name) for name, section in model.sections.items()}),
        projector=narrow_projector(model.projector),
        contrast=model.contrast and replace(model.contrast, pretrained=""),
        pretrained="",
        lora=_lora(model.lora) if adapted else model.lora,
    )


def _inline(section: ModuleConfig, values: dict[str, Any], segments: Mapping[str, int], name: str) -> ModuleConfig:
    if isinstance(section, VaeConfig):
        return replace(section, pretrained="", config=values)
    if isinstance(section, EncoderConfig):  # so that the few images of a small microbatch are still divided
        section = replace(_with_features(section), sub_microbatch_size=min(section.sub_microbatch_size, 2) or 2)
    section = replace(section, pretrained="", config=values, num_segments=segments[name], pipeline_layout="")
    if isinstance(section, DitConfig):
        return replace(section, sub_microbatch_size=min(section.sub_microbatch_size, 2))
    return replace(section, trainable_layers=section.trainable_layers and "-1..")


def _with_features(section: EncoderConfig) -> EncoderConfig:
    """The section for a config of just the blocks that run: it no longer needs the whole model that it may name."""
    layer, select = selected_features(section)
    return replace(section, feature_layer=-1 if layer else 0, feature_select=select)


def _without_source(section: ProjectorConfig) -> ProjectorConfig:
    """The section of a projector of the same kind with random weights."""
    act = projector_act(section) if PROJECTORS[section.kind].chooses_act else ""
    return replace(section, pretrained="", hidden_act=act)


def _narrow_language(model: ModelConfig, tp: int, num_stages: int) -> dict[str, Any]:
    shape, values = language_shape(model), language_config(model.language)
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
    if shape.axis_columns:
        time, height, _ = (n * (head_dim // 2) // (shape.head_dim // 2) for n in shape.axis_columns)
        rope = values.pop("rope_scaling", None) or values.get("rope_parameters") or {}
        values["rope_parameters"] = {**rope, "mrope_section": [time, height, head_dim // 2 - time - height]}
    given = {key: value for key, value in values.items() if key not in _DEPTH_LISTS}
    return inline_config(given, LANGUAGES[shape.model_type])


def _narrow_encoder(
    model: ModelConfig, name: str, tp: int, num_stages: int, language: Mapping[str, Any]
) -> dict[str, Any]:
    shape = vision_shape(model, name)
    values, keys = encoder_config(model.encoders[name], section_of(name)), ENCODERS[shape.model_type].sizes
    heads = min(shape.num_heads, max(2, tp))
    width = heads * min(shape.head_dim, _HEAD_DIM)
    depth = min(shape.depth, max(2, num_stages))
    values |= {keys["width"]: width, keys["depth"]: depth, keys["heads"]: heads}
    if "mlp" in keys:
        values[keys["mlp"]] = _scaled(shape.mlp_width, width, shape.width, tp)
    if "out" in keys:
        values[keys["out"]] = language["hidden_size"]
    if shape.taps:
        values[keys["taps"]] = list(range(min(len(shape.taps), depth, language["num_hidden_layers"])))
    if shape.window:
        values[keys["window"]] = min(shape.window, 2) * shape.patch_size * shape.merge
        full = [block for block in shape.full_blocks if block < shape.depth]
        values[keys["full"]] = list(range(depth)) if len(full) == shape.depth else [depth - 1][: len(full)]
    return inline_config(values, ENCODERS[shape.model_type])


def _narrow_dit(model: ModelConfig, tp: int, num_stages: int, text_width: int) -> dict[str, Any]:
    """A narrow DiT. Patches, channels and positions are unchanged, so a clip has the same tokens."""
    assert model.dit is not None
    shape = dit_shape(model)
    heads = min(shape.num_heads, max(2, tp))
    head_dim = min(shape.width // shape.num_heads, _HEAD_DIM)
    values = dit_config(model.dit) | {
        "num_attention_heads": heads,
        "attention_head_dim": head_dim,
        "ffn_dim": _scaled(shape.mlp_width, heads * head_dim, shape.width, tp),
        "num_layers": min(shape.depth, max(2, num_stages)),
        "text_dim": text_width,
        "freq_dim": min(shape.time_width, _TIME_WIDTH),
    }
    return inline_config(values | {"patch_size": list(shape.patch)}, DITS[shape.model_type])


def _narrow_vae(section: VaeConfig) -> dict[str, Any]:
    """A narrow VAE. The sizes of latents are unchanged, so a clip has the same tokens."""
    values = vae_config(section)
    family = VAES[values["model_type"]]
    values |= family.narrow(values)
    lists = {key: list(value) for key, value in values.items() if isinstance(value, tuple)}
    return inline_config(values | lists, family)


def _lora(section: LoRAConfig) -> LoRAConfig:
    """Narrow adapters, without dropout, whose masks the one-process model does not have."""
    rank = min(section.rank, 4)
    return replace(section, rank=rank, alpha=section.alpha * rank / section.rank, dropout=0.0, pretrained="")


def _scaled(size: int, numerator: int, denominator: int, multiple: int) -> int:
    """size * numerator / denominator, rounded up to a multiple."""
    return -(-size * numerator // (denominator * multiple)) * multiple


# ------------------------------------------------------------------------------------------- few blocks


def fewer_blocks(model: ModelConfig, num_blocks: int) -> ModelConfig:
    """The model with at most `num_blocks` blocks of each kind, all of which train if any does, and inline configs.

    Each tap of the encoder keeps a block and a language layer of its own, so that the projector is as large as it was.
    """
    family = language_shape(model).model_type
    values = language_config(model.language)
    num_taps = max((len(vision_shape(model, name).taps) for name in model.encoders), default=0)
    values["num_hidden_layers"] = min(values["num_hidden_layers"], max(num_blocks, num_taps))
    values.pop("layer_types", None)  # one entry for each layer; all supported layers have one type
    config = inline_config(values, LANGUAGES[family])
    language = replace(model.language, pretrained="", config=config, pipeline_layout="", trainable_layers="")
    encoders: dict[str, ModuleConfig | None] = {
        name: _fewer_encoder_blocks(model, name, num_blocks) for name in model.encoders
    }
    return replace(
        model.with_modules(encoders),
        dit=model.dit and _fewer_dit_blocks(model.dit, num_blocks),
        vae=model.vae and replace(model.vae, weights="random"),
        language=language,
        projector=_without_source(model.projector),
        contrast=model.contrast and replace(model.contrast, pretrained=""),
        pretrained="",
    )


def one_block(model: ModelConfig, tp: int) -> ModelConfig:
    """The model reduced to one block of its language model, trainable even if it was frozen.

    A text-to-video model is reduced to a narrow DiT of one block and a frozen text encoder, two towers to one block
    each, of which that of images is frozen.

    Args: tp: tensor-parallel ranks, which divide the narrow DiT.
    """
    if model.encoder is not None and model.reads_pairs:
        model = replace(model, encoder=replace(model.encoder, trainable=False))
    elif model.dit is None:
        model = replace(model, encoder=None, modules={}, projector=ProjectorConfig())
    model = fewer_blocks(model, 1)
    if model.dit is not None:
        values = {**model.dit.config, "num_attention_heads": tp, "ffn_dim": tp}
        dit = replace(model.dit, config=values, trainable=True)
        return replace(model, dit=dit, language=replace(model.language, trainable=False), vae=None, lora=LoRAConfig())
    language = replace(model.language, trainable=model.language.trainable or True)
    return replace(model, language=language)


def _fewer_encoder_blocks(model: ModelConfig, name: str, num_blocks: int) -> EncoderConfig:
    section = model.encoders[name]
    shape, values = vision_shape(model, name), encoder_config(section, section_of(name))
    keys = ENCODERS[shape.model_type].sizes
    full = [block for block in shape.full_blocks if block < shape.depth]
    depth = min(shape.depth, max(num_blocks, len(shape.taps)))
    if shape.taps:
        values[keys["taps"]] = list(range(len(shape.taps)))
    if shape.window:
        windowed = min(shape.depth - len(full), num_blocks)
        depth = windowed + min(len(full), num_blocks)
        values[keys["full"]] = list(range(windowed, depth))
    values[keys["depth"]] = depth
    config = inline_config(values, ENCODERS[shape.model_type])
    projector = section.projector and _without_source(section.projector)
    section = replace(_with_features(section), pretrained="", config=config, pipeline_layout="", projector=projector)
    return replace(section, trainable_layers="")


def _fewer_dit_blocks(section: DitConfig, num_blocks: int) -> DitConfig:
    values = dit_config(section)
    values |= {"num_layers": min(values["num_layers"], num_blocks), "patch_size": list(values["patch_size"])}
    return replace(section, pretrained="", config=inline_config(values, DITS[values["model_type"]]), pipeline_layout="")


def inline_config(values: Mapping[str, Any], family: Network) -> dict[str, Any]:
    """The keys of a config that a TOML file may have: known keys with a value."""
    keys = {"model_type", *family.defaults, *family.optional}
    windowed = isinstance(family, Language) and family.sliding_window
    if windowed and not values.get("sliding_window"):  # TOML has no null: a window over all positions
        values = {**values, "sliding_window": values["max_position_embeddings"]}
    return {key: value for key, value in values.items() if key in keys and value is not None}
