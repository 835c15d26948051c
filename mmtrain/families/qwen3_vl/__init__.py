"""Qwen3-VL: learned positions in addition to rotary ones, features of several blocks (DeepStack), videos with times.

Source: DeepStack, arXiv:2406.04334.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mmtrain.families.decoders import DECODER, WITH_HEAD_NORMS
from mmtrain.families.family import HALF, Encoder, Family, Videos
from mmtrain.families.native_resolution import (
    ALIASES,
    IMAGES,
    SIZES,
    merger_styles,
    packed_shape,
    packed_table,
    whole_model,
)
from mmtrain.families.shapes import VisionShape, check_square

_SIZES = SIZES | {"out": "out_hidden_size", "taps": "deepstack_visual_indexes"}
_MERGER = "norm linear_fc1 linear_fc2"


def _shape(values: Mapping[str, Any], where: str, merge: int) -> VisionShape:
    positions = values["num_position_embeddings"]
    check_square(where, "num_position_embeddings", positions)
    # The positions of a row are the corners of its cell.
    return packed_shape(
        values, where, merge, _SIZES, num_positions=positions, positions_per_row=4, embed_bias=positions > 0
    )


_VISION = Encoder(
    defaults={
        "depth": 27,
        "hidden_size": 1152,
        "hidden_act": "gelu_pytorch_tanh",
        "intermediate_size": 4304,
        "num_heads": 16,
        "in_channels": 3,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 3584,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": (8, 16, 24),
        "initializer_range": 0.02,
    },
    aliases=ALIASES,
    optional={"rope_parameters": {}},
    parents=("qwen3_vl",),
    sizes=_SIZES,
    shape=_shape,
    table=replace(
        packed_table("mlp.linear_fc1", "mlp.linear_fc2"),
        embed={"vision.patch_embed": "whole", "vision.pos_embed": "whole"},
        merger=merger_styles("vision.merger", _MERGER),
        tap_merger=merger_styles("vision.deepstack_merger_list.{}", _MERGER),
    ),
    images=replace(IMAGES, mean=HALF, std=HALF, min_pixels=256 * 256, max_pixels=4096 * 4096),
    videos=Videos(timed=True, min_pixels=128 * 32**2, max_pixels=768 * 32**2),
)

_TEXT = DECODER.like(
    {"head_dim": 128, "attention_bias": False, "max_position_embeddings": 128000},
    parents=("qwen3_vl",),
    axis_columns=(24, 20, 20),
    head_norms=True,
    table=WITH_HEAD_NORMS,
)

FAMILY = Family(
    name="qwen3_vl",
    encoders={"qwen3_vl_vision": _VISION},
    languages={"qwen3_vl_text": _TEXT},
    composites={"qwen3_vl": whole_model("qwen3_vl", "Qwen3VL", older=False)},
)
