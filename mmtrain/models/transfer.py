"""Copies from host memory to a device, for which the host does not wait; and the one back, for which it does.

A device reads pinned memory by itself. Of pageable memory the driver makes a copy first, and may wait for all that the
device still has to do, also where the caller asks it not to.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

_Tree = TypeVar("_Tree")


def pinned(x: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host in memory that copies to a device reach; itself where the device has no such memory.

    Torch keeps the memory until copies of it that were started are done, and uses it again.
    """
    return x.pin_memory() if device.type == "cuda" and x.numel() else x


def to_device(values: Tensor | np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """Values of the host on a device, copied from pinned memory in the order of its current stream; on a CPU the values
    themselves."""
    x = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    if device.type == "cpu" or x.device.type != "cpu":
        return x.to(device)
    return pinned(x, device).to(device, non_blocking=True)


def to_host(tree: _Tree) -> _Tree:
    """The tensors of nested dicts, lists and tuples on the host, detached, by a single copy: the host waits until the
    device has made all of them.

    Args: tree: integers in it are below 2**53.
    """
    tensors: list[Tensor] = []
    _changed(tree, tensors.append)
    if not tensors:
        return tree
    flat = torch.cat([x.detach().reshape(-1).to(torch.float64) for x in tensors]).cpu()
    parts = iter(flat.split([x.numel() for x in tensors]))
    on_host: _Tree = _changed(tree, lambda x: next(parts).view(x.shape).to(x.dtype))
    return on_host


def _changed(tree: Any, change: Callable[[Tensor], Any]) -> Any:
    """Nested dicts, lists and tuples with other values in place of their tensors."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {key: _changed(value, change) for key, value in tree.items()}
    return type(tree)(_changed(value, change) for value in tree) if isinstance(tree, list | tuple) else tree
