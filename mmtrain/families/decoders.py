"""Decoder-only language models of one form: keys, and how their layers are divided. Pure; no weights."""

from dataclasses import replace
from typing import Any

from mmtrain.families.family import Language
from mmtrain.families.tensor_table import GATED_MLP, QKV, TensorTable, block_styles

TABLE = TensorTable(
    blocks="language.model.layers",
    block=block_styles("input_layernorm post_attention_layernorm", QKV, "self_attn.o_proj", *GATED_MLP),
    embed={"language.model.embed_tokens": "vocabulary"},
    norm={"language.model.norm": "whole", "language.lm_head": "columns_whole"},
    states={"language.model.norm": "norm"},
)
WITH_HEAD_NORMS = replace(
    TABLE, block={**TABLE.block, "self_attn.q_norm": "norm_heads", "self_attn.k_norm": "norm_heads"}
)
"""The table of a model whose queries and keys have norms of each head."""

DECODER = Language(
    defaults={
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
    },
    optional={
        "rope_parameters": {},
        "rope_theta": 1e4,
        "rope_scaling": {},
        "head_dim": 128,
        "layer_types": ("full_attention",),
        "use_cache": True,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    dropout=("attention_dropout",),
    table=TABLE,
)

WINDOWS: dict[str, Any] = {"sliding_window": 4096, "max_window_layers": None}
"""Optional keys of a model whose windows `use_sliding_window` turns on."""
