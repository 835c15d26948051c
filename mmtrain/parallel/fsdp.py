"""FSDP2 over dp_shard x cp of a stage (and tp for a module that tensor parallelism does not divide)."""

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from mmtrain.config.sections import TrainingConfig
from mmtrain.parallel.torch_private import prepare_fsdp

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def apply_fsdp(
    chunk: nn.Module, units: list[nn.Module], mesh: DeviceMesh, training: TrainingConfig, *, reshard: bool
) -> None:
    """Shards a chunk's parameters over a mesh, unit by unit; the chunk's forward stays the entry.

    One on the meta device must then be filled, and made ready with `prepare_fsdp`.

    Args:
        units: submodules that are gathered and reduced together, in forward order.
        mesh: the ranks to shard over, one axis.
        reshard: gather a unit before each use and free it after (ZeRO-3): all ranks of the mesh must run one
            order of works. Otherwise parameters stay gathered from UNSHARD to RESHARD (ZeRO-2 inside of a
            step): replicas with different plans can only agree on one order of gathers, the canonical one.
    """
    # Inputs keep their dtype: activations have the compute dtype already, chunks convert pixels themselves, and
    # rotary tables must stay float32.
    precision = MixedPrecisionPolicy(
        param_dtype=DTYPES[training.param_dtype],
        reduce_dtype=DTYPES[training.mixed_precision_reduce],
        cast_forward_inputs=False,
    )
    offload = OffloadPolicy()
    if training.enable_cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    for part in (*units, chunk):
        fully_shard(part, mesh=mesh, mp_policy=precision, offload_policy=offload, reshard_after_forward=reshard)
    if not any(parameter.is_meta for parameter in chunk.parameters()):
        prepare_fsdp(chunk, reshard=reshard)
