"""The supported model families: the keys of their Hugging Face configs, with the defaults of the classes. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One `model_type`: the relevant keys of its Hugging Face config, with the defaults of that class."""

    defaults: Mapping[str, Any]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of a key that the Hugging Face class accepts."""
    optional: Mapping[str, Any] = field(default_factory=dict)
    """Keys without a default that an inline config may hold -> a value of their type; None: the class checks it."""
    parents: tuple[str, ...] = ()
    """Other values of `model_type` that name this family, or a whole model that contains it."""
    dropout: tuple[str, ...] = ()
    """Keys that must be 0: see `config_values`."""
    sizes: Mapping[str, str] = field(default_factory=dict)
    """What an encoder calls its width, depth, heads, mlp (if a key), and out: the width that its own merger makes."""
    axis_columns: tuple[int, ...] = ()
    """Default of `mrope_section` of a language model whose image tokens have time, height and width; empty: positions
    are along the text alone."""
    qkv_bias: bool = False
    """Whether queries, keys and values of a language model have biases that no key turns off."""
    head_norms: bool = False
    """Whether norms follow on the queries and keys of each head of a language model."""
    sliding_window: int = 0
    """Default of the key `sliding_window` where a number alone turns windows on, in tokens."""

    @property
    def position_axes(self) -> int:
        """Axes of a language model's positions."""
        return len(self.axis_columns) or 1


def _sizes(width: str, depth: str, heads: str, mlp: str) -> dict[str, str]:
    return {"width": width, "depth": depth, "heads": heads, "mlp": mlp}


_SIZES = _sizes("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")


def _like(base: Family, changes: Mapping[str, Any], optional: Mapping[str, Any], **fields: Any) -> Family:
    """Args: changes: of the defaults of the base, and further ones. optional: further keys without a default."""
    return replace(base, defaults={**base.defaults, **changes}, optional={**base.optional, **optional}, **fields)


_TOWER = Family(
    defaults={
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_channels": 3,
        "patch_size": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
        "attention_dropout": 0.0,
    },
    dropout=("attention_dropout",),
    sizes=_SIZES,
)

ENCODERS: dict[str, Family] = {
    "qwen2_vl_vision": Family(
        defaults={
            "depth": 32,
            "embed_dim": 1280,
            "hidden_size": 3584,
            "hidden_act": "quick_gelu",
            "mlp_ratio": 4,
            "num_heads": 16,
            "in_channels": 3,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "initializer_range": 0.02,
        },
        aliases={"num_attention_heads": "num_heads", "num_hidden_layers": "depth"},
        optional={"rope_parameters": {}},
        parents=("qwen2_vl",),
        sizes={"width": "embed_dim", "depth": "depth", "heads": "num_heads", "out": "hidden_size"},
    ),
    "qwen2_5_vl_vision": Family(
        defaults={
            "depth": 32,
            "hidden_size": 3584,
            "hidden_act": "silu",
            "intermediate_size": 3420,
            "num_heads": 16,
            "in_channels": 3,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "tokens_per_second": 4,
            "window_size": 112,
            "out_hidden_size": 3584,
            "fullatt_block_indexes": (7, 15, 23, 31),
            "initializer_range": 0.02,
        },
        aliases={"num_attention_heads": "num_heads", "num_hidden_layers": "depth"},
        optional={"rope_parameters": {}},
        parents=("qwen2_5_vl",),
        sizes=_sizes("hidden_size", "depth", "num_heads", "intermediate_size") | {"out": "out_hidden_size"},
    ),
    "qwen3_vl_vision": Family(
        defaults={
            "depth": 27,
            "hidden_size": 1152,
            "hidden_act": "gelu_pytorch_tanh",
            "intermediate_size": 4304,
            "num_heads": 16,
            "in_channels": 3,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": 3584,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": (8, 16, 24),
            "initializer_range": 0.02,
        },
        aliases={"num_attention_heads": "num_heads", "num_hidden_layers": "depth"},
        optional={"rope_parameters": {}},
        parents=("qwen3_vl",),
        sizes=_sizes("hidden_size", "depth", "num_heads", "intermediate_size") | {"out": "out_hidden_size"},
    ),
    "siglip_vision_model": _like(_TOWER, {"image_size": 224}, {"vision_use_head": True}, parents=("siglip",)),
    "siglip2_vision_model": _like(_TOWER, {"num_patches": 256}, {"vision_use_head": True}, parents=("siglip2",)),
    "clip_vision_model": _like(
        _TOWER,
        {
            "image_size": 224,
            "patch_size": 32,
            "hidden_act": "quick_gelu",
            "layer_norm_eps": 1e-5,
            "initializer_range": 0.02,
            "initializer_factor": 1.0,
        },
        {"projection_dim": 512},
        parents=("clip",),
    ),
    "vit": Family(
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
        sizes=_SIZES,
    ),
    "whisper_encoder": Family(
        defaults={
            "d_model": 384,
            "encoder_layers": 4,
            "encoder_attention_heads": 6,
            "encoder_ffn_dim": 1536,
            "num_mel_bins": 80,
            "max_source_positions": 1500,
            "activation_function": "gelu",
            "init_std": 0.02,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "activation_dropout": 0.0,
            "encoder_layerdrop": 0.0,
        },
        aliases={
            "hidden_size": "d_model",
            "num_hidden_layers": "encoder_layers",
            "num_attention_heads": "encoder_attention_heads",
        },
        parents=("whisper",),
        dropout=("dropout", "attention_dropout", "activation_dropout", "encoder_layerdrop"),
        sizes=_sizes("d_model", "encoder_layers", "encoder_attention_heads", "encoder_ffn_dim"),
    ),
    "qwen2_audio_encoder": Family(
        defaults={
            "d_model": 1280,
            "encoder_layers": 32,
            "encoder_attention_heads": 20,
            "encoder_ffn_dim": 5120,
            "num_mel_bins": 128,
            "max_source_positions": 1500,
            "activation_function": "gelu",
            "initializer_range": 0.02,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "activation_dropout": 0.0,
            "encoder_layerdrop": 0.0,
        },
        aliases={
            "hidden_size": "d_model",
            "num_hidden_layers": "encoder_layers",
            "num_attention_heads": "encoder_attention_heads",
            "intermediate_size": "encoder_ffn_dim",
        },
        optional={"scale_embedding": False},
        dropout=("dropout", "attention_dropout", "activation_dropout", "encoder_layerdrop"),
        sizes=_sizes("d_model", "encoder_layers", "encoder_attention_heads", "encoder_ffn_dim"),
    ),
}

