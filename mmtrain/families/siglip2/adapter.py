"""The class of SigLIP 2 in transformers."""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from mmtrain.families.siglip.adapter import Siglip
from mmtrain.families.siglip2.resize import resize_taps
from mmtrain.models.adapters import RankRows, block_positions
from mmtrain.models.transfer import to_device


class Siglip2(Siglip):
    """The SigLIP 2 vision transformer for images of any size (NaFlex), packed, without its pooling head."""

    def call_embed(self, tower: PreTrainedModel, pixels: Tensor, rows: RankRows) -> Tensor:
        embeddings = tower.embeddings
        patches = np.maximum(rows.indices, 0)[: len(pixels)]
        sizes = np.repeat([grid[1:] for grid in rows.grids], [self.rows(grid) for grid in rows.grids], axis=0)
        cells = block_positions(rows.grids, rows.shape.merge).numpy()
        taps = resize_taps(cells[patches], sizes[patches], embeddings.position_embedding_size)
        on_device = (to_device(x, pixels.device) for x in taps)
        table = embeddings.position_embedding.weight
        positions = _Resized.apply(table, *on_device)
        return embeddings.patch_embedding(pixels.to(embeddings.patch_embedding.weight.dtype)) + positions


class _Resized(torch.autograd.Function):
    """[R, D] weighted sums of rows of a table, all in one operator, in float32 whatever the table's dtype.

    The backward repeats it, so that the offsets alone are kept as what planning counts; indices and weights stay, too,
    16 bytes each, for 4 of them a patch where an image has at least as many patches along its sides as the table.
    """

    @staticmethod
    def forward(ctx: Any, table: Tensor, offsets: Tensor, positions: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(table, offsets)
        ctx.taps = positions, weights
        return _weighted_sums(table, offsets, positions, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        table, offsets = ctx.saved_tensors
        leaf = table.detach().requires_grad_()
        with torch.enable_grad():
            out = _weighted_sums(leaf, offsets, *ctx.taps)
        return *torch.autograd.grad(out, leaf, grad), None, None, None


def _weighted_sums(table: Tensor, offsets: Tensor, positions: Tensor, weights: Tensor) -> Tensor:
    sums = nn.functional.embedding_bag(
        positions, table.float(), offsets, mode="sum", per_sample_weights=weights.float()
    )
    return sums.to(table.dtype)


ADAPTERS = {"siglip2_vision_model": partial(Siglip2, "Siglip2")}
