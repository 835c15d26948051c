"""Whisper's encoder: an "image" is the spectrogram of a window of sound, its patches are one row."""

from collections.abc import Mapping
from typing import Any

from mmtrain.errors import ConfigError
from mmtrain.families.composite import removed
from mmtrain.families.family import Encoder, Family
from mmtrain.families.shapes import VisionShape
from mmtrain.families.towers import SOUND_ALIASES, SOUND_DROPOUT, SOUND_SIZES, SOUND_TABLE, sound_shape


def _shape(values: Mapping[str, Any], where: str, merge: int) -> VisionShape:
    frames = values["max_source_positions"]
    if frames % merge:
        raise ConfigError(
            f"model.projector.spatial_merge = {merge}, but {where} makes {frames} frames (max_source_positions); "
            f"choose a divisor of {frames}"
        )
    if values["d_model"] % 2:
        raise ConfigError(f"{where}: d_model = {values['d_model']}; sines and cosines of positions need an even one")
    return sound_shape(values, merge, packed=False, fixed_grid=(1, 1, frames))


FAMILY = Family(
    name="whisper",
    encoders={
        "whisper_encoder": Encoder(
            defaults={
                "d_model": 384,
                "encoder_layers": 4,
                "encoder_attention_heads": 6,
                "encoder_ffn_dim": 1536,
                "num_mel_bins": 80,
                "max_source_positions": 1500,
                "activation_function": "gelu",
                "init_std": 0.02,
                **dict.fromkeys(SOUND_DROPOUT, 0.0),
            },
            aliases=SOUND_ALIASES,
            parents=("whisper",),
            dropout=SOUND_DROPOUT,
            spellings=removed("model.encoder.", "encoder."),
            sizes=SOUND_SIZES,
            shape=_shape,
            table=SOUND_TABLE,
        )
    },
)
