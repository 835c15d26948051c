"""What mmtrain takes from torch's private parts: says what moved when torch moves."""

import inspect
import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.distributed.pipelining.stage import PipelineStage
from torch.distributed.tensor import Shard, distribute_tensor

from mmtrain.parallel.runtime import PipelineScheduleRuntime
from mmtrain.parallel.stage import ModalityStage
from mmtrain.parallel.torch_private import end_groups, is_decomposed, process_groups, profiling
from tests.ranks import run_ranks


def test_ours_are_real_subclasses():
    assert issubclass(PipelineScheduleRuntime, _PipelineScheduleRuntime)
    assert issubclass(ModalityStage, PipelineStage)


def test_hooks_that_we_override_exist():
    for name in ("_step_microbatches", "register_custom_function"):
        assert callable(getattr(_PipelineScheduleRuntime, name)), name
    for name in ("forward_one_chunk", "backward_one_chunk", "clear_runtime_states", "perform_reduce_grad"):
        assert callable(getattr(PipelineStage, name)), name


def test_what_we_use_of_the_runtime_exists():
    source = inspect.getsource(_PipelineScheduleRuntime.__init__)
    for name in ("unshard_ops", "unsharded_stages"):
        assert f"self.{name}" in source, name
    assert callable(_PipelineScheduleRuntime._assert_unsharded)


def test_a_profiler_is_noticed_while_it_records():
    assert not profiling()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert profiling()
    assert not profiling()


def test_a_process_group_takes_a_list_of_tensors_a_rank_and_a_tag():
    for transfer in (dist.ProcessGroup.send, dist.ProcessGroup.recv):
        assert re.search(r"ProcessGroup, tensors: .*Rank: .*tag: ", transfer.__doc__.splitlines()[0])


def test_fsdp_switches_exist():
    for name in (
        "set_is_last_backward",
        "set_reshard_after_backward",
        "set_requires_gradient_sync",
        "set_force_sum_reduction_for_comms",
        "set_gradient_divide_factor",
        "set_reduce_scatter_unused_params",
        "_get_fsdp_state",
        "unshard",
        "reshard",
    ):
        assert callable(getattr(FSDPModule, name)), name


def test_fsdp_adds_up_gradients_in_another_dtype_by_methods_of_a_parameter():
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    for name in ("accumulate_unsharded_grad_if_needed", "to_accumulated_grad_if_needed"):
        assert callable(getattr(FSDPParam, name)), name
    assert "_unsharded_param" in inspect.getsource(FSDPParam.init_unsharded_param)


def test_a_backward_starts_from_a_gradient_edge_without_the_output():
    x = torch.ones(3, requires_grad=True)
    output = x * 2
    start = torch.autograd.graph.get_gradient_edge(output)
    del output
    torch.autograd.backward(start, torch.ones(3))
    assert x.grad.tolist() == [2, 2, 2]


def test_what_tells_a_decomposed_operation_exists():
    assert is_decomposed(torch.ops.aten.linear.default)
    assert not is_decomposed(torch.ops.aten.mm.default)


def test_a_parameter_group_says_whether_it_frees_parameters_after_a_forward():
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    assert isinstance(FSDPParamGroup._reshard_after_forward, property)


def sums_on_equal_meshes(rank):
    """A sum on a mesh, then on an equal one that is made after the groups of the one before have ended."""
    found = []
    for _ in range(2):
        others, mesh = process_groups(), init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        total = x + x
        assert total.device_mesh is mesh
        found.append(total.full_tensor().tolist())
        dist.barrier()
        end_groups([group for group in process_groups() if group not in others])
        assert process_groups() == others
    return found


@pytest.mark.ranks
def test_an_ended_mesh_is_not_taken_for_a_new_one_of_equal_ranks():
    assert run_ranks(sums_on_equal_meshes, 2) == [[[0.0, 2.0, 4.0, 6.0]] * 2] * 2
