"""Qwen2.5-VL: images of any size, most of whose blocks attend inside of windows, and videos with seconds.

Source: arXiv:2502.13923.
"""

from collections.abc import Mapping
from typing import Any

from mmtrain.errors import ConfigError
from mmtrain.families.family import Encoder, Family, Videos
from mmtrain.families.native_resolution import ALIASES, IMAGES, SIZES, TEXT, packed_shape, packed_table, whole_model
from mmtrain.families.shapes import VisionShape, single_size
from mmtrain.families.tensor_table import GATED_MLP

_SIZES = SIZES | {"out": "out_hidden_size", "window": "window_size", "full": "fullatt_block_indexes"}


def _shape(values: Mapping[str, Any], where: str, merge: int) -> VisionShape:
    pixels = single_size(where, "window_size", values["window_size"])
    patch = single_size(where, "patch_size", values["patch_size"])
    window = pixels // merge // patch  # rounded down, as Hugging Face does
    if not window:
        raise ConfigError(
            f"{where}: window_size = {pixels} pixels is less than one merged token of spatial_merge * patch_size "
            f"= {merge} * {patch} pixels; raise it or lower model.projector.spatial_merge"
        )
    return packed_shape(
        values,
        where,
        merge,
        _SIZES,
        gated_mlp=True,
        rms_norm=True,
        window=window,
        full_blocks=tuple(values["fullatt_block_indexes"]),
    )


_VISION = Encoder(
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
    aliases=ALIASES,
    optional={"rope_parameters": {}},
    parents=("qwen2_5_vl",),
    sizes=_SIZES,
    shape=_shape,
    table=packed_table(*GATED_MLP),
    images=IMAGES,
    videos=Videos(time_key="tokens_per_second"),
)

FAMILY = Family(
    name="qwen2_5_vl",
    encoders={"qwen2_5_vl_vision": _VISION},
    languages={"qwen2_5_vl_text": TEXT.like({}, parents=("qwen2_5_vl",))},
    composites={"qwen2_5_vl": whole_model("qwen2_5_vl", "Qwen2_5_VL", older=True)},
)
