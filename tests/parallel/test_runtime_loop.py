"""The runtime's loop on one rank: what each action costs, what overrides it, what it tells a profiler."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from mmtrain.config.topology import JobLayout
from mmtrain.errors import PlanError
from mmtrain.models.loss import LossOutput
from mmtrain.parallel.mesh import Channels, build_mesh
from mmtrain.parallel.runtime import PipelineScheduleRuntime
from mmtrain.parallel.stage import ModalityStage
from mmtrain.parallel.torch_private import prepare_fsdp
from mmtrain.planner.make_plan import make_plan
from mmtrain.schedule.action import COMPUTE, Action, Kind
from mmtrain.schedule.chain import plain_chain
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.schedule.passes.lower import Program, lower

NUM_STAGES, NUM_WORKS, WIDTH = 2, 3, 4


@pytest.fixture(autouse=True)
def alone():
    """A process group of this rank alone: its stages hand their results on without messages."""
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    yield
    dist.destroy_process_group()


class Layer(nn.Module):
    def __init__(self, last: bool) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(WIDTH, WIDTH), last

    def forward(self, x: Tensor):
        x = self.linear(x)
        return LossOutput(x.sum()) if self.last else x


def shape_of(stage, work):
    return (1, WIDTH)


def feed(stage, work):
    return ((torch.full((1, WIDTH), 1.0 + work),) if stage == 0 else (), {})


class Job:
    """Two stages of one rank, and a program of three works for them."""

    def __init__(self, *, sharded: bool = False) -> None:
        problem = plain_chain(1, NUM_WORKS, CATALOGUE["Interleaved1F1B"])
        self.program = lower(make_plan(problem, "Interleaved1F1B").plan, problem, sharded=sharded)
        mesh = build_mesh(JobLayout.grid(), torch.device("cpu"))
        layers = [Layer(index == NUM_STAGES - 1) for index in range(NUM_STAGES)]
        for layer in layers if sharded else ():
            prepare_fsdp(fully_shard(layer, mesh=mesh.fsdp()))
        self.stages = [
            ModalityStage(layer, index, NUM_STAGES, mesh.device, mesh.pp_group, mesh.channels, torch.float32)
            for index, layer in enumerate(layers)
        ]
        self.runtime = PipelineScheduleRuntime(self.stages)
        self.runtime.load(self.program, shape_of)


def test_a_step_walks_over_no_modules(monkeypatch):
    """Chunks have hundreds; which of them FSDP2 shards is asked once a program."""
    job, walked = Job(), []
    modules = nn.Module.modules

    def counted(module, *args):
        walked.append(module)
        return modules(module, *args)

    monkeypatch.setattr(nn.Module, "modules", counted)
    job.runtime.load(job.program, shape_of)
    assert len(walked) == NUM_STAGES
    outcome = job.runtime.step(feed)
    assert len(walked) == NUM_STAGES
    assert len(outcome.losses) == NUM_WORKS
    assert Counter(action.kind for action, _, _ in outcome.rows) == {Kind.F: 6, Kind.B: 6}


def test_the_same_program_runs_again_with_the_same_gradients():
    job = Job()
    parameters = [p for stage in job.stages for p in stage.submod.parameters()]
    found = []
    for _ in range(2):
        job.runtime.step(feed)
        found.append([p.grad.clone() for p in parameters])
        for parameter in parameters:
            parameter.grad = None
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_method_that_is_replaced_after_the_load_is_called():
    job, seen = Job(), []
    for stage in job.stages:
        for name in ("forward_one_chunk", "backward_one_chunk", "prefetch"):
            method = getattr(stage, name)

            def noted(*args, _name=name, _method=method, **kwargs):
                seen.append(_name)
                return _method(*args, **kwargs)

            setattr(stage, name, noted)
    job.runtime.step(feed)
    works = NUM_STAGES * NUM_WORKS
    assert Counter(seen) == {"forward_one_chunk": works, "backward_one_chunk": works, "prefetch": works}


def test_a_profiler_sees_each_action_as_a_range():
    job = Job(sharded=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        job.runtime.step(feed)
    ranges = Counter(event.name for event in profiler.events() if event.name.startswith("PP:"))
    assert ranges == Counter(f"PP:{action}" for action in job.program.actions[0])
    assert sum(action.kind in COMPUTE for action in job.program.actions[0]) == 12


def test_without_a_profiler_no_range_is_made(monkeypatch):
    job = Job()
    monkeypatch.setattr(torch.profiler, "record_function", lambda name: pytest.fail(name))
    job.runtime.step(feed)


def test_parameters_that_are_gathered_for_nothing_are_named():
    job = Job(sharded=True)
    alone = Program(job.program.graph, ((Action(Kind.UNSHARD, 1),),))
    job.runtime.load(alone, shape_of)
    with pytest.raises(PlanError, match="unused tensors: stage 1: parameters gathered"):
        job.runtime.step(feed)


def test_handlers_of_torch_are_refused_since_they_would_not_be_called():
    with pytest.raises(NotImplementedError, match="override one in a subclass"):
        Job().runtime.register_custom_function(None, print)


@pytest.fixture
def four_ranks(alone):
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())


def test_a_route_names_the_peer_by_its_rank_in_the_group_of_the_direction(four_ranks):
    """Global ranks 1 and 3 are pp_ranks 0 and 1; this process is the first."""
    pipeline, there, back = dist.new_group([1, 3]), dist.new_group([1, 3]), dist.new_group([1, 3])
    directed = Channels((1, 3), pipeline, {(0, 1): there, (1, 0): back})
    assert directed.route(0, 1, pp_rank=0) == (there, 1)
    assert directed.route(1, 0, pp_rank=0) == (back, 1)
    assert directed.route(1, 0, pp_rank=0) == (back, 1)
    assert Channels((1, 3), pipeline, {}).route(1, 0, pp_rank=0) == (pipeline, 1)
    everyone = Channels((3, 1), dist.group.WORLD, {})
    assert everyone.route(0, 1, pp_rank=1) == (dist.group.WORLD, 3)
