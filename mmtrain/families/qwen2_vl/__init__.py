"""Qwen2-VL: images of any size and videos.

Source: arXiv:2409.12191.
"""

from functools import partial

from mmtrain.families.family import Encoder, Family, Videos
from mmtrain.families.native_resolution import ALIASES, IMAGES, TEXT, packed_shape, packed_table, whole_model

_SIZES = {"width": "embed_dim", "depth": "depth", "heads": "num_heads", "out": "hidden_size"}

_VISION = Encoder(
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
    aliases=ALIASES,
    optional={"rope_parameters": {}},
    parents=("qwen2_vl",),
    sizes=_SIZES,
    shape=partial(packed_shape, sizes=_SIZES),
    table=packed_table("mlp.fc1", "mlp.fc2"),
    images=IMAGES,
    videos=Videos(),
)

FAMILY = Family(
    name="qwen2_vl",
    encoders={"qwen2_vl_vision": _VISION},
    languages={"qwen2_vl_text": TEXT.like({}, parents=("qwen2_vl",))},
    composites={"qwen2_vl": whole_model("qwen2_vl", "Qwen2VL", older=True)},
)
