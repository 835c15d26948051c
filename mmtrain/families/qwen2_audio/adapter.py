"""The classes of Qwen2-Audio in transformers."""

from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from mmtrain.families.whisper.adapter import WhisperEncoder


class Qwen2AudioEncoder(WhisperEncoder):
    """The Qwen2-Audio encoder, which is always packed."""

    def classes(self) -> tuple[type[PreTrainedConfig], Any]:
        from transformers import Qwen2AudioEncoder, Qwen2AudioEncoderConfig

        return Qwen2AudioEncoderConfig, Qwen2AudioEncoder


def projector(width: int, outputs: int, hidden_act: str) -> nn.Module:
    """One linear layer. Args: see `models.adapters.make_projector_of`."""
    from transformers import Qwen2AudioConfig
    from transformers.models.qwen2_audio.modeling_qwen2_audio import Qwen2AudioMultiModalProjector

    one_head = {"num_attention_heads": 1, "num_key_value_heads": 1}  # of modules that are not made
    return Qwen2AudioMultiModalProjector(
        Qwen2AudioConfig(
            audio_config={"model_type": "qwen2_audio_encoder", "d_model": width},
            text_config={"model_type": "qwen2", "hidden_size": outputs, **one_head},
        )
    )


ADAPTERS = {"qwen2_audio_encoder": Qwen2AudioEncoder()}
