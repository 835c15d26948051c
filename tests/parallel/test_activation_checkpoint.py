"""Recomputation changes what is kept, as planning counts it, and no gradient."""

import dataclasses

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmtrain.config import ActivationCheckpointConfig, PlannerConfig
from mmtrain.data.bitfield import language_bits
from mmtrain.data.metadata import DocumentMeta, MicrobatchMeta
from mmtrain.errors import ConfigError, PlanError
from mmtrain.models.attention.context import attention_context
from mmtrain.models.chunk import build_chunk
from mmtrain.models.initialise import init_weights
from mmtrain.models.recomputation import Recomputation
from mmtrain.models.shapes import vision_shape
from mmtrain.models.spec import documents_work, images_work
from mmtrain.models.spec_builders import model_spec
from mmtrain.parallel.activation_checkpoint import apply_activation_checkpoint, saved_ops
from mmtrain.planner.cost_model import FlopsCosts
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.planner.partition import partition, reference_sizes
from tests.reference import ENCODERS, LANGUAGES, make_batch, model_config

SECTIONS = {
    "none": ActivationCheckpointConfig(),
    "full": ActivationCheckpointConfig(mode="full"),
    "selective": ActivationCheckpointConfig(mode="selective"),
    "ops": ActivationCheckpointConfig(mode="ops", save_ops=["aten.mm", "aten.addmm.default"]),
}
FAMILIES = [("vision", name) for name in ENCODERS] + [("language", name) for name in LANGUAGES]
LENGTHS = (37, 27)


class Alive(TorchDispatchMode):
    """Counts the bytes of the storages that operations made and that are still there."""

    def __init__(self):
        super().__init__()
        self._made = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._made.setdefault(storage.data_ptr(), []).append((StorageWeakRef(storage), storage.nbytes()))
        return out

    def num_bytes(self, without):
        alive = {
            place: max(size for ref, size in made if not ref.expired())
            for place, made in self._made.items()
            if any(not ref.expired() for ref, _ in made)
        }
        return sum(size for place, size in alive.items() if place not in without)


def run(model, module, section, num_blocks, dtype=torch.float32):
    """(bytes that the forward left, gradients, size of the work) of the first blocks of a module."""
    spec = model_spec(model, dtype_bytes=dtype.itemsize)
    chunk = build_chunk(model, spec, module, (1, 1 + num_blocks), device="cpu", dtype=dtype)
    init_weights(chunk, 0)
    apply_activation_checkpoint(chunk, section)
    generator = torch.Generator().manual_seed(1)
    if module == "language":
        documents = [DocumentMeta(sample=i, num_tokens=n, num_targets=2, images=()) for i, n in enumerate(LENGTHS)]
        bits = language_bits(MicrobatchMeta(documents=tuple(documents)), "causal")
        positions = torch.cat([torch.arange(n) for n in LENGTHS])
        kwargs = {"attention": attention_context(bits), "position_ids": positions}
        size = documents_work(LENGTHS, 4)
    else:
        fixed = vision_shape(model).fixed_grid
        grids = (fixed, fixed) if fixed else ((1, 4, 4), (1, 4, 6))
        kwargs = {"grids": grids}
        size = images_work(spec.module(module), grids)
    width = spec.module(module).layers[1].output_width
    x = torch.randn(size.rows, width, generator=generator).to(dtype).requires_grad_()
    with Alive() as alive:
        out = chunk(x, **kwargs)
        own = {t.untyped_storage().data_ptr() for t in (*chunk.parameters(), *chunk.buffers(), x)}
        kept = alive.num_bytes(own)
    (out.float() * torch.randn(out.shape, generator=generator)).sum().backward()
    return kept, {name: p.grad for name, p in chunk.named_parameters()} | {"input": x.grad}, size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["full", "selective", "ops"])
