"""The class of SigLIP in transformers."""

from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from mmtrain.models.adapters import MaskedVision


class Siglip(MaskedVision):
    """The SigLIP vision transformer without its pooling head."""

    blocks, embed, norm = "encoder.layers", ("embeddings",), "post_layernorm"
    name = "Siglip"

    def classes(self) -> tuple[type[PreTrainedConfig], Any]:
        import transformers

        model = getattr(transformers, f"{self.name}VisionModel")

        def make(config: PreTrainedConfig) -> PreTrainedModel:
            config.vision_use_head = False
            return model(config)

        return getattr(transformers, f"{self.name}VisionConfig"), make


ADAPTERS = {"siglip_vision_model": Siglip()}
