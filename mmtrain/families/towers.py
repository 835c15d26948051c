"""Encoders of one form: a vision transformer by the keys that most configs have, and one of spectrograms. Pure.

Both are of blocks with separate queries, keys and values, and an MLP of two linear layers.
"""

from collections.abc import Mapping
from typing import Any

from mmtrain.errors import ConfigError
from mmtrain.families.shapes import ROW_FRAMES, VisionShape, check_divides, single_size
from mmtrain.families.tensor_table import QKV, TensorTable, block_styles

SIZES = {
    "width": "hidden_size",
    "depth": "num_hidden_layers",
    "heads": "num_attention_heads",
    "mlp": "intermediate_size",
}

KEYS: Mapping[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
    "attention_dropout": 0.0,
}

TABLE = TensorTable(
    blocks="vision.encoder.layers",
    block=block_styles("layer_norm1 layer_norm2", QKV, "self_attn.out_proj", "mlp.fc1", "mlp.fc2"),
    embed={"vision.embeddings": "whole"},
    norm={"vision.post_layernorm": "norm"},
)


def tower_shape(values: Mapping[str, Any], where: str, merge: int, **flags: Any) -> VisionShape:
    """The sizes of a vision transformer. Args: flags: fields of the shape that its keys do not say."""
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
        merge=merge,
        **flags,
    )


def fixed_size(values: Mapping[str, Any], where: str, merge: int, **flags: Any) -> VisionShape:
    """The sizes of one whose images all have one size. Args: flags: as of `tower_shape`."""
    patch = single_size(where, "patch_size", values["patch_size"])
    image = single_size(where, "image_size", values["image_size"])
    check_divides(where, "patch_size", patch, "image_size", image)
    side = image // patch
    if side % merge:
        raise ConfigError(
            f"model.projector.spatial_merge = {merge}, but {where} makes {side} x {side} "
            f"patches; choose a divisor of {side}"
        )
    return tower_shape(values, where, merge, packed=False, fixed_grid=(1, side, side), **flags)


SOUND_SIZES = {
    "width": "d_model",
    "depth": "encoder_layers",
    "heads": "encoder_attention_heads",
    "mlp": "encoder_ffn_dim",
}
SOUND_ALIASES = {
    "hidden_size": "d_model",
    "num_hidden_layers": "encoder_layers",
    "num_attention_heads": "encoder_attention_heads",
}
SOUND_DROPOUT = ("dropout", "attention_dropout", "activation_dropout", "encoder_layerdrop")

SOUND_TABLE = TensorTable(
    blocks="vision.layers",
    block=block_styles("self_attn_layer_norm final_layer_norm", QKV, "self_attn.out_proj", "fc1", "fc2"),
    heads=("self_attn.num_heads",),
    embed={"vision.conv1": "whole", "vision.conv2": "whole", "vision.embed_positions": "whole"},
    norm={"vision.layer_norm": "norm"},
)


def sound_shape(values: Mapping[str, Any], merge: int, *, packed: bool, **flags: Any) -> VisionShape:
    """The sizes of an encoder of spectrograms. Args: flags: fields of the shape that its keys do not say."""
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
        merge=merge,
        **flags,
    )
