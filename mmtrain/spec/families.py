"""The supported model families, and the complete config of the model that a section names. Pure; no weights.

A section `[model.encoder]`, `[model.language]`, `[model.dit]` or `[model.vae]` names a family by an inline Hugging Face
config or by the `config.json` of a folder or hub id.
"""

import difflib
import importlib.util
import pkgutil
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mmtrain.config.model import DitConfig, EncoderConfig, LanguageConfig, VaeConfig
from mmtrain.config.toml_sections import shown
from mmtrain.errors import ConfigError
from mmtrain.spec.composites import COMPOSITES, part_config
from mmtrain.spec.config_values import check_dropout, check_rope, check_type
from mmtrain.spec.hub_files import find_file, read_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One `model_type`: the relevant keys of its Hugging Face config, with the defaults of that class."""

    defaults: Mapping[str, Any]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of a key that the Hugging Face class accepts."""
    optional: Mapping[str, Any] = field(default_factory=dict)
    """Keys without a default that an inline config may hold -> a value of their type; None: the class checks it."""
    parents: tuple[str, ...] = ()
    """Other values of `model_type` that name this family, or a whole model that contains it."""
    dropout: tuple[str, ...] = ()
    """Keys that must be 0: see `config_values`."""
    sizes: Mapping[str, str] = field(default_factory=dict)
    """What an encoder calls its width, depth, heads, mlp (if a key), and out: the width that its own merger makes."""
    position_axes: int = 1
    """Axes of a language model's positions: 3 of one whose image tokens have time, height and width."""
    sliding_window: int = 0
    """Default of the key `sliding_window` where a number alone turns windows on, in tokens."""


def _sizes(width: str, depth: str, heads: str, mlp: str) -> dict[str, str]:
    return {"width": width, "depth": depth, "heads": heads, "mlp": mlp}


_SIZES = _sizes("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")


ENCODERS: dict[str, Family] = {
    "qwen2_vl_vision": Family(
        defaults={
            "depth": 32,
            "embed_dim": 1280,
            "hidden_size": 3584,
            "hidden_act": "quick_gelu",
            "mlp_ratio": 4,
            "num_heads": 16,
            "in_channels": 3,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "initializer_range": 0.02,
        },
        aliases={"num_attention_heads": "num_heads", "num_hidden_layers": "depth"},
        optional={"rope_parameters": {}},
        parents=("qwen2_vl",),
        sizes={"width": "embed_dim", "depth": "depth", "heads": "num_heads", "out": "hidden_size"},
    ),
    "qwen2_5_vl_vision": Family(
        defaults={
            "depth": 32,
            "hidden_size": 3584,
            "hidden_act": "silu",
            "intermediate_size": 3420,
            "num_heads": 16,
            "in_channels": 3,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "tokens_per_second": 4,
            "window_size": 112,
            "out_hidden_size": 3584,
            "fullatt_block_indexes": (7, 15, 23, 31),
            "initializer_range": 0.02,
        },
        aliases={"num_attention_heads": "num_heads", "num_hidden_layers": "depth"},
        optional={"rope_parameters": {}},
        parents=("qwen2_5_vl",),
        sizes=_sizes("hidden_size", "depth", "num_heads", "intermediate_size") | {"out": "out_hidden_size"},
    ),
    "siglip_vision_model": Family(
        defaults={
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "num_channels": 3,
            "image_size": 224,
            "patch_size": 16,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": 1e-6,
            "attention_dropout": 0.0,
        },
        optional={"vision_use_head": True},
        parents=("siglip",),
        dropout=("attention_dropout",),
        sizes=_SIZES,
    ),
    "siglip2_vision_model": Family(
        defaults={
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "num_channels": 3,
            "num_patches": 256,
            "patch_size": 16,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": 1e-6,
            "attention_dropout": 0.0,
        },
        optional={"vision_use_head": True},
        parents=("siglip2",),
        dropout=("attention_dropout",),
        sizes=_SIZES,
    ),
    "clip_vision_model": Family(
        defaults={
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "num_channels": 3,
            "image_size": 224,
            "patch_size": 32,
            "hidden_act": "quick_gelu",
            "layer_norm_eps": 1e-5,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "initializer_factor": 1.0,
        },
        optional={"projection_dim": 512},
        parents=("clip",),
        dropout=("attention_dropout",),
        sizes=_SIZES,
    ),
    "vit": Family(
        defaults={
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
            "hidden_act": "gelu",
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "initializer_range": 0.02,
            "layer_norm_eps": 1e-12,
            "image_size": 224,
            "patch_size": 16,
            "num_channels": 3,
            "qkv_bias": True,
        },
        optional={"encoder_stride": 16, "pooler_output_size": 768, "pooler_act": "tanh"},
        dropout=("hidden_dropout_prob", "attention_probs_dropout_prob"),
        sizes=_SIZES,
    ),
    "whisper_encoder": Family(
        defaults={
            "d_model": 384,
            "encoder_layers": 4,
            "encoder_attention_heads": 6,
            "encoder_ffn_dim": 1536,
            "num_mel_bins": 80,
            "max_source_positions": 1500,
            "activation_function": "gelu",
            "init_std": 0.02,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "activation_dropout": 0.0,
            "encoder_layerdrop": 0.0,
        },
        aliases={
            "hidden_size": "d_model",
            "num_hidden_layers": "encoder_layers",
            "num_attention_heads": "encoder_attention_heads",
        },
        parents=("whisper",),
        dropout=("dropout", "attention_dropout", "activation_dropout", "encoder_layerdrop"),
        sizes=_sizes("d_model", "encoder_layers", "encoder_attention_heads", "encoder_ffn_dim"),
    ),
}

