"""Low-rank adapters of a checkpoint: merged into the weights that they adapt, or as a folder for `peft`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from mmtrain.config.model import LoRAConfig
from mmtrain.models.trainable import adapter_names, is_adapter, plain_name, stored_adapter_name


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """A folder of adapters, and its metadata."""

    lora: LoRAConfig
    pattern: str
    """Names of the adapted layers."""
    base: str | None
    """The source of the adapted weights."""
    task: str | None
    folder: Path


def plain(
    weights: dict[str, Tensor],
    lora: LoRAConfig,
    folder: AdapterFolder | None,
    stored: Callable[[str], str] = lambda name: name,
) -> dict[str, Tensor]:
    """Weights without adapters, under their original names; adapters are written to the folder, or without one merged
    into the weights, in place.

    Args: stored: a name -> that in the class which `peft` adapts.
    """
    low_rank = {name: tensor for name, tensor in weights.items() if is_adapter(name)}
    if low_rank and folder is None:
        _merge(weights, low_rank, lora)
    elif low_rank and folder is not None:
        _save({stored(name): tensor for name, tensor in low_rank.items()}, folder)
    return {plain_name(name): tensor for name, tensor in weights.items() if name not in low_rank}


def _merge(weights: dict[str, Tensor], adapters: dict[str, Tensor], lora: LoRAConfig) -> None:
    """Adds each adapter to the weight that it adapts, in place."""
    for name in [n for n in weights if n not in adapters and plain_name(n) != n and n.endswith(".weight")]:
        down, up = (adapters[adapter] for adapter in adapter_names(name))
        weights[name].add_(up @ down, alpha=lora.alpha / lora.rank)


def _save(tensors: dict[str, Tensor], adapters: AdapterFolder) -> None:
    """Writes a folder for `PeftModel.from_pretrained`."""
    from peft import LoraConfig

    settings = LoraConfig(
        r=adapters.lora.rank,
        lora_alpha=adapters.lora.alpha,
        target_modules=adapters.pattern,
        lora_dropout=0.0,
        bias="none",
        task_type=adapters.task,
        base_model_name_or_path=adapters.base,
        inference_mode=True,
    )
    adapters.folder.mkdir()
    settings.save_pretrained(adapters.folder)
    stored = {stored_adapter_name(name): tensor.contiguous() for name, tensor in tensors.items()}
    save_file(stored, adapters.folder / "adapter_model.safetensors", metadata={"format": "pt"})
