"""SigLIP 2: images of any size, each as large as a number of patches allows (NaFlex), with positions resized to it.

Source: arXiv:2502.14786, sec. 2.4.2.
"""

from collections.abc import Mapping
from typing import Any

from mmtrain.families.composite import removed
from mmtrain.families.family import Encoder, Family, ImageDefaults
from mmtrain.families.shapes import VisionShape, check_square
from mmtrain.families.towers import KEYS, SIZES, TABLE, tower_shape


def _shape(values: Mapping[str, Any], where: str, merge: int) -> VisionShape:
    positions = values["num_patches"]
    check_square(where, "num_patches", positions)
    return tower_shape(values, where, merge, packed=True, fills=True, num_positions=positions, final_norm=True)


FAMILY = Family(
    name="siglip2",
    encoders={
        "siglip2_vision_model": Encoder(
            defaults={**KEYS, "num_patches": 256},
            optional={"vision_use_head": True},
            parents=("siglip2",),
            dropout=("attention_dropout",),
            spellings=removed("vision_model."),
            sizes=SIZES,
            shape=_shape,
            table=TABLE,
            images=ImageDefaults(layout="filled", resample="BILINEAR"),
        )
    },
)
