"""Which model families mmtrain knows, and the shape of the one that a config names. Pure; no weights.

A section `[model.encoder]` or `[model.language]` names a family by an inline Hugging Face config or by
the `config.json` of a folder or hub id. `encoder_config` and `language_config` give that config with
all keys that matter filled in; `vision_shape` and `language_shape` reduce it to the numbers that costs,
geometry and adapters need.
"""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmtrain.config import EncoderConfig, LanguageConfig, ModelConfig
from mmtrain.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One `model_type`: the keys of its Hugging Face config that matter, with that class's defaults."""

    defaults: Mapping[str, Any]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of a key that the Hugging Face class accepts."""
    optional: tuple[str, ...] = ()
    """Keys without a default that an inline config may hold."""
    parents: tuple[str, ...] = ()
    """Other values of `model_type` that name this family, or a whole model that contains it."""
    dropout: tuple[str, ...] = ()
    """Keys that must be 0: see `_check_dropout`."""


_ENCODERS: dict[str, Family] = {
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
        optional=("rope_parameters",),
        parents=("qwen2_vl",),
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
        optional=("vision_use_head",),
        parents=("siglip",),
        dropout=("attention_dropout",),
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
        optional=("encoder_stride", "pooler_output_size", "pooler_act"),
        dropout=("hidden_dropout_prob", "attention_probs_dropout_prob"),
    ),
}

_LANGUAGE_OPTIONAL = ("rope_parameters", "rope_theta", "rope_scaling", "head_dim", "layer_types", "use_cache")
_TOKEN_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")

_LANGUAGES: dict[str, Family] = {
    "qwen2": Family(
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
            "use_sliding_window": False,
            "attention_dropout": 0.0,
        },
        optional=(*_LANGUAGE_OPTIONAL, *_TOKEN_IDS, "sliding_window", "max_window_layers"),
        dropout=("attention_dropout",),
    ),
    "llama": Family(
        defaults={
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": None,
            "hidden_act": "silu",
            "max_position_embeddings": 2048,
            "initializer_range": 0.02,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
        },
        optional=(*_LANGUAGE_OPTIONAL, *_TOKEN_IDS, "pretraining_tp"),
        dropout=("attention_dropout",),
    ),
}


def encoder_config(section: EncoderConfig) -> dict[str, Any]:
    """The Hugging Face config of a vision encoder, its `model_type` one of the known encoder families.

    Missing keys have the defaults of the Hugging Face class. A whole Qwen2-VL or SigLIP model gives its
    `vision_config`.
    Raises: ConfigError: no such config, an unknown family or key, a wrong type, dropout.
    """
    values, inline = _read("model.encoder", section)
    model_type = values.get("model_type", "")
    if isinstance(values.get("vision_config"), dict):
        values = values["vision_config"]
        model_type = values.get("model_type", model_type)
    return _complete("model.encoder", values, model_type, _ENCODERS, strict=inline)


def language_config(section: LanguageConfig) -> dict[str, Any]:
    """The Hugging Face config of a language model, its `model_type` one of the known language families.

    Raises: ConfigError: no such config, an unknown family or key, a wrong type, dropout, a sliding window.
    """
    values, inline = _read("model.language", section)
    out = _complete("model.language", values, values.get("model_type", ""), _LANGUAGES, strict=inline)
    if out.get("use_sliding_window"):
        raise ConfigError(
            "model.language: use_sliding_window = true; packed documents attend in full here. Set it to false"
        )
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionShape:
    """The numbers of a vision encoder with its projector."""

    model_type: str
    width: int
    """Columns of the activations between its blocks."""
    depth: int
    """Number of blocks."""
    num_heads: int
    mlp_width: int
    patch_dim: int
    """Numbers of one patch: channels x (time x) height x width."""
    hidden_act: str
    qkv_bias: bool
    patch_size: int
    """Pixels along one side of a patch."""
    packed: bool
    """Whether patches of pictures of any size come packed in one list, in merge-block order; otherwise all
    pictures have one size and their patches are in row-major order."""
    class_token: bool
    """Whether the encoder adds a row to each picture."""
    final_norm: bool
    """Whether a norm follows the last block."""
    fixed_grid: tuple[int, int, int] | None
    """Patches (1, height, width) of every picture; None for packed encoders."""
    native_merge: int
    """Spatial merge of the encoder's own merger; 0 if it has none."""
    native_width: int
    """Output width of the encoder's own merger; 0 if it has none."""
    merge: int
    """Spatial merge of the projector that is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageShape:
    """The numbers of a language model."""

    model_type: str
    width: int
    depth: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    vocab_size: int
    max_positions: int
    hidden_act: str
    qkv_bias: bool
    output_bias: bool
    """Whether the attention's output projection has a bias."""
    mlp_bias: bool
    tied: bool
    """Whether the head and the token embedding are one matrix."""


