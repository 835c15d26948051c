"""The whole model of transformers in a folder that somebody made: nothing in it chooses code or names other files.

`from_pretrained` does more than is wanted of such a folder: it follows adapter_config.json to another model, loads
kernels that config.json names, and unpickles weights. Here config.json gives values to a class that is known, and
weights are tensors by name.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from mmtrain.errors import ConfigError, MMTrainError, one_line, shown
from mmtrain.families.catalogue import COMPOSITES
from mmtrain.models.pretrained import module_names, open_tensors
from mmtrain.models.whole import empty_whole, filled
from mmtrain.spec.composites import class_name, part_config
from mmtrain.spec.hub_files import read_json
from mmtrain.spec.weight_files import check_weight_files, weight_files

KEY = "SOURCE"
"""What errors call the folder: the argument of the command."""
_CHOOSES_CODE = (
    *("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation"),
    *("attn_implementation_internal", "_attn_implementation_internal", "_experts_implementation_internal"),
    *("auto_map", "custom_pipelines", "fusion_config", "transformers_weights", "use_kernels", "kernel_config"),
)
"""Keys of config.json that choose implementations or files, not values; they are not read."""


def whole_class_config(folder: Path) -> PreTrainedConfig:
    """The config of the whole model in a folder, by the class that transformers has for its `model_type`.

    Raises: ConfigError: it is not of a known whole model, or the class refuses it.
    """
    import transformers

    values = read_json(KEY, folder / "config.json")
    kind = str(values.get("model_type"))
    if kind not in COMPOSITES:
        raise ConfigError(
            f"{folder}: model_type = {shown(kind)} is no whole model that is known here; these are "
            f"{', '.join(COMPOSITES)}"
        )
    if values.get("quantization_config") is not None:
        raise ConfigError(
            f"{folder}: config.json has a quantization_config; quantized weights are not supported, name a folder with "
            "weights in bfloat16 or float32"
        )
    _check_parts(folder, kind, values)
    try:
        config: PreTrainedConfig = getattr(transformers, f"{COMPOSITES[kind].class_name}Config").from_dict(
            _without_code(values)
        )
    except Exception as error:  # the config classes have validators that raise types of their own
        raise _unusable(folder, error) from None
    config.architectures = [class_name(kind)]
    return config


def read_whole(folder: Path, config: PreTrainedConfig) -> PreTrainedModel:
    """The whole model with the weights of its folder, of one dtype.

    Raises: ConfigError: weights are missing, damaged or of other shapes, or the class refuses its config.
    """
    shapes = check_weight_files(KEY, str(folder))
    try:
        with torch.no_grad():
            model = empty_whole(config)
            names = module_names(model, {name: name for name in shapes})
            _check_shapes(folder, model, {name: shapes[stored] for name, stored in names.items()})
            filled(model, _weights(folder, names))
    except MMTrainError:
        raise
    except Exception as error:
        raise _unusable(folder, error) from None
    absent = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if absent:
        raise ConfigError(f"{folder} has no weights for {absent[0]}{_more(absent)}; fetch all files of the model")
    dtypes = [parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()]
    wanted = config.dtype if isinstance(config.dtype, torch.dtype) else dtypes[0]
    return model.to(wanted) if set(dtypes) != {wanted} else model


def _check_parts(folder: Path, kind: str, values: Mapping[str, Any]) -> None:
    """Refuses parts of another family than the whole model can have: transformers would look for their class."""
    whole = COMPOSITES[kind]
    for where, families in (("model.encoder", whole.encoders), ("model.language", whole.languages)):
        part = part_config(where, values)
        assert part is not None
        if part["model_type"] not in (*families, *(family.removesuffix("_text") for family in families), kind):
            raise ConfigError(
                f"{folder}: config.json says model_type = {shown(part['model_type'])} for the part [{where}] of a "
                f"{kind} model; known are {', '.join(families)}"
            )


def _without_code(values: Any) -> Any:
    if isinstance(values, Mapping):
        return {key: _without_code(value) for key, value in values.items() if key not in _CHOOSES_CODE}
    return [_without_code(value) for value in values] if isinstance(values, list) else values


def _check_shapes(folder: Path, model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]) -> None:
    for name, parameter in model.named_parameters():
        if shapes.get(name, parameter.shape) != parameter.shape:
            raise ConfigError(
                f"{folder}: {name} has shape {shapes[name]} in the weights, but config.json makes "
                f"{tuple(parameter.shape)}; take both from one model"
            )


def _weights(folder: Path, names: Mapping[str, str]) -> dict[str, Tensor]:
    """Name in the class -> tensor. Args: names: name in the class -> name on disk."""
    files, weights = weight_files(KEY, str(folder)), dict[str, Tensor]()
    for file in dict.fromkeys(files.values()):
        with open_tensors(KEY, folder / file) as tensors:
            weights |= {name: tensors.get_tensor(key) for name, key in names.items() if files[key] == file}
    return weights


def _unusable(folder: Path, error: Exception) -> ConfigError:
    reason = f"{type(error).__name__}: {one_line(error, 300)}"
    return ConfigError(f"{folder}: its config.json makes no model: {reason}; restore the model's own config.json")


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
