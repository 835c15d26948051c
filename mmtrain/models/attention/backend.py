"""The choice of the kernels that compute attention: the one place that decides, and says why."""

from typing import Literal, NamedTuple

import torch

from mmtrain.config.config import Config
from mmtrain.errors import ConfigError
from mmtrain.families.shapes import LanguageShape, VisionShape
from mmtrain.models.attention.flex import LEAST_COLUMNS
from mmtrain.models.attention.varlen import LIMITS
from mmtrain.spec.module_sizes import shape_of

Backend = Literal["auto", "sdpa", "varlen", "flex"]


class Operands(NamedTuple):
    """What kernels are chosen by, of query, key and value."""

    device: str
    """The type of the device."""
    capability: tuple[int, int]
    """Compute capability of a CUDA device; (0, 0) of another one."""
    dtype: torch.dtype
    columns: int
    """The columns of a head."""

    @classmethod
    def on(cls, device: torch.device, dtype: torch.dtype, columns: int) -> "Operands":
        """The operands on a device."""
        return cls(device.type, capability_of(device), dtype, columns)

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)} heads of {self.columns} columns on {self.device}"


class Kernels(NamedTuple):
    """The kernels that compute attention of some operands."""

    plain: Literal["sdpa", "varlen", "flex"]
    """The kernel of segments that attend within themselves, all or causally, or to a slice of keys that is theirs
    alone."""
    masked: Literal["sdpa", "flex"]
    """The kernel of all other masks."""
    why: str
    """Why `plain` is not varlen; empty: it is."""

    def __str__(self) -> str:
        masked = f", other masks {self.masked}" if self.masked != self.plain else ""
        return f"{self.plain}{masked}{f' ({self.why})' if self.why else ''}"


def choose_kernels(backend: Backend, operands: Operands) -> Kernels:
    """The kernels of a backend for some operands. Args: backend: `training.attention_backend`."""
    if backend in ("sdpa", "flex"):
        return Kernels(backend, backend, f'training.attention_backend = "{backend}"')
    masked: Literal["sdpa", "flex"] = (
        "flex" if operands.device == "cuda" and operands.columns >= LEAST_COLUMNS else "sdpa"
    )
    why = why_no_varlen(operands)
    return Kernels("sdpa" if why else "varlen", masked, why)


def why_no_varlen(operands: Operands) -> str:
    """Why torch's variable-length attention does not take some operands; empty: it does."""
    limits = LIMITS.get(operands.device)
    if limits is None:
        return f"varlen has no kernel on {operands.device}"
    if operands.capability < limits.capability:
        return "varlen needs compute capability {}.{}, the device has {}.{}".format(
            *limits.capability, *operands.capability
        )
    if operands.dtype not in limits.dtypes:
        return f"varlen takes {' and '.join(map(dtype_name, limits.dtypes))}, not {dtype_name(operands.dtype)}"
    if operands.columns % limits.multiple or operands.columns > limits.most:
        return (
            f"varlen takes heads of a multiple of {limits.multiple} columns up to {limits.most}, not {operands.columns}"
        )
    return ""


def capability_of(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device; (0, 0) of another one."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def operands_of(config: Config, device: str, capability: tuple[int, int]) -> dict[str, Operands]:
    """Module -> the operands of its attention, of those whose attention is chosen here: all but diffusers' modules."""
    dtype = getattr(torch, config.training.param_dtype)
    shapes = {name: shape_of(config.model, name) for name in config.model.sections}
    return {
        name: Operands(device, capability, dtype, shape.head_dim)
        for name, shape in shapes.items()
        if isinstance(shape, VisionShape | LanguageShape)
    }


def attention_line(config: Config, device: str, capability: tuple[int, int]) -> str:
    """What computes the attention of each module, and why, for the log."""
    modules: dict[str, list[str]] = {}
    for name, operands in operands_of(config, device, capability).items():
        modules.setdefault(str(choose_kernels(config.training.attention_backend, operands)), []).append(name)
    return "attention: " + "; ".join(f"{', '.join(names)}: {kernels}" for kernels, names in modules.items())


def check_backend(config: Config, device: torch.device) -> None:
    """Refuses a backend that was named, but cannot compute the attention of a module.

    Raises: ConfigError.
    """
    backend = config.training.attention_backend
    if backend == "flex" and device.type != "cuda":
        raise ConfigError(
            f'training.attention_backend = "flex" trains on CUDA alone, but the device is {device.type}; set "auto"'
        )
    for name, operands in operands_of(config, device.type, capability_of(device)).items():
        if backend == "varlen" and (why := why_no_varlen(operands)):
            raise ConfigError(
                f'training.attention_backend = "varlen", but {name} has {operands}, and {why}; set "auto"'
            )


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without its module."""
    return str(dtype).removeprefix("torch.")
