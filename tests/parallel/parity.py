"""Runs one step of a small model on a layout and compares it with the one-process model."""

import dataclasses
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist

from mmtrain.config.config import Config, uses_fsdp
from mmtrain.config.data import DataConfig
from mmtrain.config.model import ModelConfig
from mmtrain.config.planner import PlannerConfig
from mmtrain.config.sections import ActivationCheckpointConfig, ParallelismConfig, TrainingConfig
from mmtrain.config.topology import JobLayout
from mmtrain.costs.cost_model import FlopsCosts
from mmtrain.errors import PlanError
from mmtrain.modality.submesh import Submesh, language_mask
from mmtrain.modality.typical import reference_sizes
from mmtrain.models.batch import labelled_tokens
from mmtrain.parallel import compile as compiling
from mmtrain.parallel.feed import StepFeed
from mmtrain.parallel.feed_ahead import FeedAhead, forwards_of
from mmtrain.parallel.feeds.inputs import StepInputs
from mmtrain.parallel.grads import fill_missing_grads, local_part, squared_norm
from mmtrain.parallel.local_model import build_local_model, check_same_program
from mmtrain.parallel.mesh import build_mesh
from mmtrain.parallel.replica_data import ReplicaData
from mmtrain.parallel.runtime import PipelineScheduleRuntime
from mmtrain.parallel.tensor import finish_gradients
from mmtrain.parallel.torch_private import compiled_for_any_size
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.planner.job import Job
from mmtrain.planner.memory.options import MemoryChoices
from mmtrain.planner.partition.partition import partition
from mmtrain.planner.search.search import search
from mmtrain.planner.search.search_options import SearchOptions
from mmtrain.schedule.action import BRAID, Braid, Kind
from mmtrain.schedule.library.catalogue import CATALOGUE, ChunkPlacement, Schedule
from mmtrain.schedule.passes.lower import lower
from mmtrain.schedule.passes.split import split_backwards
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.plan import check as check_plan
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.transport import check_transport
from mmtrain.simulator.partition_choice import partition_of
from mmtrain.spec.builders import model_spec
from mmtrain.spec.memory_strategies import BlockMemory, StageMemory
from mmtrain.spec.model_shapes import dit_shape
from mmtrain.spec.spec import ModelSpec
from mmtrain.spec.vocabulary import divided_vocabulary
from tests.pairwise import covering
from tests.reference import NOISE, PLANNER, TRAINING, in_chunks, make_batch, reference_gradients

MIXED = [[[2, 0, 1], [0, 0], [3], [1, 1]], [[0], [4, 1], [0, 0], [2]]]
"""Images of each document, for two replicas: one of each has text-only microbatches."""
TEXT_ON_ONE = [MIXED[0], [[0], [0], [0, 0], [0]]]
NO_IMAGE = [[[0, 0], [0]], [[0], [0]]]
KEEP_ALL = ActivationCheckpointConfig()
DROPOUT_KEY = 11
"""Of every work: its masks then depend on the layer and its rows alone, as those of a model that runs no works."""


def searched(problem: PlanningProblem) -> Plan:
    """The plan of a short search."""
    plan = search(problem, SearchOptions(budget_evaluations=100, seed=1)).plan
    assert plan is not None
    return plan


SCHEDULES = CATALOGUE | {"searched": Schedule(idea="", make=searched, splits_backward=True)}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its data, and how it is run."""

    model: ModelConfig
    images: list = dataclasses.field(default_factory=lambda: MIXED)
    runs: tuple[tuple, ...] = (("interleave", 1),)
    """(schedule, images in a vision work) of each step; the schedule `searched` is a short search. With a third entry,
    backwards are split, and W comes that many actions after I; with a fourth, every so many backwards only."""
    placement: ChunkPlacement = "loop"
    partition: str = ""
    """How the config says that modules are cut; empty: by DIP's rule where the model leaves it open."""
    placed: str = ""
    """How the config places modules; empty: on all ranks."""
    vocabulary: bool = False
    """Whether pipeline ranks divide it."""
    split: str = "balanced"
    share_patches: bool = False
    head_groups: int = 1
    data_encoder: bool = False
    regathered: frozenset[str] = frozenset()
    training: TrainingConfig = TRAINING
    recompute: ActivationCheckpointConfig = KEEP_ALL
    compiled: str = ""
    """The backend that compiles blocks, which then keep no operations; empty: none."""
    memories: int = 0
    """Draws of what blocks do with their activations, work by work, that are compared with keeping all."""
    braids: int = 0
    """Draws of neighbours that run as one block, that are compared with one after the other."""
    limits: tuple[float, ...] = ()
    """Parts of each rank's peak that its activations may take, first chunks offloaded; compared with keeping all."""
    prepare: Callable[[torch.nn.Module], None] | None = None
    """Changes the values of a chunk; what it does must depend on the names of parameters alone."""

    def spec(self, pp: int, tp: int) -> ModelSpec:
        spec = model_spec(self.model)
        if self.vocabulary and pp > 1:
            spec = divided_vocabulary(spec, pp, tp)
        return in_chunks(spec, self.model, self.training, tp)

    def submesh(self, shape: JobLayout) -> Submesh:
        return Submesh(
            cp=shape.cp, tp=shape.tp, split=self.split, block_size=4,
            share_patches=self.share_patches and shape.cp > 1, head_groups=self.head_groups,
            data_encoder=self.data_encoder and shape.tp > 1,
            attention_mask=language_mask(self.model),
        )  # fmt: skip


