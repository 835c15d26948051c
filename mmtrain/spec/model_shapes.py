"""The sizes of a configured language model or diffusion transformer. Pure; no weights."""

import math
from dataclasses import dataclass
from typing import Any

from mmtrain.config.model import DitConfig, EncoderConfig, LanguageConfig, ModelConfig
from mmtrain.config.toml_sections import shown
from mmtrain.errors import ConfigError
from mmtrain.families.catalogue import LANGUAGES
from mmtrain.families.family import Language
from mmtrain.families.shapes import FULL, LanguageShape, check_divides
from mmtrain.spec.model_configs import dit_config, language_config


@dataclass(frozen=True, slots=True, kw_only=True)
class DitShape:
    """The sizes of a diffusion transformer."""

    model_type: str
    width: int
    depth: int
    num_heads: int
    mlp_width: int
    patch: tuple[int, int, int]
    """Frames, rows and columns of latents in one patch."""
    in_channels: int
    """Channels of the latents."""
    out_channels: int
    """Channels of its prediction."""
    text_width: int
    """Columns of the text encoder's states."""
    time_width: int
    """Number of sines and cosines of a timestep."""
    cross_norm: bool
    """Whether a norm with parameters comes before cross-attention."""
    max_positions: int
    """Largest number of patches along each axis of a clip."""
    behind_vae: bool = False
    """Whether a VAE of the job makes its latents; its activations then have columns for the clean latents."""

    def block_kind(self, index: int) -> str:
        """The kind of a block: `FULL` of all."""
        return FULL

    @property
    def patch_size(self) -> int:
        """Latent positions of one patch."""
        return math.prod(self.patch)

    @property
    def patch_dim(self) -> int:
        """Elements of one patch."""
        return self.in_channels * self.patch_size

    @property
    def output_dim(self) -> int:
        """Elements of the prediction for one patch."""
        return self.out_channels * self.patch_size

    @property
    def clean_columns(self) -> int:
        """Columns of an activation between two chunks that hold clean latents."""
        return self.patch_dim if self.behind_vae else 0


def check_prediction(model: ModelConfig) -> None:
    """Checks that a DiT can be trained to denoise.

    Raises: ConfigError: it does not predict as many channels as it reads.
    """
    if model.dit is not None and (shape := dit_shape(model)).out_channels != shape.in_channels:
        raise ConfigError(
            f"model.dit.config: out_channels = {shape.out_channels}, but in_channels = {shape.in_channels}: the "
            "prediction must have as many channels as the latents; make them equal"
        )


def language_shape(model: ModelConfig) -> LanguageShape:
    """The sizes of the language model.

    Raises: ConfigError: its sizes do not fit together.
    """
    values = language_config(model.language)
    where = section_name("model.language", model.language)
    heads = values["num_attention_heads"]
    kv_heads = values.get("num_key_value_heads") or heads
    check_divides(where, "num_key_value_heads", kv_heads, "num_attention_heads", heads)
    if not values.get("head_dim"):
        check_divides(where, "num_attention_heads", heads, "hidden_size", values["hidden_size"])
    head_dim = values.get("head_dim") or values["hidden_size"] // heads
    family = LANGUAGES[values["model_type"]]
    is_tower = bool(family.embedding)
    if bool(model.contrast) != is_tower:
        raise ConfigError(
            f"[model.contrast] trains two towers, but {where} ({values['model_type']}) makes no embedding of a text; "
            f"towers are {', '.join(name for name, one in LANGUAGES.items() if one.embedding)}"
            if model.contrast
            else f"{where}: {values['model_type']} is a tower that makes an embedding of a text; add [model.contrast], "
            "or choose a language model"
        )
    if head_dim % 2 and not is_tower:
        raise ConfigError(f"{where}: the width of a head is {head_dim}; rotary positions need an even one")
    attention_bias = values["attention_bias"] if "attention_bias" in family.defaults else False
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
        qkv_bias=attention_bias or family.qkv_bias,
        output_bias=attention_bias or is_tower,
        mlp_bias=is_tower or (values["mlp_bias"] if "mlp_bias" in family.defaults else False),
        tied=values.get("tie_word_embeddings", False) and model.dit is None,
        head_norms=family.head_norms,
        axis_columns=_axis_columns(values, where, head_dim, family) if family.axis_columns else (),
        sliding_window=(values["sliding_window"] or 0) if family.sliding_window else 0,
        rotary=not is_tower,
        gated_mlp=not is_tower,
        rms_norm=not is_tower,
        embedding_width=(values.get(family.embedding) or values["hidden_size"]) if is_tower else 0,
        embedding_bias=family.embedding_bias,
        padded=family.bidirectional,
    )


