"""The class of SigLIP 2 in transformers."""

from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from mmtrain.families.siglip.adapter import Siglip
from mmtrain.models.adapters import RankRows, block_positions


class Siglip2(Siglip):
    """The SigLIP 2 vision transformer for images of any size (NaFlex), packed, without its pooling head."""

    def call_embed(self, tower: PreTrainedModel, pixels: Tensor, rows: RankRows) -> Tensor:
        embeddings = tower.embeddings
        side, merge = embeddings.position_embedding_size, rows.shape.merge
        table = embeddings.position_embedding.weight.unflatten(0, (side, side))
        resized, patches, start = [], [], 0
        for grid in rows.grids:
            _, h, w = grid
            sides = torch.tensor([[h, w]])
            resized.append(embeddings.resize_positional_embeddings(table, sides, max_length=h * w)[0])
            down, across = block_positions((grid,), merge).unbind(1)
            patches.append(start + down * w + across)
            start += h * w
        order = torch.cat(patches)[np.maximum(rows.indices, 0)[: len(pixels)]]
        positions = torch.cat(resized).index_select(0, order.to(pixels.device, non_blocking=True))
        return embeddings.patch_embedding(pixels.to(embeddings.patch_embedding.weight.dtype)) + positions


ADAPTERS = {"siglip2_vision_model": partial(Siglip2, "Siglip2")}
