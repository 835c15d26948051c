"""The sizes and flags of a configured model for costs, geometry and adapters. Pure; no weights."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mmtrain.config.model import DitConfig, EncoderConfig, LanguageConfig, ModelConfig
from mmtrain.config.toml_sections import shown
from mmtrain.errors import ConfigError
from mmtrain.spec.composites import selected_features
from mmtrain.spec.config_values import MOST
from mmtrain.spec.families import LANGUAGES, dit_config, encoder_config, language_config
from mmtrain.spec.windows import Grid, Indices, feature_order, row_order


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionShape:
    """The sizes of a vision encoder with its projector."""

    model_type: str
    width: int
    """Columns of the activations between its blocks."""
    depth: int
    """Number of blocks that run: up to the one whose output the projector reads."""
    num_heads: int
    mlp_width: int
    patch_dim: int
    """Elements of one patch: channels x (time x) height x width."""
    hidden_act: str
    qkv_bias: bool = True
    key_bias: bool = True
    """Whether the key has a bias if query and value have one."""
    gated_mlp: bool = False
    """Whether a third linear layer gates the inner columns."""
    joint_qkv: bool = False
    """Whether one linear layer makes query, key and value."""
    rotary: bool = False
    """Whether positions are rotary."""
    num_positions: int = 0
    """Learned positions in a square, which are resized to the grid of each image; 0: positions are of another kind."""
    rms_norm: bool = False
    """Whether norms are RMSNorms."""
    patch_size: int
    """Pixels along one side of a patch."""
    packed: bool
    """Whether the patches of images of any size are packed into one list, in merge-block order; otherwise all images
    have one size and their patches are in row-major order."""
    class_token: bool = False
    """Whether the encoder adds a row to each image."""
    keeps_class_token: bool = False
    """Whether that row is a feature, too, and so becomes a token of the language model."""
    embed_norm: bool = False
    """Whether a norm follows the embedding of patches and class token."""
    embed_bias: bool = True
    """Whether the embedding of patches has a bias."""
    final_norm: bool = False
    """Whether a norm follows the last block that runs."""
    fixed_grid: tuple[int, int, int] | None = None
    """Patches (1, height, width) of every image; None for packed encoders."""
    one_row: bool = False
    """Whether an image is one row of patches, which are merged only along it: audio over time."""
    window: int = 0
    """Side of the attention windows in merged tokens; 0: the encoder has none."""
    full_blocks: tuple[int, ...] = ()
    """With windows: blocks whose attention covers the whole frame."""
    native_merge: int = 0
    """Spatial merge of the encoder's own merger; 0 if it has none."""
    native_width: int = 0
    """Output width of the encoder's own merger; 0 if it has none."""
    merge: int
    """Spatial merge of the projector that is used."""

    @property
    def patches_per_token(self) -> int:
        """Patches that the projector joins to one token."""
        return self.merge if self.one_row else self.merge**2

    @property
    def fixed_tokens(self) -> int:
        """Tokens of each image of an encoder of one image size."""
        assert self.fixed_grid is not None
        return math.prod(self.fixed_grid) // self.patches_per_token + self.keeps_class_token

    @property
    def patches_per_output(self) -> float:
        """Patches of an image for each of its tokens, one of which may be the class token."""
        if not self.keeps_class_token:
            return self.patches_per_token
        return 1 - 1 / self.fixed_tokens

    def row_order(self, grids: Sequence[Grid]) -> Indices:
        """[R] int64: the packed patch of each row, see `windows.row_order`. Args: grids: patches of each image."""
        return row_order(grids, self.merge, self.window)

    def feature_order(self, grids: Sequence[Grid]) -> Indices:
        """[V] int64: the feature of each merged row, see `windows.feature_order`. Args: grids: as in `row_order`."""
        return feature_order(grids, self.merge, self.window)


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageShape:
    """The sizes of a language model."""

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
    """Whether the head and the token embedding are one matrix; a text encoder has no head."""
    head_norms: bool = False
    """Whether norms follow on the queries and keys of each head."""
    axis_columns: tuple[int, ...] = ()
    """Rotated pairs of a head's columns for time, height and width; empty: positions are along the text alone."""
    sliding_window: int = 0
    """Tokens that a token sees, itself included; 0: all of its document."""

    @property
    def position_axes(self) -> int:
        """Axes of its positions."""
        return len(self.axis_columns) or 1


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


