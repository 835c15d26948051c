"""The classes of Qwen2-Audio in transformers."""

import transformers
from torch import nn
from transformers.models.qwen2_audio.modeling_qwen2_audio import Qwen2AudioMultiModalProjector

from mmtrain.families.whisper.adapter import WhisperEncoder


class Qwen2AudioEncoder(WhisperEncoder):
    """The Qwen2-Audio encoder, which is always packed."""

    classes = transformers.Qwen2AudioEncoderConfig, transformers.Qwen2AudioEncoder


def projector(width: int, outputs: int, hidden_act: str) -> nn.Module:
    """One linear layer. Args: see `models.adapters.make_projector_of`."""
    one_head = {"num_attention_heads": 1, "num_key_value_heads": 1}  # of modules that are not made
    return Qwen2AudioMultiModalProjector(
        transformers.Qwen2AudioConfig(
            audio_config={"model_type": "qwen2_audio_encoder", "d_model": width},
            text_config={"model_type": "qwen2", "hidden_size": outputs, **one_head},
        )
    )


ADAPTERS = {"qwen2_audio_encoder": Qwen2AudioEncoder}
