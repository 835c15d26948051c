"""SigLIP: images of one size, and captions."""

from functools import partial

from mmtrain.families.composite import CONTRAST, Composite, Part, removed
from mmtrain.families.family import Encoder, Family, ImageDefaults
from mmtrain.families.texts import TOWER
from mmtrain.families.towers import KEYS, SIZES, TABLE, fixed_size

_IMAGES, _CAPTIONS = removed("vision_model."), removed("text_model.")

FAMILY = Family(
    name="siglip",
    encoders={
        "siglip_vision_model": Encoder(
            defaults={**KEYS, "image_size": 224},
            optional={"vision_use_head": True},
            parents=("siglip",),
            dropout=("attention_dropout",),
            spellings=_IMAGES,
            embeds="head",
            sizes=SIZES,
            shape=partial(fixed_size, final_norm=True),
            table=TABLE,
            images=ImageDefaults(layout="fixed", processor="SiglipImageProcessor"),
            pooling="attention",
            embedding="hidden_size",
            pools="vision_use_head",
        )
    },
    languages={
        "siglip_text_model": TOWER.like(
            {
                "vocab_size": 32000,
                "hidden_size": 768,
                "intermediate_size": 3072,
                "num_attention_heads": 12,
                "max_position_embeddings": 64,
                "hidden_act": "gelu_pytorch_tanh",
                "layer_norm_eps": 1e-6,
            },
            {"projection_size": 768},
            spellings=_CAPTIONS,
            embeds="head",
            embedding="projection_size",
            embedding_bias=True,
            bidirectional=True,
        )
    },
    composites={
        "siglip": Composite(
            class_name="Siglip",
            encoders=("siglip_vision_model",),
            languages=("siglip_text_model",),
            loss="siglip",
            final_norm=True,
            parts={
                "model.encoder": Part(
                    config="vision_config", model_type="siglip_vision_model", spellings=_IMAGES, in_class=0
                ),
                "model.language": Part(
                    config="text_config", model_type="siglip_text_model", spellings=_CAPTIONS, in_class=0
                ),
                "model.contrast": CONTRAST,
            },
        )
    },
)
