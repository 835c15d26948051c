"""Split backwards: I and W give the gradients of B, hold what planning counts, and leave nothing."""

import dataclasses
import gc
from itertools import product

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from mmtrain.config.sections import ActivationCheckpointConfig
from mmtrain.config.topology import JobLayout
from mmtrain.costs.cost_model import FlopsCosts
from mmtrain.errors import PlanError
from mmtrain.modality.bitfield import language_bits
from mmtrain.modality.metadata import DocumentMeta, MicrobatchMeta
from mmtrain.modality.typical import reference_sizes
from mmtrain.models.adapter_layers import DropoutKeys
from mmtrain.models.attention.context import attention_context
from mmtrain.models.batch import IGNORE_INDEX, head_arguments
from mmtrain.models.build import build_chunk
from mmtrain.models.initialise import init_weights
from mmtrain.models.trainable import is_adapter
from mmtrain.parallel.activation_memory import ActivationMemory
from mmtrain.parallel.feed import StepFeed
from mmtrain.parallel.feeds.inputs import StepInputs
from mmtrain.parallel.grads import local_part
from mmtrain.parallel.local_model import build_local_model
from mmtrain.parallel.mesh import build_mesh
from mmtrain.parallel.runtime import PipelineScheduleRuntime
from mmtrain.parallel.tensor import apply_tensor_parallel
from mmtrain.parallel.weight_grads import WeightGrads
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.planner.job import Job
from mmtrain.planner.partition.partition import partition
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.schedule.passes.lower import Program
from mmtrain.spec.builders import model_spec
from mmtrain.spec.spec import documents_work, images_work
from tests.lora import with_lora
from tests.pairwise import covering
from tests.parallel.parity import (
    KEEP_ALL,
    NO_IMAGE,
    TEXT_ON_ONE,
    Case,
    check,
    layouts,
    run_layout,
    selection,
    shallow,
    small,
)
from tests.parallel.test_activation_memory import Alive
from tests.parallel.test_parity import TOLERANCE
from tests.ranks import run_ranks
from tests.reference import ENCODERS, LANGUAGES, PLANNER, TRAINING, make_batch, model_config, two_grids

LENGTHS = (37, 27)

DELAYS = (("1F1B", 1, 0), ("1F1B", 1, 3), ("interleave", 0, 10**6))
"""W right after its I, a few actions later with several works in between, and all at the end."""
BF16 = dataclasses.replace(TRAINING, mixed_precision_param="bfloat16")


