"""bfloat16 compute with float32 master weights and reductions, through pipelines and FSDP2."""

import dataclasses

import pytest
import torch

from mmtrain.config.topology import JobLayout
from mmtrain.costs.cost_model import FlopsCosts
from mmtrain.modality.submesh import Submesh
from mmtrain.modality.typical import reference_sizes
from mmtrain.parallel.local_model import build_local_model
from mmtrain.parallel.mesh import build_mesh
from mmtrain.parallel.runtime import PipelineScheduleRuntime
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.planner.job import Job
from mmtrain.planner.partition.partition import partition
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.spec.builders import model_spec
from mmtrain.spec.vocabulary import divided_vocabulary
from tests.parallel.parity import MIXED, run_step
from tests.ranks import run_ranks
from tests.reference import PLANNER, TRAINING, in_chunks, make_batch, model_config, reference_gradients

TOLERANCE = 0.02
"""L2 norm of the difference of all gradients, relative to the float32 gradients'. Measured: 0.0082 to 0.0089."""


def gradients(rank, shape, divided, chunk_tokens):
    mesh = build_mesh(shape, torch.device("cpu"))
    training = dataclasses.replace(TRAINING, mixed_precision_param="bfloat16")
    model = model_config(tied=True)
    spec = model_spec(model, dtype_bytes=2)
    if divided:
        spec = divided_vocabulary(spec, shape.pp, shape.tp)
    spec = in_chunks(spec, model, chunk_tokens, shape.tp)
    parts = partition(spec, shape.pp, {"vision": 1, "language": 1}, reference_sizes(spec, training.seq_len))
    local = build_local_model(model, spec, parts, mesh, training, seed=5)
    runtime = PipelineScheduleRuntime(local.stages)
    planner = IterationPlanner(Job(
        spec=spec, partition=parts, section=PLANNER,
        costs=FlopsCosts.of(PLANNER, shares=shape.cp * shape.tp), schedule=CATALOGUE["interleave"],
        sub_microbatch_size=1, sharded=True, submesh=Submesh(cp=shape.cp, tp=shape.tp, block_size=4),
    ))  # fmt: skip
    batches = [make_batch(model, MIXED[replica], seed=replica + 1) for replica in range(shape.dp)]
    loss = run_step(mesh, parts, planner, model, local, runtime, batches)
    wanted_loss, wanted = reference_gradients(model, model_spec(model), batches, seed=5)
    difference = total = 0.0
    for chunk, name, parameter in ((c, n, p) for c in local.chunks for n, p in c.named_parameters()):
        assert parameter.dtype == parameter.grad.dtype == torch.float32, name
        grad = parameter.grad.full_tensor()
        rows = slice(*chunk.stored_rows[name][:2]) if name in chunk.stored_rows else slice(None)
        reference = wanted[local.aliases.get(name, name)][rows]
        difference += float((grad - reference).pow(2).sum())
        total += float(reference.pow(2).sum())
    return abs(loss - wanted_loss) / wanted_loss, difference, total


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("shape", "divided", "chunk_tokens"),
    [
        (JobLayout.grid(), False, 0),
        (JobLayout.grid(pp=2, dp_shard=2), False, 3),
        (JobLayout.grid(cp=2, tp=2), False, 0),
        (JobLayout.grid(pp=2, dp_shard=2), True, 0),
        *(
            pytest.param(JobLayout.grid(**{axis: 2}), False, 2, marks=pytest.mark.nightly)
            for axis in ("pp", "cp", "tp")
        ),
        pytest.param(JobLayout.grid(pp=2, tp=2), True, 3, marks=pytest.mark.nightly),
        pytest.param(JobLayout.grid(pp=4), True, 0, marks=pytest.mark.nightly),
        pytest.param(JobLayout.grid(pp=2, dp_shard=2), False, 0, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_bfloat16_gradients_are_close_to_float32(shape, divided, chunk_tokens):
    found = run_ranks(gradients, shape.world_size, shape, divided, chunk_tokens)
    assert all(loss < 1e-3 for loss, _, _ in found)
    error = (sum(d for _, d, _ in found) / sum(t for _, _, t in found)) ** 0.5
    assert 0 < error < TOLERANCE