_LANGUAGE_OPTIONAL: dict[str, Any] = {
    "rope_parameters": {},
    "rope_theta": 1e4,
    "rope_scaling": {},
    "head_dim": 128,
    "layer_types": ("full_attention",),
    "use_cache": True,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}

_DECODER = Family(
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
    optional=_LANGUAGE_OPTIONAL,
    dropout=("attention_dropout",),
)


_WINDOWS: dict[str, Any] = {"sliding_window": 4096, "max_window_layers": None}
_QWEN_VL_TEXT = _like(
    _DECODER,
    {
        "vocab_size": 152064,
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "use_sliding_window": False,
    },
    _WINDOWS,
    axis_columns=(16, 24, 24),
    qkv_bias=True,
)

LANGUAGES: dict[str, Family] = {
    "qwen2": _like(_DECODER, {"use_sliding_window": False}, _WINDOWS, qkv_bias=True),
    "llama": _like(
        _DECODER,
        {
            "vocab_size": 32000,
            "intermediate_size": 11008,
            "num_key_value_heads": None,
            "max_position_embeddings": 2048,
            "attention_bias": False,
            "mlp_bias": False,
        },
        {"pretraining_tp": 1},
    ),
    "qwen3": _like(
        _DECODER,
        {"head_dim": 128, "attention_bias": False, "use_sliding_window": False},
        _WINDOWS,
        head_norms=True,
    ),
    "mistral": _like(
        _DECODER,
        {
            "vocab_size": 32000,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
        },
        {"sliding_window": 4096},
        sliding_window=4096,
    ),
    "qwen2_vl_text": replace(_QWEN_VL_TEXT, parents=("qwen2_vl",)),
    "qwen2_5_vl_text": replace(_QWEN_VL_TEXT, parents=("qwen2_5_vl",)),
    "qwen3_vl_text": _like(
        _DECODER,
        {"head_dim": 128, "attention_bias": False, "max_position_embeddings": 128000},
        {},
        parents=("qwen3_vl",),
        axis_columns=(24, 20, 20),
        head_norms=True,
    ),
}

IMAGE_KEYS = ("image_dim", "added_kv_proj_dim", "pos_embed_seq_len")
"""Keys of the branch that reads an image in addition to the text."""

DITS: dict[str, Family] = {
    "wan": Family(
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
    ),
}


VAES: dict[str, Family] = {
    "autoencoder_kl": Family(
        defaults={
            "in_channels": 3,
            "out_channels": 3,
            "down_block_types": ("DownEncoderBlock2D",),
            "up_block_types": ("UpDecoderBlock2D",),
            "block_out_channels": (64,),
            "layers_per_block": 1,
            "act_fn": "silu",
            "latent_channels": 4,
            "norm_num_groups": 32,
            "sample_size": 32,
            "scaling_factor": 0.18215,
            "force_upcast": True,
            "use_quant_conv": True,
            "use_post_quant_conv": True,
            "mid_block_add_attention": True,
        },
        optional=dict.fromkeys(("shift_factor", "latents_mean", "latents_std")),
        parents=("AutoencoderKL",),
    ),
    "autoencoder_kl_wan": Family(
        defaults={
            "base_dim": 96,
            "z_dim": 16,
            "dim_mult": (1, 2, 4, 4),
            "num_res_blocks": 2,
            "temperal_downsample": (False, True, True),
            "dropout": 0.0,
            "latents_mean": (
                *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
                *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
            ),
            "latents_std": (
                *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
                *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160),
            ),
            "is_residual": False,
            "in_channels": 3,
            "out_channels": 3,
        },
        optional={
            "decoder_base_dim": 96,
            "attn_scales": None,
            "patch_size": None,
            "scale_factor_temporal": 4,
            "scale_factor_spatial": 8,
        },
        parents=("AutoencoderKLWan",),
        dropout=("dropout",),
    ),
}