_LANGUAGE_OPTIONAL: dict[str, Any] = {
    "rope_parameters": {},
    "rope_theta": 1e4,
    "rope_scaling": {},
    "head_dim": 128,
    "layer_types": ("full_attention",),
    "use_cache": True,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}

_DECODER = Family(
    defaults={
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
    },
    optional=_LANGUAGE_OPTIONAL,
    dropout=("attention_dropout",),
)


def _decoder(changes: Mapping[str, Any], optional: Mapping[str, Any], **fields: Any) -> Family:
    """Args: changes: of the defaults of Qwen2. optional: further keys without a default."""
    return replace(
        _DECODER,
        defaults={**_DECODER.defaults, **changes},
        optional={**_DECODER.optional, **optional},
        **fields,
    )


_WINDOWS: dict[str, Any] = {"sliding_window": 4096, "max_window_layers": None}
_QWEN_VL_TEXT = _decoder(
    {
        "vocab_size": 152064,
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "use_sliding_window": False,
    },
    _WINDOWS,
    position_axes=3,
)

LANGUAGES: dict[str, Family] = {
    "qwen2": _decoder({"use_sliding_window": False}, _WINDOWS),
    "llama": _decoder(
        {
            "vocab_size": 32000,
            "intermediate_size": 11008,
            "num_key_value_heads": None,
            "max_position_embeddings": 2048,
            "attention_bias": False,
            "mlp_bias": False,
        },
        {"pretraining_tp": 1},
    ),
    "qwen3": _decoder({"head_dim": 128, "attention_bias": False, "use_sliding_window": False}, _WINDOWS),
    "mistral": _decoder(
        {
            "vocab_size": 32000,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
        },
        {"sliding_window": 4096},
        sliding_window=4096,
    ),
    "qwen2_vl_text": replace(_QWEN_VL_TEXT, parents=("qwen2_vl",)),
    "qwen2_5_vl_text": replace(_QWEN_VL_TEXT, parents=("qwen2_5_vl",)),
}

_IMAGE_KEYS = ("image_dim", "added_kv_proj_dim", "pos_embed_seq_len")
"""Keys of the branch that reads an image in addition to the text."""

DITS: dict[str, Family] = {
    "wan": Family(
        defaults={
            "patch_size": (1, 2, 2),
            "num_attention_heads": 40,
            "attention_head_dim": 128,
            "in_channels": 16,
            "out_channels": 16,
            "text_dim": 4096,
            "freq_dim": 256,
            "ffn_dim": 13824,
            "num_layers": 40,
            "cross_attn_norm": True,
            "qk_norm": "rms_norm_across_heads",
            "eps": 1e-6,
            "rope_max_seq_len": 1024,
        },
        optional=dict.fromkeys(_IMAGE_KEYS),
        parents=("WanTransformer3DModel",),
    ),
}


