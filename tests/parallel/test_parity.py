"""Loss and every parameter's gradient of every layout equal the one-process model's."""

import itertools

import pytest
import torch

from mmtrain.config import uses_fsdp
from mmtrain.models.spec_builders import model_spec
from mmtrain.parallel.build import build_local_model, check_same_program
from mmtrain.parallel.feed import StepFeed
from mmtrain.parallel.grads import fill_missing_grads, sync_tied, total_norm
from mmtrain.parallel.mesh import build_mesh
from mmtrain.parallel.runtime import PipelineScheduleRuntime
from mmtrain.planner.iteration import IterationPlanner, reference_sizes
from mmtrain.planner.partition import partition
from mmtrain.topology import MeshShape
from tests.ranks import run_ranks
from tests.reference import PLANNER, TRAINING, make_batch, model_config, reference_gradients

TOLERANCE = 3e-5
"""Largest difference of one gradient element, relative to its tensor's largest element. Measured: at most 1.3e-5."""

LAYOUTS = [
    MeshShape(),
    MeshShape(pp=2),
    MeshShape(pp=4),
    MeshShape(dp_shard=2),
    MeshShape(dp_replicate=2),
    MeshShape(dp_replicate=2, dp_shard=2),
    MeshShape(pp=2, dp_shard=2),
    MeshShape(pp=2, dp_replicate=2),
]

MIXED = [[[2, 0, 1], [0, 0], [3], [1, 1]], [[0], [4, 1], [0, 0], [2]]]
"""Pictures of each document, for two replicas: one of each has text-only microbatches."""
TEXT_ON_ONE = [MIXED[0], [[0], [0], [0, 0], [0]]]
NO_IMAGE = [[[0, 0], [0]], [[0], [0]]]

CASES = {
    "trainable": (model_config(), MIXED),
    "tied": (model_config(tied=True, segments=(1, 1)), MIXED),
    "no image on one replica": (model_config(), TEXT_ON_ONE),
    "no image at all": (model_config(), NO_IMAGE),
    "frozen encoder": (model_config(frozen=("encoder",)), TEXT_ON_ONE),
    "frozen encoder and projector": (model_config(frozen=("encoder", "projector")), MIXED),
    "frozen language": (model_config("siglip_vision_model", "llama", frozen=("language",)), TEXT_ON_ONE),
    "class token": (model_config("vit", "llama"), MIXED),
    "native merger": (model_config(projector="native"), MIXED),
    "text model": (model_config(None, "llama", tied=True), NO_IMAGE),
}


def run_case(mesh, model, images):
    """(schedule, pictures a work) -> (loss, largest gradient and norm error, all relative; names compared)."""
    spec = model_spec(model)
    segments = {
        "vision": model.encoder.num_segments if model.encoder else 0,
        "language": model.language.num_segments,
    }
    parts = partition(spec, mesh.shape.pp, segments, reference_sizes(spec, TRAINING.seq_len))
    local = build_local_model(model, spec, parts, mesh, TRAINING, seed=5)
    runtime = PipelineScheduleRuntime(local.stages)
    batches = [make_batch(model, images[replica % 2], seed=replica + 1) for replica in range(mesh.shape.dp)]
    wanted_loss, wanted = reference_gradients(model, spec, batches, seed=5)
    found = {}
    for schedule, size in itertools.product(("1F1B", "interleave"), (0, 1) if model.encoder else (0,)):
        planner = IterationPlanner(
            spec=spec, partition=parts, section=PLANNER, schedule=schedule, sub_microbatch_size=size,
            sharded=uses_fsdp(mesh.shape, TRAINING), check_plans=True,
        )  # fmt: skip
        loss = run_step(mesh, parts, planner, local, runtime, batches)
        found[schedule, size] = compare(mesh, parts, local, loss, wanted_loss, wanted)
        for parameter in local.parameters:
            parameter.grad = None
    return found


def run_step(mesh, parts, planner, local, runtime, batches):
    batch, meta = batches[mesh.dp_rank]
    plan = planner.plan(meta)
    check_same_program(plan.program.hash, mesh)
    num_targets = sum(m.num_targets for _, m in batches)
    feed = StepFeed(
        parts, plan.batching, meta, mesh.device,
        batch=batch if mesh.is_leader else None, labels=[m.labels for m in batch.microbatches],
    )  # fmt: skip
    runtime.load(plan.program, lambda stage, work: planner.output_shape(plan.batching, stage, work))
    outcome = runtime.step(feed, loss_grad=1 / num_targets)
    fill_missing_grads(local.parameters)
    sync_tied(local.tied, mesh)
    loss = torch.tensor(sum(float(x) for x in outcome.losses.values()) / num_targets, dtype=torch.float64)
    torch.distributed.all_reduce(loss)
    return float(loss)


def compare(mesh, parts, local, loss, wanted_loss, wanted):
    skip = local.tied[-1] if local.tied and parts.of_module("language")[-1].pp_rank == mesh.pp_rank else None
    norm = total_norm(local.parameters, mesh, skip=skip)
    largest = max(g.abs().max() for g in wanted.values())
    worst, compared = 0.0, set()
    for chunk in local.chunks:
        for name, parameter in chunk.named_parameters():
            if not parameter.requires_grad:
                assert parameter.grad is None, name
                continue
            grad = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
            name = local.aliases.get(name, name)
            error = (grad - wanted[name]).abs().max() / (wanted[name].abs().max() + 1e-3 * largest)
            worst = max(worst, float(error))
            compared.add(name)
    wanted_norm = torch.stack([g.double().pow(2).sum() for g in wanted.values()]).sum().sqrt()
    norm_error = abs(float(norm - wanted_norm)) / float(wanted_norm)
    return abs(loss - wanted_loss) / abs(wanted_loss), worst, norm_error, compared, set(wanted)


def run_layout(rank, shape):
    mesh = build_mesh(shape, torch.device("cpu"))
    return {
        (name, *key): value
        for name, (model, images) in CASES.items()
        for key, value in run_case(mesh, model, images).items()
    }


@pytest.mark.ranks
@pytest.mark.parametrize("shape", LAYOUTS, ids=lambda s: f"pp{s.pp}-rep{s.dp_replicate}-shard{s.dp_shard}")
def test_every_gradient_equals_the_one_process_model(shape):
    ranks = run_ranks(run_layout, shape.world_size, shape)
    for case in ranks[0]:
        compared, wanted = set(), set()
        for found in ranks:
            loss, grad, norm, names, all_names = found[case]
            assert loss < 1e-6, (case, loss)
            assert grad < TOLERANCE, (case, grad)
            assert norm < 1e-6, (case, norm)
            compared |= names
            wanted |= all_names
        assert compared == wanted, case
