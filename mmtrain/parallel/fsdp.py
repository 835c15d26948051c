"""FSDP2 over dp_shard (x cp), HSDP over dp_replicate."""

import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from mmtrain.config import TrainingConfig
from mmtrain.parallel.mesh import Mesh
from mmtrain.parallel.torch_private import prepare_fsdp

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def uses_fsdp(mesh: Mesh, training: TrainingConfig) -> bool:
    """Whether chunks are sharded: with data parallelism, or for the sake of its mixed precision."""
    low_precision = "bfloat16" in (training.mixed_precision_param, training.mixed_precision_reduce)
    return mesh.shape.dp * mesh.shape.cp > 1 or low_precision


def apply_fsdp(chunk: nn.Module, units: list[nn.Module], mesh: Mesh, training: TrainingConfig) -> None:
    """Shards a chunk's parameters over the fsdp mesh, unit by unit; the chunk's forward stays the entry.

    Parameters stay gathered from UNSHARD to RESHARD (ZeRO-2 inside of a step): the data-parallel
    replicas have different plans, so they can only agree on one order of gathers, the canonical one.

    Args: units: submodules that are gathered and reduced together, in forward order.
    """
    if not uses_fsdp(mesh, training):
        return
    dtypes = {
        "param_dtype": DTYPES[training.mixed_precision_param],
        "reduce_dtype": DTYPES[training.mixed_precision_reduce],
    }
    # A unit's inputs are of the compute dtype already, but for rotary tables, which must stay float32.
    inner = MixedPrecisionPolicy(**dtypes, cast_forward_inputs=False)
    for unit in units:
        fully_shard(unit, mesh=mesh.fsdp, mp_policy=inner, reshard_after_forward=False)
    outer = MixedPrecisionPolicy(**dtypes)
    fully_shard(chunk, mesh=mesh.fsdp, mp_policy=outer, reshard_after_forward=False)
    prepare_fsdp(chunk)
