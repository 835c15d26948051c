"""Every private name of torch that mmtrain uses.

`tests/parallel/test_torch_private.py` says what moved when torch moves. Seen with torch 2.11 to 2.13.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.testing._internal.distributed.fake_pg  # registers the backend of axes of size 1
from torch._ops import OperatorBase as Operator
from torch._ops import OpOverloadPacket as OperatorPacket
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils._python_dispatch import _len_torch_dispatch_stack, _pop_mode, _push_mode
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = [
    "Operator",
    "OperatorPacket",
    "PipelineStage",
    "TorchScheduleRuntime",
    "abort_device_groups",
    "as_dtensor",
    "compiled_for_any_size",
    "default_store",
    "dump_cuda_memory",
    "end_all_groups",
    "end_groups",
    "forget_meshes",
    "fsdp_modules",
    "fsdp_pass",
    "gathers_itself",
    "gradient_edge",
    "group_of_one",
    "is_decomposed",
    "norms",
    "prepare_fsdp",
    "process_groups",
    "profiling",
    "raw_part",
    "reduce_grads",
    "scale_",
    "set_default_timeout",
    "set_fsdp_pass",
    "set_timeout",
    "settle_grads",
    "tensor_like",
    "tree_leaves",
    "tree_map_only",
    "wait_unsharded",
    "why_no_compiler",
    "without_modes",
]

TorchScheduleRuntime = _PipelineScheduleRuntime


@contextmanager
def without_modes() -> Iterator[None]:
    """Inside, no dispatch mode of this thread sees the operations, such as that of a selective recomputation."""
    modes = [_pop_mode() for _ in range(_len_torch_dispatch_stack())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)


def default_store() -> dist.Store:
    """The store in which the ranks of the default process group met."""
    return dist.distributed_c10d._get_default_store()


def tensor_like(cls: type[Any], part: torch.Tensor, shape: tuple[int, ...]) -> Any:
    """A tensor of a subclass without memory. Args: part: whose dtype and device it has."""
    make: Any = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
    return make(cls, shape, dtype=part.dtype, device=part.device)


def scale_(tensors: list[torch.Tensor], factor: float) -> None:
    """Multiplies tensors of any shapes in place, in few kernels."""
    torch._foreach_mul_(tensors, factor)


def norms(tensors: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """The 2-norms of tensors of any shapes, computed in a dtype, in few kernels."""
    found: list[torch.Tensor] = list(torch._foreach_norm(tensors, dtype=dtype))
    return found


def profiling() -> bool:
    """Whether a profiler records ranges now, in this process."""
    return bool(torch.autograd._profiler_enabled())


def dump_cuda_memory(path: str) -> None:
    """Writes the blocks of the CUDA allocator for torch's memory viewer."""
    torch.cuda.memory._dump_snapshot(path)


def set_default_timeout(timeout: timedelta) -> None:
    """How long collectives wait on groups that are made from now on without a timeout, as device meshes make theirs."""
    dist.distributed_c10d.default_pg_timeout = timeout
    dist.distributed_c10d.default_pg_nccl_timeout = timeout


def set_timeout(timeout: timedelta) -> None:
    """How long collectives of the default process group wait from now on, and the store in which its ranks met."""
    dist.distributed_c10d._set_pg_timeout(timeout)
    default_store().set_timeout(timeout)


def process_groups() -> list[dist.ProcessGroup]:
    """The process groups that this process has, in the order in which they were made."""
    return list(dist.distributed_c10d._world.pg_map)


def group_of_one() -> dist.ProcessGroup:
    """A process group of this rank alone, whose collectives do nothing: an axis of size 1 of a device mesh."""
    return dist.new_group([dist.get_rank()], backend="fake", use_local_synchronization=True)


def forget_meshes() -> None:
    """Forgets the device meshes that have ended: DTensor remembers what operations gave, with their meshes, and takes
    a new mesh for an old one of equal ranks."""
    _clear_sharding_prop_cache()


def end_groups(groups: Iterable[dist.ProcessGroup]) -> None:
    """Ends process groups, and forgets the device meshes that used them."""
    forget_meshes()
    for group in groups:
        dist.destroy_process_group(group)


def abort_device_groups() -> None:
    """Ends the collectives of accelerators that run or wait, from any thread: no other process has to take part."""
    for group in process_groups():
        with suppress(RuntimeError):  # a group of the CPU alone
            group._get_backend(torch.device("cuda")).abort()


def end_all_groups() -> None:
    """Ends the default process group and all others, whose peers may be gone."""
    forget_meshes()
    if dist.is_initialized():
        dist.destroy_process_group()


