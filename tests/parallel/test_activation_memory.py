"""What blocks do with their activations changes what is kept, as planning counts it, and no bit of a gradient."""

import dataclasses
import time

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmtrain.config.planner import PlannerConfig, SearchConfig
from mmtrain.config.sections import ActivationCheckpointConfig
from mmtrain.costs.cost_model import FlopsCosts
from mmtrain.errors import ConfigError, PlanError
from mmtrain.modality.bitfield import language_bits
from mmtrain.modality.metadata import DocumentMeta, MicrobatchMeta
from mmtrain.modality.typical import reference_sizes
from mmtrain.models.attention.context import attention_context
from mmtrain.models.build import build_chunk
from mmtrain.models.initialise import init_weights
from mmtrain.models.trainable import is_adapter
from mmtrain.parallel.activation_memory import ActivationMemory, saved_ops
from mmtrain.parallel.grads import local_part
from mmtrain.parallel.tensor import apply_tensor_parallel
from mmtrain.parallel.weight_grads import WeightGrads
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.planner.job import Job
from mmtrain.planner.memory.options import MemoryChoices
from mmtrain.planner.partition.partition import partition
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.spec.builders import model_spec
from mmtrain.spec.layer import Division
from mmtrain.spec.linears import block_linears
from mmtrain.spec.memory_strategies import StageMemory
from mmtrain.spec.model_shapes import language_shape
from mmtrain.spec.recomputation import Recomputation
from mmtrain.spec.spec import documents_work, images_work
from mmtrain.spec.vision_shapes import vision_shape
from tests.lora import with_lora
from tests.reference import ENCODERS, LANGUAGES, make_batch, model_config, two_grids

SECTIONS = {
    "none": ActivationCheckpointConfig(),
    "full": ActivationCheckpointConfig(mode="full"),
    "selective": ActivationCheckpointConfig(mode="selective"),
    "ops": ActivationCheckpointConfig(mode="ops", save_ops=["aten.mm", "aten.addmm.default"]),
    "offload": ActivationCheckpointConfig(mode="offload"),
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
                storage = local_part(tensor).untyped_storage()
                self._made.setdefault(storage.data_ptr(), []).append((StorageWeakRef(storage), storage.nbytes()))
        return out

    def num_bytes(self, without):
        if dist.is_initialized():  # gloo's threads let go of what they have sent a little later
            dist.barrier()
            counts = [-1]
            while len(counts) < 6 or len(set(counts[-5:])) > 1:
                time.sleep(0.01)
                counts.append(self._num_bytes(without))
        return self._num_bytes(without)

    def _num_bytes(self, without):
        alive = {
            place: max(size for ref, size in made if not ref.expired())
            for place, made in self._made.items()
            if any(not ref.expired() for ref, _ in made)
        }
        return sum(size for place, size in alive.items() if place not in without)


KEEP = SECTIONS["none"]
NUM_BLOCKS = 4
MIXED = "1 offload, 1 recompute, 1 selective, 1 keep"
MEMORIES = ("selective", "recompute", "offload", MIXED, "1 keep, 1 offload, 1 recompute, 1 offload")


def family_model(module, family):
    return model_config(family) if module == "vision" else model_config(None, family)


class Call:
    """The first blocks of a module with their switch, and what they are called with: on one rank of a tp mesh, if there
    is one."""

    def __init__(
        self, model, module, num_blocks=NUM_BLOCKS, dtype=torch.float32, section=KEEP, offloader=None, mesh=None
    ):
        self.spec = model_spec(model, dtype_bytes=dtype.itemsize)
        self.chunk = build_chunk(model, self.spec, module, (1, 1 + num_blocks), device="cpu", dtype=dtype)
        init_weights(self.chunk, 0)
        fill_adapters(self.chunk)
        self._ranks = mesh.size() if mesh else 1
        if mesh:
            apply_tensor_parallel(self.chunk, mesh)
        layers = self.spec.module(module).layers[1 : 1 + num_blocks]
        self.layers = [layer.of_rank(Division(tp=self._ranks)) for layer in layers]
        self.section = section
        self.memory = ActivationMemory(self.chunk.blocks(), section, offloader)
        if module == "language":
            documents = [DocumentMeta(sample=i, num_tokens=n, num_targets=2, images=()) for i, n in enumerate(LENGTHS)]
            bits = language_bits(MicrobatchMeta(documents=tuple(documents)), "causal")
            positions = torch.cat([torch.arange(n) for n in LENGTHS])
            self.kwargs = {"attention": attention_context(bits), "position_ids": positions}
            self.size = documents_work(LENGTHS, 4)
        else:
            grids = two_grids(model)
            self.kwargs = {"grids": grids}
            self.size = images_work(self.spec.module(module), grids)
        self._width, self._dtype = self.layers[0].output_width, dtype

    def input(self, work=0):
        """A leaf; another one for each work."""
        generator = torch.Generator().manual_seed(1 + work)
        shape = (self.size.rows // self._ranks, self._width)
        return torch.randn(shape, generator=generator).to(self._dtype).requires_grad_()

    def own(self, *others):
        """`data_ptr` of parameters, buffers and other tensors."""
        tensors = (*self.chunk.parameters(), *self.chunk.buffers(), *others)
        return {local_part(t).untyped_storage().data_ptr() for t in tensors}

    def forward(self, x, memory=None, work=0):
        """A scalar of the output, whose gradient is no constant. Args: memory: text; None: no word to the switch."""
        if memory is None:
            return scalar(self.chunk(x, **self.kwargs))
        with self.memory.of(StageMemory.parse(memory, self.memory.num_blocks), work):
            return scalar(self.chunk(x, **self.kwargs))

    def gradients(self):
        """Name -> gradient of a parameter; they are removed."""
        found = {name: p.grad for name, p in self.chunk.named_parameters()}
        self.chunk.zero_grad(set_to_none=True)
        return found


def scalar(out):
    return (out.float() * torch.randn(out.shape, generator=torch.Generator().manual_seed(3))).sum()


@torch.no_grad()
def fill_adapters(chunk):
    """The second matrix of an adapter starts as zero."""
    for name, parameter in chunk.named_parameters():
        if is_adapter(name):
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))


