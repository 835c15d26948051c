"""The optimizer of one rank's chunks, the averages of weights, and the learning rate as a pure function of the step."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

from mmtrain.config.optimizer import LRSchedulerConfig, OptimizerConfig, OptimizerGroup
from mmtrain.errors import ConfigError
from mmtrain.models.trainable import part_of
from mmtrain.parallel.fill import LocalPart, new_part, stored_as
from mmtrain.parallel.grads import local_part
from mmtrain.parallel.titan import FrozenAwareOptimizers, ParamGroupConfig, init_optim_state
from mmtrain.parallel.torch_private import raw_part

_MOMENTS = ("exp_avg", "exp_avg_sq")
EMA = "ema"
"""Names of the tensors in the state of a parameter: the two moments, and the average of its values."""

_BUCKET = 1 << 24
"""Elements whose moments are widened to float32 at the same time: 128 MiB of both."""


class LocalOptimizers(FrozenAwareOptimizers):
    """The container of torchtitan, whose optimizers compute on this rank's parts of DTensors.

    Updates are elementwise, so that plain tensors give the values of DTensors, bit for bit, without the sharding rules
    of operations on whole lists of DTensors (0.8 s of the first step on a CPU). Parameters and moments stay DTensors.
    Moments and parameters that are stored in another dtype are float32 during their update, a bucket at a time.

    The average of a parameter is one more entry of its state, in the parameter's own dtype and sharding, so that it is
    saved, loaded and moved as moments are.
    """

    def __init__(self, *args: Any, moments: torch.dtype = torch.float32, ema_decay: float = 0.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._moments, self._ema_decay = moments, ema_decay
        self.peaks = [[float(group["lr"]) for group in optimizer.param_groups] for optimizer in self]
        """Peak learning rate of each group of each optimizer."""

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Updates every parameter that has a gradient."""
        for optimizer in self.optimizers:
            for bucket in _buckets(optimizer, self._moments):
                with _on_local_parts(optimizer, bucket, self._moments):
                    optimizer.step(*args, **kwargs)

    @property
    def averages(self) -> bool:
        """Whether weights are averaged."""
        return self._ema_decay > 0

    def average(self, step: int) -> None:
        """Moves the average of every parameter towards its value after a step; the first values are the first average.

        In plain words: average = d average + (1 - d) value, with d of `ema_part`. Args: step: 1 ..
        """
        if not self.averages:
            return
        self._begin_averages()
        part = ema_part(self._ema_decay, step)
        for _, parameter, optimizer, _ in self.trained():
            raw_part(optimizer.state[parameter][EMA]).lerp_(raw_part(parameter), 1 - part)

    def _begin_averages(self) -> None:
        for _, parameter, optimizer, _ in self.trained():
            if EMA not in optimizer.state[parameter]:
                optimizer.state[parameter][EMA] = stored_as(raw_part(parameter).clone(), parameter)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """A context in which parameters have the values of their averages, if these exist: before the first step none
        does."""
        self._swap_averages()
        try:
            yield
        finally:
            self._swap_averages()

    def _swap_averages(self) -> None:
        for _, parameter, optimizer, _ in self.trained():
            if (average := optimizer.state.get(parameter, {}).get(EMA)) is not None:
                value, other = raw_part(parameter), raw_part(average)
                held = value.clone()
                value.copy_(other)
                other.copy_(held)

    def state_dict(self) -> dict[str, Any]:
        """Name -> value of every moment, average and setting."""
        self._init_state()
        return super().state_dict()  # type: ignore[no-any-return]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the values of `state_dict`; averages that it lacks begin at the weights."""
        self._init_state()
        super().load_state_dict(state_dict)
        if self.averages:
            self._begin_averages()
        for name, parameter, optimizer, _ in self.trained():  # torch's loads moments in the dtype of parameters
            values = optimizer.state[parameter]
            for key in _MOMENTS:
                stored = state_dict[f"state.{name}.{key}"]
                values[key] = (stored if parameter.dtype != self._moments else values[key]).to(self._moments)

    def fill(self, local: LocalPart, aliases: Mapping[str, str], first: Mapping[str, int]) -> None:
        """Gives memory to all moments and averages, whose values are undefined where this rank has none.

        Args:
            aliases: parameter -> name that its moments are stored under (tied head -> embedding).
            first: parameter -> its first row of the stored one, if not 0.
        """
        keys = (*_MOMENTS, EMA) if self.averages else _MOMENTS
        for name, parameter, optimizer, group in self.trained():
            stored, state = f"optimizer.state.{aliases.get(name, name)}", optimizer.state[parameter]
            device = raw_part(parameter).device
            step = torch.zeros((), device=device if group["fused"] or group.get("capturable") else "cpu")
            own = local(f"{stored}.step", step, step.dtype, 0)
            state["step"] = step if own is None else own
            for key in keys:
                dtype = parameter.dtype if key == EMA else self._moments
                part = local(f"{stored}.{key}", parameter, dtype, first.get(name, 0))
                part = new_part(parameter, dtype, device) if part is None else part
                state[key] = stored_as(part, parameter)

    def trained(self) -> Iterator[tuple[str, torch.Tensor, torch.optim.Optimizer, dict[str, Any]]]:
        """All parameters that train, each with its name, its optimizer and its group: (name, parameter, optimizer,
        group)."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for name, parameter in zip(group["param_names"], group["params"], strict=True):
                    yield name, parameter, optimizer, group

    def _init_state(self) -> None:
        for optimizer in self.optimizers:
            if not optimizer.state:
                for bucket in _buckets(optimizer, self._moments):
                    with _on_local_parts(optimizer, bucket, self._moments):
                        init_optim_state(optimizer)
        if self.averages:
            self._begin_averages()


def ema_part(decay: float, step: int) -> float:
    """The part of an average that stays in a step; of the first steps less, so that initial weights are soon forgotten.

    Args: decay: its largest value. step: 1 ..
    """
    return min(decay, (1 + step) / (10 + step))


def lr_factor(section: LRSchedulerConfig, step: int, steps: float) -> float:
    """The learning rate of a step as a fraction of the peak.

    Linear warm-up over `warmup_steps` (or `warmup_ratio` of all steps), then the peak, then the decay over the last
    `decay_ratio` of the remaining steps down to `min_lr_factor`, which the last step has.

    Args: step: 1 .. steps. steps: of the job; a float: as many as its epochs will take if the steps that remain have as
        many samples as those so far, so that the rate follows the samples.
    """
    warmup_steps = section.warmup_steps or section.warmup_ratio * steps
    if step <= warmup_steps:
        return step / warmup_steps
    decay_steps = (steps - warmup_steps) * section.decay_ratio
    if isinstance(steps, int):
        decay_steps = round(decay_steps)
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
    section: OptimizerConfig,
    chunks: Sequence[nn.Module],
    tied: Sequence[nn.Parameter],
    aliases: Mapping[str, str] | None = None,
) -> LocalOptimizers:
    """The container of torchtitan over the trainable parameters of this rank's chunks (there may be none).

    Matrices are decayed; vectors, embeddings and the tied head, which is an embedding, are not.

    Plain and distributed tensors are in different groups, since one kernel call cannot take both.

    Args:
        tied: copies of the tied embedding among the parameters.
        aliases: name of such a copy -> that of the parameter, by which its group is chosen.
    """
    kinds: dict[tuple[int, bool, bool], set[str]] = {}
    for chunk in chunks:
        embeddings = {id(m.weight) for m in chunk.modules() if isinstance(m, nn.Embedding)}
        for name, parameter in chunk.named_parameters():
            undecayed = parameter.ndim < 2 or id(parameter) in embeddings or any(parameter is t for t in tied)
            group = _group_of(section.groups, (aliases or {}).get(name, name))
            kinds.setdefault((group, not undecayed, isinstance(parameter, DTensor)), set()).add(name)
    default = OptimizerGroup(pattern=".", lr=section.lr, weight_decay=section.weight_decay)
    configs = []
    for (number, decayed, _), names in sorted(kinds.items(), key=lambda item: item[0]):
        own = [*section.groups, default][number]
        lr = section.lr if own.lr is None else own.lr
        decay = section.weight_decay if own.weight_decay is None else own.weight_decay
        values = {"lr": lr, "betas": (section.beta1, section.beta2), "eps": section.eps}
        configs.append(
            ParamGroupConfig(
                pattern="^(?:" + "|".join(re.escape(name) for name in sorted(names)) + ")$",
                optimizer_name=section.name,
                optimizer_kwargs={**values, "weight_decay": decay if decayed else 0.0},
            )
        )
    config = LocalOptimizers.Config(param_groups=configs, implementation=section.kernel)
    moments = getattr(torch, section.moments_dtype)
    return LocalOptimizers(config, model_parts=list(chunks), moments=moments, ema_decay=section.ema_decay)


def check_groups(section: OptimizerConfig, chunks: Sequence[nn.Module], aliases: Mapping[str, str]) -> None:
    """Checks that each group of the config has a parameter that trains. Collective over the job.

    Raises: ConfigError: one has none.
    """
    if not section.groups:
        return
    names = [name for chunk in chunks for name, parameter in chunk.named_parameters() if parameter.requires_grad]
    groups = [_group_of(section.groups, aliases.get(name, name)) for name in names]
    members = torch.bincount(torch.tensor(groups, dtype=torch.int64), minlength=1 + len(section.groups))
    dist.all_reduce(members)
    for group, count in zip(section.groups, members.tolist(), strict=False):
        if not count:
            raise ConfigError(
                f"optimizer.groups: {group.described} has no parameter that trains and is in no group before it; names "
                "are like language.model.layers.0.mlp.up_proj.weight. Change the group, or remove it"
            )


def _group_of(groups: Sequence[OptimizerGroup], name: str) -> int:
    """The index of a parameter's group; the number of groups if it is in none."""
    fits = (group.module in ("", part_of(name)) and re.search(group.pattern, name) for group in groups)
    return next((i for i, fit in enumerate(fits) if fit), len(groups))


