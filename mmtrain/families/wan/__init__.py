"""Wan, a diffusion transformer that makes videos of texts.

Source: arXiv:2503.20314.
"""

from mmtrain.families.family import Family, Network
from mmtrain.families.tensor_table import Style, TensorTable, two_linears

IMAGE_KEYS = ("image_dim", "added_kv_proj_dim", "pos_embed_seq_len")
"""Keys of the branch that reads an image in addition to the text."""


def _attention(name: str) -> dict[str, Style]:
    """One attention of a block: queries and keys are normed over the columns of all heads."""
    styles: dict[str, Style] = {name: "gathered"}
    styles |= {f"{name}.to_{part}": "columns" for part in "qkv"}
    styles |= {f"{name}.norm_{part}": "norm_columns" for part in "qk"}
    return styles | {f"{name}.to_out.0": "rows"}


FAMILY = Family(
    name="wan",
    dits={
        "wan": Network(
            defaults={
                "patch_size": (1, 2, 2),
                "num_attention_heads": 40,
                "attention_head_dim": 128,
                "in_channels": 16,
                "out_channels": 16,
                "text_dim": 4096,
                "freq_dim": 256,
                "ffn_dim": 13824,
                "num_layers": 40,
                "cross_attn_norm": True,
                "qk_norm": "rms_norm_across_heads",
                "eps": 1e-6,
                "rope_max_seq_len": 1024,
            },
            optional=dict.fromkeys(IMAGE_KEYS),
            parents=("WanTransformer3DModel",),
            table=TensorTable(
                blocks="dit.blocks",
                block={
                    "scale_shift_table": "moved",
                    **_attention("attn1"),
                    "norm2": "norm",
                    **_attention("attn2"),
                    "ffn": "gathered",
                    "ffn.net.0.proj": "columns",
                    "ffn.net.2": "rows",
                },
                heads=("attn1.heads", "attn2.heads"),
                embed={
                    "dit.patch_embedding": "whole",
                    **two_linears("dit.condition_embedder.text_embedder"),
                    **two_linears("dit.condition_embedder.time_embedder"),
                    "dit.condition_embedder.time_proj": "columns_gather",
                },
                norm={"dit.scale_shift_table": "whole", "dit.proj_out": "whole"},
            ),
        )
    },
)