def check_equal(found, wanted):
    assert set(found) == set(wanted)
    for name, grad in wanted.items():
        assert (grad is None and found[name] is None) or torch.equal(found[name], grad), name


def run(model, module, section, num_blocks, dtype=torch.float32, memory=None, mesh=None):
    """(bytes that the forward left on the device, bytes that it offloaded, loss and gradients, the call)."""
    call = Call(model, module, num_blocks, dtype, section, mesh=mesh)
    x = call.input()
    with Alive() as alive:
        if memory is None:
            out = call.chunk(x, **call.kwargs)
        else:
            with call.memory.of(StageMemory.parse(memory, num_blocks), 0):
                out = call.chunk(x, **call.kwargs)
        call.memory.offloader.settle()
        offloaded = call.memory.offloader.held_bytes()
        kept = alive.num_bytes(call.own(x)) - offloaded  # on a CPU host memory is counted like that of the device
    loss = scalar(out)
    loss.backward()
    call.memory.finish(0)
    assert call.memory.offloader.held_bytes() == 0
    return kept, offloaded, {"loss": loss.detach(), "input": x.grad} | call.gradients(), call


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["full", "selective", "ops", "offload"])
@pytest.mark.parametrize(("module", "family"), FAMILIES)
def test_a_block_keeps_the_bytes_that_planning_counts_and_has_the_same_gradients(module, family, mode, dtype):
    model = family_model(module, family)
    section = SECTIONS[mode]
    two, two_offloaded, gradients, call = run(model, module, section, 2, dtype)
    one, one_offloaded, _, _ = run(model, module, section, 1, dtype)
    block, planned = call.layers[0], Recomputation.of(section)
    # Rotary tables are shared by the blocks of a chunk, so a block is the difference.
    assert two - one == planned.kept_bytes(block, call.size)
    assert two_offloaded - one_offloaded == planned.offloaded_bytes(block, call.size)
    _, _, wanted, _ = run(model, module, KEEP, 2, dtype)
    check_equal(gradients, wanted)


