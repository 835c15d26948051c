"""Tensor parallelism, with sequence parallelism or without: each rank of the tp axis computes a part of every layer.

Parameters become DTensors of the tp mesh, and a rank computes its own heads, inner columns and tokens. Between blocks
it holds an equal part of the rows, and a sublayer costs one all-gather and one reduce-scatter forward, and the same
backward; or it holds all rows, and a sublayer costs one all-reduce forward, and one backward. Source: Megatron-LM,
arXiv:2205.05198 and arXiv:1909.08053.

Attention of a DiT stays inside of a clip: each rank has a part of the rows of each clip, filled up where the ranks do
not divide them, and all rows of its text and timestep. No other row reads the padding, and it has no gradient.
"""

from collections.abc import Iterable, Iterator

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from mmtrain.errors import ConfigError
from mmtrain.families.catalogue import PROJECTORS, TABLES
from mmtrain.families.tensor_table import Style, TensorTable
from mmtrain.models.chunk import Chunk, LanguageChunk, VisionChunk
from mmtrain.models.dit import DitChunk
from mmtrain.models.vocabulary import HEAD, VocabularyPart
from mmtrain.parallel.row_shards import RowShards, WholeRowShards
from mmtrain.parallel.tensor_styles import Divided, MovedTable, make_styles
from mmtrain.parallel.tensor_vocabulary import VocabularyShards, token_shards

_HEAD = HEAD.removesuffix(".weight")

_Divisible = LanguageChunk | VisionChunk | DitChunk | VocabularyPart


def apply_tensor_parallel(chunk: Chunk, mesh: DeviceMesh, *, whole_rows: bool = False) -> None:
    """Divides a chunk over the tp mesh, in place; weights must be set, and equal on all its ranks.

    Called before FSDP2. Afterwards activations between chunks are this rank's rows, and the logits of a
    language model those of this rank's part of the vocabulary.

    Args: whole_rows: these are all rows, not a part of them.
    Raises: ConfigError: the family's table does not fit its class.
    """
    assert isinstance(chunk, _Divisible)
    table = TABLES.get(chunk.shape.model_type)
    if table is None:
        raise ConfigError(
            f"parallelism.tensor_parallel_degree = {mesh.size()}: model_type {chunk.shape.model_type!r} has no table "
            f"of divided layers; set the degree to 1, or use one of {', '.join(TABLES)}"
        )
    rows = WholeRowShards(mesh) if whole_rows else RowShards(mesh)
    divided: Divided = {}
    styles: dict[str, ParallelStyle] = {}
    whole: list[str] = []
    for name, style in _entries(chunk, table):
        module = _find(chunk, name, parameter=style in ("whole", "moved"))
        if style in ("whole", "moved"):
            whole.append(name)
        if style == "moved":
            owner, _, moved = name.rpartition(".")
            styles[owner] = MovedTable(moved, rows)
        elif style != "whole":
            styles |= {f"{name}{child}": how for child, how in make_styles(module, style, divided, mesh, rows)}
    parallelize_module(chunk, mesh, styles, src_data_rank=None)
    for block in chunk.blocks():
        for path in table.heads:
            _divide(block, path, mesh.size())
    _check_complete(chunk, whole)
    chunk.row_sharding = rows
    if isinstance(chunk, LanguageChunk | VocabularyPart):
        chunk.shards = token_shards(mesh.get_group(), rows)
    if isinstance(chunk, LanguageChunk):
        chunk.vocabulary = VocabularyShards(chunk.shards)


def finish_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Sums over tp the gradients that are still partial: each rank has those of its own rows, as of norms.

    Once a step, after the last backward. Collective over tp unless FSDP2, which does it itself, holds the parameters.
    """
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor) and isinstance(parameter, DTensor) and grad.placements != parameter.placements:
            parameter.grad = grad.redistribute(placements=parameter.placements)  # partial -> as the parameter


def _entries(chunk: _Divisible, table: TensorTable) -> Iterator[tuple[str, Style]]:
    """The names of modules and parameters with their styles, for the layers that this chunk has."""
    tables = [table.embed] if chunk.has_embed else []
    if isinstance(chunk, VocabularyPart):
        tables += [{_HEAD: table.norm[_HEAD]}] if chunk.has_head else []
    elif isinstance(chunk, LanguageChunk) and chunk.chooses_rows:
        tables.append({name: style for name, style in table.norm.items() if name != _HEAD})
    elif chunk.has_norm:
        tables.append(table.states if isinstance(chunk, LanguageChunk) and not chunk.has_head else table.norm)
    if isinstance(chunk, VisionChunk) and chunk.has_projector:
        tables.append(PROJECTORS[chunk.projector_kind].table or table.merger)
        for number, _ in enumerate(chunk.shape.taps):
            tables.append({name.format(number): style for name, style in table.tap_merger.items()})
    own = chunk.own_name if isinstance(chunk, VisionChunk) else str
    for styles in tables:
        yield from ((own(name), style) for name, style in styles.items())
    for index in chunk.block_indices:
        for name, style in table.of_kind(chunk.shape.block_kind(index)).items():
            yield f"{own(table.blocks)}.{index}.{name}", style


def _find(chunk: _Divisible, name: str, *, parameter: bool) -> nn.Module:
    """The module that an entry names. Args: parameter: it may name a parameter instead; then its owner."""
    owner, _, last = name.rpartition(".")
    try:
        if parameter and isinstance(getattr(chunk.get_submodule(owner), last, None), nn.Parameter):
            return chunk.get_submodule(owner)
        return chunk.get_submodule(name)
    except AttributeError as error:
        raise ConfigError(
            f"tensor parallelism of {chunk.shape.model_type}: the table names {name}, which this version of its "
            f"class does not have; set parallelism.tensor_parallel_degree = 1, or use another version of "
            f"{_library(chunk)}"
        ) from error


def _library(chunk: _Divisible) -> str:
    return "diffusers" if isinstance(chunk, DitChunk) else "transformers"


def _divide(block: nn.Module, path: str, degree: int) -> None:
    owner, _, attribute = path.rpartition(".")
    module = block.get_submodule(owner)
    setattr(module, attribute, getattr(module, attribute) // degree)


def _check_complete(chunk: _Divisible, whole: list[str]) -> None:
    """Refuses a parameter that no entry of the table names."""
    for name, parameter in chunk.named_parameters():
        if not isinstance(parameter, DTensor) and not any(f"{name}.".startswith(f"{entry}.") for entry in whole):
            raise ConfigError(
                f"tensor parallelism of {chunk.shape.model_type}: parameter {name} is in no entry of the family's "
                "table, so nothing says how it is divided; set parallelism.tensor_parallel_degree = 1, or use another "
                f"version of {_library(chunk)}"
            )
