"""The numbers of a configured model that costs, geometry and adapters need. Pure; no weights."""

from dataclasses import dataclass
from typing import Any

from mmtrain.config import EncoderConfig, LanguageConfig, ModelConfig
from mmtrain.errors import ConfigError
from mmtrain.models.families import encoder_config, language_config


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
            f"{where}: embed_dim / num_heads = {width // heads}; rotary positions of two axes need a multiple of 4"
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


def _single(where: str, key: str, value: Any) -> int:
    """The one number of a size that may be given as a list of equal numbers."""
    first, *others = value if isinstance(value, list | tuple) and value else [value]
    if type(first) is not int or first < 1 or any(other != first for other in others):
        raise ConfigError(f"{where}: {key} = {value!r}; only square sizes are supported: give one integer")
    return first


def _divides(where: str, part_name: str, part: int, whole_name: str, whole: int) -> None:
    if whole % part:
        raise ConfigError(f"{where}: {whole_name} = {whole} is not a multiple of {part_name} = {part}; change one")


def _check_native(model: ModelConfig, shape: VisionShape, where: str) -> None:
    """Refuses a native merger that is absent or does not fit."""
    if model.projector.kind != "native":
        return
    if not shape.native_merge:
        raise ConfigError(
            f'model.projector.kind = "native", but {where} ({shape.model_type}) has no merger of its own; use "mlp"'
        )
    if shape.merge != shape.native_merge:
        raise ConfigError(
            f"model.projector.spatial_merge = {shape.merge}, but the merger of {where} merges "
            f"{shape.native_merge} x {shape.native_merge}; set spatial_merge = {shape.native_merge} or "
            'kind = "mlp"'
        )
    if model.projector.hidden_size:
        raise ConfigError(
            f'model.projector.hidden_size = {model.projector.hidden_size} has no effect with kind = "native"; remove it'
        )
    language_width = language_shape(model).width
    if shape.native_width != language_width:
        raise ConfigError(
            f'model.projector.kind = "native": the merger of {where} makes {shape.native_width} columns '
            f'(hidden_size), but the language model has {language_width}; change one or use kind = "mlp"'
        )


def _name(where: str, section: EncoderConfig | LanguageConfig) -> str:
    return f"{where} ({section.pretrained})" if section.pretrained else f"{where}.config"
