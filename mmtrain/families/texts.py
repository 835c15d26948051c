"""Towers of texts of one form: blocks of a vision transformer over tokens with learned positions. Pure; no weights."""

from mmtrain.families.family import Language
from mmtrain.families.tensor_table import QKV, TensorTable, block_styles

TABLE = TensorTable(
    blocks="language.encoder.layers",
    block=block_styles("layer_norm1 layer_norm2", QKV, "self_attn.out_proj", "mlp.fc1", "mlp.fc2"),
    embed={"language.embeddings": "whole"},
    norm={"language.final_layer_norm": "norm"},
)

TOWER = Language(
    defaults={
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "attention_dropout": 0.0,
    },
    optional={"pad_token_id": None, "bos_token_id": None, "eos_token_id": None},
    qkv_bias=True,
    dropout=("attention_dropout",),
    table=TABLE,
)
