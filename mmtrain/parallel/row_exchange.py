"""Exchanges of rows among the ranks of a submesh: keys and values over cp, image features over cp x tp.

Ranks hold unequal numbers of rows. Forward: all-gather of equal, padded pieces, then a choice of rows.
Backward: the gradients go back into the pieces and are reduce-scattered, so that each row gets the sum of its
gradients on all ranks.

Source: all-gather context parallelism: Llama 3, arXiv:2407.21783, section 3.3.2; Cornstarch, arXiv:2503.11367,
section 3.4.3.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmtrain.parallel.collectives import all_gather, reduce_scatter


class _Exchange:
    """One exchange under way, and its backward."""

    def __init__(self, group: dist.ProcessGroup, copies: int) -> None:
        self.group, self.copies = group, copies
        self.under_way: dist.Work | None = None
        self.grad: Tensor | None = None

    def wait(self) -> None:
        assert self.under_way is not None
        self.under_way.wait()
        self.under_way = None


class _Start(torch.autograd.Function):
    """[M, ...] of each rank -> [ranks x M, ...] on all, once `_Finish` has waited for it."""

    @staticmethod
    def forward(ctx: Any, piece: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        out = piece.new_empty(len(piece) * dist.get_world_size(exchange.group), *piece.shape[1:])
        exchange.under_way = all_gather(out, piece.contiguous(), group=exchange.group, async_op=True)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        exchange: _Exchange = ctx.exchange
        exchange.wait()
        grad, exchange.grad = exchange.grad, None
        assert grad is not None
        return grad if exchange.copies == 1 else grad / exchange.copies, None


class _Finish(torch.autograd.Function):
    """Waits for the forward of `_Start` and starts its backward, which other backwards then hide."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.wait()
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        exchange, grad = ctx.exchange, grads[0].contiguous()
        exchange.grad = grad.new_empty(len(grad) // dist.get_world_size(exchange.group), *grad.shape[1:])
        exchange.under_way = reduce_scatter(exchange.grad, grad, group=exchange.group, async_op=True)
        return grad.new_zeros(()).expand_as(grad), None  # `_Start` has the gradient from the exchange


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
        to_device: Callable[[Tensor], Tensor] = lambda rows: rows,
        *,
        copies: int = 1,
    ) -> None:
        """Args:
        rows_of_ranks: [rank of the group] names of the rows that it holds, in order; -1 for padding.
        needed_rows: names of the rows that this rank asks for, in the order in which it gets them.
        to_device: copies indices to where rows are.
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
        self._rows = to_device(torch.from_numpy(indices))

    def start(self, x: Tensor) -> Callable[[], Tensor]:
        """Starts the exchange of [rows held by this rank, ...]. Returns: what waits for it: [rows wanted, ...]."""
        missing = self._most - len(x)
        if missing:
            x = nn.functional.pad(x, (0, 0) * (x.dim() - 1) + (0, missing))
        exchange = _Exchange(self._group, self._copies)
        out: Tensor = _Start.apply(x, exchange)
        return lambda: _Finish.apply(out, exchange).index_select(0, self._rows)

    def __call__(self, x: Tensor) -> Tensor:
        """[rows held by this rank, ...] -> [rows wanted, ...]."""
        return self.start(x)()


class KeyValueGather:
    """Keys and values of all cp ranks, in the order of the sequence, by one all-gather for each group of heads."""

    def __init__(self, exchange: RowExchange, head_groups: int = 1) -> None:
        self._exchange, self.head_groups = exchange, head_groups

    def start(self, key: Tensor, value: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
        """Starts the exchange of [1, K, rows of this rank, E] twice. Returns: what waits for it: [1, K, T, E] twice."""
        wait = self._exchange.start(torch.stack((key[0], value[0])).permute(2, 0, 1, 3))

        def waited() -> tuple[Tensor, Tensor]:
            keys_and_values = wait().permute(1, 2, 0, 3)
            return keys_and_values[:1], keys_and_values[1:]

        return waited