def vision_shape(model: ModelConfig) -> VisionShape:
    """The sizes of the vision encoder of a model that has one.

    Raises: ConfigError: its sizes do not fit together, or the projector does not fit.
    """
    assert model.encoder is not None
    values = encoder_config(model.encoder)
    where = _name("model.encoder", model.encoder)
    merge = model.projector.merge
    if values["model_type"] in ("qwen2_vl_vision", "qwen2_5_vl_vision"):
        shape = _native_resolution(values, where, merge)
    elif values["model_type"] == "siglip2_vision_model":
        shape = _resized_positions(values, where, merge)
    elif values["model_type"] == "whisper_encoder":
        shape = _audio(values, where, merge)
    else:
        shape = _fixed_size(values, where, merge)
    shape = _with_selected_features(model, shape, where)
    _divides(where, "number of heads", shape.num_heads, "width", shape.width)
    _check_native(model, shape, where)
    return shape


def _native_resolution(values: dict[str, Any], where: str, merge: int) -> VisionShape:
    """Encoders of packed images: Qwen2-VL and Qwen2.5-VL."""
    windowed = values["model_type"] == "qwen2_5_vl_vision"
    width_key = "hidden_size" if windowed else "embed_dim"
    width, heads = values[width_key], values["num_heads"]
    patch = single_size(where, "patch_size", values["patch_size"])
    frames = single_size(where, "temporal_patch_size", values["temporal_patch_size"])
    _divides(where, "number of heads", heads, "width", width)
    if width // heads % 4:
        raise ConfigError(
            f"{where}: {width_key} / num_heads = {width // heads}; rotary positions of two axes need a multiple of 4"
        )
    window = 0
    if windowed:
        pixels = single_size(where, "window_size", values["window_size"])
        window = pixels // merge // patch  # rounded down, as Hugging Face does
        if not window:
            raise ConfigError(
                f"{where}: window_size = {pixels} pixels is less than one merged token of spatial_merge * patch_size "
                f"= {merge} * {patch} pixels; raise it or lower model.projector.spatial_merge"
            )
    return VisionShape(
        model_type=values["model_type"],
        width=width,
        depth=values["depth"],
        num_heads=heads,
        mlp_width=values["intermediate_size"] if windowed else int(width * values["mlp_ratio"]),
        patch_dim=values["in_channels"] * frames * patch * patch,
        hidden_act=values["hidden_act"],
        patch_size=patch,
        packed=True,
        joint_qkv=True,
        rotary=True,
        embed_bias=False,
        gated_mlp=windowed,
        rms_norm=windowed,
        window=window,
        full_blocks=tuple(values["fullatt_block_indexes"]) if windowed else (),
        native_merge=values["spatial_merge_size"],
        native_width=values["out_hidden_size" if windowed else "hidden_size"],
        merge=merge,
    )


def _resized_positions(values: dict[str, Any], where: str, merge: int) -> VisionShape:
    """Encoders of packed images with learned positions, which are resized to each image: SigLIP 2 (NaFlex)."""
    patch, positions = single_size(where, "patch_size", values["patch_size"]), values["num_patches"]
    if math.isqrt(positions) ** 2 != positions:
        raise ConfigError(f"{where}: num_patches = {positions}; positions form a square, so it must be a square number")
    return VisionShape(
        model_type=values["model_type"],
        width=values["hidden_size"],
        depth=values["num_hidden_layers"],
        num_heads=values["num_attention_heads"],
        mlp_width=values["intermediate_size"],
        patch_dim=values["num_channels"] * patch * patch,
        hidden_act=values["hidden_act"],
        patch_size=patch,
        packed=True,
        num_positions=positions,
        final_norm=True,
        merge=merge,
    )


