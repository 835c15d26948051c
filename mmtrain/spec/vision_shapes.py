"""The sizes and flags of a configured vision encoder for costs, geometry and adapters. Pure; no weights."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mmtrain.config.model import EncoderConfig, ModelConfig, ProjectorConfig, projector_section, section_of
from mmtrain.errors import ConfigError
from mmtrain.spec.composites import selected_features
from mmtrain.spec.families import ENCODERS
from mmtrain.spec.model_configs import encoder_config
from mmtrain.spec.shapes import check_divides, language_shape, section_name, single_size
from mmtrain.spec.windows import Grid, Indices, feature_order, row_order

ROW_FRAMES = 5
"""Log-mel frames that the two convolutions of Whisper read for one row: from 2 r - 2 to 2 r + 2 for row r. They are the
patch of a row where sounds of any length are packed."""


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
    """Elements of one patch: channels x (time x) height x width; of sound mel bins x frames."""
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
    """Learned positions in a square, which are resized to the grid of each image; 0: there are none."""
    positions_per_row: int = 1
    """Those of them whose weighted sum is added to a row; 1: they are resized before."""
    rms_norm: bool = False
    """Whether norms are RMSNorms."""
    patch_size: int
    """Pixels along one side of a patch."""
    packed: bool
    """Whether the patches of images of any size are packed into one list, in merge-block order; otherwise all images
    have one size and their patches are in row-major order."""
    fills: bool = False
    """Whether each packed image is made as large as the limit allows (NaFlex)."""
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
    max_rows: int = 0
    """Of sound: rows of the longest clip, each of which has a position of its own."""
    pool: int = 1
    """Rows whose mean is one feature, before the final norm; the rows behind the last feature of a clip make none."""
    window: int = 0
    """Side of the attention windows in merged tokens; 0: the encoder has none."""
    full_blocks: tuple[int, ...] = ()
    """With windows: blocks whose attention covers the whole frame."""
    native_merge: int = 0
    """Spatial merge of the encoder's own merger; 0 if it has none."""
    native_width: int = 0
    """Output width of the encoder's own merger; 0 if it has none."""
    taps: tuple[int, ...] = ()
    """Blocks whose outputs the encoder's own merger reads, in addition to that of the last one; the j-th of them is
    added to the output of language layer j. Source: DeepStack, arXiv:2406.04334."""
    merge: int
    """Spatial merge of the projector that is used."""

    @property
    def features_per_token(self) -> int:
        """Features that the projector joins to one token."""
        return self.merge if self.one_row else self.merge**2

    @property
    def patches_per_token(self) -> int:
        """Patches that become one token."""
        return self.pool * self.features_per_token

    @property
    def mel_bins(self) -> int:
        """Of sound: rows of its spectrogram."""
        return self.patch_dim // (ROW_FRAMES if self.packed else 2)

    @property
    def first_convolutions(self) -> int:
        """Of sound: outputs of the first convolution that are computed for one row. Those of packed rows overlap."""
        return 3 if self.packed else 2

    @property
    def any_size(self) -> bool:
        """Whether it reads images of any size."""
        return self.packed and not self.one_row

    @property
    def full_grid(self) -> Grid:
        """Patches of every image of an encoder of one image size, or of the longest sound."""
        assert not self.any_size
        return self.fixed_grid or (1, 1, self.max_rows)

    @property
    def full_tokens(self) -> int:
        """Tokens of such an image or sound."""
        return math.prod(self.full_grid) // self.patches_per_token + self.keeps_class_token

    @property
    def patches_per_output(self) -> float:
        """Patches of an image for each of its tokens, one of which may be the class token."""
        if not self.keeps_class_token:
            return self.patches_per_token
        return 1 - 1 / self.full_tokens

    def row_order(self, grids: Sequence[Grid]) -> Indices:
        """[R] int64: the packed patch of each row, see `windows.row_order`. Args: grids: patches of each image."""
        return row_order(grids, self.merge, self.window)

    def feature_order(self, grids: Sequence[Grid]) -> Indices:
        """[V] int64: the feature of each merged row, see `windows.feature_order`. Args: grids: as in `row_order`."""
        return feature_order(grids, self.merge, self.window)


