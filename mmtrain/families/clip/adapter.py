"""The class of CLIP in transformers."""

from transformers import CLIPVisionConfig, CLIPVisionModel

from mmtrain.models.adapters import MaskedVision


class CLIP(MaskedVision):
    """The CLIP vision transformer, up to its last block: the norm after it is for the pooled class token alone."""

    classes = CLIPVisionConfig, CLIPVisionModel
    extra_rows = 1


ADAPTERS = {"clip_vision_model": CLIP}
