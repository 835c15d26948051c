"""Replaces torchtitan in `parallel/titan.py` if it is not installed: meshes, optimizers, metrics by torch alone.

For machines that a package cannot be brought to. Process groups, groups of parameters and the names in checkpoints are
those of torchtitan (`tests/parallel/test_without_titan.py` compares them).
"""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import AdamW, Optimizer


class ParallelDims:
    """Meshes by the names of their axes, of a process group that exists."""

    def __init__(self, *, dp_replicate: int, dp_shard: int, cp: int, tp: int, pp: int, **_: Any) -> None:
        self._axes = {
            ("pp", "dp_replicate", "fsdp", "tp"): (pp, dp_replicate, dp_shard * cp, tp),
            ("pp", "batch", "cp", "tp"): (pp, dp_replicate * dp_shard, cp, tp),
        }

    def build_mesh(self) -> None:
        """Makes the process groups. Collective over the job."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._dense, self._data = (
            init_device_mesh(device, degrees, mesh_dim_names=names) for names, degrees in self._axes.items()
        )

    def get_mesh(self, axes: str | Sequence[str]) -> DeviceMesh:
        """The mesh of this rank along one or several axes."""
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        mesh = self._data if {"batch", "cp"} & set(names) else self._dense
        return mesh[names if len(names) > 1 else names[0]]


@dataclass(frozen=True, kw_only=True)
class ParamGroupConfig:
    """A group of parameters and how it is optimized."""

    pattern: str
    """Regular expression that is searched for in the names of parameters; the first group that has it counts."""
    optimizer_name: str
    optimizer_kwargs: dict[str, Any]


class OptimizersContainer:
    """One AdamW for each model part that has trainable parameters."""

    @dataclass(kw_only=True)
    class Config:
        """Groups of parameters, and the kernel that steps them."""

        param_groups: list[ParamGroupConfig] = field(default_factory=list)
        implementation: str = "foreach"

    def __init__(self, config: Config, *, model_parts: Sequence[nn.Module]) -> None:
        kernel = {"fused": config.implementation == "fused", "foreach": config.implementation == "foreach"}
        built = [self._build_param_groups(part, config.param_groups, kernel)[0] for part in model_parts]
        self.optimizers: list[Optimizer] = [AdamW(groups["AdamW"]) for groups in built if groups]
        self._post_init([])

    @staticmethod
    def _build_param_groups(
        model: nn.Module, configs: list[ParamGroupConfig], kernel: dict[str, Any]
    ) -> tuple[dict[str, list[dict[str, Any]]], dict[str, list[str]]]:
        """(optimizer -> its groups, optimizer -> their patterns), as torchtitan's method of this name."""
        remaining = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        groups: dict[str, list[dict[str, Any]]] = {}
        for config in configs:
            names = [name for name in remaining if re.search(config.pattern, name)]
            group = {"params": [remaining.pop(name) for name in names], "param_names": names}
            groups.setdefault(config.optimizer_name, []).append({**group, **kernel, **config.optimizer_kwargs})
        return groups, {}

    def _post_init(self, all_params: list[Any]) -> None: ...

    def __iter__(self) -> Iterator[Optimizer]:
        return iter(self.optimizers)

    def step(self) -> None:
        """Steps all of them."""
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        """Drops all gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """state.NAME.KEY and param_groups.NAME.KEY of every parameter; moments that are not there yet are made."""
        state: dict[str, Any] = {}
        for optimizer in self.optimizers:
            init_optim_state(optimizer)
            for group in optimizer.param_groups:
                settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
                for name, parameter in zip(group["param_names"], group["params"], strict=True):
                    state |= {f"state.{name}.{key}": value for key, value in optimizer.state[parameter].items()}
                    state |= {f"param_groups.{name}.{key}": value for key, value in settings.items()}
        return state

    def load_state_dict(self, stored: dict[str, Any]) -> None:
        """Loads the values of `state_dict`."""
        for optimizer in self.optimizers:
            init_optim_state(optimizer)
            for group in optimizer.param_groups:
                for name, parameter in zip(group["param_names"], group["params"], strict=True):
                    state = optimizer.state[parameter]
                    state.update({key: stored[f"state.{name}.{key}"] for key in state})
                    group.update({
                        key: stored[f"param_groups.{name}.{key}"]
                        for key in group
                        if key not in ("params", "param_names")
                    })  # fmt: skip


def init_optim_state(optimizer: Optimizer) -> None:
    """Lets an optimizer make its moments, by a step that changes no parameter."""
    groups = optimizer.param_groups
    if optimizer.state or any(parameter.grad is not None for group in groups for parameter in group["params"]):
        return
    rates = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = parameter.new_zeros(parameter.shape)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate


class TensorBoardLogger:
    """torch's writer of tensorboard files."""

    def __init__(self, log_dir: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(log_dir, max_queue=1000)

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """Adds numbers."""
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Writes the remaining metrics."""
        self.writer.close()


class WandBLogger:
    """wandb's own run, with its variables for names."""

    def __init__(self, log_dir: str, config_dict: dict[str, Any] | None = None) -> None:
        import wandb

        self.wandb = wandb
        project, name, number = map(os.getenv, ("WANDB_PROJECT", "WANDB_RUN_NAME", "WANDB_RUN_ID"))
        wandb.init(dir=log_dir, config=config_dict, project=project, name=name, id=number)

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """Adds numbers."""
        self.wandb.log(metrics, step=step)

    def close(self) -> None:
        """Ends the run."""
        self.wandb.finish()