VAES: dict[str, Family] = {
    "autoencoder_kl": Family(
        defaults={
            "in_channels": 3,
            "out_channels": 3,
            "down_block_types": ("DownEncoderBlock2D",),
            "up_block_types": ("UpDecoderBlock2D",),
            "block_out_channels": (64,),
            "layers_per_block": 1,
            "act_fn": "silu",
            "latent_channels": 4,
            "norm_num_groups": 32,
            "sample_size": 32,
            "scaling_factor": 0.18215,
            "force_upcast": True,
            "use_quant_conv": True,
            "use_post_quant_conv": True,
            "mid_block_add_attention": True,
        },
        optional=dict.fromkeys(("shift_factor", "latents_mean", "latents_std")),
        parents=("AutoencoderKL",),
    ),
    "autoencoder_kl_wan": Family(
        defaults={
            "base_dim": 96,
            "z_dim": 16,
            "dim_mult": (1, 2, 4, 4),
            "num_res_blocks": 2,
            "temperal_downsample": (False, True, True),
            "dropout": 0.0,
            "latents_mean": (
                *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
                *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
            ),
            "latents_std": (
                *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
                *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160),
            ),
            "is_residual": False,
            "in_channels": 3,
            "out_channels": 3,
        },
        optional={
            "decoder_base_dim": 96,
            "attn_scales": None,
            "patch_size": None,
            "scale_factor_temporal": 4,
            "scale_factor_spatial": 8,
        },
        parents=("AutoencoderKLWan",),
        dropout=("dropout",),
    ),
}


_ROLES: dict[str, tuple[str, dict[str, Family]]] = {
    "model.encoder": ("encoder", ENCODERS),
    "model.language": ("language model", LANGUAGES),
    "model.dit": ("diffusion transformer", DITS),
    "model.vae": ("VAE", VAES),
}
"""Section of the config -> the kind of model that it names, and the supported families."""


def vae_config(section: VaeConfig) -> dict[str, Any]:
    """The complete diffusers config of a VAE; its `model_type` is a key of `VAES`.

    Missing keys have the defaults of the diffusers class.
    Raises: ConfigError: there is no such config, or it has an unknown family or key, or a wrong type.
    """
    values, inline = _read("model.vae", section)
    model_type = values.get("model_type") or values.get("_class_name", "")
    return _complete("model.vae", values, model_type, strict=inline)


def dit_config(section: DitConfig) -> dict[str, Any]:
    """The complete diffusers config of a diffusion transformer; its `model_type` is a key of `DITS`.

    Missing keys have the defaults of the diffusers class.
    Raises: ConfigError: there is no such config, or it has an unknown family or key, a wrong type, or belongs to a
        model that also reads images.
    """
    values, inline = _read("model.dit", section)
    model_type = values.get("model_type") or values.get("_class_name", "")
    config = _complete("model.dit", values, model_type, strict=inline)
    for key in _IMAGE_KEYS:
        if config.pop(key, None) is not None:
            raise ConfigError(
                f"model.dit: {key} = {shown(values[key])} is of a model that also reads images; only text-to-video "
                "models are supported, remove it or choose another model"
            )
    patch = config["patch_size"] = tuple(config["patch_size"])
    if len(patch) != 3 or 0 in patch:
        raise ConfigError(
            f"model.dit: patch_size = {shown(patch)}; it is [frames, rows, columns] of latents, each at least 1"
        )
    if config["qk_norm"] != "rms_norm_across_heads":
        raise ConfigError(
            f"model.dit: qk_norm = {shown(config['qk_norm'])}, but the class always normalizes queries and keys across "
            'heads; write "rms_norm_across_heads", or leave it out'
        )
    return config


def encoder_config(section: EncoderConfig) -> dict[str, Any]:
    """The complete Hugging Face config of a vision encoder; its `model_type` is a key of `ENCODERS`.

    Missing keys have the defaults of the Hugging Face class. Of a whole Qwen-VL, CLIP or SigLIP model, or a
    whole model of `composites`, it is the `vision_config`; a whole Whisper model's config is also that of its encoder.
    Raises: ConfigError: there is no such config, or it has an unknown family or key, a wrong type, or dropout.
    """
    values, inline = _read("model.encoder", section)
    model_type = values.get("model_type", "")
    if isinstance(values.get("vision_config"), dict):
        values = values["vision_config"]
        model_type = values.get("model_type", model_type)
    return _complete("model.encoder", values, model_type, strict=inline)


