"""CLIP: images of one size, cut out of their middle, with a class token; and captions."""

from dataclasses import replace
from functools import partial

from mmtrain.families.composite import CONTRAST, Composite, Part, Spelling
from mmtrain.families.family import CLIP_MEAN, CLIP_STD, Encoder, Family, ImageDefaults
from mmtrain.families.texts import TOWER
from mmtrain.families.towers import KEYS, SIZES, TABLE, fixed_size

_IMAGES: tuple[Spelling, ...] = ({"vision_model.": "", "visual_projection.": "visual_projection."},)
_CAPTIONS: tuple[Spelling, ...] = ({"text_model.": "", "text_projection.": "text_projection."},)
_WIDTH = {"projection_dim": 512}

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
            spellings=_IMAGES,
            embeds="visual_projection",
            sizes=SIZES,
            # Not run: the norm behind the last block is for the pooled class token alone.
            shape=partial(fixed_size, class_token=True, embed_norm=True, embed_bias=False),
            table=replace(TABLE, embed={"vision.embeddings": "whole", "vision.pre_layrnorm": "whole"}),
            images=ImageDefaults(layout="cropped", processor="CLIPImageProcessor", mean=CLIP_MEAN, std=CLIP_STD),
            pooling="token",
            embedding="projection_dim",
        )
    },
    languages={
        "clip_text_model": TOWER.like(
            {
                "vocab_size": 49408,
                "max_position_embeddings": 77,
                "hidden_act": "quick_gelu",
                "layer_norm_eps": 1e-5,
                "initializer_range": 0.02,
                "initializer_factor": 1.0,
                "projection_dim": 512,
            },
            spellings=_CAPTIONS,
            embeds="text_projection",
            embedding="projection_dim",
        )
    },
    composites={
        "clip": Composite(
            class_name="CLIP",
            encoders=("clip_vision_model",),
            languages=("clip_text_model",),
            loss="clip",
            scalar=(),
            parts={
                "model.encoder": Part(
                    config="vision_config",
                    older="vision_config_dict",
                    model_type="clip_vision_model",
                    decided=_WIDTH,
                    spellings=_IMAGES,
                    in_class=0,
                ),
                "model.language": Part(
                    config="text_config",
                    older="text_config_dict",
                    model_type="clip_text_model",
                    decided=_WIDTH,
                    spellings=_CAPTIONS,
                    in_class=0,
                ),
                "model.contrast": CONTRAST,
            },
            defaults=_WIDTH,
        )
    },
)
