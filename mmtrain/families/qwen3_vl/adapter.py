"""The classes of Qwen3-VL in transformers."""

from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel
from transformers.vision_utils import get_vision_interpolation_indices_and_weights

from mmtrain.models.adapters import PackedVision, RankRows, TextPart
from mmtrain.models.transfer import to_device


class Qwen3VLVision(PackedVision):
    """The Qwen3-VL vision transformer: learned positions in addition, and a merger for the output of some blocks."""

    classes = Qwen3VLVisionConfig, Qwen3VLVisionModel

    def call_embed(self, tower: PreTrainedModel, pixels: Tensor, rows: RankRows) -> Tensor:
        x_RD = tower.patch_embed(pixels)
        index, weight = get_vision_interpolation_indices_and_weights(
            torch.tensor(rows.grids),
            tower.num_grid_per_side,
            tower.interpolation_mode,
            tower.interpolation_align_corners,
            rows.shape.merge,
        )
        patches = np.maximum(rows.indices, 0)[: len(pixels)]
        index, weight = (to_device(t[patches], x_RD.device) for t in (index, weight))
        return x_RD + (tower.pos_embed(index) * weight[:, :, None]).sum(1).to(x_RD.dtype)

    def merge(self, tower: PreTrainedModel, x_RD: Tensor, taps: list[Tensor]) -> Tensor:
        pairs = zip(tower.deepstack_merger_list, taps, strict=True)
        return torch.cat([tower.merger(x_RD), *(merger(tap) for merger, tap in pairs)], dim=1)


ADAPTERS = {"qwen3_vl_vision": Qwen3VLVision, "qwen3_vl_text": partial(TextPart, "Qwen3VL")}
