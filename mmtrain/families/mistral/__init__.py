"""Mistral, a language model whose tokens see a window of the text."""

from mmtrain.families.decoders import DECODER
from mmtrain.families.family import Family

FAMILY = Family(
    name="mistral",
    languages={
        "mistral": DECODER.like(
            {
                "vocab_size": 32000,
                "intermediate_size": 14336,
                "num_key_value_heads": 8,
                "max_position_embeddings": 131072,
            },
            {"sliding_window": 4096},
            sliding_window=4096,
        )
    },
)
