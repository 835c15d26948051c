"""The classes of Qwen2.5-VL in transformers."""

from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

from mmtrain.families.shapes import FULL, WINDOWED
from mmtrain.families.windows import window_rows
from mmtrain.modality.bitfield import segment_bits
from mmtrain.models.adapters import PackedVision, RankRows, TextPart


class Qwen25VLVision(PackedVision):
    """The Qwen2.5-VL vision transformer: most blocks attend inside of windows, each of them one run of rows."""

    classes = Qwen2_5_VLVisionConfig, Qwen2_5_VisionTransformerPretrainedModel

    def context(self, tower: PreTrainedModel, x_rD: Tensor, rows: RankRows) -> Any:
        full, shape = super().context(tower, x_rD, rows), rows.shape
        windows = rows.attend(segment_bits(window_rows(rows.grids, shape.merge, shape.window)))
        kinds = {FULL: full, WINDOWED: {**full, "context": windows}}
        return [kinds[shape.block_kind(index)] for index in range(shape.depth)]

    def call_block(self, index: int, block: nn.Module, x_RD: Tensor, context: Any) -> Tensor:
        return block(x_RD, **context[index])


ADAPTERS = {"qwen2_5_vl_vision": Qwen25VLVision, "qwen2_5_vl_text": partial(TextPart, "Qwen2_5_VL")}