def vision_shape(model: ModelConfig, module: str = "vision") -> VisionShape:
    """The sizes of an encoder of a model that has it.

    Raises: ConfigError: its sizes do not fit together, or the projector does not fit.
    """
    section, projector = model.encoders[module], model.projector_of(module)
    values = encoder_config(section, section_of(module))
    where = section_name(section_of(module), section)
    try:
        shape = _SHAPES[values["model_type"]](values, where, projector.merge)
    except ConfigError as error:  # which speaks of the usual projector
        raise ConfigError(str(error).replace("model.projector.", f"{projector_section(module)}.")) from None
    if shape.one_row != (section.kind == "audio") and module != "vision":
        raise ConfigError(
            f'{section_of(module)}.kind = "{section.kind}", but {where} ({shape.model_type}) reads '
            f"{'spectrograms of sound' if shape.one_row else 'images'}; change one of the two"
        )
    if section.sound_rows == "sound":
        if shape.packed or not shape.one_row:
            why = "runs no other rows" if shape.one_row else "hears nothing"
            raise ConfigError(
                f'{section_of(module)}.sound_rows = "sound" has no effect: {where} ({shape.model_type}) {why}; '
                "remove it"
            )
        shape = replace(shape, packed=True, fixed_grid=None, patch_dim=ROW_FRAMES * shape.mel_bins)
    shape = _with_selected_features(section, projector, section_of(module), shape, where)
    check_divides(where, "number of heads", shape.num_heads, "width", shape.width)
    if projector.kind != "native":
        return shape
    _check_native(model, projector_section(module), shape, where)
    return replace(shape, taps=_taps(values, where, shape.depth, language_shape(model).depth))


def _native_resolution(values: dict[str, Any], where: str, merge: int) -> VisionShape:
    """Encoders of packed images: Qwen2-VL, Qwen2.5-VL and Qwen3-VL."""
    family = ENCODERS[values["model_type"]]  # a folder's config may have keys of other families
    keys, windowed = family.sizes, "window_size" in family.defaults
    width_key = keys["width"]
    width, heads = values[width_key], values["num_heads"]
    patch = single_size(where, "patch_size", values["patch_size"])
    frames = single_size(where, "temporal_patch_size", values["temporal_patch_size"])
    check_divides(where, "number of heads", heads, "width", width)
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
    positions = values["num_position_embeddings"] if "num_position_embeddings" in family.defaults else 0
    _check_square(where, "num_position_embeddings", positions)
    return VisionShape(
        model_type=values["model_type"],
        width=width,
        depth=values["depth"],
        num_heads=heads,
        mlp_width=values[keys["mlp"]] if "mlp" in keys else int(width * values["mlp_ratio"]),
        patch_dim=values["in_channels"] * frames * patch * patch,
        hidden_act=values["hidden_act"],
        patch_size=patch,
        packed=True,
        joint_qkv=True,
        rotary=True,
        num_positions=positions,
        positions_per_row=4,  # the corners of its cell
        embed_bias=positions > 0,
        gated_mlp=windowed,
        rms_norm=windowed,
        window=window,
        full_blocks=tuple(values["fullatt_block_indexes"]) if windowed else (),
        native_merge=values["spatial_merge_size"],
        native_width=values[keys["out"]],
        merge=merge,
    )


def _resized_positions(values: dict[str, Any], where: str, merge: int) -> VisionShape:
    """Encoders of packed images with learned positions, which are resized to each image: SigLIP 2 (NaFlex)."""
    positions = values["num_patches"]
    _check_square(where, "num_patches", positions)
    return _tower(values, where, packed=True, fills=True, num_positions=positions, final_norm=True, merge=merge)