@torch.no_grad()
def fill_adapters_by_name(chunk):
    """Values for adapters that depend on their names alone; the second matrix of one starts as zero."""
    for name, parameter in chunk.named_parameters():
        if is_adapter(name):
            generator = torch.Generator().manual_seed(sum(name.encode()))
            values = 0.1 * torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:  # lengths of rows (DoRA), as of initial ones
                values = 0.2 + 0.2 * values
            if isinstance(parameter, DTensor):
                values = distribute_tensor(values, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.copy_(values)


def split(model, **options):
    return Case(model=model, runs=DELAYS, **options)


CASES = {
    "trainable": split(model_config()),
    "tied": split(model_config(tied=True)),
    "no image on one replica": split(model_config(), images=TEXT_ON_ONE),
    "frozen encoder": split(model_config(frozen=("encoder",)), images=TEXT_ON_ONE),
    "frozen encoder and projector": split(model_config(frozen=("encoder", "projector"))),
    "frozen language": split(model_config("siglip_vision_model", "llama", frozen=("language",)), images=TEXT_ON_ONE),
    "adapters": split(with_lora(model_config()), prepare=fill_adapters_by_name),
    "native merger, recomputed": split(
        model_config("qwen2_5_vl_vision", projector="native"), recompute=ActivationCheckpointConfig(mode="full")
    ),
    "recomputed in part": split(model_config("vit", "llama"), recompute=ActivationCheckpointConfig(mode="selective")),
    "sound": split(model_config("whisper_encoder", "llama")),
    "text model": split(model_config(None, "llama"), images=NO_IMAGE),
}
PLANE = {
    name: dataclasses.replace(shallow(CASES[name]), **options)
    for name, options in {
        "trainable": {},
        "tied": {"split": "causal"},
        "frozen encoder": {"share_patches": True},
        "adapters": {},
        "native merger, recomputed": {"share_patches": True},
        "recomputed in part": {"data_encoder": True},
    }.items()
}
REGATHERED = {
    name: dataclasses.replace(shallow(CASES[name]), regathered=frozenset({"vision", "language"}), share_patches=True)
    for name in ("trainable", "native merger, recomputed")
}
SOME = {"every second": Case(model=model_config(), runs=(("1F1B", 1, 0, 2),))}


def check_split(ranks):
    check(ranks, TOLERANCE)
    check_equal(ranks)


def check_equal(ranks):
    for rank, found in enumerate(ranks):
        for case, errors in found.items():
            assert errors.unequal == (), (case, rank)


PIPELINES = dict.fromkeys((JobLayout.grid(pp=2), JobLayout.grid(pp=4), JobLayout.grid(pp=2, dp_shard=2)), CASES | SOME)
DAILY = {  # each case on two ranks, and each pair of layout and run
    shape: cases if shape.world_size == 2 else {name: cases[name] for name in ("tied", "frozen encoder")}
    for shape, cases in PIPELINES.items()
}
DAILY |= {JobLayout.grid(pp=2, tp=2): {name: PLANE[name] for name in ("tied", "adapters")}}
DAILY |= {JobLayout.grid(pp=2, cp=2): {name: PLANE[name] for name in ("frozen encoder", "native merger, recomputed")}}
PLANES = dict.fromkeys((JobLayout.grid(pp=2, tp=2), JobLayout.grid(pp=2, cp=2)), PLANE)


@pytest.mark.ranks
@layouts(selection(DAILY, small))
def test_gradients_are_those_of_whole_backwards_and_of_one_process(shape, cases):
    check_split(run_ranks(run_layout, shape.world_size, shape, cases))


@pytest.mark.ranks
@pytest.mark.nightly
@layouts(PIPELINES | PLANES)
def test_every_layout(shape, cases):
    check_split(run_ranks(run_layout, shape.world_size, shape, cases, timeout=900))


@pytest.mark.ranks
def test_parameters_that_are_gathered_at_each_use():
    check_split(
        run_ranks(run_layout, 2, JobLayout.grid(cp=2), {name: small(case, 1) for name, case in REGATHERED.items()})
    )


@pytest.mark.ranks
def test_bfloat16_gradients_are_added_up_in_float32_as_those_of_whole_backwards():
    cases = {
        "bfloat16": split(model_config(tied=True), training=BF16),
        "offload": split(model_config(), training=dataclasses.replace(BF16, enable_cpu_offload=True)),
    }
    cases = {name: small(case, 2) for name, case in cases.items()}
    check_equal(run_ranks(run_layout, 2, JobLayout.grid(pp=2), cases))
    check_equal(run_ranks(run_layout, 2, JobLayout.grid(dp_shard=2), {"offload": cases["offload"]}))


@pytest.mark.ranks
def test_a_matrix_tied_in_one_chunk_gets_both_gradients():
    """The embedding's comes in I and the head's in W, so that sums over works have another order."""
    found = run_ranks(run_layout, 1, JobLayout.grid(), {"tied": CASES["tied"]})
    check(found, TOLERANCE)
    assert {errors.unequal for errors in found[0].values()} <= {(), ("0: language.model.embed_tokens.weight",)}


# ---------------------------------------------------------------------------------------- one chunk


def one_chunk(module, model, section=KEEP_ALL, layers=None, dtype=torch.float32, mesh=None):
    """A chunk, what it is called with, and its WorkSize.

    Args: layers: default: the first two blocks. mesh: of tp ranks; the input is then one rank's rows.
    """
    spec = model_spec(model, dtype_bytes=dtype.itemsize)
    chunk = build_chunk(model, spec, module, layers or (1, 3), device="cpu", dtype=dtype)
    init_weights(chunk, 0)
    fill_adapters_by_name(chunk)
    if mesh:
        apply_tensor_parallel(chunk, mesh)
    ActivationMemory(chunk.blocks(), section)
    if module == "language":
        documents = [DocumentMeta(sample=i, num_tokens=n, num_targets=2, images=()) for i, n in enumerate(LENGTHS)]
        bits = language_bits(MicrobatchMeta(documents=tuple(documents)), "causal")
        labels = torch.full((sum(LENGTHS),), IGNORE_INDEX)
        labels[::9] = 1
        positions = torch.cat([torch.arange(n) for n in LENGTHS])
        kwargs = {"attention": attention_context(bits), "position_ids": positions, **head_arguments(labels)}
        size = documents_work(LENGTHS, int((labels != IGNORE_INDEX).sum()))
    else:
        kwargs = {"grids": two_grids(model)}
        size = images_work(spec.module(module), kwargs["grids"])
    before = spec.module(module).layers[chunk.lo - 1]
    width, arriving = before.output_width, size.outputs if before.output_rows == "outputs" else size.rows
    rows = arriving // (mesh.size() if mesh else 1) * (1 + spec.module(module).num_carried(chunk.lo - 1))
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(1)).to(dtype)
    return chunk, x, kwargs, size


