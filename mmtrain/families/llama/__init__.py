"""Llama, a language model."""

from mmtrain.families.decoders import DECODER
from mmtrain.families.family import Family

FAMILY = Family(
    name="llama",
    languages={
        "llama": DECODER.like(
            {
                "vocab_size": 32000,
                "intermediate_size": 11008,
                "num_key_value_heads": None,
                "max_position_embeddings": 2048,
                "attention_bias": False,
                "mlp_bias": False,
            },
            {"pretraining_tp": 1},
        )
    },
)
