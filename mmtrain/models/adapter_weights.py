"""Starts a chunk's low-rank adapters from a `peft` folder, such as `mmtrain export` writes."""

from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from mmtrain.config.model import ModelConfig, section_of
from mmtrain.errors import ConfigError
from mmtrain.families.catalogue import ENCODERS
from mmtrain.models.chunk import Chunk, VisionChunk
from mmtrain.models.fused_qkv import is_fused, to_head_major
from mmtrain.models.pretrained import open_tensors
from mmtrain.models.trainable import adapter_names, is_adapter, stored_adapter_name
from mmtrain.models.whole import in_classes
from mmtrain.spec.adapter_settings import check_settings
from mmtrain.spec.hub_files import find_file, read_json
from mmtrain.spec.linears import adapted_layers
from mmtrain.spec.model_configs import encoder_config
from mmtrain.spec.module_sizes import whole_kind
from mmtrain.spec.vision_shapes import vision_shape

_KEY = "model.lora.pretrained"
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

TensorShape = tuple[int, ...]


@torch.no_grad()
def load_adapters(chunk: Chunk, model: ModelConfig) -> int:
    """The number of adapters' parameters of a materialised, not yet sharded chunk that were set from files.

    Nothing is read, and 0 returned, without `model.lora.pretrained`. Raises: ConfigError: as `stored_adapters`.
    """
    parameters = {name: parameter for name, parameter in chunk.named_parameters() if is_adapter(name)}
    if not model.lora.pretrained or not parameters:
        return 0
    stored = stored_adapters(model)
    for module in {name.partition(".")[0] for name in parameters}:
        file, keys = stored[module]
        with open_tensors(_KEY, file) as tensors:
            for name, parameter in parameters.items():
                if name.partition(".")[0] != module:
                    continue
                tensor = tensors.get_tensor(keys[name])
                if isinstance(chunk, VisionChunk) and is_fused(name, chunk.adapter.fused_qkv):
                    tensor = to_head_major(tensor, chunk.shape.num_heads)
                parameter.copy_(tensor)
    return len(parameters)


def stored_adapters(model: ModelConfig) -> dict[str, tuple[Path, dict[str, str]]]:
    """Module, or projector -> the file of its adapters in `model.lora.pretrained`, and parameter -> its name there.
    An encoder's own merger belongs to the encoder.

    A folder of a whole model has the names of its class in transformers, of any release; a folder of exported parts has
    a folder for each module. No tensor is read.
    Raises: ConfigError: no such folder, adapters that compute something else than those of the config, or tensors that
        are missing, of another shape, or that no parameter takes.
    """
    modules = list(dict.fromkeys(name.partition(".")[0] for name in _parameters(model)))
    if find_file(_KEY, model.lora.pretrained, _CONFIG, optional=True) is None:
        return {name: _in_folder(model, f"{name}_adapter/", [name], "") for name in modules}
    kind = whole_kind(model)
    if not kind:
        raise ConfigError(
            f"{_KEY} = {model.lora.pretrained!r} holds adapters of a whole model of transformers, but this job's "
            f"modules make none; give the folder with {modules[0]}_adapter/ that `mmtrain export` writes of such a job"
        )
    return dict.fromkeys(modules, _in_folder(model, "", modules, kind))


def _in_folder(model: ModelConfig, folder: str, modules: list[str], kind: str) -> tuple[Path, dict[str, str]]:
    """The file and names of some modules' adapters. Args: folder: in the source. kind: of a whole model, or empty."""
    settings, file = (find_file(_KEY, model.lora.pretrained, folder + name) for name in (_CONFIG, _WEIGHTS))
    assert settings is not None and file is not None
    with open_tensors(_KEY, file) as tensors:
        stored = {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    shapes = {name: shape for name, shape in _parameters(model).items() if name.partition(".")[0] in modules}
    keys = {name: _stored_name(kind, name, stored) for name in shapes}
    source = f"{_KEY} = {model.lora.pretrained!r}"
    check_settings(f"{source}: {folder}{_CONFIG}", read_json(_KEY, settings), model.lora, map(_layer, keys.values()))
    wanted = {keys[name]: shape for name, shape in shapes.items()}
    unused = {_stored_name(kind, name, stored) for name in _parameters(model, unused=True)}
    _check_tensors(f"{source}: {folder}{_WEIGHTS}", stored, wanted, unused)
    return file, keys


def _parameters(model: ModelConfig, *, unused: bool = False) -> dict[str, TensorShape]:
    """Name of each parameter of all adapters -> its shape.

    Args: unused: of blocks behind the features that are read, which no job has, instead.
    """
    lora, found = model.lora, dict[str, TensorShape]()
    for module in (*model.encoders, "language"):
        behind = _unused_blocks(model, module) if unused else range(0)
        layers = adapted_layers(model, module, unused=behind) if behind or not unused else {}
        for layer, linear in layers.items():
            names = adapter_names(f"{layer}.base_layer.weight")
            found |= {names.down: (lora.rank, linear.inputs), names.up: (linear.outputs, lora.rank)}
            found |= {names.magnitude: (linear.outputs,)} if lora.use_dora else {}
    return found


def _unused_blocks(model: ModelConfig, module: str) -> range:
    """The blocks of a module's class that no job has."""
    if module == "language":
        return range(0)
    shape, values = vision_shape(model, module), encoder_config(model.encoders[module], section_of(module))
    return range(shape.depth, values[ENCODERS[shape.model_type].sizes["depth"]])


def _stored_name(kind: str, name: str, stored: Collection[str]) -> str:
    """The name of a parameter in a file. Args: kind: of a whole model; empty: of a part. stored: all names in it."""
    names = [stored_adapter_name(n) for n in (in_classes(kind, name) if kind else [name.partition(".")[2]])]
    return next((name for name in names if name in stored), names[0])


def _layer(key: str) -> str:
    """The name of the layer that an adapter's stored parameter adapts, as `peft` matches it."""
    return key.removeprefix("base_model.model.").rpartition(".lora_")[0]


def _check_tensors(
    where: str, stored: Mapping[str, TensorShape], wanted: Mapping[str, TensorShape], unused: set[str]
) -> None:
    for name, shape in wanted.items():
        if stored.get(name) != shape:
            there_is = f"has shape {stored[name]}, not {shape}" if name in stored else "is not there"
            raise ConfigError(
                f"{where}: {name} {there_is}; take the base model, model.lora.target_modules and trainable_layers with "
                "which the adapters were trained"
            )
    surplus = sorted(stored.keys() - wanted.keys() - unused)
    if surplus:
        more = f" and {len(surplus) - 1} more" if len(surplus) > 1 else ""
        raise ConfigError(
            f"{where}: no parameter of this job takes {surplus[0]}{more}; "
            'set trainable = "lora" for each module, and name in model.lora.target_modules and trainable_layers each '
            "layer, that has adapters there, or merge them into the base model with peft (`merge_and_unload`)"
        )