def _axis_columns(values: dict[str, Any], where: str, head_dim: int, family: Language) -> tuple[int, ...]:
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    columns = rope.get("mrope_section", family.axis_columns)
    numbers = isinstance(columns, list | tuple) and all(type(x) is int and x >= 0 for x in columns)
    if not numbers or len(columns) != 3 or sum(columns) != head_dim // 2:
        raise ConfigError(
            f"{where}: mrope_section = {shown(columns)}; it has three numbers, for time, height and width, whose sum "
            f"is half of the width of a head, {head_dim // 2}; set it in rope_parameters"
        )
    if "head_dim" not in family.defaults and values["hidden_size"] != head_dim * values["num_attention_heads"]:
        raise ConfigError(
            f"{where}: head_dim = {head_dim}, but heads of this family have hidden_size / num_attention_heads = "
            f"{values['hidden_size'] / values['num_attention_heads']:g} columns; leave head_dim out"
        )
    return tuple(columns)


def check_window(model: ModelConfig, seq_len: int) -> None:
    """Checks that attention in packed documents, which has no windows, is that of the language model.

    Args: seq_len: largest number of tokens of a document.
    Raises: ConfigError: the model has a sliding window that is shorter.
    """
    window = language_shape(model).sliding_window
    if 0 < window < seq_len:
        raise ConfigError(
            f"{section_name('model.language', model.language)}: sliding_window = {window} tokens is below "
            f"training.seq_len = {seq_len}; packed documents attend in full here. Set training.seq_len to at most "
            f"{window}, or take a model without a window: null in a config.json, at least training.seq_len in an "
            "inline config"
        )


def dit_shape(model: ModelConfig) -> DitShape:
    """The sizes of the diffusion transformer of a model that has one.

    Raises: ConfigError: its sizes do not fit together, or do not fit the width of the text encoder.
    """
    assert model.dit is not None
    values, where = dit_config(model.dit), section_name("model.dit", model.dit)
    head_dim, text = values["attention_head_dim"], language_shape(model).width
    if head_dim % 2 or head_dim < 6:
        raise ConfigError(
            f"{where}: attention_head_dim = {head_dim}; rotary positions of three axes need an even one of at least 6"
        )
    if values["freq_dim"] % 2:
        raise ConfigError(f"{where}: freq_dim = {values['freq_dim']}; sines and cosines of timesteps need an even one")
    if values["text_dim"] != text:
        raise ConfigError(
            f"{where}: text_dim = {values['text_dim']}, but the text encoder (model.language) makes states of {text} "
            "columns (hidden_size); set text_dim to that, or choose another text encoder"
        )
    return DitShape(
        model_type=values["model_type"],
        width=values["num_attention_heads"] * head_dim,
        depth=values["num_layers"],
        num_heads=values["num_attention_heads"],
        mlp_width=values["ffn_dim"],
        patch=values["patch_size"],
        in_channels=values["in_channels"],
        out_channels=values["out_channels"],
        text_width=values["text_dim"],
        time_width=values["freq_dim"],
        cross_norm=values["cross_attn_norm"],
        max_positions=values["rope_max_seq_len"],
        behind_vae=model.vae is not None,
    )


def section_name(where: str, section: EncoderConfig | LanguageConfig | DitConfig) -> str:
    """What a section's config is called in errors: by its source, or inline."""
    return f"{where} ({section.pretrained})" if section.pretrained else f"{where}.config"
