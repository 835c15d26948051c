"""Models of tests with low-rank adapters."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from mmtrain.config.model import LoRAConfig, ModelConfig
from mmtrain.models.trainable import is_adapter

RANK, ALPHA = 3, 6.0


def with_lora(
    model: ModelConfig,
    modules: Sequence[str] = ("encoder", "language"),
    targets: Sequence[str] = (),
    **settings: Any,
) -> ModelConfig:
    """The model with adapters in some of its modules.

    Args: modules: of encoder, projector, language. settings: of [model.lora].
    """
    sections = {
        name: dataclasses.replace(getattr(model, name), trainable="lora")
        for name in modules
        if getattr(model, name) is not None
    }
    lora = LoRAConfig(rank=RANK, alpha=ALPHA, target_modules=list(targets), **settings)
    return dataclasses.replace(model, lora=lora, **sections)


@torch.no_grad()
def fill_adapters(module: nn.Module, seed: int = 7) -> None:
    """Random values for the adapters of a module, whose second matrix starts as zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        if is_adapter(name):
            values = 0.1 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(
                values if parameter.dim() > 1 else 0.2 + 0.2 * values
            )  # lengths of rows, as of initial ones