def start(out):
    """A scalar of a chunk's output, whose gradient is no constant."""
    if not isinstance(out, torch.Tensor):
        return out.loss_sum
    return (out.float() * torch.randn(out.shape, generator=torch.Generator().manual_seed(2))).sum()


def halves(chunk, x, kwargs):
    """(bytes between I and W, bytes of all tensors that are left then but gradients, gradients)."""
    grads = WeightGrads(chunk)
    with Alive() as alive:
        with grads.deferred(0):
            loss = start(chunk(x, **kwargs))
        with grads.deferred(0):
            loss.backward()
        del loss
        own = {local_part(t).untyped_storage().data_ptr() for t in (*chunk.parameters(), *chunk.buffers(), x)}
        own |= {local_part(t.grad).untyped_storage().data_ptr() for t in (*chunk.parameters(), x) if t.grad is not None}
        own |= {t.untyped_storage().data_ptr() for t in kwargs.values() if isinstance(t, torch.Tensor)}
        gc.collect()
        left = alive.num_bytes(own)
    held = grads.held_bytes()
    grads.run(0)
    return held, left, {n: p.grad for n, p in chunk.named_parameters()} | {"input": x.grad}


FAMILIES = [("vision", name) for name in ENCODERS] + [("language", name) for name in LANGUAGES]


def family_model(module, family, projector="mlp"):
    return model_config(family, projector=projector) if module == "vision" else model_config(None, family)


BLOCKS = list(product(FAMILIES, (False, True), ("none", "full", "selective"), (torch.float32, torch.bfloat16)))
DAILY_BLOCKS = covering(BLOCKS, lambda row: row, lambda row: 1)


@pytest.mark.parametrize(
    ("family", "adapters", "mode", "dtype"),
    [
        pytest.param(*row, marks=() if row in DAILY_BLOCKS else pytest.mark.nightly, id="-".join(map(str, row)))
        for row in BLOCKS
    ],
)
def test_blocks_hold_the_bytes_that_planning_counts_and_nothing_else(family, adapters, mode, dtype):
    """Daily every pair of a family and an option, and of two options."""
    module, name = family
    model = family_model(module, name)
    model = with_lora(model) if adapters else model
    section = ActivationCheckpointConfig(mode=mode)
    chunk, x, kwargs, size = one_chunk(module, model, section, dtype=dtype)
    held, left, gradients = halves(chunk, x.requires_grad_(), kwargs)
    block = model_spec(model, dtype_bytes=dtype.itemsize).module(module).layers[1]
    assert held == left == 2 * block.linear_bytes(size)

    chunk, x, kwargs, _ = one_chunk(module, model, section, dtype=dtype)
    start(chunk(x.requires_grad_(), **kwargs)).backward()
    wanted = {n: p.grad for n, p in chunk.named_parameters()} | {"input": x.grad}
    for name, grad in wanted.items():
        assert (grad is None and gradients[name] is None) or torch.equal(gradients[name], grad), name


