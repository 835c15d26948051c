"""All-gather and reduce-scatter of equal parts along the first dimension, under the names of each torch version; and
what rank 0 does for all."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

_Value = TypeVar("_Value")

# Names since torch 2.13, which warns of the older ones.
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""(out, x, group=): the parts of all ranks, flattened, one after the other."""
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""(out, x, group=): this rank's part of the sum over ranks."""


def gather_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The parts [r, ...] of all ranks one after the other, [ranks x r, ...]."""
    out = x.new_empty(len(x) * dist.get_world_size(group), *x.shape[1:])
    all_gather(out, x.contiguous(), group=group)
    return out


def sum_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part [R / ranks, ...] of the sum over ranks of x [R, ...]."""
    out = x.new_empty(len(x) // dist.get_world_size(group), *x.shape[1:])
    reduce_scatter(out, x.contiguous(), group=group)
    return out


def on_rank_zero(act: Callable[[], _Value]) -> _Value:
    """What `act` returns on rank 0, on every rank. Collective over the job.

    Raises: OSError: on every rank, if it does on rank 0.
    """
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            box[0] = act()
        except OSError as error:
            box[0] = error
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    if isinstance(box[0], OSError):
        raise box[0]
    value: _Value = box[0]
    return value
