"""The class of ViT in transformers."""

from functools import partial

from transformers import ViTConfig, ViTModel

from mmtrain.models.adapters import MaskedVision


class ViT(MaskedVision):
    """The ViT without its pooler."""

    classes = ViTConfig, partial(ViTModel, add_pooling_layer=False)
    extra_rows = 1


ADAPTERS = {"vit": ViT}
