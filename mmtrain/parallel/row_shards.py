"""Exchanges between tensor-parallel ranks, which divide columns inside of layers, and between them rows (sequence
parallelism, arXiv:2205.05198, section 4.2.2), or nothing (arXiv:1909.08053).

Legend: tp ranks; R rows, all of a cp rank, or of a clip; r = R / tp rows of one rank, rounded up; D columns. Tensors
are [..., rows, columns]; dimensions before the rows are those of a batch. Every collective here is over tp.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mmtrain.parallel import passes
from mmtrain.parallel.collectives import all_gather, reduce_scatter


class RowShards:
    """The `RowSharding` of one rank, which has the tp_rank-th of tp equal parts; and the exchanges inside of layers.

    What a name says happens forward. Gradients go the opposite way: of equal tensors they are equal, of parts parts.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.degree: int = mesh.size()
        self._group = mesh.get_group()

    def shard(self, x: Tensor) -> Tensor:
        """[R, D], equal on all ranks -> this rank's rows [r, D], zeros behind all R; backward: all-gather."""
        return _RowExchange.apply(self._filled_up(x), _own, _gather, self._group)

    def gather(self, x: Tensor) -> Tensor:
        """[r, D] -> [R, D] on all ranks, which compute the same from it; backward: this rank's rows."""
        return _RowExchange.apply(x, _gather, _own, self._group)

    def gather_for_parts(self, x: Tensor) -> Tensor:
        """[r, D] -> [R, D] on all ranks, each of which uses it for its own columns; backward: reduce-scatter."""
        return _RowExchange.apply(x, _gather, _sum_own, self._group)

    def sum_shard(self, x: Tensor) -> Tensor:
        """Summands [R, D] -> this rank's rows [r, D] of their sum, zeros behind all R; backward: all-gather."""
        return _RowExchange.apply(self._filled_up(x), _sum_own, _gather, self._group)

    def use_for_parts(self, x: Tensor) -> Tensor:
        """x [R, D], equal on all ranks, each of which uses it for its own columns or rows; backward: all-reduce."""
        return _RowExchange.apply(x, _same, _sum, self._group)

    def use_for_rows(self, x: Tensor) -> Tensor:
        """x, equal on all ranks, each of which uses it for its own rows between layers; backward: all-reduce."""
        return self.use_for_parts(x)

    def sum(self, x: Tensor) -> Tensor:
        """Summands [R, D] -> their sum on all ranks, which compute the same from it; backward: no communication."""
        return _RowExchange.apply(x, _sum, _same, self._group)

    def sum_for_parts(self, x: Tensor) -> Tensor:
        """Summands [R, D] -> their sum, which each rank uses for its own columns; backward: all-reduce."""
        return _RowExchange.apply(x, _sum, _sum, self._group)

    def gather_columns(self, x: Tensor) -> Tensor:
        """[R, D / tp] -> [R, D] on all ranks, which compute the same from it; backward: this rank's columns."""
        return _RowExchange.apply(x, _gather_columns, _own_columns, self._group)

    def pause(self, x: Tensor) -> Tensor:
        """x, in the middle of a unit: forward and backward another pass may go on here (see `passes`)."""
        return _RowExchange.apply(x, _pause, _pause, self._group)

    def _filled_up(self, x: Tensor) -> Tensor:
        missing = -x.shape[-2] % self.degree
        return nn.functional.pad(x, (0, 0, 0, missing)) if missing else x


class WholeRowShards(RowShards):
    """Row shards of ranks that each have all rows between layers, r = R: the gradients of these rows are equal, too."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh)
        self.degree = 1

    def shard(self, x: Tensor) -> Tensor:
        """The rows x as they are."""
        return x

    def gather(self, x: Tensor) -> Tensor:
        """The rows x as they are."""
        return x

    def gather_for_parts(self, x: Tensor) -> Tensor:
        """x [R, D], which each rank uses for its own columns; backward: all-reduce."""
        return self.use_for_parts(x)

    def sum_shard(self, x: Tensor) -> Tensor:
        """Summands [R, D] -> their sum on all ranks; backward: no communication."""
        return self.sum(x)

    def use_for_rows(self, x: Tensor) -> Tensor:
        """The rows x as they are."""
        return x

    def pause(self, x: Tensor) -> Tensor:
        """x: a unit has one exchange."""
        return x


_Operation = Callable[[Tensor, dist.ProcessGroup], Tensor]


class _RowExchange(torch.autograd.Function):
    """One operation forward, and the one that its gradient needs backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, operation: _Operation, inverse: _Operation, group: dist.ProcessGroup) -> Tensor:
        ctx.back, ctx.group = inverse, group
        return operation(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(grad, ctx.group), None, None, None


def _same(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x


def _pause(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    passes.pause()
    return x


def _own(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[R, D] -> [r, D], a copy, so that the whole can be freed."""
    rows = x.shape[-2] // dist.get_world_size(group)
    return x.narrow(-2, dist.get_rank(group) * rows, rows).clone()


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[r, D] of each rank -> [R, D] on all."""
    parts = x.new_empty(dist.get_world_size(group), *x.shape)
    passes.exchange(all_gather(parts.flatten(), x.flatten(), group=group, async_op=True))
    return parts.movedim(0, -3).flatten(-3, -2)  # a copy only of a batch


def _own_columns(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[R, D] -> [R, D / tp], a copy, so that the whole can be freed."""
    return x.chunk(dist.get_world_size(group), -1)[dist.get_rank(group)].clone()


def _gather_columns(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[R, D / tp] of each rank -> [R, D] on all."""
    parts = x.new_empty(dist.get_world_size(group), *x.shape)
    passes.exchange(all_gather(parts.flatten(), x.flatten(), group=group, async_op=True))
    return parts.movedim(0, -2).flatten(-2)


def _sum_own(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Summands [R, D] -> [r, D] of the sum."""
    parts = x.unflatten(-2, (dist.get_world_size(group), -1)).movedim(-3, 0)  # of each rank together
    out = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
    passes.exchange(reduce_scatter(out.flatten(), parts.flatten(), group=group, async_op=True), scatters=True)
    return out


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Summands -> the sum on all ranks."""
    out = x.contiguous().clone()
    if out.numel():
        passes.exchange(dist.all_reduce(out, group=group, async_op=True))
    return out