def set_lr(optimizers: LocalOptimizers, factor: float) -> None:
    """Gives every parameter group its learning rate. Args: factor: part of its peak."""
    for optimizer, peaks in zip(optimizers, optimizers.peaks, strict=True):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = factor * peak


_Bucket = list[list[torch.Tensor]]
"""Some parameters of each group of an optimizer."""


def _buckets(optimizer: torch.optim.Optimizer, moments: torch.dtype) -> Iterator[_Bucket]:
    """All parameters at once, or the few that are float32, with their moments, at the same time."""
    groups = [group["params"] for group in optimizer.param_groups]
    if moments == torch.float32 and all(x.dtype == torch.float32 for parameters in groups for x in parameters):
        yield groups
        return
    for number, parameters in enumerate(groups):
        start = elements = 0
        for end, parameter in enumerate(parameters, start=1):
            elements += local_part(parameter).numel()
            if elements >= _BUCKET or end == len(parameters):
                yield [parameters[start:end] if i == number else [] for i in range(len(groups))]
                start, elements = end, 0


@contextmanager
def _on_local_parts(optimizer: torch.optim.Optimizer, bucket: _Bucket, moments: torch.dtype) -> Iterator[None]:
    """A context in which an optimizer has the parameters of a bucket: this rank's parts of them, with moments in
    float32.

    A parameter without a float32 master is one within it, too, and rounded to its own dtype at the end.
    """
    whole = [group["params"] for group in optimizer.param_groups]
    local = [[_local_parameter(parameter) for parameter in parameters] for parameters in bucket]
    pairs = [(w, x) for ws, xs in zip(bucket, local, strict=True) for w, x in zip(ws, xs, strict=True)]
    others = dict(optimizer.state)
    optimizer.state.clear()
    for parameter, part in pairs:
        part.grad = None if parameter.grad is None else local_part(parameter.grad).to(part.dtype)
        if parameter in others:
            optimizer.state[part] = {key: local_part(value).float() for key, value in others[parameter].items()}
    for group, parts in zip(optimizer.param_groups, local, strict=True):
        group["params"] = parts
    try:
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, whole, strict=True):
            group["params"] = parameters
        updated = dict(optimizer.state)
        optimizer.state.clear()
        optimizer.state.update(others)
        for parameter, part in pairs:
            if part.dtype != parameter.dtype:
                local_part(parameter).detach().copy_(part.detach())
            if part in updated:
                stored = optimizer.state.setdefault(parameter, {})
                for key, value in updated[part].items():
                    if key not in stored:  # the first step
                        stored[key] = value if key == "step" else stored_as(value.to(moments), parameter)
                    elif (kept := local_part(stored[key])) is not value:
                        kept.copy_(value)


def _local_parameter(parameter: torch.Tensor) -> torch.Tensor:
    if isinstance(parameter, DTensor) or parameter.dtype != torch.float32:
        return local_part(parameter).detach().float().requires_grad_()
    return parameter
