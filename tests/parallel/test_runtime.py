"""The runtime beyond gradients: memory, conservation, refusals, release of sends, forward-only programs."""

import dataclasses
import weakref

import pytest
import torch

from mmtrain.config.topology import JobLayout
from mmtrain.costs.cost_model import FlopsCosts
from mmtrain.errors import DataError, PlanError
from mmtrain.modality.typical import reference_sizes
from mmtrain.parallel.feed import StepFeed
from mmtrain.parallel.feeds.inputs import StepInputs
from mmtrain.parallel.local_model import build_local_model, check_same_program
from mmtrain.parallel.mesh import build_mesh
from mmtrain.parallel.runtime import PipelineScheduleRuntime
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.planner.job import Job
from mmtrain.planner.partition.partition import partition
from mmtrain.schedule.action import Action, Kind
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.schedule.passes.release import releases
from mmtrain.spec.builders import model_spec
from tests.ranks import run_ranks
from tests.reference import PLANNER, TRAINING, make_batch, model_config, reference_gradients

IMAGES = [[2, 1], [0], [3], [1]]


class Rank:
    """A model on one rank of a pipeline, ready to run batches."""

    def __init__(self, pp, model=None, schedule="interleave", size=1):
        self.mesh = build_mesh(JobLayout.grid(pp=pp), torch.device("cpu"))
        self.model = model or model_config()
        self.spec = model_spec(self.model)
        self.parts = partition(
            self.spec, pp, {"vision": 1, "language": 1}, reference_sizes(self.spec, TRAINING.seq_len)
        )
        self.planner = IterationPlanner(Job(
            spec=self.spec, partition=self.parts, section=PLANNER,
            costs=FlopsCosts.of(PLANNER), schedule=CATALOGUE[schedule], sub_microbatch_size=size,
            sharded=False, check_plans=True,
        ))  # fmt: skip
        self.local = build_local_model(self.model, self.spec, self.parts, self.mesh, TRAINING, seed=5)
        self.runtime = PipelineScheduleRuntime(self.local.stages)

    def run(self, batch, meta, *, forward_only=False, want_predictions=False, planned=None):
        plan = self.planner.plan(planned or meta, forward_only=forward_only)
        labels = [m.labels for m in batch.microbatches]
        inputs = StepInputs(
            layout=plan.layout, meta=meta, mesh=self.mesh, batch=batch, labels=labels,
            want_predictions=want_predictions,
        )  # fmt: skip
        feed = StepFeed(self.parts, inputs)
        self.runtime.load(plan.program, lambda s, w: self.planner.job.output_shape(plan.layout, s, w))
        return self.runtime.step(feed, loss_grad=1.0), plan


def forward_only(rank):
    job = Rank(2)
    batch, meta = make_batch(job.model, IMAGES, seed=1)
    outcome, plan = job.run(batch, meta, forward_only=True, want_predictions=True)
    assert all(p.grad is None for p in job.local.parameters)
    assert {a.kind for a, _, _ in outcome.rows} == {Kind.F}
    reference_loss, _ = reference_gradients(job.model, job.spec, [(batch, meta)], seed=5)
    predicted = {plan.batching.works[w].microbatch: p.shape[0] for w, p in outcome.predictions.items()}
    return sum(float(x) for x in outcome.losses.values()) / meta.num_targets, reference_loss, predicted


@pytest.mark.ranks
def test_a_forward_only_program_gives_losses_and_predictions():
    first, last = run_ranks(forward_only, 2)
    assert first[0] == 0 and first[2] == {}
    assert last[0] == pytest.approx(last[1], rel=1e-6)
    assert last[2] == {0: 4, 1: 2, 2: 2, 3: 2}


def steps_leave_nothing(rank):
    """New shapes in every step; afterwards no box and no transfer holds a tensor."""
    job = Rank(2)
    shapes = set()
    for seed in range(1, 5):
        batch, meta = make_batch(job.model, IMAGES if seed % 2 else [[0], [4]], seed=seed)
        job.run(batch, meta)
        shapes.add(meta.num_patches)
    runtime = job.runtime
    assert not runtime._pending and not runtime._sent
    assert all(not stage.leftovers() for stage in job.local.stages)
    return len(shapes)


@pytest.mark.ranks
def test_shapes_change_every_step_and_nothing_is_left():
    assert run_ranks(steps_leave_nothing, 2) == [4, 4]