def shallow(case: Case, blocks: int = 3) -> Case:
    """The case with few blocks in each module, and windows in all but one of them."""

    def cut(section):
        if section is None:
            return None
        depths = {key: blocks for key in ("depth", "num_hidden_layers", "encoder_layers") if key in section.config}
        windows = {"fullatt_block_indexes": [1]} if "fullatt_block_indexes" in section.config else {}
        return dataclasses.replace(section, config=section.config | depths | windows)

    encoders = {name: cut(section) for name, section in case.model.encoders.items()}
    model = dataclasses.replace(case.model.with_modules(encoders), language=cut(case.model.language))
    return dataclasses.replace(case, model=model)


def thin(case: Case, pp: int) -> Case:
    """The case with as few blocks as fill all stages of a pipeline, two at least."""
    model = case.model
    segments = max(1, model.language.num_segments, model.encoder.num_segments if model.encoder else 0)
    return shallow(case, max(2, pp * segments - (2 if segments > 1 else 0)))


def short(case: Case, pp: int) -> Case:
    """The case with one microbatch more than there are pipeline ranks: some with images, some without."""
    return dataclasses.replace(case, images=[replica[: pp + 1] for replica in case.images])


def small(case: Case, pp: int) -> Case:
    """The case with few blocks and few microbatches, in a third of the time."""
    return short(thin(case, pp), pp)


Table = dict[JobLayout, dict[str, Case]]
"""Which cases are run on a layout."""


def selection(table: Table, shrink: Callable[[Case, int], Case] = lambda case, pp: case) -> Table:
    """Few of the runs of a table, in which every pair of a degree, another degree, a case and a run still occurs.

    Args: shrink: makes a case smaller for a number of pipeline ranks, such as `small`.
    """
    rows = [(shape, name, run) for shape, cases in table.items() for name, case in cases.items() for run in case.runs]
    found: Table = {}
    for shape, name, run in covering(
        rows, lambda row: (*row[0].degrees.values(), *row[1:]), lambda row: 2 + row[0].world_size
    ):
        cases = found.setdefault(shape, {})
        runs = cases[name].runs if name in cases else ()
        cases[name] = dataclasses.replace(shrink(table[shape][name], shape.pp), runs=(*runs, run))
    return found


def layouts(table: Table) -> pytest.MarkDecorator:
    """The rows of a table as parameters `shape` and `cases` of a test."""
    return pytest.mark.parametrize(("shape", "cases"), table.items(), ids=[identify(shape) for shape in table])


def identify(shape: JobLayout) -> str:
    """The axes above 1."""
    return "-".join(f"{axis}{n}" for axis, n in shape.divided.items()) or "one"


def possible(shape: JobLayout, cases: dict[str, Case]) -> dict[str, Case]:
    """The cases that a layout can run: context parallelism does not divide the works of a text-to-video model."""
    return {name: case for name, case in cases.items() if shape.cp == 1 or not case.model.reads_clips}


def with_mask(model: ModelConfig, mask: str) -> ModelConfig:
    """The model with another attention mask."""
    return dataclasses.replace(model, language=dataclasses.replace(model.language, attention_mask=mask))


@dataclass(frozen=True)
class Found:
    """Relative errors of one run on one rank, and the parameters compared."""

    loss: float
    gradient: float
    worst: str
    norm: float
    compared: frozenset[str]
    wanted: frozenset[str]
    unequal: tuple[str, ...] = ()
    """Of split backwards: the parameters whose gradient is not bit for bit that of whole ones on the same layout. Of
    drawn memory options: those for which it is not that of keeping all, and what else went wrong."""


