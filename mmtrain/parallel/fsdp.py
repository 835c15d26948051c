"""FSDP2 over dp_shard (x cp), HSDP over dp_replicate."""

import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from mmtrain.config import TrainingConfig, uses_fsdp
from mmtrain.parallel.mesh import Mesh
from mmtrain.parallel.torch_private import prepare_fsdp

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def apply_fsdp(chunk: nn.Module, units: list[nn.Module], mesh: Mesh, training: TrainingConfig) -> None:
    """Shards a chunk's parameters over the fsdp mesh, unit by unit; the chunk's forward stays the entry.

    Parameters stay gathered from UNSHARD to RESHARD (ZeRO-2 inside of a step): the data-parallel
    replicas have different plans, so they can only agree on one order of gathers, the canonical one.

    Args: units: submodules that are gathered and reduced together, in forward order.
    """
    if not uses_fsdp(mesh.shape, training):
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