def outputs_are_released(rank):
    """An output that has been sent and received is gone before the step ends."""
    job = Rank(2, schedule="1F1B")
    batch, meta = make_batch(job.model, [[0]] * 6, seed=1)
    alive = []
    sent = []
    original = type(job.local.stages[0]).send

    def send(stage, edge, forward):
        work, tensor = original(stage, edge, forward)
        sent.append(weakref.ref(tensor))
        return work, tensor

    type(job.local.stages[0]).send = send
    original_b = type(job.local.stages[0]).backward_one_chunk

    def backward(stage, *args, **kwargs):
        original_b(stage, *args, **kwargs)
        alive.append(sum(r() is not None for r in sent))

    type(job.local.stages[0]).backward_one_chunk = backward
    job.run(batch, meta)
    return max(alive), len(sent)


@pytest.mark.ranks
def test_sent_tensors_are_released_inside_of_the_step():
    for held, total in run_ranks(outputs_are_released, 2):
        assert held < total / 2, (held, total)


def last_chunk_ignores_its_input(rank):
    """The largest gradient of the last chunk and of all others on this rank; no real chunk does this."""
    job = Rank(2)
    last = job.local.stages[-1].submod
    if job.local.stages[-1].is_last:
        forward = last.forward
        last.forward = lambda x, **more: forward(x.detach(), **more)
    job.run(*make_batch(job.model, IMAGES, seed=1))
    found = {True: 0.0, False: 0.0}
    for chunk in job.local.chunks:
        ends = chunk is last and job.local.stages[-1].is_last
        found[ends] = max([found[ends], *(p.grad.abs().max().item() for p in chunk.parameters() if p.grad is not None)])
    return found[True], found[False]


@pytest.mark.ranks
def test_what_the_loss_does_not_depend_on_has_gradients_of_zero():
    (_, first), (last, others) = run_ranks(last_chunk_ignores_its_input, 2)
    assert last > 0
    assert first == others == 0


def plan_without_an_image(rank):
    job = Rank(1)
    batch, meta = make_batch(job.model, IMAGES, seed=1)
    first = meta.microbatches[0]
    documents = list(first.documents)
    documents[0] = dataclasses.replace(documents[0], images=documents[0].images[:1])
    planned = dataclasses.replace(
        meta, microbatches=(dataclasses.replace(first, documents=tuple(documents)), *meta.microbatches[1:])
    )
    with pytest.raises(DataError) as error:
        job.run(batch, meta, planned=planned)
    return str(error.value)


@pytest.mark.ranks
def test_a_plan_that_disagrees_with_the_batch_stops_the_step():
    (message,) = run_ranks(plan_without_an_image, 1)
    assert "rows arrived, but 1 images have" in message


def wrong_shape(rank):
    job = Rank(1)
    batch, meta = make_batch(job.model, IMAGES, seed=1)
    plan = job.planner.plan(meta)
    labels = [m.labels for m in batch.microbatches]
    feed = StepFeed(job.parts, StepInputs(layout=plan.layout, meta=meta, mesh=job.mesh, batch=batch, labels=labels))
    job.runtime.load(plan.program, lambda s, w: (1, 2))
    with pytest.raises(PlanError) as error:
        job.runtime.step(feed)
    return str(error.value)


@pytest.mark.ranks
def test_a_shape_is_checked_before_it_is_sent():
    (message,) = run_ranks(wrong_shape, 1)
    assert "but the plan's metadata says (1, 2)" in message


def different_hashes(rank):
    mesh = build_mesh(JobLayout.grid(pp=2), torch.device("cpu"))
    check_same_program(5, mesh)
    with pytest.raises(PlanError) as error:
        check_same_program(5 + rank, mesh)
    return str(error.value)


@pytest.mark.ranks
def test_different_programs_are_found_before_the_step():
    assert all("ranks [1] hold another program" in message for message in run_ranks(different_hashes, 2))


def test_releases_follow_from_the_program():
    """Rank 0 sends an activation; the gradient that comes back proves that it arrived."""
    from mmtrain.planner.make_plan import make_plan
    from mmtrain.schedule.chain import plain_chain
    from mmtrain.schedule.library.catalogue import CATALOGUE
    from mmtrain.schedule.passes.lower import lower

    problem = plain_chain(2, 3, CATALOGUE["1F1B"])
    program = lower(make_plan(problem, "1F1B").plan, problem, sharded=False)
    found = releases(program, 0)
    actions = program.actions[0]
    for index, transfers in found.items():
        assert actions[index].kind is Kind.WAIT_B
        for edge, forward in transfers:
            assert forward
            assert actions.index(Action(Kind.SEND_F, 0, program.graph.works[edge.work].microbatch, 0, 1)) < index
    assert sum(len(t) for t in found.values()) == 3