def run_layout(rank, shape, cases) -> dict[tuple, Found]:
    """(case, schedule, images a work) -> errors, on one rank of `run_ranks`."""
    meshes = {}
    found = {}
    depth = shape.depths[shape.coordinates(rank).pipeline]
    for name, case in cases.items():
        submesh, parts = case.submesh(shape), cut(case, JobLayout.grid(pp=depth, tp=shape.tp))
        key = submesh.data_encoder
        if key not in meshes:
            meshes[key] = build_mesh(shape, torch.device("cpu"), data_encoder=key)
        for run, errors in run_case(meshes[key], case, submesh, parts).items():
            found[name, *run] = errors
    return found


def cut(case, shape):
    """The partition of a case."""
    model, spec = case.model, case.spec(shape.pp, shape.tp)
    if case.partition or case.placed:
        job = Config(
            model=model, data=DataConfig(source="nowhere"), training=case.training,
            parallelism=ParallelismConfig(
                pipeline_parallel_degree=shape.pp, pipeline_parallel_schedule=case.runs[0][0]
            ),
            planner=PlannerConfig(partition=case.partition or "search", placement=case.placed or "spread"),
        )  # fmt: skip
        return partition_of(job, spec)
    segments = {name: section.num_segments for name, section in model.cut_modules.items()}
    return partition(spec, shape.pp, segments, reference_sizes(spec, case.training.seq_len), case.placement)


def run_case(mesh, case, submesh, parts):
    model, spec = case.model, case.spec(parts.num_ranks, mesh.layout.tp)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "compiled_for_any_size", partial(compiled_for_any_size, backend=case.compiled))
        local = build_local_model(
            model, spec, parts, mesh, case.training, seed=5, regathered=case.regathered, recompute=case.recompute,
            compiled=bool(case.compiled),
        )  # fmt: skip
    for chunk in local.chunks if case.prepare else ():
        case.prepare(chunk)
    runtime = PipelineScheduleRuntime(local.stages, reduced=local.sums.stage_reduced)
    batches = [make_batch(model, case.images[replica % 2], seed=replica + 1) for replica in range(mesh.layout.dp)]
    wanted_loss, wanted = reference_gradients(model, model_spec(model), batches, seed=5, prepare=case.prepare)
    found = {}
    whole = {}
    for run in case.runs:
        schedule, size, *delay = run
        planner = make_planner(mesh, case, submesh, parts, spec, run)
        if delay and (schedule, size) not in whole:
            run_step(mesh, parts, planner, model, local, runtime, batches)
            whole[schedule, size] = take_gradients(local)
        loss = run_step(mesh, parts, planner, model, local, runtime, batches, *delay)
        found[run] = compare(mesh, parts, local, loss, wanted_loss, wanted)
        gradients = take_gradients(local)
        if delay:
            wrong = [n for n, g in whole[schedule, size].items() if not torch.equal(g, gradients[n])]
            found[run] = dataclasses.replace(found[run], unequal=tuple(wrong))
        options = [how for how in BlockMemory if not (case.compiled and how is BlockMemory.SELECTIVE)]
        for draw in range(case.memories):
            seed = 100 * mesh.dp_rank + draw  # replicas have plans of their own
            drawn = run_step(
                mesh, parts, planner, model, local, runtime, batches, *delay, memories=seed, options=options
            )
            wrong = [n for n, g in take_gradients(local).items() if not torch.equal(g, gradients[n])]
            wrong += ["the loss"] if drawn != loss else []
            wrong += [f"held bytes of stage {s.stage_index}" for s in local.stages if s.memory.offloader.held_bytes()]
            found[run] = dataclasses.replace(found[run], unequal=(*found[run].unequal, *wrong))
        for limit in case.limits:
            drawn = run_step(mesh, parts, planner, model, local, runtime, batches, *delay, limit=limit)
            wrong = [f"{n} (limit)" for n, g in take_gradients(local).items() if not torch.equal(g, gradients[n])]
            wrong += ["the loss"] if drawn != loss else []
            found[run] = dataclasses.replace(found[run], unequal=(*found[run].unequal, *wrong))
        for draw in range(case.braids):
            seed = 100 * mesh.dp_rank + draw
            memories = seed if case.memories else None
            drawn = run_step(
                mesh, parts, planner, model, local, runtime, batches, *delay, memories=memories, braids=seed
            )
            wrong = [f"{n} (braids)" for n, g in take_gradients(local).items() if not torch.equal(g, gradients[n])]
            wrong += ["the loss"] if drawn != loss else []
            found[run] = dataclasses.replace(found[run], unequal=(*found[run].unequal, *wrong))
    return found


