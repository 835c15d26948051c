"""Loads a chunk's own weights, and no others, from the safetensors files of a folder or hub id."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from mmtrain.config.model import (
    ContrastConfig,
    DitConfig,
    EncoderConfig,
    LanguageConfig,
    ModelConfig,
    VaeConfig,
    projector_section,
    section_of,
)
from mmtrain.errors import ConfigError
from mmtrain.families.catalogue import NETWORKS
from mmtrain.families.composite import Spelling
from mmtrain.models.build import build_chunk
from mmtrain.models.chunk import Chunk, LanguageChunk, VisionChunk
from mmtrain.models.contrast import ContrastChunk
from mmtrain.models.dit import DitChunk
from mmtrain.models.fused_qkv import is_fused, to_head_major
from mmtrain.models.trainable import is_adapter, plain_name, start_magnitudes
from mmtrain.models.vae import VaeChunk, VaeDecoder
from mmtrain.models.vocabulary import LossChunk, VocabularyPart
from mmtrain.spec.composites import check_contrast, check_embeds, occurring, part_names, part_spellings, spellings_of
from mmtrain.spec.hub_files import find_file, read_json
from mmtrain.spec.module_sizes import projector_sizes
from mmtrain.spec.spec import ModelSpec, VocabularyRows
from mmtrain.spec.weight_files import STEMS, damaged, header, weight_files

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
    loaded = _load_chunk(chunk, model)
    start_magnitudes(chunk)
    return loaded


def check_pretrained(model: ModelConfig, spec: ModelSpec) -> int:
    """Checks the names and shapes of all stored weights against the model, as `load_pretrained` does, but reads none.

    Returns: the number of parameters (tensors) that they set.
    Raises: ConfigError: as `load_pretrained`.
    """
    whole = ((module.name, (0, len(module.layers))) for module in spec.modules)
    return sum(_load_chunk(build_chunk(model, spec, name, layers), model) for name, layers in whole)


def _load_chunk(chunk: Chunk | VaeDecoder, model: ModelConfig) -> int:
    if isinstance(chunk, VisionChunk):
        name = chunk.module_spec.name
        fused_heads = dict.fromkeys(chunk.adapter.fused_qkv, chunk.shape.num_heads)
        section, model_type = model.encoders[name], chunk.shape.model_type
        loaded = load_encoder(chunk.vision, section, model_type, fused_heads, where=section_of(name))
        return loaded + (_load_projector(chunk.projector, model, name) if chunk.projector is not None else 0)
    if isinstance(chunk, DitChunk):
        assert model.dit is not None
        return _load(chunk.dit, "model.dit", model.dit, chunk.shape.model_type, {})
    if isinstance(chunk, VaeChunk | VaeDecoder):
        assert model.vae is not None
        return _load(chunk.vae, "model.vae", model.vae, chunk.shape.model_type, {})
    if isinstance(chunk, ContrastChunk):
        assert model.contrast is not None
        return _load_contrast(chunk.contrast, model.contrast)
    if isinstance(chunk, LossChunk):
        return 0
    assert isinstance(chunk, LanguageChunk | VocabularyPart)
    tied = {"lm_head.weight": "model.embed_tokens.weight"} if chunk.shape.tied else {}
    rows = {name.removeprefix("language."): own for name, own in chunk.stored_rows.items()}
    return _load(chunk.language, "model.language", model.language, chunk.shape.model_type, tied, rows=rows)


def load_encoder(
    module: nn.Module,
    section: EncoderConfig,
    model_type: str,
    fused_heads: Mapping[str, int] | None = None,
    where: str = "model.encoder",
) -> int:
    """The number of parameters of a part of an encoder that were set from files, as `load_pretrained` does.

    Args: fused_heads: layer of a block that holds its rows in head-major order -> number of heads.
    """
    return _load(module, where, section, model_type, {}, fused_heads)


def _load(
    module: nn.Module,
    where: str,
    section: EncoderConfig | LanguageConfig | DitConfig | VaeConfig,
    model_type: str,
    same_as: dict[str, str],
    fused_heads: Mapping[str, int] | None = None,
    rows: Mapping[str, VocabularyRows] = MappingProxyType({}),
) -> int:
    """Fills the parameters of one Hugging Face module.

    Args:
        same_as: parameter -> the other parameter under whose name its values are stored.
        fused_heads: layer of a block that holds its rows in head-major order -> number of heads.
        rows: parameter -> the rows of the stored matrix that it is.
    """
    if not section.pretrained or section.weights == "random":
        return 0
    source = f"{where}.pretrained = {section.pretrained!r}"
    files = _index(where, section.pretrained, STEMS.get(where, "model"))
    spellings = spellings_of(where, section.pretrained, model_type)
    spelling = occurring(files, spellings)
    names = module_names(module, part_names(files, spelling))
    # A tied head counts under both of its names.
    parameters = module.named_parameters(remove_duplicate=False)
    to_fill = {plain_name(name): parameter for name, parameter in parameters if not is_adapter(name)}
    missing = sorted(name for name in to_fill if same_as.get(name, name) not in names)
    unexpected = sorted(name for name in names if _belongs(module, name) and name not in to_fill)
    if any(name.startswith(f"{NETWORKS[model_type].embeds}.") for name in missing):
        check_embeds(where, section.pretrained, model_type, files)
    _refuse(source, missing, unexpected, _searched(spelling, spellings))
    stored = {name: names[same_as.get(name, name)] for name in to_fill}
    for name, matrix in _read_tensors(where, section.pretrained, files, stored):
        heads = next((n for layer, n in (fused_heads or {}).items() if is_fused(name, (layer,))), 0)
        _fill(source, name, to_fill[name], matrix, heads, rows.get(name))
    return len(to_fill)


def _read_tensors(
    where: str, folder: str, files: Mapping[str, str], names: Mapping[str, str]
) -> Iterator[tuple[str, Any]]:
    """Each name with the slice of its tensor by safetensors, of which nothing is read yet, file by file.

    Args:
        files: name on disk -> file.
        names: name -> name on disk.
    """
    by_file: dict[str, list[str]] = defaultdict(list)
    for name, key in names.items():
        by_file[files[key]].append(name)
    for file, names_in_file in by_file.items():
        path = find_file(f"{where}.pretrained", folder, file)
        assert path is not None
        with open_tensors(f"{where}.pretrained", path) as tensors:
            for name in names_in_file:
                yield name, tensors.get_slice(names[name])


def _load_projector(projector: nn.Module, model: ModelConfig, module: str) -> int:
    """Fills a projector of our own from an exported folder, or that of a whole model."""
    where, section = projector_section(module), model.projector_of(module)
    if not section.pretrained:
        return 0
    source = f"{where}.pretrained = {section.pretrained!r}"
    files = _index(where, section.pretrained, "model", instead="leave it out for random ones")
    spellings = part_spellings(where, section.pretrained)
    if not spellings:
        _check_sizes(source, model, module)
    spelling = occurring(files, spellings)
    names = part_names(files, spelling)
    parameters = {plain_name(name): value for name, value in projector.named_parameters() if not is_adapter(name)}
    missing, unexpected = sorted(parameters.keys() - names.keys()), sorted(names.keys() - parameters.keys())
    _refuse(source, missing, unexpected, _searched(spelling, spellings))
    for name, matrix in _read_tensors(where, section.pretrained, files, names):
        _fill(source, name, parameters[name], matrix)
    return len(parameters)


def _load_contrast(contrast: nn.Module, section: ContrastConfig) -> int:
    """Fills the parameters of the loss of two towers, which may be scalars on disk."""
    if not section.pretrained:
        return 0
    check_contrast(section)
    where, parameters = "model.contrast", dict(contrast.named_parameters())
    source = f"{where}.pretrained = {section.pretrained!r}"
    files = _index(where, section.pretrained, "model", instead="leave it out for those of a new model")
    names = {name: name for name in parameters if name in files}
    _refuse(source, sorted(parameters.keys() - names.keys()), [], "")
    for name, stored in _read_tensors(where, section.pretrained, files, names):
        _fill(source, name, parameters[name].view(stored.get_shape()), stored)
    return len(parameters)


def _check_sizes(source: str, model: ModelConfig, module: str) -> None:
    """Refuses an exported projector of another kind or size."""
    key = f"{projector_section(module)}.pretrained"
    path = find_file(key, model.projector_of(module).pretrained, "config.json")
    assert path is not None
    sizes = read_json(key, path)
    for key, value in projector_sizes(model, module).items():
        if sizes.get(key) != value:
            raise ConfigError(
                f"{source}: {path.name} says {key} = {sizes.get(key)!r}, but the config makes {value!r}; "
                "change the config, or leave the projector's weights random"
            )


def _searched(spelling: Spelling, spellings: Sequence[Spelling]) -> str:
    """The names under which a part of a larger model was looked for. Args: spelling: the one that occurs."""
    beginning, beginnings = next(iter(spelling)), [repr(next(iter(known))) for known in spellings]
    if beginning:
        return f" (among the names that begin with {beginning!r})"
    return f" (no name begins with {' or '.join(beginnings)})" if beginnings else ""


def _refuse(source: str, missing: list[str], unexpected: list[str], searched: str) -> None:
    for problem, names in (("misses", missing), ("has unexpected", unexpected)):
        if names:
            shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise ConfigError(
                f"{source}: the checkpoint {problem} {shown}{searched}; take config.json and weights from one folder"
            )


def _fill(
    source: str,
    name: str,
    parameter: Tensor,
    stored: Any,
    fused_heads: int = 0,
    rows: VocabularyRows | None = None,
) -> None:
    """Args: stored: of `_read_tensors`. rows: that the parameter is of the stored matrix; None: all."""
    shape = (rows.total, *parameter.shape[1:]) if rows else tuple(parameter.shape)
    if tuple(stored.get_shape()) != shape:
        raise ConfigError(
            f"{source}: {name} has shape {tuple(stored.get_shape())} "
            f"in the checkpoint, but the config makes {shape}; take both from one folder"
        )
    if parameter.is_meta:
        return
    tensor: Tensor = stored[rows.first : rows.last] if rows else stored[...]
    parameter.copy_(to_head_major(tensor, fused_heads) if fused_heads else tensor)


def _index(where: str, source: str, stem: str, instead: str = 'set weights = "random"') -> dict[str, str]:
    """Name on disk -> file, without reading a weight.

    Args: stem: of the names of the files. instead: what else to do if there are none.
    """
    return weight_files(f"{where}.pretrained", source, stem, instead)


@contextmanager
def open_tensors(key: str, path: Path) -> Iterator[Any]:
    """A safetensors file, opened with `safe_open`. This is the only place that opens one.

    Args: key: of the config that names the file's folder, for errors.
    Raises: ConfigError: the file is damaged, or lacks a tensor that is asked for.
    """
    header(key, path)
    try:
        with safe_open(str(path), "pt") as tensors:
            yield tensors
    except SafetensorError as error:
        raise damaged(key, path, ValueError(error)) from None


def stored_spelling(where: str, source: str) -> Spelling | None:
    """The names of a section's module in the files of a whole model; None: they are not of a whole model.

    Args: where: the section. source: folder or hub id.
    """
    spellings = part_spellings(where, source)
    return occurring(_index(where, source, "model"), spellings) if spellings else None


def module_names(module: nn.Module, on_disk: Mapping[str, str]) -> dict[str, str]:
    """Name in the module -> name on disk, by transformers' own table of renamed parameters.

    Args: on_disk: name without the prefix of a larger model -> name on disk.
    """
    if not isinstance(module, PreTrainedModel):  # diffusers' names on disk are those of its modules
        return {_present_name(name): key for name, key in on_disk.items()}
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    renamings = [r for r in get_model_conversion_mapping(module) if isinstance(r, WeightRenaming)]
    names = {}
    for name, key in on_disk.items():
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
