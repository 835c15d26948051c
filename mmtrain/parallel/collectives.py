"""All-gather and reduce-scatter of equal parts along the first dimension, under the names of each torch version; calls
of rank 0 for all; errors and counts of a group."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from mmtrain.errors import MMTrainError

_Value = TypeVar("_Value")

# Names since torch 2.13, which warns of the older ones.
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""Writes to `out` the parts x of all ranks, flattened, one after the other: all_gather(out, x, group=)."""
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""Writes to `out` this rank's part of the sum of x over ranks: reduce_scatter(out, x, group=)."""


def on_rank_zero(act: Callable[[], _Value]) -> _Value:
    """What `act` returns on rank 0, on every rank. Collective over the job.

    Raises: OSError, MMTrainError: on every rank, if it does on rank 0.
    """
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            box[0] = act()
        except (OSError, MMTrainError) as error:
            box[0] = error
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    if isinstance(box[0], OSError | MMTrainError):
        raise box[0]
    value: _Value = box[0]
    return value


@contextmanager
def errors_on_all(group: dist.ProcessGroup | None) -> Iterator[None]:
    """A context in which an error of one rank ends all ranks of a group, instead of leaving them to wait for it.

    Collective over the group. Args: group: None: only this rank.
    Raises: MMTrainError: this rank's own error, or else the first one of the others.
    """
    error: MMTrainError | None = None
    try:
        yield
    except MMTrainError as own:
        error = own
    if group is not None:
        failed = torch.tensor(int(error is not None))
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=group)
        if failed:
            errors: list[MMTrainError | None] = [None] * dist.get_world_size(group)
            dist.all_gather_object(errors, error, group=group)
            error = error or next(other for other in errors if other)
    if error:
        raise error


def equal_over(group: dist.ProcessGroup | None, number: int) -> bool:
    """Whether an integer of 63 bits is equal on all ranks of a group. Collective over it. Args: group: None: all."""
    range_of = torch.tensor([number, -number], dtype=torch.int64)
    dist.all_reduce(range_of, op=dist.ReduceOp.MAX, group=group)
    return int(range_of[0]) == -int(range_of[1])


def sum_over(group: dist.ProcessGroup | None, count: int) -> int:
    """The sum of a count over the ranks of a group. Collective over it. Args: group: None: only this rank."""
    total = torch.tensor(count)
    if group is not None:
        dist.all_reduce(total, group=group)
    return int(total)