@pytest.mark.parametrize(
    "settings", [{"use_dora": True}, {"dropout": 0.2}, {"use_dora": True, "dropout": 0.2}], ids=str
)
@pytest.mark.parametrize(("module", "family"), [("vision", "qwen2_vl_vision"), ("language", "llama")])
def test_adapters_with_lengths_and_dropout_hold_what_planning_counts(module, family, settings):
    model = with_lora(family_model(module, family), **settings)
    chunk, x, kwargs, size = one_chunk(module, model)
    DropoutKeys(chunk).now = 4
    held, left, gradients = halves(chunk, x.requires_grad_(), kwargs)
    assert held == left == 2 * model_spec(model).module(module).layers[1].linear_bytes(size)
    chunk, x, kwargs, _ = one_chunk(module, model)
    DropoutKeys(chunk).now = 4
    start(chunk(x.requires_grad_(), **kwargs)).backward()
    wanted = {n: p.grad for n, p in chunk.named_parameters()} | {"input": x.grad}
    for name, grad in wanted.items():
        assert (grad is None and gradients[name] is None) or torch.equal(gradients[name], grad), name


@pytest.mark.parametrize(
    ("module", "family", "projector"), [*((*f, "mlp") for f in FAMILIES), ("vision", "qwen2_vl_vision", "native")]
)
def test_the_last_layer_holds_the_bytes_that_planning_counts(module, family, projector):
    model = family_model(module, family, projector)
    layers = model_spec(model).module(module).layers
    chunk, x, kwargs, size = one_chunk(module, model, layers=(len(layers) - 1, len(layers)))
    held, _, _ = halves(chunk, x.requires_grad_(), kwargs)
    assert held == layers[-1].linear_bytes(size)


def test_weights_behind_an_input_without_a_gradient_get_theirs():
    """The first chunk behind a frozen encoder: I runs for the gradients between its layers."""
    model = model_config(None)
    chunk, x, kwargs, _ = one_chunk("language", model)
    _, _, gradients = halves(chunk, x, kwargs)
    assert gradients.pop("input") is None
    assert all(grad is not None and grad.abs().max() > 0 for grad in gradients.values())


def test_a_whole_backward_leaves_nothing():
    chunk, x, kwargs, _ = one_chunk("language", model_config(None))
    grads = WeightGrads(chunk)
    start(chunk(x.requires_grad_(), **kwargs)).backward()
    assert grads.works() == () and grads.held_bytes() == 0


def test_halves_of_two_works_may_cross():
    chunk, x, kwargs, _ = one_chunk("language", model_config(None), ActivationCheckpointConfig(mode="full"))
    grads = WeightGrads(chunk)
    losses = []
    for work in range(2):
        with grads.deferred(work):
            losses.append(start(chunk((work + 1) * x, **kwargs)))
    for work in (1, 0):
        with grads.deferred(work):
            losses[work].backward()
    for work in (0, 1):
        grads.run(work)
    found = [p.grad.clone() for p in chunk.parameters()]
    chunk.zero_grad()
    for work in range(2):
        start(chunk((work + 1) * x, **kwargs)).backward()
    for parameter, grad in zip(chunk.parameters(), found, strict=True):
        assert torch.allclose(parameter.grad, grad, rtol=1e-4, atol=1e-5)


# -------------------------------------------------------------------------------------- wrong programs


WRONG = {
    "0F0.0 0I0.0": "no W comes after 0I0.0",
    "0F0.0 0W0.0": "step 1: 0W0.0 comes after 0F0.0; a stage runs F of a work, then B, or I and then W",
    "0F0.0 0W0.0 0I0.0": "step 1: 0W0.0 comes after 0F0.0",
    "0F0.0 0I0.0 0I0.0 0W0.0": "step 2: 0I0.0 comes after 0I0.0",
    "0I0.0 0F0.0 0W0.0": "step 0: 0I0.0 comes after nothing",
    "0F0.0 0I0.0 0W0.0 0I0.0 0W0.0": "step 3: 0I0.0 comes after 0W0.0",
    "0F0.0 0I0.0 0B0.0 0W0.0": "step 2: 0B0.0 comes after 0I0.0",
    "0F0.0 0F0.0 0B0.0": "step 1: 0F0.0 comes after 0F0.0",
}
"""Programs of one rank whose actions do not fit together -> what is said of them."""