@pytest.mark.parametrize(("module", "family"), FAMILIES)
def test_a_block_keeps_the_bytes_that_planning_counts_and_has_the_same_gradients(module, family, mode, dtype):
    model = model_config(family) if module == "vision" else model_config(None, family)
    section = SECTIONS[mode]
    two, gradients, size = run(model, module, section, 2, dtype)
    one, _, _ = run(model, module, section, 1, dtype)
    block = model_spec(model, dtype_bytes=dtype.itemsize).module(module).layers[1]
    # Rotary tables are shared by the blocks of a chunk, so a block is the difference.
    assert two - one == Recomputation.of(section).kept_bytes(block, size)
    _, wanted, _ = run(model, module, SECTIONS["none"], 2, dtype)
    assert set(gradients) == set(wanted)
    for name, grad in gradients.items():
        assert torch.equal(grad, wanted[name]), name


def test_parameters_keep_their_names():
    model = model_config(None)
    spec = model_spec(model)
    plain, wrapped = (build_chunk(model, spec, "language", (0, 4)) for _ in range(2))
    apply_activation_checkpoint(wrapped, SECTIONS["full"])
    assert [n for n, _ in plain.named_parameters()] == [n for n, _ in wrapped.named_parameters()]
    assert list(plain.state_dict()) == list(wrapped.state_dict())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("aten.mmm", "is no operation of torch"),
        ("mm", "is no operation of torch"),
        ("aten.mm.defualt", "is no operation of torch"),
        ("nowhere.mm", "is no operation of torch"),
        ("aten.linear", "is made of other operations"),
        ("aten.scaled_dot_product_attention", "is made of other operations"),
    ],
)
def test_operations_that_cannot_be_kept_are_refused_by_name(name, message):
    with pytest.raises(ConfigError, match=f"{name}.*{message}"):
        saved_ops(ActivationCheckpointConfig(mode="ops", save_ops=["aten.mm", name]))


def test_a_name_without_an_overload_means_all_of_them():
    found = saved_ops(ActivationCheckpointConfig(mode="ops", save_ops=["aten.mm"]))
    assert {torch.ops.aten.mm.default, torch.ops.aten.mm.dtype} <= found


def test_the_preset_has_the_operations_of_this_torch():
    found = saved_ops(SECTIONS["selective"])
    assert {torch.ops.aten.mm.default, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default} <= found
    assert torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default in found


def planner(mode, memory_gib=0.0):
    model = model_config()
    spec = model_spec(model)
    section = PlannerConfig(activation_memory_gib=memory_gib)
    return model, IterationPlanner(
        spec=spec, partition=partition(spec, 2, {"vision": 1, "language": 1}, reference_sizes(spec, 64)),
        section=section, costs=FlopsCosts.of(section), schedule="interleave", sub_microbatch_size=2,
        sharded=False, recomputation=Recomputation.of(SECTIONS[mode]),
    )  # fmt: skip


def test_recomputation_fits_a_lower_memory_limit_and_takes_longer():
    model, free = planner("none")
    _, meta = make_batch(model, [[2, 1]] * 4, seed=1)
    # What one microbatch alone holds on the fuller rank: with less there is no plan.
    problem = free.problem(meta)[1]
    rows = [problem.cost_index[w] for w, work in enumerate(problem.graph.works) if work.microbatch == 0]
    needs = [
        sum(problem.options(stage, w)[0].activation_bytes for w in range(len(rows)) for stage in (r, r + 2)
            if (stage >= 2) == (problem.graph.works[w].module == 1))
        for r in range(2)
    ]  # fmt: skip
    limit = 0.9 * max(needs) / 2**30
    with pytest.raises(PlanError):
        planner("none", limit)[1].plan(meta)
    plan = planner("full", limit)[1].plan(meta)
    assert plan.result.timeline.makespan_s > free.plan(meta).result.timeline.makespan_s
    assert max(plan.result.timeline.peak_bytes) <= limit * 2**30


def test_a_limit_below_the_recomputation_of_one_block_is_refused_with_the_numbers():
    model, _ = planner("full")
    _, meta = make_batch(model, [[2, 1]], seed=1)
    with pytest.raises(PlanError, match=r"the recomputation of one block takes .* GiB"):
        planner("full", 1e-9)[1].plan(meta)


def test_flops_of_the_model_do_not_count_what_is_repeated():
    model, full = planner("full")
    batching, _ = full.problem(make_batch(model, [[1]], seed=1)[1])
    assert full.flops(batching) == dataclasses.replace(full, recomputation=Recomputation()).flops(batching)