def _check_square(where: str, key: str, positions: int) -> None:
    if math.isqrt(positions) ** 2 != positions:
        raise ConfigError(f"{where}: {key} = {positions}; positions form a square, so it must be a square number")


def _fixed_size(values: dict[str, Any], where: str, merge: int) -> VisionShape:
    """Encoders whose images all have one size: SigLIP, CLIP and ViT."""
    patch = single_size(where, "patch_size", values["patch_size"])
    image = single_size(where, "image_size", values["image_size"])
    check_divides(where, "patch_size", patch, "image_size", image)
    patches_per_side = image // patch
    clip = values["model_type"] == "clip_vision_model"
    if patches_per_side % merge:
        raise ConfigError(
            f"model.projector.spatial_merge = {merge}, but {where} makes {patches_per_side} x {patches_per_side} "
            f"patches; choose a divisor of {patches_per_side}"
        )
    return _tower(
        values,
        where,
        qkv_bias=values.get("qkv_bias", True),
        packed=False,
        class_token=values["model_type"] in ("clip_vision_model", "vit"),
        embed_norm=clip,
        embed_bias=not clip,
        final_norm=not clip,  # its norm is for the pooled class token alone
        fixed_grid=(1, patches_per_side, patches_per_side),
        merge=merge,
    )


