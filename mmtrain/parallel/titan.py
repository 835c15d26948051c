"""The only file that imports torchtitan: its optimizer container and writers of metrics.

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

if not torch.cuda.is_available():
    # torchtitan falls back to "cuda" on a machine without one; the names below are read at import.
    _titan_utils.device_type, _titan_utils.device_module = "cpu", torch.cpu

from torchtitan.components.metrics import TensorBoardLogger, WandBLogger
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.components.optimizer.utils import init_optim_state

__all__ = [
    "FrozenAwareOptimizers",
    "ParamGroupConfig",
    "TensorBoardLogger",
    "WandBLogger",
    "init_optim_state",
]

logging.getLogger("torchtitan").setLevel(logging.WARNING)


class FrozenAwareOptimizers(OptimizersContainer):  # type: ignore[type-arg]
    """The container of torchtitan, for model parts in which a parameter group (or every group) may be empty."""

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
