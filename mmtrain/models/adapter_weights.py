"""Starts a chunk's low-rank adapters from a `peft` folder, such as `mmtrain export` writes."""

import torch

from mmtrain.config.model import LoRAConfig, ModelConfig
from mmtrain.errors import ConfigError
from mmtrain.models.chunk import Chunk, VisionChunk
from mmtrain.models.fused_qkv import is_fused, to_head_major
from mmtrain.models.pretrained import open_tensors
from mmtrain.models.trainable import is_adapter, stored_adapter_name
from mmtrain.models.whole import in_class
from mmtrain.spec.hub_files import find_file, read_json
from mmtrain.spec.modules import whole_kind

_KEY = "model.lora.pretrained"
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@torch.no_grad()
def load_adapters(chunk: Chunk, model: ModelConfig) -> int:
    """The number of adapters' parameters of a materialised, not yet sharded chunk that were set from files.

    The folder's names are those of the whole class of transformers, where the modules make one; a folder of exported
    parts has a folder for each module. Nothing is read, and 0 returned, without `model.lora.pretrained`.
    Raises: ConfigError: no such folder, other sizes than the config's, or adapters that are missing or of another
        shape.
    """
    parameters = {name: parameter for name, parameter in chunk.named_parameters() if is_adapter(name)}
    source = model.lora.pretrained
    if not source or not parameters:
        return 0
    module = next(iter(parameters)).partition(".")[0]
    folder, kind = "", whole_kind(model)
    if find_file(_KEY, source, _CONFIG, optional=True) is None:
        folder = f"{module}_adapter/"
    elif not kind:
        raise ConfigError(
            f"{_KEY} = {source!r} holds adapters of a whole model of transformers, but this job's modules make none; "
            f"give the folder with {module}_adapter/ that `mmtrain export` writes of such a job"
        )
    _check_settings(model.lora, f"{folder}{_CONFIG}")
    of_class = {name: name.partition(".")[2] if folder else in_class(kind, name) for name in parameters}
    path = find_file(_KEY, source, f"{folder}{_WEIGHTS}")
    assert path is not None
    with open_tensors(_KEY, path) as stored:
        names = set(stored.keys())
        for name, parameter in parameters.items():
            key = stored_adapter_name(of_class[name])
            shape = tuple(stored.get_slice(key).get_shape()) if key in names else None
            if shape != parameter.shape:
                there_is = "is not there" if shape is None else f"has shape {shape}, not {tuple(parameter.shape)}"
                raise ConfigError(
                    f"{_KEY} = {source!r}: {key} {there_is} in {folder}{_WEIGHTS}; take the base model and "
                    "model.lora.target_modules with which the adapters were trained"
                )
            tensor = stored.get_tensor(key)
            if isinstance(chunk, VisionChunk) and is_fused(name, chunk.adapter.fused_qkv):
                tensor = to_head_major(tensor, chunk.shape.num_heads)
            parameter.copy_(tensor)
    return len(parameters)


def _check_settings(lora: LoRAConfig, name: str) -> None:
    """Checks that a folder's adapters have the sizes of the config."""
    path = find_file(_KEY, lora.pretrained, name)
    assert path is not None
    stored = read_json(_KEY, path)
    for theirs, (key, ours) in {"r": ("rank", lora.rank), "lora_alpha": ("alpha", lora.alpha)}.items():
        if stored.get(theirs) != ours:
            raise ConfigError(
                f"{_KEY} = {lora.pretrained!r}: {name} has {theirs} = {stored.get(theirs)}, but model.lora.{key} = "
                f"{ours}; set model.lora.{key} = {stored.get(theirs)}"
            )
