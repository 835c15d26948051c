"""Low-rank adapters of a checkpoint: merged into the weights that they adapt, or as a folder for `peft`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from mmtrain.config.model import LoRAConfig
from mmtrain.models.trainable import (
    adapter_names,
    is_adapter,
    merged_weight,
    plain_name,
    stored_adapter_name,
    target_pattern,
)


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """A folder of adapters, and its metadata."""

    lora: LoRAConfig
    base: str | None
    """The source of the adapted weights."""
    task: str | None
    folder: Path
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportForm:
    """What an export writes of the weights."""

    merge_adapters: bool = False
    """Adapters are added to the weights that they adapt."""
    adapters_only: bool = False
    """Adapters are written without the weights that they adapt."""
    dtype: torch.dtype = torch.float32
    """The dtype in which weights are stored; they are merged in float32."""

    def adapters(self, lora: LoRAConfig, base: str | None, task: str | None, folder: Path) -> AdapterFolder | None:
        """The folder that gets adapters; None: they are merged into the weights. Args: as of `AdapterFolder`."""
        return None if self.merge_adapters else AdapterFolder(lora, base, task, folder, self.dtype)

    def stored(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors as they are stored; those of other numbers than floating-point ones are unchanged."""
        return {name: x.to(self.dtype) if x.is_floating_point() else x for name, x in tensors.items()}


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
        weights[name].copy_(merged_weight(weights[name], adapters, adapter_names(name), lora))


def _save(tensors: dict[str, Tensor], adapters: AdapterFolder) -> None:
    """Writes a folder for `PeftModel.from_pretrained`."""
    from peft import LoraConfig

    settings = LoraConfig(
        r=adapters.lora.rank,
        lora_alpha=adapters.lora.alpha,
        target_modules=target_pattern(list(dict.fromkeys(name.partition(".lora_")[0] for name in tensors))),
        lora_dropout=adapters.lora.dropout,
        use_rslora=adapters.lora.use_rslora,
        use_dora=adapters.lora.use_dora,
        bias="none",
        task_type=adapters.task,
        base_model_name_or_path=adapters.base,
        inference_mode=True,
    )
    adapters.folder.mkdir(exist_ok=True)
    settings.save_pretrained(adapters.folder)
    stored = {stored_adapter_name(name): tensor.to(adapters.dtype).contiguous() for name, tensor in tensors.items()}
    save_file(stored, adapters.folder / "adapter_model.safetensors", metadata={"format": "pt"})
