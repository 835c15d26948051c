"""The class of ViT in transformers."""

from typing import Any

from transformers import PreTrainedConfig

from mmtrain.models.adapters import MaskedVision


class ViT(MaskedVision):
    """The ViT without its pooler."""

    blocks, embed, norm = "layers", ("embeddings",), "layernorm"
    extra_rows = 1

    def classes(self) -> tuple[type[PreTrainedConfig], Any]:
        from transformers import ViTConfig, ViTModel

        return ViTConfig, lambda config: ViTModel(config, add_pooling_layer=False)


ADAPTERS = {"vit": ViT()}
