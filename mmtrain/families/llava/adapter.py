"""The projector of LLaVA in transformers."""

from torch import nn
from transformers import LlavaConfig
from transformers.models.llava.modeling_llava import LlavaMultiModalProjector


def projector(width: int, outputs: int, hidden_act: str) -> nn.Module:
    """Two linear layers. Args: see `models.adapters.make_projector_of`."""
    one_head = {"num_attention_heads": 1, "num_key_value_heads": 1}  # of modules that are not made
    config = LlavaConfig(
        vision_config={"model_type": "clip_vision_model", "hidden_size": width, **one_head},
        text_config={"model_type": "llama", "hidden_size": outputs, **one_head},
        projector_hidden_act=hidden_act,
    )
    return LlavaMultiModalProjector(config)