def bytes_inside_of_a_backward(model, module, mode, dtype=torch.float32, mesh=None):
    """(bytes when the backward of a block has just begun and all that it computes again is there; the call)."""
    call = Call(model, module, 1, dtype, SECTIONS[mode], mesh=mesh)
    shape = vision_shape(model) if module == "vision" else language_shape(model)
    (block,) = call.chunk.blocks()
    seen, x = [], call.input()
    with Alive() as alive:
        last = block.get_submodule(block_linears(shape)[-1].name).weight
        last.register_hook(lambda grad: seen.append(alive.num_bytes(call.own(x))))
        call.forward(x).backward()
    return seen[0], call


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("module", "family"), FAMILIES)
def test_a_backward_brings_back_what_planning_counts(module, family, dtype):
    """Of a recomputed block all activations; saved products of which no backward reads the result stay beside them."""
    model = family_model(module, family)
    keep, call = bytes_inside_of_a_backward(model, module, "none", dtype)
    (block,) = call.layers
    for mode in ("full", "selective"):
        planned = Recomputation.of(SECTIONS[mode])
        peak = planned.kept_bytes(block, call.size) + planned.peak_bytes(block, call.size)
        more = bytes_inside_of_a_backward(model, module, mode, dtype)[0] - keep
        assert abs(more - (peak - block.activation_bytes(call.size))) <= 16, mode  # a scalar or two


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("module", "family"), FAMILIES)
def test_a_backward_repeats_all_products_of_a_block_but_the_last(module, family):
    """No tensor that the backward reads is made after the input of the last product (`OperatorCosts.repeated_s`)."""
    counts = {}
    for mode in ("none", "full"):
        call = Call(family_model(module, family), module, 1, section=SECTIONS[mode])
        with Products() as forward:
            loss = call.forward(call.input())
        with Products() as backward:
            loss.backward()
        counts[mode] = backward.count
    assert forward.count >= 4
    assert counts["full"] - counts["none"] == forward.count - 1


@pytest.mark.parametrize("adapters", [False, True], ids=["all", "adapters"])
@pytest.mark.parametrize(("module", "family"), FAMILIES)
def test_each_block_does_what_is_said_for_a_work(module, family, adapters):
    model = family_model(module, family)
    model = with_lora(model) if adapters else model
    kept, _, wanted, call = run(model, module, KEEP, NUM_BLOCKS, memory="keep")
    shared, _, _, _ = run(model, module, KEEP, NUM_BLOCKS, memory="offload")  # rotary tables and the output
    for memory in ("keep", *MEMORIES):
        found_kept, offloaded, found, _ = run(model, module, KEEP, NUM_BLOCKS, memory=memory)
        check_equal(found, wanted)
        assert found_kept <= kept or adapters  # whose products, kept by `selective`, double those of a frozen layer
        plan = [Recomputation.by(how, KEEP) for how in StageMemory.parse(memory, NUM_BLOCKS).blocks]
        planned = sum(r.kept_bytes(layer, call.size) for r, layer in zip(plan, call.layers, strict=True))
        away = sum(r.offloaded_bytes(layer, call.size) for r, layer in zip(plan, call.layers, strict=True))
        # The input of the first block is a leaf, which was not counted; it stays on the device also when offloaded.
        planned -= 0 if plan[0].offload else call.layers[0].output_bytes(call.size)
        # Planning lets frozen norms, of which Qwen3 has four a block, keep what those that train keep.
        least = 0.8 if adapters else 0.95
        assert least * planned <= found_kept - shared <= 1.05 * planned, memory
        assert least * away <= offloaded <= 1.05 * away, memory


@pytest.mark.parametrize(("module", "family"), FAMILIES)
def test_works_in_flight_may_do_different_things(module, family):
    """One forward, one backward, two works under way: each backward does what its own forward was told."""
    model, memories = family_model(module, family), [*MEMORIES, "keep", *reversed(MEMORIES)]
    call = Call(model, module)

    def steps(memories):
        losses, leaves, found = [], [], []
        for work, memory in enumerate([*memories, None]):
            if memory is not None:
                leaves.append(call.input(work))
                losses.append(call.forward(leaves[-1], memory, work))
            if work:
                call.memory.prefetch(work - 1)
                losses[work - 1].backward()
                call.memory.finish(work - 1)
                found.append({"input": leaves[work - 1].grad, "loss": losses[work - 1].detach()} | call.gradients())
        return found

    wanted = steps(["keep"] * len(memories))
    for found, other in zip(steps(memories), wanted, strict=True):
        check_equal(found, other)
    assert call.memory.works() == () and call.memory.offloader.held_bytes() == 0


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("adapters", [False, True], ids=["all", "adapters"])
def test_split_backwards_hold_and_give_the_same(adapters, memory):
    model = model_config(None)
    call = Call(with_lora(model) if adapters else model, "language")
    grads = WeightGrads(call.chunk)

    def halves(memory):
        x = call.input()
        with grads.deferred(0):
            loss = call.forward(x, memory)
        with grads.deferred(0):
            loss.backward()
        call.memory.finish(0)
        held = grads.held_bytes()
        grads.run(0)
        return held, {"input": x.grad} | call.gradients()

    wanted_held, wanted = halves("keep")
    held, found = halves(memory)
    assert held == wanted_held
    check_equal(found, wanted)


