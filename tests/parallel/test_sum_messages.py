"""What equal pipelines send to add up their gradients, counted on real ranks: as much as HSDP, in no more messages."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from mmtrain.config.topology import JobLayout
from mmtrain.costs.cost_model import FlopsCosts
from mmtrain.parallel import local_model
from mmtrain.parallel.layer_sums import LayerSums
from mmtrain.parallel.mesh import Mesh, build_mesh
from mmtrain.parallel.runtime import PipelineScheduleRuntime
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.planner.job import Job
from mmtrain.planner.memory.options import MemoryChoices
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.spec.builders import model_spec
from tests.parallel.parity import MIXED, Case, cut, run_step, take_gradients
from tests.ranks import run_ranks
from tests.reference import PLANNER, make_batch, model_config

LAYOUT = JobLayout(depths=(2, 2))


@contextmanager
def counted(ranks: tuple[int, ...]) -> Iterator[list[int]]:
    """The bytes of each all-reduce among some ranks, in the order of their start."""
    found: list[int] = []
    original = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if tuple(dist.get_process_group_ranks(group or dist.group.WORLD)) == ranks:
            found.append(tensor.numel() * tensor.element_size())
        return original(tensor, op=op, group=group, async_op=async_op)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", all_reduce)
        yield found


def one_step(mesh: Mesh, case: Case) -> tuple[list[int], dict[str, torch.Tensor]]:
    """What this rank sends in one step to its copy, and its gradients."""
    parts, spec = cut(case, LAYOUT), model_spec(case.model)
    local = local_model.build_local_model(case.model, spec, parts, mesh, case.training, seed=5)
    batches = [make_batch(case.model, images, seed=replica) for replica, images in enumerate(case.images)]
    planner = IterationPlanner(
        Job(
            spec=spec,
            partition=parts,
            section=PLANNER,
            costs=FlopsCosts.of(PLANNER),
            schedule=CATALOGUE["1F1B"],
            sub_microbatch_size=1,
            sharded=True,
            submesh=case.submesh(LAYOUT),
            memory=MemoryChoices(section=case.recompute),
        )
    )
    runtime = PipelineScheduleRuntime(local.stages, reduced=local.sums.stage_reduced)
    with counted(tuple(mesh.column[place] for place in (mesh.place.pp, 2 + mesh.place.pp))) as sent:
        run_step(mesh, parts, planner, case.model, local, runtime, batches)
    return sent, take_gradients(local)


def ours_and_hsdp(rank: int) -> tuple[list[int], list[int], float]:
    """The bytes of the messages of both, and the largest difference of a gradient."""
    case = Case(model=model_config(segments=(1, 2)), images=MIXED)
    mesh = build_mesh(LAYOUT, torch.device("cpu"))
    ours, gradients = one_step(mesh, case)
    grid = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp_replicate", "pp", "dp_shard"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mesh, "fsdp", lambda self, *, over_tp=False: grid["dp_replicate", "dp_shard"])
        patch.setattr(LayerSums, "of", lambda *args: LayerSums())
        hsdp, theirs = one_step(mesh, case)
    assert gradients.keys() == theirs.keys()
    return ours, hsdp, max(float((gradients[name] - theirs[name]).abs().max()) for name in gradients)


def test_equal_pipelines_send_the_bytes_of_hsdp_in_fewer_messages() -> None:
    for ours, hsdp, difference in run_ranks(ours_and_hsdp, LAYOUT.world_size):
        assert 0 < len(ours) <= len(hsdp)
        assert sum(ours) == sum(hsdp) > 0
        assert len(ours) == 3  # the rank's stages: one of vision, two of language
        assert difference < 1e-6
