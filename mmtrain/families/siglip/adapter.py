"""The class of SigLIP in transformers."""

import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from mmtrain.models.adapters import MaskedVision


class Siglip(MaskedVision):
    """The SigLIP vision transformer without its pooling head."""

    blocks, embed, norm = "encoder.layers", ("embeddings",), "post_layernorm"

    def __init__(self, name: str) -> None:
        """Args: name: how the names of its classes begin."""
        model = getattr(transformers, f"{name}VisionModel")

        def make(config: PreTrainedConfig) -> PreTrainedModel:
            config.vision_use_head = False
            made: PreTrainedModel = model(config)
            return made

        self.classes = getattr(transformers, f"{name}VisionConfig"), make


ADAPTERS = {"siglip_vision_model": Siglip("Siglip")}