def _tower(values: dict[str, Any], where: str, **flags: Any) -> VisionShape:
    """An encoder by the keys that most configs have. Args: flags: fields of the shape that these do not say."""
    patch = single_size(where, "patch_size", values["patch_size"])
    return VisionShape(
        model_type=values["model_type"],
        width=values["hidden_size"],
        depth=values["num_hidden_layers"],
        num_heads=values["num_attention_heads"],
        mlp_width=values["intermediate_size"],
        patch_dim=values["num_channels"] * patch * patch,
        hidden_act=values["hidden_act"],
        patch_size=patch,
        **flags,
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
    return _audio_tower(values, packed=False, fixed_grid=(1, 1, frames), merge=merge)


def _packed_audio(values: dict[str, Any], where: str, merge: int) -> VisionShape:
    """The Qwen2-Audio encoder, of whose spectrograms only the rows of the sound itself are run and packed."""
    if merge > 1:
        raise ConfigError(
            f"model.projector.spatial_merge = {merge}, but {where} makes one feature of two rows itself; set "
            "spatial_merge = 1"
        )
    return _audio_tower(values, packed=True, pool=2, merge=merge)


def _audio_tower(values: dict[str, Any], *, packed: bool, **flags: Any) -> VisionShape:
    """An encoder of Whisper's shape. Args: flags: fields of the shape that its config does not say."""
    return VisionShape(
        model_type=values["model_type"],
        width=values["d_model"],
        depth=values["encoder_layers"],
        num_heads=values["encoder_attention_heads"],
        mlp_width=values["encoder_ffn_dim"],
        # The second convolution halves the frames.
        patch_dim=(ROW_FRAMES if packed else 2) * values["num_mel_bins"],
        hidden_act=values["activation_function"],
        key_bias=False,
        patch_size=1,
        packed=packed,
        final_norm=True,
        one_row=True,
        max_rows=values["max_source_positions"],
        **flags,
    )


_SHAPES: Mapping[str, Callable[[dict[str, Any], str, int], VisionShape]] = {
    "qwen2_vl_vision": _native_resolution,
    "qwen2_5_vl_vision": _native_resolution,
    "qwen3_vl_vision": _native_resolution,
    "siglip_vision_model": _fixed_size,
    "siglip2_vision_model": _resized_positions,
    "clip_vision_model": _fixed_size,
    "vit": _fixed_size,
    "whisper_encoder": _audio,
    "qwen2_audio_encoder": _packed_audio,
}
"""Family -> (complete config, name of the section in errors, spatial merge) -> shape."""


def _with_selected_features(
    section: EncoderConfig, projector: ProjectorConfig, name: str, shape: VisionShape, where: str
) -> VisionShape:
    """The shape of the part of an encoder that makes the features which the projector reads.

    Raises: ConfigError: there is no such block or class token, or they do not fit the projector.
    """
    layer, select = selected_features(section)
    if abs(layer) > shape.depth:
        raise ConfigError(
            f"{name}.feature_layer = {layer}, but {where} has {shape.depth} blocks; choose 1 to {shape.depth}, "
            f"or -1 to -{shape.depth} from the last one"
        )
    if layer and projector.kind == "native":
        if not section.feature_layer:
            raise ConfigError(
                f'{projector.SECTION}.kind = "native", but {name}.pretrained is of a LLaVA model, whose projector is '
                'of another kind; set kind = "llava"'
            )
        raise ConfigError(
            f'{name}.feature_layer = {layer}, but its projector of kind "native" reads the output of the last '
            'block; remove it, or use kind = "mlp"'
        )
    if layer and shape.pool > 1:
        raise ConfigError(
            f"{name}.feature_layer = {layer}, but {where} ({shape.model_type}) makes its features of rows behind its "
            "last block; remove it"
        )
    if select == "default" and not shape.class_token:
        raise ConfigError(
            f'{name}.feature_select = "default" leaves out the class token, but {where} ({shape.model_type}) '
            'has none; set feature_select = "full"'
        )
    keeps_class_token = select == "full" and shape.class_token
    if keeps_class_token and shape.merge > 1:
        raise ConfigError(
            f'{name}.feature_select = "full" keeps the class token, which has no neighbours to merge with, but its '
            f"projector merges {shape.merge} x {shape.merge} features; set its spatial_merge = 1"
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
    fixed = [shape.model_type for name in model.encoders if not (shape := vision_shape(model, name)).packed]
    for model_type in fixed:
        raise ConfigError(
            f'parallelism.encoder_context_parallel = "patches", but the patches of a {model_type} are those of one '
            'fixed size and stay together; use "images"'
        )


def _taps(values: dict[str, Any], where: str, depth: int, language_depth: int) -> tuple[int, ...]:
    """The blocks that a native merger reads in addition to the last one.

    Raises: ConfigError: there are no such blocks, or no language layers that take them.
    """
    if "deepstack_visual_indexes" not in ENCODERS[values["model_type"]].defaults:
        return ()
    taps = tuple(values["deepstack_visual_indexes"])
    if list(taps) != sorted(set(taps)) or any(block >= depth for block in taps):
        raise ConfigError(
            f"{where}: deepstack_visual_indexes = {list(taps)}; they name blocks 0 to {depth - 1}, each once and in "
            "their order"
        )
    if len(taps) > language_depth:
        raise ConfigError(
            f"{where}: deepstack_visual_indexes = {list(taps)}: each of these features is added to the output of a "
            f"language layer of its own, but the language model has {language_depth}; name at most as many"
        )
    return taps


def _check_native(model: ModelConfig, section: str, shape: VisionShape, where: str) -> None:
    """Checks that a configured native merger exists and fits."""
    if not shape.native_merge:
        raise ConfigError(
            f'{section}.kind = "native", but {where} ({shape.model_type}) has no merger of its own; use "mlp"'
        )
    if shape.merge != shape.native_merge:
        raise ConfigError(
            f"{section}.spatial_merge = {shape.merge}, but the merger of {where} merges "
            f"{shape.native_merge} x {shape.native_merge}; set spatial_merge = {shape.native_merge} or "
            'kind = "mlp"'
        )
    language_width = language_shape(model).width
    if shape.native_width != language_width:
        raise ConfigError(
            f'{section}.kind = "native": the merger of {where} makes {shape.native_width} columns '
            f'(hidden_size), but the language model has {language_width}; change one or use kind = "mlp"'
        )
