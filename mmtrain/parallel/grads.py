"""Gradient norm and clipping."""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

from mmtrain.parallel.mesh import Mesh
from mmtrain.parallel.torch_private import norms, scale_


def local_part(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def fill_missing_grads(parameters: Iterable[nn.Parameter]) -> None:
    """Gives zero gradients to trainable parameters without one.

    A module that no sample of the step used has no gradient; whether it is None or zero would
    otherwise depend on the layout, and with it the optimizer's moments and weight decay.
    """
    for parameter in parameters:
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def squared_norm(parameters: Iterable[nn.Parameter], mesh: Mesh, *, skip: nn.Parameter | None = None) -> Tensor:
    """This rank's share of the square of the 2-norm of all gradients of the model, a float64 scalar.

    Args: skip: a copy of a parameter that another rank counts (the tied head).
    """
    grads: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None and parameter is not skip:
            grads.setdefault(_copies(parameter, mesh), []).append(local_part(parameter.grad))
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for copies, of_parameters in grads.items():  # a few operators for all parameters
        of_each = norms(of_parameters, torch.float64)
        total += torch.stack(of_each).to(mesh.device).square().sum() / copies
    return total


def _copies(parameter: nn.Parameter, mesh: Mesh) -> int:
    """Ranks of the job that hold the same values as this rank's shard: some of a stage, in each pipeline."""
    layout = mesh.layout
    if not isinstance(parameter, DTensor):
        return layout.dp_replicate * layout.stage_size
    shards = 1
    for axis, placement in enumerate(parameter.placements):
        if not placement.is_replicate():  # is_shard() is false for the strided shards of FSDP2 over tp
            shards *= parameter.device_mesh.size(axis)
    return layout.dp_replicate * layout.stage_size // shards


def clip(parameters: Iterable[nn.Parameter], norm: float, max_norm: float) -> None:
    """Scales all gradients so that their total norm is at most max_norm; 0: no limit."""
    if max_norm <= 0:
        return
    grads = [local_part(p.grad) for p in parameters if p.grad is not None]
    if grads:
        scale_(grads, min(1.0, max_norm / (norm + 1e-6)))


def nonfinite_ranks(parameters: Iterable[nn.Parameter], loss: float, mesh: Mesh) -> list[int]:
    """The ranks whose loss or shard of a gradient is not finite. Collective over the job. Args: loss: of this rank."""
    grads = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
    flags: list[Any] = [None] * mesh.layout.world_size
    dist.all_gather_object(flags, not math.isfinite(loss) or not all(bool(grad.isfinite().all()) for grad in grads))
    return [rank for rank, flag in enumerate(flags) if flag]
