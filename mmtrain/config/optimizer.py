"""[optimizer] and [lr_scheduler]: how weights follow from gradients."""

import re
from dataclasses import dataclass, field
from typing import Literal

from mmtrain.config.bounds import at_least, at_most
from mmtrain.config.toml_sections import shown
from mmtrain.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerGroup:
    """[[optimizer.groups]]: parameters with a learning rate or a weight decay of their own. A parameter belongs to the
    first group that has it, or to none."""

    module: str = ""
    """Part of the model; projector: also the encoder's own merger. Empty: all of them."""
    pattern: str = ""
    """Regular expression that is searched for in the names of parameters (language.model.layers.0.mlp.up_proj.weight);
    empty: all of the module."""
    lr: float | None = None
    """Peak learning rate, with the schedule of [lr_scheduler]; left out: optimizer.lr."""
    weight_decay: float | None = None
    """The weight decay of the group's matrices; left out: optimizer.weight_decay."""

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ConfigError(
                f"optimizer.groups: pattern = {shown(self.pattern)} is no regular expression: {error}; correct it"
            ) from None
        if not self.module and not self.pattern:
            raise ConfigError(
                "optimizer.groups: a group has neither module nor pattern, so it would be all parameters; name some, "
                "or set optimizer.lr and weight_decay instead"
            )
        if self.lr is None and self.weight_decay is None:
            raise ConfigError(f"optimizer.groups: {self.described} sets neither lr nor weight_decay; set one of them")
        limits = {name: 1e6 for name in ("lr", "weight_decay") if getattr(self, name) is not None}
        at_most("optimizer.groups", self, **limits)
        at_least("optimizer.groups", self, **dict.fromkeys(limits, 0.0))

    @property
    def described(self) -> str:
        """What it says of its parameters."""
        words = [f"{key} = {shown(value)}" for key in ("module", "pattern") if (value := getattr(self, key))]
        return "the group with " + " and ".join(words)


_BFLOAT16_BETA = 0.99
"""Largest decay whose changes, 1 % of a value, are clearly above the 0.4 % that 8 bits of mantissa resolve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """[optimizer]: decoupled weight decay on matrices; norms, biases and embeddings are not decayed."""

    name: Literal["AdamW"] = "AdamW"
    """Update rule."""
    lr: float = 8e-4
    """Peak learning rate."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decay of matrices, times the learning rate."""
    implementation: Literal["auto", "for-loop", "foreach", "fused"] = "auto"
    """Kernel of torch's optimizer. auto: fused on CUDA, else foreach."""
    moments_dtype: Literal["float32", "bfloat16"] = "float32"
    """Both moments between steps. bfloat16 halves their memory (4 instead of 8 bytes a parameter) and rounds them,
    so beta2 is at most 0.99: changes below 0.4 % are lost."""
    ema_decay: float = 0.0
    """An exponential moving average of every parameter that trains, which `mmtrain sample`, `generate` and `export` can
    take in place of the weights: this much of it stays in each step, in step s at most (1 + s) / (10 + s). It takes
    4 bytes a parameter. 0: none."""
    groups: list[OptimizerGroup] = field(default_factory=list)
    """Parameters with values of their own, each a table [[optimizer.groups]]."""

    @property
    def kernel(self) -> str:
        """The implementation; that of a CPU where the device is not known."""
        return "foreach" if self.implementation == "auto" else self.implementation

    def __post_init__(self) -> None:
        at_most("optimizer", self, lr=1e6, eps=1e6, weight_decay=1e6)
        at_least("optimizer", self, lr=0.0, beta1=0.0, beta2=0.0, eps=0.0, weight_decay=0.0, ema_decay=0.0)
        for name in ("beta1", "beta2", "ema_decay"):
            if getattr(self, name) >= 1:
                raise ConfigError(f"optimizer.{name} = {getattr(self, name)}; it must be below 1")
        if self.moments_dtype == "bfloat16" and self.beta2 > _BFLOAT16_BETA:
            raise ConfigError(
                f'optimizer.beta2 = {self.beta2}, but moments_dtype = "bfloat16" rounds changes of '
                f'{1 - self.beta2:.2g} away; set beta2 to at most {_BFLOAT16_BETA}, or moments_dtype = "float32"'
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LRSchedulerConfig:
    """[lr_scheduler]: linear warm-up, stable part, decay."""

    warmup_steps: int = 0
    """Steps from near 0 to the peak."""
    warmup_ratio: float = 0.0
    """The same as a part of all steps, in place of warmup_steps."""
    decay_type: Literal["cosine", "linear", "sqrt"] = "cosine"
    """Shape of the decay."""
    decay_ratio: float = 1.0
    """Part of the steps after warm-up over which the rate decays; 0: it stays at the peak."""
    min_lr_factor: float = 0.0
    """Rate at the end, as a fraction of the peak."""

    def __post_init__(self) -> None:
        at_least("lr_scheduler", self, warmup_steps=0, warmup_ratio=0.0, decay_ratio=0.0, min_lr_factor=0.0)
        for name in ("warmup_ratio", "decay_ratio", "min_lr_factor"):
            if getattr(self, name) > 1:
                raise ConfigError(f"lr_scheduler.{name} = {getattr(self, name)}; it is a fraction, at most 1")
        if self.warmup_steps and self.warmup_ratio:
            raise ConfigError(
                f"lr_scheduler.warmup_steps = {self.warmup_steps} and lr_scheduler.warmup_ratio = {self.warmup_ratio} "
                "are both set; keep one, and set the other to 0 if a base file has it"
            )