def wrong_programs(rank):
    """What the runtime says to programs of one rank whose halves do not fit together."""
    model = model_config(None)
    spec = model_spec(model)
    parts = partition(spec, 1, {"language": 1}, reference_sizes(spec, TRAINING.seq_len))
    mesh = build_mesh(JobLayout.grid(), torch.device("cpu"))
    local = build_local_model(model, spec, parts, mesh, TRAINING, seed=5)
    planner = IterationPlanner(
        Job(
            spec=spec,
            partition=parts,
            section=PLANNER,
            costs=FlopsCosts.of(PLANNER),
            schedule=CATALOGUE["1F1B"],
            sub_microbatch_size=0,
            sharded=False,
        )
    )
    batch, meta = make_batch(model, [[0]], seed=1)
    plan = planner.plan(meta)
    runtime = PipelineScheduleRuntime(local.stages)
    said = []
    for text in WRONG:
        with pytest.raises(PlanError) as error:
            runtime.load(Program.parse(plan.program.graph, text), lambda stage, work: ())
        said.append(str(error.value))
    runtime.load(Program.parse(plan.program.graph, "0F0.0 0I0.0 0W0.0"), lambda stage, work: ())
    labels = [m.labels for m in batch.microbatches]
    feed = StepFeed(parts, StepInputs(layout=plan.layout, meta=meta, mesh=mesh, batch=batch, labels=labels))
    local.stages[0].backward_weight = lambda work: None  # a W that does nothing
    with pytest.raises(PlanError) as error:
        runtime.step(feed)
    return [*said, str(error.value)]


@pytest.mark.ranks
def test_weight_gradients_are_never_lost_silently():
    (said,) = run_ranks(wrong_programs, 1)
    for words, found in zip(WRONG.values(), said, strict=False):
        assert words in found
    assert "weight gradients without their W, work 0" in said[-1]


# ------------------------------------------------------------------------------------- other modules


class Modulated(nn.Module):
    """Blocks that share one modulation, as those of a diffusion transformer, and take an object that is no tensor."""

    def __init__(self):
        super().__init__()
        self.time = nn.Linear(4, 16)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.tables = nn.ParameterList(nn.Parameter(torch.randn(16)) for _ in range(3))

    def forward(self, x, mask):
        modulation = nn.functional.silu(self.time(torch.ones(1, 4)))
        for block, table in zip(self.blocks, self.tables, strict=True):
            shift, scale = (modulation + table).chunk(2, -1)
            x = x + mask(block(x * (1 + scale) + shift))
        return x


@dataclasses.dataclass
class Mask:
    """Stands where attention gets a `BlockMask`."""

    kept: torch.Tensor

    def __call__(self, x):
        return x * self.kept


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("shape", [(5, 8), (2, 5, 8), (8,)], ids=str)
def test_shared_modulation_and_arguments_that_are_no_tensors(shape, recompute):
    torch.manual_seed(0)
    module, mask, x = Modulated(), Mask(torch.tensor([1.0, 0.0] * 4)), torch.randn(shape)

    def run():
        y = checkpoint(module, x, mask, use_reentrant=False) if recompute else module(x, mask)
        return (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum()

    run().backward()
    wanted = {name: parameter.grad.clone() for name, parameter in module.named_parameters()}
    module.zero_grad()
    grads = WeightGrads(module)
    with grads.deferred(0):
        loss = run()
        with grads.deferred(1):
            pass
    with grads.deferred(0):
        loss.backward()
    assert grads.held_bytes()
    grads.run(0)
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter.grad, wanted[name]), name


def test_an_input_that_changes_between_the_halves_is_noticed():
    module = nn.Linear(4, 4)
    grads, x = WeightGrads(module), torch.randn(3, 4)
    with grads.deferred(0):
        loss = module(x).sum()
    with grads.deferred(0):
        loss.backward()
    x.mul_(2)
    with pytest.raises(AssertionError, match="changed in place between I and W"):
        grads.run(0)