def make_planner(mesh, case, submesh, parts, spec, run):
    """Of a run's schedule."""
    schedule, size, *_ = run
    return IterationPlanner(Job(
        spec=spec, partition=parts, section=PLANNER,
        costs=FlopsCosts.of(PLANNER, shares=submesh.size), schedule=SCHEDULES[schedule], sub_microbatch_size=size,
        sharded=uses_fsdp(mesh.layout, case.training, data_encoder=submesh.data_encoder),
        regathered=case.regathered, submesh=submesh, check_plans=True,
        memory=MemoryChoices(section=case.recompute),
    ))  # fmt: skip


def take_gradients(local):
    """Name -> this rank's part of the gradient, of every parameter that trains; they are removed."""
    found = {}
    for chunk in local.chunks:
        for name, parameter in chunk.named_parameters():
            if parameter.grad is not None:
                found[f"{chunk.lo}: {name}"] = local_part(parameter.grad)
            parameter.grad = None
    return found


def run_step(
    mesh, parts, planner, model, local, runtime, batches, delay=None, every=1, memories=None, braids=None, limit=None,
    options=tuple(BlockMemory),
):  # fmt: skip
    outcome = run_program(
        mesh, parts, planner, model, runtime, batches[mesh.dp_rank], delay, every, memories, braids, limit, options,
        num_targets=(num_targets := values_of(model) * sum(m.num_targets for _, m in batches)),
    )  # fmt: skip
    fill_missing_grads(local.parameters)
    finish_gradients(local.parameters)
    local.sums.finish()
    losses = outcome.losses.values() if mesh.place.tp == 0 else ()
    loss = torch.tensor(sum(float(x) for x in losses) / num_targets, dtype=torch.float64)
    torch.distributed.all_reduce(loss)
    return float(loss)


def values_of(model):
    """Numbers that a target has."""
    return dit_shape(model).output_dim if model.dit is not None else 1


def run_program(
    mesh, parts, planner, model, runtime, batch_of_replica, delay=None, every=1, memories=None, braids=None, limit=None,
    options=tuple(BlockMemory), *, num_targets=1, uploads=None,
):  # fmt: skip
    """The outcome of the actions of a step. Args: uploads: how inputs get to the device, ahead."""
    batch, meta = batch_of_replica
    item = ReplicaData(
        Config(model=model, data=DataConfig(source="nowhere"), training=TRAINING), mesh, planner.job.spec, parts
    ).item(batch, meta)
    plan = planner.plan(meta) if limit is None else limited_plan(planner, meta, limit)
    program = plan.program if delay is None and braids is None else changed_program(planner, plan, delay, every, braids)
    if memories is not None:
        drawn = draw_memories(parts, planner.job.spec, program.graph, memories, options)
        program = dataclasses.replace(program, memory=drawn)
    check_same_program(program.hash, mesh)
    layout = plan.layout.with_labelled(labelled_tokens(item.labels))
    inputs = StepInputs(
        layout=layout, meta=meta, mesh=mesh, batch=item.batch, labels=item.labels, noise=NOISE, uploads=uploads
    )
    feed, place = StepFeed(parts, inputs), mesh.place
    if uploads is not None:
        feed = FeedAhead(feed, uploads, forwards_of(program, mesh.pp_rank), most_bytes=1e6)
    runtime.load(
        program,
        lambda stage, work: planner.job.output_shape(layout, stage, work, place.cp, place.tp),
        key_of=(lambda work: DROPOUT_KEY) if model.lora.dropout else None,
    )
    return runtime.step(feed, loss_grad=1 / num_targets)


def limited_plan(planner, meta, limit):
    """The plan of a batch whose activations may take a part of what they take if all are kept."""
    timeline = planner.plan(meta).result.timeline
    memory = MemoryChoices(strategies=(BlockMemory.OFFLOAD, BlockMemory.KEEP))
    limited = IterationPlanner(
        dataclasses.replace(planner.job, memory=memory), tuple(limit * peak for peak in timeline.peak_bytes)
    )
    iteration = limited.prepare(meta, searched=True)
    plan = limited.finish(iteration, iteration.first)
    assert "activations of first chunks offloaded" in plan.result.message, plan.result.message
    assert any("offload" in name for name in plan.program.memory.values())
    return plan