def _fixed_size(values: dict[str, Any], where: str, merge: int) -> VisionShape:
    """Encoders whose images all have one size: SigLIP, CLIP and ViT."""
    patch = single_size(where, "patch_size", values["patch_size"])
    image = single_size(where, "image_size", values["image_size"])
    _divides(where, "patch_size", patch, "image_size", image)
    patches_per_side = image // patch
    clip = values["model_type"] == "clip_vision_model"
    if patches_per_side % merge:
        raise ConfigError(
            f"model.projector.spatial_merge = {merge}, but {where} makes {patches_per_side} x {patches_per_side} "
            f"patches; choose a divisor of {patches_per_side}"
        )
    return VisionShape(
        model_type=values["model_type"],
        width=values["hidden_size"],
        depth=values["num_hidden_layers"],
        num_heads=values["num_attention_heads"],
        mlp_width=values["intermediate_size"],
        patch_dim=values["num_channels"] * patch * patch,
        hidden_act=values["hidden_act"],
        qkv_bias=values.get("qkv_bias", True),
        patch_size=patch,
        packed=False,
        class_token=values["model_type"] in ("clip_vision_model", "vit"),
        embed_norm=clip,
        embed_bias=not clip,
        final_norm=not clip,  # its norm is for the pooled class token alone
        fixed_grid=(1, patches_per_side, patches_per_side),
        merge=merge,
    )


def _audio(values: dict[str, Any], where: str, merge: int) -> VisionShape:
    """The Whisper encoder: an "image" is a spectrogram, its patches are one row of `max_source_positions`."""
    frames = values["max_source_positions"]
    if frames % merge:
        raise ConfigError(
            f"model.projector.spatial_merge = {merge}, but {where} makes {frames} frames (max_source_positions); "
            f"choose a divisor of {frames}"
        )
    if values["d_model"] % 2:
        raise ConfigError(f"{where}: d_model = {values['d_model']}; sines and cosines of positions need an even one")
    return VisionShape(
        model_type=values["model_type"],
        width=values["d_model"],
        depth=values["encoder_layers"],
        num_heads=values["encoder_attention_heads"],
        mlp_width=values["encoder_ffn_dim"],
        patch_dim=2 * values["num_mel_bins"],  # the second convolution halves the frames
        hidden_act=values["activation_function"],
        key_bias=False,
        patch_size=1,
        packed=False,
        final_norm=True,
        fixed_grid=(1, 1, frames),
        one_row=True,
        merge=merge,
    )


def _with_selected_features(model: ModelConfig, shape: VisionShape, where: str) -> VisionShape:
    """The shape of the part of an encoder that makes the features which the projector reads.

    Raises: ConfigError: there is no such block or class token, or they do not fit the projector.
    """
    assert model.encoder is not None
    layer, select = selected_features(model.encoder)
    if abs(layer) > shape.depth:
        raise ConfigError(
            f"model.encoder.feature_layer = {layer}, but {where} has {shape.depth} blocks; choose 1 to {shape.depth}, "
            f"or -1 to -{shape.depth} from the last one"
        )
    if layer and model.projector.kind == "native":
        raise ConfigError(
            f'model.encoder.feature_layer = {layer}, but model.projector.kind = "native" reads the output of the last '
            'block; remove it, or use kind = "mlp"'
        )
    if select == "default" and not shape.class_token:
        raise ConfigError(
            f'model.encoder.feature_select = "default" leaves out the class token, but {where} ({shape.model_type}) '
            'has none; set feature_select = "full"'
        )
    keeps_class_token = select == "full" and shape.class_token
    if keeps_class_token and shape.merge > 1:
        raise ConfigError(
            f'model.encoder.feature_select = "full" keeps the class token, which has no neighbours to merge with, but '
            f"model.projector merges {shape.merge} x {shape.merge} features; set model.projector.spatial_merge = 1"
        )
    return replace(
        shape,
        depth=(layer if layer > 0 else shape.depth + 1 + layer) if layer else shape.depth,
        final_norm=shape.final_norm and not layer,
        keeps_class_token=keeps_class_token,
    )


