"""Which parameters of a Hugging Face module train: all, none, or low-rank adapters that `peft` adds to it.

With adapters a linear layer X becomes `X.base_layer` (frozen), `X.lora_A.default` and `X.lora_B.default`, the names
that `peft` gives: y = X x + (alpha / rank) B A x, arXiv:2106.09685. Only the functions on
names depend on this.
"""

import re
from collections.abc import Sequence

from torch import nn

from mmtrain.config.model import LoRAConfig, Trainable, projector_name
from mmtrain.families.catalogue import TABLES
from mmtrain.spec.linears import Linear

_MERGERS = tuple({f"{name}." for table in TABLES.values() for name in table.mergers})
_ADAPTER = "default"
_BASE = ".base_layer"


def set_trainable(
    module: nn.Module, setting: Trainable, *, lora: LoRAConfig, adapted: Sequence[Linear], blocks: str
) -> None:
    """Sets which parameters of a newly built module on the meta device train; "lora" adds adapters, on meta too.

    true leaves parameters fixed that the Hugging Face class keeps fixed, such as sinusoidal positions.
    Args:
        adapted: the linear layers of a block that get an adapter.
        blocks: name of the container of the blocks inside of the module; it may be empty, or hold some of them.
    """
    if setting is not True:
        module.requires_grad_(False)
    container = module.get_submodule(blocks)
    if setting != "lora" or not list(container.children()):
        return
    from peft import LoraConfig, inject_adapter_in_model

    section = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=target_pattern(adapted),
        lora_dropout=0.0,
        bias="none",
    )
    # Not into the whole module: of a Hugging Face class peft asks for embeddings, which a chunk may lack.
    inject_adapter_in_model(section, container, adapter_name=_ADAPTER, low_cpu_mem_usage=True)


def target_pattern(adapted: Sequence[Linear], blocks: str = "", num_blocks: int = 0) -> str:
    """The regular expression that names of adapted layers match, as `peft` takes it.

    Args:
        blocks: name of the container of the blocks in the module that is asked; empty: the container itself.
        num_blocks: blocks with adapters; 0: all that it has.
    """
    names = "|".join(re.escape(linear.name) for linear in adapted)
    index = f"({'|'.join(map(str, range(num_blocks)))})" if num_blocks else r"\d+"
    return (rf"{re.escape(blocks)}\." if blocks else "") + rf"{index}\.({names})"


def is_adapter(name: str) -> bool:
    """Whether a parameter or submodule belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def plain_name(name: str) -> str:
    """The name that a parameter or submodule has in the module without adapters."""
    return name.replace(_BASE, "")


def adapter_names(name: str) -> tuple[str, str]:
    """Names of the A [rank, inputs] and B [outputs, rank] that belong to a layer's weight, given its name with
    adapters, `X.base_layer.weight`.
    """
    layer = name.removesuffix(f"{_BASE}.weight")
    return f"{layer}.lora_A.{_ADAPTER}.weight", f"{layer}.lora_B.{_ADAPTER}.weight"


def stored_adapter_name(name: str) -> str:
    """The name of an adapter's parameter in a `peft` folder."""
    return "base_model.model." + name.replace(f".{_ADAPTER}.", ".")


def part_of(name: str) -> str:
    """The part of a model that a parameter belongs to: its module, or `projector`, also for an encoder's own merger."""
    module, _, rest = name.partition(".")
    return projector_name(module) if rest.startswith(_MERGERS) else module
