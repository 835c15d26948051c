"""The classes of Qwen2-VL in transformers."""

from functools import partial

from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from mmtrain.models.adapters import PackedVision, TextPart


class Qwen2VLVision(PackedVision):
    """The Qwen2-VL vision transformer."""

    classes = Qwen2VLVisionConfig, Qwen2VisionTransformerPretrainedModel


ADAPTERS = {"qwen2_vl_vision": Qwen2VLVision, "qwen2_vl_text": partial(TextPart, "Qwen2VL")}
