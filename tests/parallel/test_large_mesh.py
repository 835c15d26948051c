"""A mesh of 256 ranks, built by single ranks of it on torch's fake backend: groups and shards, no communication."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from mmtrain.config.topology import JobLayout
from mmtrain.modality.typical import reference_sizes
from mmtrain.parallel.local_model import build_local_model
from mmtrain.parallel.mesh import build_mesh
from mmtrain.planner.partition.partition import partition
from mmtrain.spec.builders import model_spec
from tests.ranks import run_alone
from tests.reference import TRAINING, model_config

SHAPE = JobLayout.grid(pp=4, dp_replicate=2, dp_shard=4, cp=4, tp=2)


def build(rank):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=SHAPE.world_size)
    try:
        mesh = build_mesh(SHAPE, torch.device("cpu"), data_encoder=True)
        model = model_config()
        spec = model_spec(model)
        parts = partition(spec, SHAPE.pp, {"vision": 1, "language": 1}, reference_sizes(spec, 64))
        local = build_local_model(model, spec, parts, mesh, TRAINING, seed=0)
        return (
            mesh.place,
            mesh.pp_ranks,
            mesh.replica_ranks,
            {name: tuple(p.to_local().shape) for chunk in local.chunks for name, p in chunk.named_parameters()},
            {name: tuple(p.shape) for chunk in local.chunks for name, p in chunk.named_parameters()},
        )
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("rank", [0, 255, 137])
def test_a_rank_of_256_holds_its_shards(rank):
    place, pp_ranks, replica_ranks, shards, whole = run_alone(build, rank)
    assert place == SHAPE.coordinates(rank)
    assert [SHAPE.coordinates(r).pp for r in pp_ranks] == [0, 1, 2, 3]
    assert len(replica_ranks) == SHAPE.pp * SHAPE.cp * SHAPE.tp
    assert rank in pp_ranks
    assert rank in replica_ranks
    kinds = {"vision": 1, "language": SHAPE.tp}
    for module, tensor_parallel in kinds.items():
        name = next(
            n for n in shards if n.startswith(f"{module}.") and n.endswith(("mlp.fc1.weight", "up_proj.weight"))
        )
        rows, columns = whole[name]
        ranks = SHAPE.dp_shard * SHAPE.cp * (SHAPE.tp if module == "vision" else 1)
        assert shards[name] == (rows // tensor_parallel // ranks, columns), name
