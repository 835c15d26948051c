"""Loads a chunk's own weights, and no others, from the safetensors files of a folder or hub id."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from mmtrain.config.model import DitConfig, EncoderConfig, LanguageConfig, ModelConfig, ProjectorConfig, VaeConfig
from mmtrain.errors import ConfigError
from mmtrain.models.chunk import Chunk, LanguageChunk, VisionChunk
from mmtrain.models.dit import DitChunk
from mmtrain.models.fused_qkv import is_fused, to_head_major
from mmtrain.models.projector import Projector
from mmtrain.models.trainable import is_adapter, plain_name
from mmtrain.models.vae import VaeChunk, VaeDecoder
from mmtrain.spec.hub_files import find_file, read_json

_PREFIXES = {
    "qwen2_vl_vision": ("model.visual.", "visual."),
    "qwen2_5_vl_vision": ("model.visual.", "visual."),
    "siglip_vision_model": ("vision_model.",),
    "vit": ("vit.",),
    "whisper_encoder": ("model.encoder.", "encoder."),
    "qwen2": (),
    "llama": (),
    "qwen3": (),
    "mistral": (),
    "qwen2_vl_text": ("model.language_model.",),
    "qwen2_5_vl_text": ("model.language_model.",),
    "wan": (),
    "autoencoder_kl": (),
    "autoencoder_kl_wan": (),
}
"""What may stand before the names of a family's parameters where it is a part of a larger model; not before those of a
language model's head."""

_STEM = {"model.dit": "diffusion_pytorch_model", "model.vae": "diffusion_pytorch_model"}
"""What files of weights are called, where that is not `model`."""

_OLD_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
"""Names of layers of a VAE's attention as files of old versions of diffusers have them -> as its class has them."""

_HEAD = "lm_head."
"""How the names of a head begin."""

_DERIVED = ("rotary_emb.inv_freq", "position_ids")
"""Ends of names that old checkpoints hold although the values follow from the config."""


@torch.no_grad()
def load_pretrained(chunk: Chunk | VaeDecoder, model: ModelConfig) -> int:
    """The number of parameters (tensors) of a materialised, not yet sharded chunk that were set from files.

    Only tensors of this chunk are read. Nothing is read, and 0 returned, for a module that is to have random
    weights. Adapters keep their initial values: a file holds the layers that they adapt.
    Raises: ConfigError: no safetensors file, or weights that are missing, unexpected or of another shape.
    """
    if isinstance(chunk, VisionChunk):
        assert model.encoder is not None
        loaded = _load(
            chunk.vision,
            "model.encoder",
            model.encoder,
            chunk.shape.model_type,
            {},
            fused_heads=dict.fromkeys(chunk.adapter.fused_qkv, chunk.shape.num_heads),
        )
        return loaded + (_load_projector(chunk.projector, model.projector) if chunk.projector is not None else 0)
    if isinstance(chunk, DitChunk):
        assert model.dit is not None
        return _load(chunk.dit, "model.dit", model.dit, chunk.shape.model_type, {})
    if isinstance(chunk, VaeChunk | VaeDecoder):
        assert model.vae is not None
        return _load(chunk.vae, "model.vae", model.vae, chunk.shape.model_type, {})
    assert isinstance(chunk, LanguageChunk)
    tied = {"lm_head.weight": "model.embed_tokens.weight"} if chunk.shape.tied else {}
    return _load(chunk.language, "model.language", model.language, chunk.shape.model_type, tied)


def _load(
    module: nn.Module,
    where: str,
    section: EncoderConfig | LanguageConfig | DitConfig | VaeConfig,
    model_type: str,
    same_as: dict[str, str],
    fused_heads: Mapping[str, int] | None = None,
) -> int:
    """Fills the parameters of one Hugging Face module.

    Args:
        same_as: parameter -> the other parameter under whose name its values are stored.
        fused_heads: layer of a block that holds its rows in head-major order -> number of heads.
    """
    if not section.pretrained or section.weights == "random":
        return 0
    source = f"{where}.pretrained = {section.pretrained!r}"
    files = _index(where, section.pretrained, _STEM.get(where, "model"))
    prefixes = _PREFIXES[model_type]
    prefix = next((p for p in prefixes if any(name.startswith(p) for name in files)), "")
    names = _module_names(module, files, prefix)
    # A tied head counts under both of its names.
    parameters = module.named_parameters(remove_duplicate=False)
    to_fill = {plain_name(name): parameter for name, parameter in parameters if not is_adapter(name)}
    missing = sorted(name for name in to_fill if same_as.get(name, name) not in names)
    unexpected = sorted(name for name in names if _belongs(module, name) and name not in to_fill)
    _refuse(source, missing, unexpected, _searched(prefix, prefixes))
    by_file: dict[str, list[str]] = defaultdict(list)
    for name in to_fill:
        by_file[files[names[same_as.get(name, name)]]].append(name)
    for file, names_in_file in by_file.items():
        path = find_file(f"{where}.pretrained", section.pretrained, file)
        with safe_open(str(path), "pt") as tensors:
            for name in names_in_file:
                tensor = tensors.get_tensor(names[same_as.get(name, name)])
                heads = next((n for layer, n in (fused_heads or {}).items() if is_fused(name, (layer,))), 0)
                _fill(source, name, to_fill[name], tensor, heads)
    return len(to_fill)


