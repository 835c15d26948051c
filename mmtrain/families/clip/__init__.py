"""CLIP: images of one size, cut out of their middle, with a class token."""

from dataclasses import replace
from functools import partial

from mmtrain.families.family import CLIP_MEAN, CLIP_STD, Encoder, Family, Images
from mmtrain.families.towers import KEYS, SIZES, TABLE, fixed_size

FAMILY = Family(
    name="clip",
    encoders={
        "clip_vision_model": Encoder(
            defaults={
                **KEYS,
                "image_size": 224,
                "patch_size": 32,
                "hidden_act": "quick_gelu",
                "layer_norm_eps": 1e-5,
                "initializer_range": 0.02,
                "initializer_factor": 1.0,
            },
            optional={"projection_dim": 512},
            parents=("clip",),
            dropout=("attention_dropout",),
            prefixes=("vision_model.",),
            sizes=SIZES,
            # Not run: the norm behind the last block is for the pooled class token alone.
            shape=partial(fixed_size, class_token=True, embed_norm=True, embed_bias=False),
            table=replace(TABLE, embed={"vision.embeddings": "whole", "vision.pre_layrnorm": "whole"}),
            images=Images(layout="cropped", processor="CLIPImageProcessor", mean=CLIP_MEAN, std=CLIP_STD),
        )
    },
)
