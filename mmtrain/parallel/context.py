"""Exchanges of rows among the ranks of a submesh: keys and values over cp, image features over cp x tp.

Ranks hold unequal numbers of rows. Forward: all-gather of equal, padded pieces, then a choice of rows.
Backward: the gradients go back into the pieces and are reduce-scattered, so that each row gets the sum of its
gradients on all ranks.

Source: all-gather context parallelism: Llama 3, arXiv:2407.21783, section 3.3.2; Cornstarch, arXiv:2503.11367,
section 3.4.3.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmtrain.parallel.collectives import gather_rows, sum_rows


class _GatherPieces(torch.autograd.Function):
    """[M, ...] of each rank -> [ranks x M, ...] on all."""

    @staticmethod
    def forward(ctx: Any, piece: Tensor, group: dist.ProcessGroup, copies: int) -> Tensor:
        ctx.group, ctx.copies = group, copies
        return gather_rows(piece, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad = sum_rows(grads[0], ctx.group)
        return grad if ctx.copies == 1 else grad / ctx.copies, None, None


class RowExchange:
    """Chosen rows of all ranks of a group, for one division of rows.

    A call is collective over the group, and so is its backward: every rank must call, and the result must take
    part in every rank's backward, even if it chose no row.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        rows_of_ranks: Sequence[npt.NDArray[np.int64]],
        needed_rows: npt.NDArray[np.int64],
        device: Any,
        *,
        copies: int = 1,
    ) -> None:
        """Args:
        rows_of_ranks: [rank of the group] names of the rows that it holds, in order; -1 for padding.
        needed_rows: names of the rows that this rank asks for, in the order in which it gets them.
        copies: how many ranks ask for equal rows and have equal gradients of them, which count once.
        """
        self._group, self._copies = group, copies
        self._most = max(1, *(len(names) for names in rows_of_ranks))
        index_of = np.full(1 + max(int(names.max(initial=-1)) for names in rows_of_ranks), -1, dtype=np.int64)
        for rank, names in enumerate(rows_of_ranks):
            is_row = names >= 0
            index_of[names[is_row]] = rank * self._most + np.flatnonzero(is_row)
        indices = index_of[needed_rows]
        assert (indices >= 0).all(), "a row was asked for that no rank holds"
        self._rows = torch.from_numpy(indices).to(device, non_blocking=True)

    def __call__(self, x: Tensor) -> Tensor:
        """[rows held by this rank, ...] -> [rows wanted, ...]."""
        missing = self._most - len(x)
        if missing:
            x = nn.functional.pad(x, (0, 0) * (x.dim() - 1) + (0, missing))
        return _GatherPieces.apply(x, self._group, self._copies).index_select(0, self._rows)


class KeyValueGather:
    """Keys and values of all cp ranks, in the order of the sequence, by one all-gather."""

    def __init__(self, exchange: RowExchange) -> None:
        self._exchange = exchange

    def __call__(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """[1, K, rows of this rank, E] twice -> [1, K, T, E] twice."""
        rows = self._exchange(torch.stack((key[0], value[0])).permute(2, 0, 1, 3))
        keys_and_values = rows.permute(1, 2, 0, 3)
        return keys_and_values[:1], keys_and_values[1:]
