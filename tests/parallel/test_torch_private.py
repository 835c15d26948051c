"""What mmtrain takes from torch's private parts: says what moved when torch moves."""

import inspect

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime
from torch.distributed.pipelining.stage import PipelineStage
from torch.distributed.tensor import Shard, distribute_tensor

from mmtrain.parallel.runtime import BoundAction, PipelineScheduleRuntime
from mmtrain.parallel.stage import ModalityStage
from mmtrain.parallel.torch_private import end_groups, is_decomposed, process_groups
from mmtrain.schedule.action import Action, Kind
from tests.ranks import run_ranks


def test_ours_are_real_subclasses():
    assert issubclass(PipelineScheduleRuntime, _PipelineScheduleRuntime)
    assert issubclass(ModalityStage, PipelineStage)
    assert issubclass(BoundAction, _Action)


def test_action_has_the_fields_that_the_loop_reads():
    assert _Action._fields[:3] == ("stage_index", "computation_type", "microbatch_index")


def test_computation_types_that_we_map():
    names = {kind.value for kind in _ComputationType}
    assert {"F", "B", "I", "W", "UNSHARD", "RESHARD", "REDUCE_GRAD", "SEND_F", "RECV_F", "SEND_B", "RECV_B"} <= names


def test_a_bound_action_prints_as_our_action():
    action = BoundAction(3, _ComputationType.FORWARD, 7)
    action.ours = Action(Kind.F, 3, 5, 1)
    assert str(action) == "3F5.1"


def test_the_loop_looks_into_the_function_map_before_its_own_branches():
    source = inspect.getsource(_PipelineScheduleRuntime._step_microbatches)
    assert source.index("in self._comp_type_to_function_map") < source.rindex("_perform_action(action)")
    assert "self.pipeline_order_with_comms[self.rank]" in source


def test_hooks_that_we_override_exist():
    for name in ("_initialize_stages", "_update_losses", "_assert_unsharded", "_check_inputs"):
        assert callable(getattr(_PipelineScheduleRuntime, name)), name
    for name in ("forward_one_chunk", "backward_one_chunk", "clear_runtime_states", "perform_reduce_grad"):
        assert callable(getattr(PipelineStage, name)), name


def test_runtime_attributes_that_we_read():
    source = inspect.getsource(_PipelineScheduleRuntime.__init__)
    for name in ("_comp_type_to_function_map", "unshard_ops", "unsharded_stages"):
        assert f"self.{name}" in source, name


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
