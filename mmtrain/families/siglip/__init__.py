"""SigLIP: images of one size."""

from functools import partial

from mmtrain.families.family import Encoder, Family, Images
from mmtrain.families.towers import KEYS, SIZES, TABLE, fixed_size

FAMILY = Family(
    name="siglip",
    encoders={
        "siglip_vision_model": Encoder(
            defaults={**KEYS, "image_size": 224},
            optional={"vision_use_head": True},
            parents=("siglip",),
            dropout=("attention_dropout",),
            prefixes=("vision_model.",),
            sizes=SIZES,
            shape=partial(fixed_size, final_norm=True),
            table=TABLE,
            images=Images(layout="fixed", processor="SiglipImageProcessor"),
        )
    },
)