@pytest.mark.parametrize("memory", MEMORIES)
def test_what_does_not_train_is_not_kept_for_its_own_sake(memory):
    """Frozen blocks behind an input with a gradient, and without one, where autograd keeps nothing."""
    call = Call(model_config(None, frozen=("language",)), "language")
    found = []
    for how in ("keep", memory):
        x = call.input()
        call.forward(x, how).backward()
        call.memory.finish(0)
        found.append({"input": x.grad})
    check_equal(found[1], found[0])
    call.forward(call.input().detach(), memory, work=1)
    assert call.memory.works() == ()
    with torch.no_grad():
        call.forward(call.input(), memory, work=2)
    assert call.memory.works() == () and call.memory.offloader.held_bytes() == 0


def hooks():
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def test_a_step_leaves_no_hook_and_no_new_forward():
    call = Call(model_config(None), "language")
    forwards = [block.forward for block in call.chunk.blocks()]
    for memory in MEMORIES:
        call.forward(call.input(), memory).backward()
        call.memory.finish(0)
        assert hooks() is None
        assert [block.forward for block in call.chunk.blocks()] == forwards
        assert not any(block._forward_hooks or block._forward_pre_hooks for block in call.chunk.blocks())


def test_a_forward_that_fails_leaves_the_switch_as_it_was():
    call = Call(model_config(None), "language")
    wanted = call.forward(call.input(), "keep")
    broken = call.chunk.blocks()[2].mlp

    def fail(*args):
        raise KeyError("broken")

    broken.forward = fail
    for memory in MEMORIES:
        with pytest.raises(KeyError, match="broken"):
            call.forward(call.input(), memory)
        assert hooks() is None
        assert call.memory.works() == () and call.memory.offloader.held_bytes() == 0
        assert not call.memory.offloader.leaving
    del broken.forward
    x = call.input()
    assert torch.equal(call.forward(x), wanted)  # without a word: the default, which keeps
    assert call.memory.offloader.held_bytes() == 0


def test_a_work_without_its_backward_is_named_and_forgotten():
    call = Call(model_config(None), "language")
    losses = [call.forward(call.input(), "offload", work) for work in (3, 4)]
    losses[0].backward()
    call.memory.finish(3)
    assert call.memory.works() == (4,)
    assert call.memory.offloader.held_bytes() > 0
    call.memory.clear()
    assert call.memory.works() == () and call.memory.offloader.held_bytes() == 0
    with pytest.raises(AssertionError, match="dropped before their backward"):
        losses[1].backward()


def test_parameters_keep_their_names():
    model = model_config(None)
    spec = model_spec(model)
    plain, wrapped = (build_chunk(model, spec, "language", (0, 4)) for _ in range(2))
    ActivationMemory(wrapped.blocks(), SECTIONS["full"])
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
    section = PlannerConfig(search=SearchConfig(activation_memory_gib=memory_gib))
    return model, IterationPlanner(Job(
        spec=spec, partition=partition(spec, 2, {"vision": 1, "language": 1}, reference_sizes(spec, 64)),
        section=section, costs=FlopsCosts.of(section), schedule=CATALOGUE["interleave"], sub_microbatch_size=2,
        sharded=False, memory=MemoryChoices(section=SECTIONS[mode]),
    ))  # fmt: skip


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
    with pytest.raises(PlanError, match=r"the tensors that a backward computes again .* take up to .* KiB, over"):
        planner("full", 1e-9)[1].plan(meta)


def test_flops_of_the_model_do_not_count_what_is_repeated():
    model, full = planner("full")
    batching, _ = full.problem(make_batch(model, [[1]], seed=1)[1])
    job = full.job
    assert job.flops(batching) == dataclasses.replace(job, memory=MemoryChoices()).flops(batching)