def changed_program(planner, plan, delay, every, braids):
    """The program of an iteration's plan with backwards split, and with neighbours braided."""
    graph, changed = plan.problem.graph, plan.result.plan
    if delay is not None:
        nodes = {(stage, w) for stage, w in graph.nodes() if graph.has_backward(stage, w) and (stage + w) % every == 0}
        changed = split_backwards(changed, plan.problem, delay, nodes=nodes)
        assert changed.split == nodes
    if braids is not None:
        changed = draw_braids(changed, braids)
    check_plan(changed, plan.problem)
    spec, stages = planner.job.spec, planner.job.partition.stages
    regathered = [s.index for s in stages if spec.module(s.module).section in planner.job.regathered]
    program = lower(changed, plan.problem, sharded=planner.job.sharded, regathered=regathered, reduce=True)
    check_transport(program)
    return program


def draw_braids(plan, seed):
    """The plan with about three in four of the neighbours braided that can be."""
    rng = random.Random(seed)
    for rank in range(plan.graph.num_ranks):
        index = 0
        while index + 1 < len(plan.orders[rank]):
            order = plan.orders[rank]
            pair = sorted(order[index : index + 2], key=lambda action: action.kind is not Kind.F)
            kinds = [action.kind for action in pair]
            index += 1
            if kinds.count(Kind.F) == 1 and BRAID not in kinds and rng.random() < 0.75:
                joined = (*order[: index - 1], Braid.of(*pair), *order[index + 1 :])
                orders = (*plan.orders[:rank], joined, *plan.orders[rank + 1 :])
                braided = dataclasses.replace(plan, orders=orders)
                if plan.graph.work_of(pair[0]) != plan.graph.work_of(pair[1]):
                    with suppress(PlanError):  # a deadlock
                        braided.run()
                        plan = braided
    return plan


def draw_memories(parts, spec, graph, seed, options):
    """(stage, work) -> text of what its blocks do, of about three in four with a backward."""
    rng = random.Random(seed)
    found = {}
    for stage, work in graph.nodes():
        layers = parts.stages[stage].layers
        num_blocks = sum(layer.is_block for layer in spec.module(parts.stages[stage].module).layers[slice(*layers)])
        if graph.has_backward(stage, work) and rng.random() < 0.75:
            found[stage, work] = str(StageMemory(tuple(rng.choices(options, k=num_blocks))))
    return found


def compare(mesh, parts, local, loss, wanted_loss, wanted):
    skip = local.tied[-1] if local.tied and parts.of_module("language")[-1].pp_rank == mesh.pp_rank else None
    square = squared_norm(local.parameters, mesh, skip=skip)
    dist.all_reduce(square)
    norm = square.sqrt()
    largest = max(g.abs().max() for g in wanted.values())
    worst, worst_name, compared = 0.0, "", set()
    for chunk in local.chunks:
        for name, parameter in chunk.named_parameters():
            if not parameter.requires_grad:
                assert parameter.grad is None, name
                continue
            grad = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
            rows = slice(*chunk.stored_rows[name][:2]) if name in chunk.stored_rows else slice(None)
            name = local.aliases.get(name, name)
            theirs = wanted[name][rows] if rows.stop else wanted[name]
            assert grad.shape == theirs.shape, name
            error = float((grad - theirs).abs().max() / (theirs.abs().max() + 1e-3 * largest))
            if not error <= worst:
                worst, worst_name = error, name
            compared.add(name)
    wanted_norm = torch.stack([g.double().pow(2).sum() for g in wanted.values()]).sum().sqrt()
    norm_error = abs(float(norm - wanted_norm)) / float(wanted_norm)
    loss_error = abs(loss - wanted_loss) / abs(wanted_loss)
    return Found(loss_error, worst, worst_name, norm_error, frozenset(compared), frozenset(wanted))


def check(ranks: list[dict[tuple, Found]], tolerance: float) -> None:
    """Refuses errors above the tolerance, and parameters that no rank compared."""
    for case in ranks[0]:
        for rank, found in enumerate(found[case] for found in ranks):
            assert found.loss < 1e-6, (case, rank, found.loss)
            assert found.gradient < tolerance, (case, rank, found.worst, found.gradient)
            assert found.norm < 1e-6, (case, rank, found.norm)
        compared = frozenset().union(*(found[case].compared for found in ranks))
        assert compared == ranks[0][case].wanted, case
