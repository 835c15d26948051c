"""Tiny models of every family, small enough for a test to run all of them."""

from types import SimpleNamespace

import pytest

from mmtrain.config.model import EncoderConfig, LanguageConfig, ModelConfig, ProjectorConfig

_QWEN = {
    "depth": 3,
    "hidden_size": 32,
    "out_hidden_size": 24,
    "intermediate_size": 40,
    "num_heads": 2,
    "patch_size": 4,
}
ENCODERS = {
    "qwen2_vl": {
        "model_type": "qwen2_vl",
        "depth": 3,
        "embed_dim": 32,
        "hidden_size": 24,
        "num_heads": 2,
        "mlp_ratio": 2,
        "patch_size": 4,
    },
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl",
        **_QWEN,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    },
    "qwen3_vl": {
        "model_type": "qwen3_vl",
        **_QWEN,
        "num_position_embeddings": 9,
        "deepstack_visual_indexes": [0, 1],
    },
    "siglip": {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
    },
    "siglip2": {
        "model_type": "siglip2_vision_model",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_patches": 25,
        "patch_size": 4,
    },
    "clip": {
        "model_type": "clip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
    },
    "vit": {
        "model_type": "vit",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
    },
    "whisper": {
        "model_type": "whisper",
        "d_model": 32,
        "encoder_ffn_dim": 48,
        "encoder_layers": 3,
        "encoder_attention_heads": 2,
        "num_mel_bins": 10,
        "max_source_positions": 12,
    },
    "qwen2_audio": {
        "model_type": "qwen2_audio_encoder",
        "d_model": 32,
        "encoder_ffn_dim": 48,
        "encoder_layers": 3,
        "encoder_attention_heads": 2,
        "num_mel_bins": 10,
        "max_source_positions": 12,
    },
}
_LANGUAGE = {
    "vocab_size": 96,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LANGUAGES = {
    "qwen2": {"model_type": "qwen2", **_LANGUAGE},
    "llama": {"model_type": "llama", **_LANGUAGE, "head_dim": 8, "attention_bias": True, "mlp_bias": True},
    "qwen3": {"model_type": "qwen3", **_LANGUAGE, "head_dim": 8},
    "mistral": {"model_type": "mistral", **_LANGUAGE},
    "qwen2_vl_text": {
        "model_type": "qwen2_vl_text",
        **_LANGUAGE,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 1]},
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen3_vl_text": {
        "model_type": "qwen3_vl_text",
        **_LANGUAGE,
        "head_dim": 8,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]},
    },
}


VISION_MODELS = [
    ("vision", {"encoder": "qwen2_vl"}),
    ("vision", {"encoder": "qwen2_vl", "projector": {"kind": "native"}}),
    ("vision", {"encoder": "qwen2_vl", "projector": {"hidden_size": 20, "spatial_merge": 1}}),
    ("vision", {"encoder": "qwen2_5_vl"}),
    ("vision", {"encoder": "qwen2_5_vl", "projector": {"kind": "native"}}),
    ("vision", {"encoder": "qwen3_vl"}),
    ("vision", {"encoder": "qwen3_vl", "projector": {"kind": "native"}}),
    ("vision", {"encoder": "siglip"}),
    ("vision", {"encoder": "siglip2"}),
    ("vision", {"encoder": "clip", "features": {"feature_layer": -2}, "projector": {"kind": "llava"}}),
    ("vision", {"encoder": "clip", "features": {"feature_select": "full"}, "projector": {"kind": "llava"}}),
    (
        "vision",
        {"encoder": "siglip", "features": {"feature_layer": -1}, "projector": {"kind": "llava", "hidden_act": "relu"}},
    ),
    ("vision", {"encoder": "vit"}),
    ("vision", {"encoder": "vit", "encoder_config": {"qkv_bias": False}}),
    ("vision", {"encoder": "whisper", "projector": {"spatial_merge": 3}}),
    ("vision", {"encoder": "qwen2_audio", "projector": {"kind": "linear"}}),
    ("vision", {"encoder": "qwen2_audio", "projector": {"spatial_merge": 1}}),
]
"""What `tiny_model` makes a model with each kind of vision module of."""


def tiny_model(
    encoder: str | None = "qwen2_vl",
    language: str = "qwen2",
    *,
    frozen: tuple[str, ...] = (),
    projector: dict | None = None,
    encoder_config: dict | None = None,
    features: dict | None = None,
    language_config: dict | None = None,
) -> ModelConfig:
    """A tiny model; `frozen` names the sections to freeze and the dicts add to or change configs.

    Args: features: which of the encoder's features the projector reads, keys of its section.
    """
    encoder_section = None
    if encoder:
        values = {**ENCODERS[encoder], **(encoder_config or {})}
        encoder_section = EncoderConfig(config=values, trainable="encoder" not in frozen, **(features or {}))
    return ModelConfig(
        encoder=encoder_section,
        projector=ProjectorConfig(trainable="projector" not in frozen, **(projector or {})),
        language=LanguageConfig(
            config={**LANGUAGES[language], **(language_config or {})}, trainable="language" not in frozen
        ),
    )


@pytest.fixture(scope="session")
def tiny() -> SimpleNamespace:
    """`tiny.model(...)` and the raw configs of the tiny families."""
    return SimpleNamespace(model=tiny_model, encoders=ENCODERS, languages=LANGUAGES)
