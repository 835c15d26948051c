"""Qwen2-Audio: an encoder of sounds, of whose spectrograms only the rows of the sound itself are run and packed."""

from collections.abc import Mapping
from typing import Any

from mmtrain.errors import ConfigError
from mmtrain.families.composite import PROJECTOR, Composite, Part, language_part, removed
from mmtrain.families.family import Encoder, Family
from mmtrain.families.projectors import ProjectorKind
from mmtrain.families.shapes import VisionShape
from mmtrain.families.towers import SOUND_ALIASES, SOUND_DROPOUT, SOUND_SIZES, SOUND_TABLE, sound_shape


def _shape(values: Mapping[str, Any], where: str, merge: int) -> VisionShape:
    if merge > 1:
        raise ConfigError(
            f"model.projector.spatial_merge = {merge}, but {where} makes one feature of two rows itself; set "
            "spatial_merge = 1"
        )
    return sound_shape(values, merge, packed=True, pool=2)


_ENCODER = Encoder(
    defaults={
        "d_model": 1280,
        "encoder_layers": 32,
        "encoder_attention_heads": 20,
        "encoder_ffn_dim": 5120,
        "num_mel_bins": 128,
        "max_source_positions": 1500,
        "activation_function": "gelu",
        "initializer_range": 0.02,
        **dict.fromkeys(SOUND_DROPOUT, 0.0),
    },
    aliases={**SOUND_ALIASES, "intermediate_size": "encoder_ffn_dim"},
    optional={"scale_embedding": False},
    dropout=SOUND_DROPOUT,
    sizes=SOUND_SIZES,
    shape=_shape,
    table=SOUND_TABLE,
)

FAMILY = Family(
    name="qwen2_audio",
    encoders={"qwen2_audio_encoder": _ENCODER},
    projectors={
        "linear": ProjectorKind(
            norm="",
            inner="",
            table={"projector.linear": "columns_gather"},
            made_by="`multi_modal_projector` of transformers' Qwen2-Audio",
        )
    },
    composites={
        "qwen2_audio": Composite(
            class_name="Qwen2Audio",
            encoders=("qwen2_audio_encoder",),
            languages=("qwen2",),
            projector="linear",
            final_norm=True,
            parts={
                "model.encoder": Part(
                    config="audio_config",
                    model_type="qwen2_audio_encoder",
                    spellings=removed("audio_tower.", "model.audio_tower."),
                    in_class=1,
                ),
                "model.projector": PROJECTOR,
                "model.language": language_part(model_type="qwen2", fixed={"tie_word_embeddings": False}),
            },
        )
    },
)
