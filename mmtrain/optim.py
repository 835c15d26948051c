"""The optimizer of one rank's chunks and the learning rate as a pure function of the step."""

import math
import re
from collections.abc import Sequence

import torch.nn as nn
from torch.distributed.tensor import DTensor

from mmtrain.config import LRSchedulerConfig, OptimizerConfig
from mmtrain.titan import FrozenAwareOptimizers, ParamGroupConfig


def lr_factor(section: LRSchedulerConfig, step: int, steps: int) -> float:
    """The learning rate of a step as a fraction of the peak.

    Linear warm-up over `warmup_steps`, then the peak, then the decay over the last
    `decay_ratio` of the remaining steps down to `min_lr_factor`, which the last step has.

    Args: step: 1 .. steps.
    """
    if step <= section.warmup_steps:
        return step / section.warmup_steps
    decay_steps = round((steps - section.warmup_steps) * section.decay_ratio)
    done = step - (steps - decay_steps)
    if done <= 0:
        return 1.0
    progress = done / decay_steps
    shape = {
        "linear": 1 - progress,
        "sqrt": 1 - math.sqrt(progress),
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
    }[section.decay_type]
    return section.min_lr_factor + (1 - section.min_lr_factor) * shape


def build_optimizers(
    section: OptimizerConfig, chunks: Sequence[nn.Module], tied: Sequence[nn.Parameter]
) -> FrozenAwareOptimizers:
    """torchtitan's container over the trainable parameters of this rank's chunks (there may be none).

    Matrices are decayed; vectors, embeddings and the tied head, which is an embedding, are not.

    Plain and distributed tensors are in different groups, since one kernel call cannot take both.

    Args: tied: copies of the tied embedding among the parameters.
    """
    kinds: dict[tuple[bool, bool], set[str]] = {}
    for chunk in chunks:
        embeddings = {id(m.weight) for m in chunk.modules() if isinstance(m, nn.Embedding)}
        for name, parameter in chunk.named_parameters():
            kept = parameter.ndim < 2 or id(parameter) in embeddings or any(parameter is t for t in tied)
            kinds.setdefault((not kept, isinstance(parameter, DTensor)), set()).add(name)
    shared = {"lr": section.lr, "betas": (section.beta1, section.beta2), "eps": section.eps}
    groups = [
        ParamGroupConfig(
            pattern="^(?:" + "|".join(re.escape(name) for name in sorted(names)) + ")$",
            optimizer_name=section.name,
            optimizer_kwargs={**shared, "weight_decay": section.weight_decay if decayed else 0.0},
        )
        for (decayed, _), names in sorted(kinds.items(), key=lambda item: item[0])
    ]
    config = FrozenAwareOptimizers.Config(param_groups=groups, implementation=section.implementation)
    return FrozenAwareOptimizers(config, model_parts=list(chunks))


def set_lr(optimizers: FrozenAwareOptimizers, lr: float) -> None:
    """Gives every parameter group a learning rate."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
