"""What all feeds of a step share: its data on this rank, and how to bring them to the device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmtrain.modality.metadata import IterationMeta
from mmtrain.modality.submesh import Indices, pad_indices
from mmtrain.models.attention.context import AttentionChoices
from mmtrain.models.batch import Batch
from mmtrain.models.diffusion import ClipNoise
from mmtrain.models.transfer import to_device
from mmtrain.parallel.feed_ahead import Uploads
from mmtrain.parallel.mesh import Mesh
from mmtrain.parallel.row_exchange import KeyValueGather, RowExchange
from mmtrain.planner.layout import IterationLayout

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """The data of one step on one rank."""

    layout: IterationLayout
    meta: IterationMeta
    mesh: Mesh
    batch: Batch | None
    """What this rank needs of the batch."""
    labels: Sequence[Tensor] = ()
    """[T] of each microbatch."""
    uploads: Uploads | None = None
    """How tensors get to the device; None: by copies that what is computed next waits for."""
    noise: ClipNoise | None = None
    """The random choices for clips."""
    attention: AttentionChoices = AttentionChoices()  # noqa: RUF009  immutable
    """How it is computed."""
    want_predictions: bool = False
    """Whether the predictions of a language model's tokens are wanted."""
    want_losses: bool = False
    """Whether the loss of each labelled position is wanted, for losses by source."""

    def take(self, values: Tensor, indices: Indices, padding: int) -> Tensor:
        """[..., n]: values [..., T] at the n indices, with `padding` for the indices -1, on the device."""
        return self.to_device(self.at(values, indices, padding))

    def at(self, values: Tensor, indices: Indices, padding: int) -> Tensor:
        """`take`, on the host."""
        index = torch.from_numpy(indices)
        return values[..., index.clamp(min=0)].masked_fill(index < 0, padding)

    def to_device(self, tensor: Tensor) -> Tensor:
        """The tensor on this rank's device, where copies may be under way (`Uploads.add`)."""
        return self.uploads.add(tensor) if self.uploads else to_device(tensor, self.mesh.device)

    def key_value_gather(self, rows_of_ranks: Sequence[Indices], degree: int, total: int) -> KeyValueGather:
        """The exchange of keys among cp ranks.

        Args:
            rows_of_ranks: indices of the rows of each cp rank.
            degree: a rank pads its rows to a multiple of it.
            total: number of all rows.
        """
        assert self.mesh.cp_group is not None
        padded = [pad_indices(rows, degree) for rows in rows_of_ranks]
        exchange = RowExchange(self.mesh.cp_group, padded, np.arange(total), self.to_device)
        return KeyValueGather(exchange, self.layout.submesh.head_groups)
