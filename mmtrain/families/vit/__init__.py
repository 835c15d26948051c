"""ViT: images of one size, with a class token."""

from collections.abc import Mapping
from typing import Any

from mmtrain.families.composite import removed
from mmtrain.families.family import Encoder, Family, ImageDefaults
from mmtrain.families.shapes import VisionShape
from mmtrain.families.tensor_table import TensorTable, block_styles
from mmtrain.families.towers import SIZES, fixed_size


def _shape(values: Mapping[str, Any], where: str, merge: int) -> VisionShape:
    return fixed_size(values, where, merge, class_token=True, final_norm=True, qkv_bias=values["qkv_bias"])


FAMILY = Family(
    name="vit",
    encoders={
        "vit": Encoder(
            defaults={
                "hidden_size": 768,
                "num_hidden_layers": 12,
                "num_attention_heads": 12,
                "intermediate_size": 3072,
                "hidden_act": "gelu",
                "hidden_dropout_prob": 0.0,
                "attention_probs_dropout_prob": 0.0,
                "initializer_range": 0.02,
                "layer_norm_eps": 1e-12,
                "image_size": 224,
                "patch_size": 16,
                "num_channels": 3,
                "qkv_bias": True,
            },
            optional={"encoder_stride": 16, "pooler_output_size": 768, "pooler_act": "tanh"},
            dropout=("hidden_dropout_prob", "attention_probs_dropout_prob"),
            spellings=removed("vit."),
            sizes=SIZES,
            shape=_shape,
            table=TensorTable(
                blocks="vision.layers",
                block=block_styles(
                    "layernorm_before layernorm_after",
                    "attention.q_proj attention.k_proj attention.v_proj",
                    "attention.o_proj",
                    "mlp.fc1",
                    "mlp.fc2",
                ),
                embed={"vision.embeddings": "whole"},
                norm={"vision.layernorm": "norm"},
            ),
            images=ImageDefaults(layout="fixed", resample="BILINEAR"),
        )
    },
)
