"""Projectors from encoder features to the language model's width: two linear layers, of kind `mlp` after a merge of
neighbours.

Shape legend: R patches of all images; V merged tokens; D encoder width; m spatial merge; M merged columns;
I inner width; L width of the language model.
"""

import torch
from torch import Tensor, nn

from mmtrain.config.model import ModelConfig
from mmtrain.models.adapters import make_projector_of
from mmtrain.spec.module_sizes import projection_of
from mmtrain.spec.vision_shapes import vision_shape

Grid = tuple[int, int, int]
"""Patches (time, height, width) of one image."""


def merge_neighbours(x_RD: Tensor, grids: tuple[Grid, ...], merge: int, *, row_major: bool) -> Tensor:
    """The features of each m x m square of patches side by side, [V, M], squares in row-major order.

    Where all images are one row of patches (sound), neighbours are m of that row.
    Args:
        grids: of the images, whose patches follow each other in x_RD.
        row_major: patches of an image come row by row; otherwise square by square.
    """
    width = x_RD.shape[-1]
    if not row_major or merge == 1:
        return x_RD.reshape(-1, merge * merge * width)
    if all(h == 1 for _, h, _ in grids):
        return x_RD.reshape(-1, merge * width)
    if len(set(grids)) > 1:
        parts = x_RD.split([t * h * w for t, h, w in grids])
        merged = [merge_neighbours(x, (g,), merge, row_major=True) for x, g in zip(parts, grids, strict=True)]
        return torch.cat(merged)
    _, h, w = grids[0]
    squares = x_RD.reshape(-1, h // merge, merge, w // merge, merge, width).transpose(2, 3)
    return squares.reshape(-1, merge * merge * width)


class Projector(nn.Module):
    """LayerNorm of each feature, merge of neighbours, Linear, GELU, Linear.

    Source: PatchMerger of arXiv:2409.12191, sec. 2.1; two layers: arXiv:2310.03744.
    """

    def __init__(
        self,
        width: int,
        language_width: int,
        *,
        merge: int,
        hidden_size: int,
        row_major: bool,
        one_row: bool = False,
    ) -> None:
        """Args: hidden_size: I; 0: M. one_row: images are one row of patches, so that M = m x D, not m x m x D."""
        super().__init__()
        self.merge, self.row_major = merge, row_major
        merged = (merge if one_row else merge * merge) * width
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.fc1 = nn.Linear(merged, hidden_size or merged)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden_size or merged, language_width)

    def forward(self, x_RD: Tensor, grids: tuple[Grid, ...]) -> Tensor:
        """The tokens of all images, [V, L]. Args: grids: unread where patches come square by square."""
        x_VM = merge_neighbours(self.norm(x_RD), grids, self.merge, row_major=self.row_major)
        return self.fc2(self.act(self.fc1(x_VM)))


def make_projector(model: ModelConfig, module: str = "vision") -> nn.Module:
    """A new projector of an encoder, ours of kind `mlp` or a family's, for the default device."""
    projection, shape = projection_of(model, module), vision_shape(model, module)
    assert projection is not None
    if projection.kind == "mlp":
        return Projector(
            shape.width,
            projection.outputs,
            merge=shape.merge,
            hidden_size=projection.width,
            row_major=not shape.any_size,
            one_row=shape.one_row,
        )
    return make_projector_of(projection.kind, shape.width, projection.outputs, projection.hidden_act)
