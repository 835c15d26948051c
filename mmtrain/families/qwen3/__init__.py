"""Qwen3, a language model with norms of each head's queries and keys."""

from mmtrain.families.decoders import DECODER, WINDOWS, WITH_HEAD_NORMS
from mmtrain.families.family import Family

FAMILY = Family(
    name="qwen3",
    languages={
        "qwen3": DECODER.like(
            {"head_dim": 128, "attention_bias": False, "use_sliding_window": False},
            WINDOWS,
            head_norms=True,
            table=WITH_HEAD_NORMS,
        )
    },
)