def vision_shape(model: ModelConfig) -> VisionShape:
    """The numbers of the vision encoder of a model that has one.

    Raises: ConfigError: sizes that do not fit together, or a projector that does not fit.
    """
    assert model.encoder is not None
    values = encoder_config(model.encoder)
    where = _name("model.encoder", model.encoder)
    packed = values["model_type"] == "qwen2_vl_vision"
    width = values["embed_dim" if packed else "hidden_size"]
    heads = values["num_heads" if packed else "num_attention_heads"]
    channels = values["in_channels" if packed else "num_channels"]
    patch = _single(where, "patch_size", values["patch_size"])
    frames = _single(where, "temporal_patch_size", values["temporal_patch_size"]) if packed else 1
    _divides(where, "number of heads", heads, "width", width)
    if packed and width // heads % 4:
        raise ConfigError(
            f"{where}: embed_dim / num_heads = {width // heads}; rotary positions of two axes need a "
            "multiple of 4"
        )
    grid = None
    merge = model.projector.spatial_merge
    if not packed:
        image = _single(where, "image_size", values["image_size"])
        _divides(where, "patch_size", patch, "image_size", image)
        grid = (1, image // patch, image // patch)
        if grid[1] % merge:
            raise ConfigError(
                f"model.projector.spatial_merge = {merge}, but {where} makes {grid[1]} x {grid[2]} patches; "
                f"choose a divisor of {grid[1]}"
            )
    shape = VisionShape(
        model_type=values["model_type"],
        width=width,
        depth=values["depth" if packed else "num_hidden_layers"],
        num_heads=heads,
        mlp_width=int(width * values["mlp_ratio"]) if packed else values["intermediate_size"],
        patch_dim=channels * frames * patch * patch,
        hidden_act=values["hidden_act"],
        qkv_bias=values.get("qkv_bias", True),
        patch_size=patch,
        packed=packed,
        class_token=values["model_type"] == "vit",
        final_norm=not packed,
        fixed_grid=grid,
        native_merge=values["spatial_merge_size"] if packed else 0,
        native_width=values["hidden_size"] if packed else 0,
        merge=merge,
    )
    _check_native(model, shape, where)
    return shape


def language_shape(model: ModelConfig) -> LanguageShape:
    """The numbers of the language model.

    Raises: ConfigError: sizes that do not fit together.
    """
    values = language_config(model.language)
    where = _name("model.language", model.language)
    heads = values["num_attention_heads"]
    kv_heads = values["num_key_value_heads"] or heads
    _divides(where, "num_key_value_heads", kv_heads, "num_attention_heads", heads)
    if not values.get("head_dim"):
        _divides(where, "num_attention_heads", heads, "hidden_size", values["hidden_size"])
    head_dim = values.get("head_dim") or values["hidden_size"] // heads
    if head_dim % 2:
        raise ConfigError(f"{where}: the width of a head is {head_dim}; rotary positions need an even one")
    llama = values["model_type"] == "llama"
    return LanguageShape(
        model_type=values["model_type"],
        width=values["hidden_size"],
        depth=values["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_width=values["intermediate_size"],
        vocab_size=values["vocab_size"],
        max_positions=values["max_position_embeddings"],
        hidden_act=values["hidden_act"],
        qkv_bias=values["attention_bias"] if llama else True,
        output_bias=values["attention_bias"] if llama else False,
        mlp_bias=values["mlp_bias"] if llama else False,
        tied=values["tie_word_embeddings"],
    )


def find_file(where: str, source: str, name: str, *, optional: bool = False) -> Path | None:
    """The path of one file of a local folder or a hub id (fetched into the local cache), or None if optional
    and absent.

    Raises: ConfigError: no such folder or id, no such file, or the hub cannot be reached.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        if (folder / name).is_file():
            return folder / name
        if optional:
            return None
        raise ConfigError(f"{where}.pretrained = {source!r}: the folder has no {name}; choose another folder")
    if folder.is_absolute() or source.startswith((".", "~")) or source.count("/") > 1:
        raise ConfigError(f"{where}.pretrained = {source!r}: there is no such folder; check the path")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    unreachable = LocalEntryNotFoundError  # a kind of EntryNotFoundError that says nothing about the hub

    try:
        return Path(hf_hub_download(source, name))
    except Exception as error:  # the hub client raises errors of its own, of its transport and of the OS
        if optional and isinstance(error, EntryNotFoundError) and not isinstance(error, unreachable):
            return None
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"{where}.pretrained = {source!r}: it is no local folder, and {name} could not be fetched from "
            f"the hub ({reason}); give a folder, or an id that is cached or can be reached"
        ) from error


# -------------------------------------------------------------------------------------------- reading


def _read(where: str, section: EncoderConfig | LanguageConfig) -> tuple[dict[str, Any], bool]:
    """The raw config, and whether it was written inline (and so is checked key by key)."""
    if section.config:
        return dict(section.config), True
    path = find_file(where, section.pretrained, "config.json")
    assert path is not None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}.pretrained: {path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{where}.pretrained: {path} holds no JSON object")
    return values, False


def _complete(
    where: str, values: dict[str, Any], model_type: str, families: dict[str, Family], *, strict: bool
) -> dict[str, Any]:
    """The values under their own names with `model_type` and all defaults."""
    names = {alias: name for name, f in families.items() for alias in (name, *f.parents)}
    if model_type not in names:
        near = difflib.get_close_matches(str(model_type), names, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        kind = "encoder" if families is _ENCODERS else "language model"
        raise ConfigError(
            f"{where}: model_type = {model_type!r} is not a known {kind}; known are {', '.join(names)}{hint}"
        )
    family = families[names[model_type]]
    known = {**family.defaults, **dict.fromkeys(family.optional)}
    out = dict(family.defaults)
    for key, value in values.items():
        name = family.aliases.get(key, key)
        if key == "model_type":
            continue
        if strict and name not in known:
            near = difflib.get_close_matches(key, [*known, *family.aliases], 1)
            hint = f"did you mean {near[0]!r}?" if near else f"{names[model_type]} has {', '.join(known)}"
            raise ConfigError(f"{where}.config: unknown key {key!r}; {hint}")
        if name in family.defaults:
            _check_type(where, key, value, family.defaults[name])
        out[name] = value
    out["model_type"] = names[model_type]
    for key in family.dropout:
        _check_dropout(where, key, out[key])
    return out


def _check_type(where: str, key: str, value: Any, default: Any) -> None:
    if default is None or isinstance(default, bool):
        fits = isinstance(value, bool) if default is not None else value is None or type(value) is int
        wanted = "true or false" if default is not None else "an integer"
    elif isinstance(default, float):
        fits, wanted = type(value) in (int, float) and value >= 0, "a number of at least 0"
    elif isinstance(default, int):
        # Hugging Face also allows pairs for the sizes of pictures and patches; `_single` judges those.
        sizes = key.endswith("_size") and isinstance(value, list | tuple)
        fits = sizes or (type(value) is int and value > 0)
        wanted = "an integer above 0"
    else:
        fits, wanted = isinstance(value, str), "a string"
    if not fits:
        raise ConfigError(f"{where}: {key} = {value!r}; it must be {wanted}")


def _check_dropout(where: str, key: str, value: float | None) -> None:
    """Dropout is refused: its mask would depend on the pipeline layout and on recomputation."""
    if value:
        raise ConfigError(
            f"{where}: {key} = {value}; dropout is not supported, since its random mask would depend on "
            "how the pipeline is cut. Set it to 0"
        )


def _single(where: str, key: str, value: Any) -> int:
    """The one number of a size that may be given as a list of equal numbers."""
    first, *others = value if isinstance(value, list | tuple) and value else [value]
    if type(first) is not int or first < 1 or any(other != first for other in others):
        raise ConfigError(f"{where}: {key} = {value!r}; only square sizes are supported: give one integer")
    return first


def _divides(where: str, part_name: str, part: int, whole_name: str, whole: int) -> None:
    if whole % part:
        raise ConfigError(
            f"{where}: {whole_name} = {whole} is not a multiple of {part_name} = {part}; change one"
        )


def _check_native(model: ModelConfig, shape: VisionShape, where: str) -> None:
    """Refuses a native merger that is absent or does not fit."""
    if model.projector.kind != "native":
        return
    if not shape.native_merge:
        raise ConfigError(
            f'model.projector.kind = "native", but {where} ({shape.model_type}) has no merger of its own; '
            'use "mlp"'
        )
    if shape.merge != shape.native_merge:
        raise ConfigError(
            f"model.projector.spatial_merge = {shape.merge}, but the merger of {where} merges "
            f"{shape.native_merge} x {shape.native_merge}; set spatial_merge = {shape.native_merge} or "
            'kind = "mlp"'
        )
    if model.projector.hidden_size:
        raise ConfigError(
            f"model.projector.hidden_size = {model.projector.hidden_size} has no effect with "
            'kind = "native"; remove it'
        )
    language_width = language_shape(model).width
    if shape.native_width != language_width:
        raise ConfigError(
            f'model.projector.kind = "native": the merger of {where} makes {shape.native_width} columns '
            f'(hidden_size), but the language model has {language_width}; change one or use kind = "mlp"'
        )


def _name(where: str, section: EncoderConfig | LanguageConfig) -> str:
    return f"{where} ({section.pretrained})" if section.pretrained else f"{where}.config"