def raw_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's memory of a tensor, without its gradient.

    No operation of DTensor, which would remember the mesh of a layout that has ended, and give it to tensors of the
    next one (see `end_groups`).
    """
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


def as_dtensor(part: torch.Tensor, like: DTensor) -> DTensor:
    """A tensor of the shape and sharding of another one, which keeps the device and dtype of its part.

    `DTensor.from_local` would move it to the device of the mesh, where offloaded parameters are not.
    Args: part: of this rank.
    """
    meta = TensorMeta(like.shape, like.stride(), part.dtype)
    spec: Any = replace(like._spec, tensor_meta=meta)
    made: Any = DTensor
    return made(part, spec, requires_grad=False)  # type: ignore[no-any-return]


def fsdp_modules(module: nn.Module) -> list[FSDPModule]:
    """The parts of a module that FSDP2 shards, the root first; empty without FSDP2."""
    return [m for m in module.modules() if isinstance(m, FSDPModule)]


def prepare_fsdp(module: nn.Module, *, reshard: bool = False) -> None:
    """Makes a chunk ready for the actions of a program. Collective over the ranks that share it, if `reshard`.

    Gradients are summed, not averaged (the loss is already divided by the global number of targets),
    they stay unreduced until REDUCE, and a replica that had no work for a chunk still takes part in
    its reduction.

    Args: reshard: parameters are gathered before and freed after each use, without UNSHARD and RESHARD.
    """
    parts = fsdp_modules(module)
    if not parts:
        return
    fully_shard.state(module)._lazy_init()  # type: ignore[attr-defined]  # a chunk may have no work in its first step
    for part in parts:
        if hasattr(part, "set_reduce_scatter_unused_params"):
            part.set_reduce_scatter_unused_params(True)
        part.set_force_sum_reduction_for_comms(True)
        part.set_gradient_divide_factor(1.0)
        if reshard:  # only a parameter that was gathered once takes part in a reduction without a gradient
            part.unshard()
            part.reshard()
    keep_grads_local(module)


def gathers_itself(module: nn.Module) -> bool:
    """Whether FSDP2 gathers this chunk's parameters before each use and frees them after."""
    return any(group._reshard_after_forward for part in fsdp_modules(module) for group in _param_groups(part))


def keep_grads_local(module: nn.Module) -> None:
    """Backwards of this chunk accumulate unsharded gradients and reduce nothing until `reduce_grads`."""
    root = module
    assert isinstance(root, FSDPModule)
    root.set_is_last_backward(False)
    root.set_reshard_after_backward(gathers_itself(root))
    root.set_requires_gradient_sync(False)


def fsdp_pass(parts: Iterable[FSDPModule]) -> list[Any]:
    """Where FSDP2's hooks believe that the pass over each part is: in a forward, a backward, or none."""
    return [owner._training_state for owner in _with_training_state(parts)]


def set_fsdp_pass(parts: Iterable[FSDPModule], states: list[Any]) -> None:
    """Puts what `fsdp_pass` gave back."""
    for owner, state in zip(_with_training_state(parts), states, strict=True):
        owner._training_state = state


def _with_training_state(parts: Iterable[FSDPModule]) -> list[Any]:
    return [owner for part in parts for owner in (part._get_fsdp_state(), *_param_groups(part))]


def _param_groups(part: FSDPModule) -> list[Any]:
    state = part._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch 2.11: one group a state
        group = state._fsdp_param_group
        groups = [group] if group is not None else []
    return list(groups)


def wait_unsharded(parts: Iterable[FSDPModule]) -> None:
    """Waits for the all-gathers of an UNSHARD, also where no forward used the parameters. Args: parts: of one chunk."""
    for part in parts:
        for group in _param_groups(part):
            group.wait_for_unshard()


def settle_grads(parts: Iterable[FSDPModule]) -> None:
    """Takes gradients that were added outside of a backward of the modules over as FSDP2 keeps them: added up in the
    dtype of the reduction."""
    for part in parts:
        for group in _param_groups(part):
            for parameter in group.fsdp_params:
                if hasattr(parameter, "_unsharded_param"):  # else it was never gathered
                    parameter.accumulate_unsharded_grad_if_needed()
                    parameter.to_accumulated_grad_if_needed()


def reduce_grads(stage: PipelineStage) -> None:
    """Reduces a chunk's accumulated gradients over its data-parallel ranks (torch's REDUCE_GRAD)."""
    stage.perform_reduce_grad(1)
    if isinstance(stage.submod, FSDPModule):
        keep_grads_local(stage.submod)


def gradient_edge(output: torch.Tensor) -> Any:
    """A handle to start a backward from, which does not keep the output's memory alive."""
    return torch.autograd.graph.get_gradient_edge(output)


def is_decomposed(op: Any) -> bool:
    """Whether an operation is always carried out as other operations, as `aten.linear` is."""
    return isinstance(op, torch._ops.OpOverload) and op.has_kernel_for_dispatch_key(
        torch._C.DispatchKey.CompositeImplicitAutograd
    )


def compiled_for_any_size(function: Callable[..., Any], backend: str = "inductor") -> Callable[..., Any]:
    """A function compiled for tensors of any size, of which it assumes no two to be equal because they once were.

    Args: backend: of torch.compile.
    """
    torch.fx.experimental._config.use_duck_shape = False
    # One limit for all modules of a class: chunks with and without gradients, towers, validation.
    torch._dynamo.config.recompile_limit = 64
    compiled: Callable[..., Any] = torch.compile(function, dynamic=True, backend=backend)
    return compiled


def why_no_compiler(device: str) -> str:
    """Why torch.compile cannot make kernels for a device; empty: it can. Args: device: its type."""
    if device == "cuda":
        return "" if torch.utils._triton.has_triton() else "Triton cannot be imported"
    from torch._inductor import cpp_builder, exc  # takes seconds

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return "there is no C++ compiler (g++, clang++ or $CXX)"
    return ""