def check_patches_split(model: ModelConfig) -> None:
    """Checks that the patches of an encoder's images can be divided over ranks.

    Raises: ConfigError: they cannot, as its images have one fixed size.
    """
    if model.encoder is not None and not vision_shape(model).packed:
        model_type = vision_shape(model).model_type
        raise ConfigError(
            f'parallelism.encoder_context_parallel = "patches", but the patches of a {model_type} are those of one '
            'fixed size and stay together; use "images"'
        )


def language_shape(model: ModelConfig) -> LanguageShape:
    """The sizes of the language model.

    Raises: ConfigError: its sizes do not fit together.
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
    family = LANGUAGES[values["model_type"]]
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
        qkv_bias=attention_bias or values["model_type"].startswith("qwen2"),
        output_bias=attention_bias,
        mlp_bias=values["mlp_bias"] if "mlp_bias" in family.defaults else False,
        tied=values["tie_word_embeddings"] and model.dit is None,
        head_norms=values["model_type"] == "qwen3",
        axis_columns=_axis_columns(values, where, head_dim) if family.position_axes > 1 else (),
        sliding_window=(values["sliding_window"] or 0) if family.sliding_window else 0,
    )


def _axis_columns(values: dict[str, Any], where: str, head_dim: int) -> tuple[int, ...]:
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    columns = rope.get("mrope_section", (16, 24, 24))  # the default of the class
    numbers = isinstance(columns, list | tuple) and all(type(x) is int and x >= 0 for x in columns)
    if not numbers or len(columns) != 3 or sum(columns) != head_dim // 2:
        raise ConfigError(
            f"{where}: mrope_section = {shown(columns)}; it has three numbers, for time, height and width, whose sum "
            f"is half of the width of a head, {head_dim // 2}; set it in rope_parameters"
        )
    if values["hidden_size"] != head_dim * values["num_attention_heads"]:
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
            f"{_name('model.language', model.language)}: sliding_window = {window} tokens is below training.seq_len = "
            f"{seq_len}; packed documents attend in full here. Set training.seq_len to at most {window}, or take a "
            "model without a window: null in a config.json, at least training.seq_len in an inline config"
        )


def dit_shape(model: ModelConfig) -> DitShape:
    """The sizes of the diffusion transformer of a model that has one.

    Raises: ConfigError: its sizes do not fit together, or do not fit the width of the text encoder.
    """
    assert model.dit is not None
    values, where = dit_config(model.dit), _name("model.dit", model.dit)
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


def single_size(where: str, key: str, value: Any) -> int:
    """The number in a size that may be given as a list of equal numbers.

    Raises: ConfigError: the numbers differ, or are no integers above 0.
    """
    size, *other_sizes = value if isinstance(value, list | tuple) and value else [value]
    if type(size) is not int or not 0 < size <= MOST or any(x != size for x in other_sizes):
        raise ConfigError(f"{where}: {key} = {shown(value)}; only square sizes are supported: give one integer")
    return size


def _divides(where: str, divisor_name: str, divisor: int, name: str, number: int) -> None:
    if number % divisor:
        raise ConfigError(f"{where}: {name} = {number} is not a multiple of {divisor_name} = {divisor}; change one")


def _check_native(model: ModelConfig, shape: VisionShape, where: str) -> None:
    """Checks that a configured native merger exists and fits."""
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
    language_width = language_shape(model).width
    if shape.native_width != language_width:
        raise ConfigError(
            f'model.projector.kind = "native": the merger of {where} makes {shape.native_width} columns '
            f'(hidden_size), but the language model has {language_width}; change one or use kind = "mlp"'
        )


def _name(where: str, section: EncoderConfig | LanguageConfig | DitConfig) -> str:
    return f"{where} ({section.pretrained})" if section.pretrained else f"{where}.config"