def _load_projector(projector: nn.Module, section: ProjectorConfig) -> int:
    """Fills a projector of our own from the folder that an export made."""
    if not section.pretrained:
        return 0
    where = "model.projector"
    source = f"{where}.pretrained = {section.pretrained!r}"
    sizes_file = find_file(f"{where}.pretrained", section.pretrained, "config.json")
    assert sizes_file is not None
    sizes, own_sizes = read_json(f"{where}.pretrained", sizes_file), projector_sizes(projector)
    for key, value in own_sizes.items():
        if sizes.get(key) != value:
            raise ConfigError(
                f"{source}: {sizes_file.name} says {key} = {sizes.get(key)!r}, but the config makes {value!r}; "
                "change the config, or leave the projector's weights random"
            )
    path = find_file(f"{where}.pretrained", section.pretrained, "model.safetensors")
    parameters = dict(projector.named_parameters())
    with safe_open(str(path), "pt") as tensors:
        _refuse(
            source, sorted(parameters.keys() - set(tensors.keys())), sorted(set(tensors.keys()) - parameters.keys())
        )
        for name, parameter in parameters.items():
            _fill(source, name, parameter, tensors.get_tensor(name))
    return len(parameters)


def projector_sizes(projector: nn.Module) -> dict[str, Any]:
    """The sizes of a projector of our own, as an export writes them next to its weights."""
    assert isinstance(projector, Projector)
    return {
        "kind": "mlp",
        "spatial_merge": projector.merge,
        "hidden_size": projector.fc1.out_features,
        "language_width": projector.fc2.out_features,
    }


def _searched(prefix: str, prefixes: tuple[str, ...]) -> str:
    """Where the names of a part of a larger model were looked for. Args: prefix: the one in the files."""
    if prefix:
        return f" (among the names that begin with {prefix!r})"
    return f" (no name begins with {' or '.join(map(repr, prefixes))})" if prefixes else ""


def _refuse(source: str, missing: list[str], unexpected: list[str], searched: str = "") -> None:
    for problem, names in (("misses", missing), ("has unexpected", unexpected)):
        if names:
            shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise ConfigError(
                f"{source}: the checkpoint {problem} {shown}{searched}; take config.json and weights from one folder"
            )


def _fill(source: str, name: str, parameter: nn.Parameter, tensor: Tensor, fused_heads: int = 0) -> None:
    if tensor.shape != parameter.shape:
        raise ConfigError(
            f"{source}: {name} has shape {tuple(tensor.shape)} "
            f"in the checkpoint, but the config makes {tuple(parameter.shape)}; take both from one folder"
        )
    parameter.copy_(to_head_major(tensor, fused_heads) if fused_heads else tensor)


def _index(where: str, source: str, stem: str) -> dict[str, str]:
    """Name on disk -> file, without reading a weight. Args: stem: of the names of the files."""
    index = find_file(f"{where}.pretrained", source, f"{stem}.safetensors.index.json", optional=True)
    if index is not None:
        return dict(read_json(f"{where}.pretrained", index)["weight_map"])
    single = find_file(f"{where}.pretrained", source, f"{stem}.safetensors", optional=True)
    if single is None:
        raise ConfigError(
            f"{where}.pretrained = {source!r}: there is no {stem}.safetensors (or its index); save the "
            'weights as safetensors, or set weights = "random"'
        )
    with safe_open(str(single), "pt") as tensors:
        return dict.fromkeys(tensors.keys(), Path(single).name)


def _module_names(module: nn.Module, on_disk: Iterable[str], prefix: str) -> dict[str, str]:
    """Name in the module -> name on disk, by transformers' own table of renamed parameters.

    Args: prefix: of the names that belong to the module.
    """
    if not isinstance(module, PreTrainedModel):  # diffusers' names on disk are those of its modules
        return {_present_name(name): name for name in on_disk}
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    renamings = [r for r in get_model_conversion_mapping(module) if isinstance(r, WeightRenaming)]
    names = {}
    for key in on_disk:
        if key.startswith((prefix, _HEAD)):
            name = key.removeprefix(prefix)
            for renaming in renamings:
                name, _ = renaming.rename_source_key(name)
            names[name] = key
    base = f"{module.base_model_prefix}."
    if module.base_model is not module and not any(name.startswith(base) for name in names):
        # Stored by the class without a head, or inside of a larger model.
        return {name if name.startswith(_HEAD) else base + name: key for name, key in names.items()}
    return names


def _present_name(name: str) -> str:
    """The name in diffusers' class of today."""
    layer, _, kind = name.rpartition(".")
    block, _, last = layer.rpartition(".")
    return f"{block}.{_OLD_ATTENTION[last]}.{kind}" if last in _OLD_ATTENTION and ".attentions." in layer else name


def _belongs(module: nn.Module, name: str) -> bool:
    """Whether a name lies inside of a submodule that this chunk holds, so it must be a parameter of it."""
    if name.endswith(_DERIVED):
        return False
    parts = name.split(".")
    if len(parts) == 1 and getattr(module, name, module) is None:
        return False  # a parameter of the whole itself, which another chunk holds
    for i, part in enumerate(parts[:-1]):
        child = dict(module.named_children()).get(part)
        if child is None:
            # Other layers and parts of a larger model are absent on purpose; parts of a block never are.
            return any(p.isdigit() for p in parts[:i])
        module = child
    return True
