"""The class of CLIP in transformers."""

from typing import Any

from transformers import PreTrainedConfig

from mmtrain.models.adapters import MaskedVision


class CLIP(MaskedVision):
    """The CLIP vision transformer, up to its last block: the norm after it is for the pooled class token alone."""

    blocks, embed, norm = "encoder.layers", ("embeddings", "pre_layrnorm"), "post_layernorm"
    extra_rows = 1

    def classes(self) -> tuple[type[PreTrainedConfig], Any]:
        from transformers import CLIPVisionConfig, CLIPVisionModel

        return CLIPVisionConfig, CLIPVisionModel


ADAPTERS = {"clip_vision_model": CLIP()}