def language_config(section: LanguageConfig) -> dict[str, Any]:
    """The complete Hugging Face config of a language model; its `model_type` is a key of `LANGUAGES`.

    Of a whole model of `composites` it is the `text_config`, or the part outside of `vision_config` in older files.
    Raises: ConfigError: there is no such config, or it has an unknown family or key, a wrong type, dropout, layers with
        partial attention, or positions on axes that the family does not have.
    """
    values, inline = _read("model.language", section)
    model_type = values.get("model_type", "")
    if {"text_config", "vision_config"} & set(values):
        raise ConfigError(
            f"model.language: {shown(section.pretrained or 'config')} is a whole model with model_type = "
            f"{shown(model_type)}; supported whole models are {', '.join(COMPOSITES)}. Name one of them, or a "
            "language model by itself"
        )
    config = _complete("model.language", values, model_type, strict=inline)
    family = LANGUAGES[config["model_type"]]
    if config.get("use_sliding_window"):
        raise ConfigError(
            "model.language: use_sliding_window = true; packed documents attend in full here. Set it to false"
        )
    if family.sliding_window:
        config.setdefault("sliding_window", family.sliding_window)
    if set(config.get("layer_types") or ()) - {"full_attention"}:
        raise ConfigError(
            f"model.language: layer_types = {shown(config['layer_types'])}; packed documents attend in full here, in "
            'every layer. Write "full_attention" for each, or leave the key out'
        )
    for key in ("rope_parameters", "rope_scaling"):
        check_rope(f"model.language: {key}", config.get(key) or {}, family.position_axes)
    return config


# -------------------------------------------------------------------------------------------- reading


def _read(where: str, section: EncoderConfig | LanguageConfig | DitConfig | VaeConfig) -> tuple[dict[str, Any], bool]:
    """The raw config, and whether it is inline (then its keys are checked)."""
    if section.config:
        return dict(section.config), True
    key = f"{where}.pretrained"
    path = find_file(key, section.pretrained, "config.json")
    assert path is not None
    values = read_json(key, path)
    return part_config(where, values) or values, False


def _complete(where: str, values: dict[str, Any], model_type: Any, *, strict: bool) -> dict[str, Any]:
    """The values with aliases replaced by their keys, with `model_type` and all defaults."""
    _, families = _ROLES[where]
    names = _names(families)
    if not isinstance(model_type, str) or model_type not in names:
        raise _unknown_family(where, model_type)
    family = families[names[model_type]]
    keys = {**family.defaults, **family.optional}
    config = dict(family.defaults)
    for key, value in values.items():
        name = family.aliases.get(key, key)
        if key == "model_type":
            continue
        if strict and name not in keys:
            near = difflib.get_close_matches(key, [*keys, *family.aliases], 1)
            hint = f"did you mean {shown(near[0])}?" if near else f"{names[model_type]} has {', '.join(keys)}"
            raise ConfigError(f"{where}.config: unknown key {shown(key)}; {hint}")
        if name in family.defaults or (value is not None and keys.get(name) is not None):
            check_type(where, key, value, keys[name])
        config[name] = value
    config["model_type"] = names[model_type]
    for key in family.dropout:
        check_dropout(where, key, config[key])
    return config


def _names(families: Mapping[str, Family]) -> dict[str, str]:
    """Value of `model_type` -> the family that it names."""
    return {name: family for family, values in families.items() for name in (family, *values.parents)}


def _unknown_family(where: str, model_type: Any) -> ConfigError:
    """The error for an unsupported `model_type`.

    Another one is suggested only for a typing error: "qwen3" is no misspelt "qwen2", nor "llava" a "llama".
    """
    kind, families = _ROLES[where]
    names, wrong_type, hint = list(_names(families)), str(model_type), ""
    near = difflib.get_close_matches(wrong_type, names, 1, 0.75)
    if near and re.findall(r"\d+", wrong_type) == re.findall(r"\d+", near[0]) and wrong_type not in _library_families():
        hint = f"; did you mean {shown(near[0])}?"
    for section, (_, other_families) in _ROLES.items():
        if wrong_type in _names(other_families):
            hint = f"; [{section}] takes it"
    return ConfigError(
        f"{where}: model_type = {shown(model_type)} is no supported {kind}; supported are {', '.join(names)}{hint}"
    )


def _library_families() -> set[str]:
    """Names of the model families of the transformers library, which is not imported."""
    spec = importlib.util.find_spec("transformers")
    folders = [f"{folder}/models" for folder in (spec and spec.submodule_search_locations) or ()]
    return {module.name for module in pkgutil.iter_modules(folders)}
