"""The only file that imports torchtitan: its mesh algebra, optimizer container and writers of metrics.

What of torchtitan 0.3 serves is taken as it is. Not taken, because it does not fit: its checkpoint
manager writes in place (ours renames a finished folder), its learning-rate container refuses a rank
without trainable parameters (a pipeline rank of frozen layers), its metrics line is fixed.
"""

import logging
import re
from typing import Any

import torch
import torch.nn as nn
import torchtitan.tools.utils as _titan_utils

import mmtrain.parallel.torch_private  # noqa: F401  registers the backend of axes of size 1

if not torch.cuda.is_available():
    # torchtitan falls back to "cuda" on a machine without one; the names below are read at import.
    _titan_utils.device_type, _titan_utils.device_module = "cpu", torch.cpu

from torchtitan.components.metrics import TensorBoardLogger, WandBLogger
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.components.optimizer.utils import init_optim_state
from torchtitan.distributed.parallel_dims import ParallelDims

from mmtrain.config.topology import MeshShape

__all__ = [
    "FrozenAwareOptimizers",
    "ParallelDims",
    "ParamGroupConfig",
    "TensorBoardLogger",
    "WandBLogger",
    "init_optim_state",
    "parallel_dims",
]

logging.getLogger("torchtitan").setLevel(logging.WARNING)


def parallel_dims(shape: MeshShape) -> ParallelDims:
    """torchtitan's meshes for our degrees; the process group must exist. Axes of size 1 get no group."""
    dims = ParallelDims(
        dp_replicate=shape.dp_replicate,
        dp_shard=shape.dp_shard,
        cp=shape.cp,
        tp=shape.tp,
        pp=shape.pp,
        ep=1,
        world_size=shape.world_size,
        spmd_backend="partial_dtensor",
    )
    dims.build_mesh()
    return dims


class FrozenAwareOptimizers(OptimizersContainer):  # type: ignore[type-arg]
    """torchtitan's container, for model parts in which a parameter group (or every group) may be empty."""

    @staticmethod
    def _build_param_groups(
        model: nn.Module, param_group_configs: list[ParamGroupConfig], impl_kwargs: dict[str, Any]
    ) -> tuple[dict[str, list[dict[str, Any]]], dict[str, list[str]]]:
        names = [name for name, param in model.named_parameters() if param.requires_grad]
        used, remaining = [], set(names)
        for group in param_group_configs:
            matched = {name for name in remaining if re.search(group.pattern, name)}
            if matched:
                used.append(group)
            remaining -= matched
        groups: tuple[Any, Any] = OptimizersContainer._build_param_groups(model, used, impl_kwargs)
        return groups

    def _post_init(self, all_params: list[Any]) -> None:
        # torch's Optimizer refuses an empty list; a parameter without elements, which no step changes, satisfies it
        super()._post_init(all_params or [nn.Parameter(torch.empty(0))])
