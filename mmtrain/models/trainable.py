"""The parameters of a Hugging Face module that train: all, none, or low-rank adapters that `peft` adds to it.

With adapters a linear layer X becomes `X.base_layer` (frozen), `X.lora_A.default` and `X.lora_B.default`, the names
that `peft` gives: y = X x + (alpha / rank) B A x, arXiv:2106.09685. Only the functions on
names depend on this.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mmtrain.config.model import LoRAConfig, Trainable, projector_name
from mmtrain.families.catalogue import TABLES
from mmtrain.models.adapter_layers import AdapterDropout, Magnitude

_MERGERS = tuple({f"{name}." for table in TABLES.values() for name in table.mergers})
_ADAPTER = "default"
_BASE = ".base_layer"
_MAGNITUDE = ".lora_magnitude_vector."
_INDEX = re.compile(r"((?:.*?\.)?)(\d+)(\..+)")


def set_trainable(
    module: nn.Module, setting: Trainable, *, blocks: str, trained: Collection[int] | None = None
) -> None:
    """Sets which parameters of a newly built module on the meta device train: all, or none but those of adapters.

    true leaves parameters fixed that the Hugging Face class keeps fixed, such as sinusoidal positions.
    Args:
        blocks: name of the container of the blocks inside of the module; it may be empty, or hold some of them.
        trained: with true, the blocks that train alone; None: all of the module.
    """
    if setting is True and trained is None:
        return
    kept = [
        parameter
        for index, block in module.get_submodule(blocks).named_children()
        if setting is True and int(index) in (trained or ())
        for parameter in block.parameters()
        if parameter.requires_grad
    ]
    module.requires_grad_(False)
    for parameter in kept:
        parameter.requires_grad_()


def add_adapters(container: nn.Module, names: Sequence[str], lora: LoRAConfig) -> None:
    """Adds adapters to linear layers of a module on the meta device, on meta too; all else of it becomes fixed.

    Args: names: of the layers inside of the container; those that it does not have get none.
    """
    present = [name for name, module in container.named_modules() if name in set(names) and type(module) is nn.Linear]
    if not present:
        return
    from peft import LoraConfig, inject_adapter_in_model

    section = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules="|".join(map(re.escape, present)),
        lora_dropout=lora.dropout,
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        bias="none",
    )
    # Not into the whole module: of a Hugging Face class peft asks for embeddings, which a chunk may lack.
    inject_adapter_in_model(section, container, adapter_name=_ADAPTER, low_cpu_mem_usage=True)
    for name in present:
        layer: Any = container.get_submodule(name)
        if lora.dropout:
            layer.lora_dropout[_ADAPTER] = AdapterDropout(lora.dropout)
        if lora.use_dora:
            with torch.device("meta"):
                layer.lora_magnitude_vector[_ADAPTER] = Magnitude(layer.out_features)


def start_magnitudes(module: nn.Module) -> None:
    """Sets the lengths of adapted weights (DoRA) to those of the weights, with which adapters change nothing."""
    for layer in module.modules():
        magnitudes = getattr(layer, "lora_magnitude_vector", None)
        for magnitude in magnitudes.values() if magnitudes else ():
            magnitude.start(layer)


def target_pattern(names: Sequence[str]) -> str:
    """The regular expression that names of layers match, as `peft` takes it; names that differ in the index of a block
    alone are one alternative."""
    indices: dict[tuple[str, str], list[str]] = {}
    for name in names:
        found = _INDEX.fullmatch(name)
        before, index, after = found.groups() if found else (name, "", "")
        indices.setdefault((before, after), []).append(index)
    layers: dict[tuple[str, str], list[str]] = {}
    for (before, after), numbers in indices.items():
        layers.setdefault((before, "|".join(numbers)), []).append(re.escape(after))
    return "|".join(
        f"{re.escape(before)}({numbers})({'|'.join(afters)})" if numbers else re.escape(before)
        for (before, numbers), afters in layers.items()
    )


def is_adapter(name: str) -> bool:
    """Whether a parameter or submodule belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name or _MAGNITUDE in name


def plain_name(name: str) -> str:
    """The name that a parameter or submodule has in the module without adapters."""
    return name.replace(_BASE, "")


class AdapterNames(NamedTuple):
    """Names of the parameters of one layer's adapter."""

    down: str
    """The name of matrix A, [rank, inputs]."""
    up: str
    """The name of matrix B, [outputs, rank]."""
    magnitude: str
    """The name of the lengths of rows, [outputs]; only DoRA has them."""


def adapter_names(name: str) -> AdapterNames:
    """Names of the adapter that belongs to a layer's weight, given its name with adapters, `X.base_layer.weight`."""
    layer = name.removesuffix(f"{_BASE}.weight")
    kinds = ("lora_A", "lora_B", "lora_magnitude_vector")
    return AdapterNames(*(f"{layer}.{kind}.{_ADAPTER}.weight" for kind in kinds))


def merged_weight(weight: Tensor, adapter: Mapping[str, Tensor], names: AdapterNames, lora: LoRAConfig) -> Tensor:
    """The weight [outputs, inputs] that computes what a layer with its adapter does. Args: adapter: name -> value."""
    merged = torch.addmm(weight, adapter[names.up], adapter[names.down], alpha=lora.scale)
    if not lora.use_dora:
        return merged
    lengths = torch.linalg.vector_norm(merged, dim=1).detach()  # whose gradient DoRA leaves out
    return (adapter[names.magnitude] / lengths)[:, None] * merged


def stored_adapter_name(name: str) -> str:
    """The name of an adapter's parameter in a `peft` folder."""
    stored = name.removesuffix(f".{_ADAPTER}.weight") if _MAGNITUDE in name else name.replace(f".{_ADAPTER}.", ".")
    return "base_model.model." + stored


def part_of(name: str) -> str:
    """The part of a model that a parameter belongs to: its module, or `projector`, also for an encoder's own merger."""
    module, _, rest = name.partition(".")
    return projector_name(module) if rest.startswith(_MERGERS) else module
