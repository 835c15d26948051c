"""Activations that wait in host memory come back as they were, once each, when they are needed and not after."""

import gc

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from mmtrain.config.sections import ActivationCheckpointConfig
from mmtrain.parallel.activation_memory import ActivationMemory
from mmtrain.parallel.offload import Offloaded, Offloader, PlainCopies
from mmtrain.spec.memory_strategies import BlockMemory, StageMemory
from tests.parallel.test_activation_memory import MEMORIES, SECTIONS, Call, check_equal, family_model
from tests.reference import model_config

CPU = torch.device("cpu")


class LateCopies:
    """A stream whose copies happen as late as they may: when something waits for them.

    Fresh memory is not a number. A copy whose device memory was given up comes to nothing if it was to host memory;
    to the device it would write into what belongs to others by then.
    """

    least_bytes = 1

    def __init__(self):
        self._queue, self._places = [], set()
        self.started = 0

    def buffer(self, num_bytes):
        buffer = torch.full((num_bytes,), 255, dtype=torch.uint8)
        self._places.add(buffer.untyped_storage().data_ptr())
        return buffer

    def start(self, copies):
        for to, source in copies:
            leaves = to.untyped_storage().data_ptr() in self._places
            host, device = (to, source) if leaves else (source, to)
            if not leaves:
                device.fill_(255)
            self._queue.append((leaves, host, StorageWeakRef(device.untyped_storage())))
        self.started += len(copies)
        return self.started

    def wait(self, started):
        while self._queue and self.started - len(self._queue) < started:
            leaves, host, place = self._queue.pop(0)
            storage = torch.UntypedStorage._new_with_weak_ptr(place.cdata)
            assert leaves or storage is not None, "the memory that a copy writes to was freed before"
            if storage is None:
                host.fill_(255)
                continue
            device = torch.empty(0, dtype=torch.uint8).set_(storage)
            to, source = (host, device) if leaves else (device, host)
            to.copy_(source)


@pytest.fixture(params=["at once", "late"])
def offloader(request):
    return Offloader(CPU, PlainCopies() if request.param == "at once" else LateCopies())


@pytest.mark.parametrize("memory", [m for m in MEMORIES if "offload" in m])
@pytest.mark.parametrize(("module", "family"), [("vision", "qwen2_5_vl_vision"), ("language", "llama")])
def test_copies_that_come_late_change_nothing(module, family, memory):
    """Several works under way, with what the runtime calls around them."""
    model = family_model(module, family)
    call = Call(model, module, offloader=Offloader(CPU, LateCopies()))

    def steps(memory):
        leaves = [call.input(work) for work in range(3)]
        losses, found = {}, []
        for action in ["F0", "F1", "P0", "F2", "B0", "P2", "B1", "B2"]:
            kind, work = action[0], int(action[1])
            if kind == "P":
                call.memory.prefetch(work)
                continue
            if kind == "B":
                call.memory.prefetch(work)
            call.memory.offloader.settle()
            if kind == "F":
                losses[work] = call.forward(leaves[work], memory, work)
            else:
                losses.pop(work).backward()
                call.memory.finish(work)
                found.append({"input": leaves[work].grad} | call.gradients())
        return found

    for found, wanted in zip(steps(memory), steps("keep"), strict=True):
        check_equal(found, wanted)
    assert call.memory.offloader.copies.started
    assert call.memory.offloader.held_bytes() == 0 and not call.memory.offloader.leaving


def offloaded(offloader, function, *stays):
    """What a function gives whose kept tensors were offloaded, and its work."""
    work = Offloaded(offloader)
    with work.block({x.untyped_storage().data_ptr() for x in stays}):
        out = function()
    return out, work


def test_views_of_one_storage_are_one_copy_and_come_back_as_views(offloader):
    x = torch.arange(24.0).reshape(4, 6).requires_grad_()
    others = torch.arange(48.0)

    def function(y):
        parts = [y, y[1:3], y.t(), y[:, ::2], y.view(2, 12)]
        return sum((part * part * others[: part.numel()].view(part.shape)).sum() for part in parts)

    y = x * 1
    loss, work = offloaded(offloader, lambda: function(y), others)
    assert offloader.held_bytes() == y.untyped_storage().nbytes()
    offloader.settle()
    loss.backward()
    found, x.grad = x.grad, None
    function(x * 1).backward()
    assert torch.equal(found, x.grad)
    assert work.empty and offloader.held_bytes() == 0


class Twice(torch.autograd.Function):
    """Reads twice what it saved."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (first,), (second,) = ctx.saved_tensors, ctx.saved_tensors
        assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        assert first._version == second._version
        return grad * (first + second)


def test_a_tensor_may_be_read_twice(offloader):
    x = torch.randn(5, 7, requires_grad=True)
    loss, _ = offloaded(offloader, lambda: Twice.apply(x * 3).sum())
    offloader.settle()
    loss.backward()
    assert torch.equal(x.grad, 3 * (x * 3 + x * 3).detach())


def test_only_what_a_block_owns_leaves(offloader):
    linear, table = nn.Linear(6, 6), torch.randn(4, 6)
    index = torch.tensor([3, 1, 2])
    x = torch.randn(4, 6, requires_grad=True)

    def function():
        return (linear(x)[index] * table[:3]).sum()

    loss, _ = offloaded(offloader, function, *linear.parameters(), table)
    assert offloader.held_bytes() == x.untyped_storage().nbytes()
    loss.backward()
    found = [x.grad, *(p.grad for p in linear.parameters())]
    x.grad = None
    linear.zero_grad()
    function().backward()
    for mine, wanted in zip(found, [x.grad, *(p.grad for p in linear.parameters())], strict=True):
        assert torch.equal(mine, wanted)


def test_a_result_that_stays_does_not_hold_its_own_graph():
    """Storages below the least size stay; a result among them would keep its graph alive until a garbage collection."""
    copies = PlainCopies()
    copies.least_bytes = 10**6
    x = torch.randn(5, requires_grad=True)
    gc.collect()
    gc.disable()
    try:
        y, _ = offloaded(Offloader(CPU, copies), lambda: x.exp())
        place = StorageWeakRef(y.untyped_storage())
        del y
        assert place.expired()
    finally:
        gc.enable()


@pytest.mark.parametrize("settled", [False, True])
def test_a_change_in_place_is_refused_as_autograd_does(offloader, settled):
    x = torch.randn(5, requires_grad=True)
    y = x * 1

    def function():
        z = (y * y).sum()
        if settled:
            y.detach().mul_(2)
        return z

    loss, _ = offloaded(offloader, function)
    if not settled:
        y.detach().mul_(2)  # while it may still be on its way
    offloader.settle()
    with pytest.raises(RuntimeError, match=r"shape \(5,\) .* changed in place"):
        loss.backward()


def test_two_versions_of_one_storage_are_two_copies(offloader):
    x = torch.randn(5, requires_grad=True)
    y = torch.zeros(5)

    def function():
        first = (x * y).sum()  # its backward is never asked for
        y.add_(2)
        return first.detach() + (x * y).sum()

    loss, _ = offloaded(offloader, function)
    offloader.settle()
    loss.backward()
    assert torch.equal(x.grad, torch.full((5,), 2.0))


def test_memory_on_the_device_is_that_of_two_blocks():
    """While a block runs forward, the one before it leaves; in the backward, the one before it comes."""
    copies = LateCopies()
    offloader = Offloader(CPU, copies)
    work = Offloaded(offloader)
    x = torch.randn(1000, requires_grad=True)
    places = []

    def alive():
        return sum(not place.expired() for place in places)

    def keep(t):
        places.append(StorageWeakRef(t.untyped_storage()))
        return t

    for _ in range(6):
        with work.block(()):
            x = keep(x * 1).exp()  # keeps its result
            places[-1] = StorageWeakRef(x.untyped_storage())
        assert alive() <= 2
    last = x.sum()
    del x
    offloader.settle()
    assert alive() == 0
    assert offloader.held_bytes() == 6 * 4000
    most = []
    original = copies.start

    def start(pairs):
        places.extend(StorageWeakRef(to.untyped_storage()) for to, _ in pairs)
        started = original(pairs)
        most.append(alive())
        return started

    copies.start = start
    last.backward()
    assert len(most) == 6 and max(most) == 2
    assert alive() == 0 and work.empty


def test_buffers_of_host_memory_are_used_again():
    made = []
    copies = PlainCopies()
    plain = copies.buffer

    def buffer(num_bytes):
        made.append(num_bytes)
        return plain(num_bytes)

    copies.buffer = buffer
    offloader = Offloader(CPU, copies)
    for rows in (8, 6, 8, 10, 7, 10):
        x = torch.randn(rows, 5, requires_grad=True)
        losses = [offloaded(offloader, lambda: (x * 1).square().sum())[0] for _ in range(2)]  # noqa: B023
        for loss in losses:
            loss.backward()
    assert made == [8 * 20] * 2 + [10 * 20] * 2
    assert len(offloader.buffers._free) == 2


def test_what_is_dropped_is_gone(offloader):
    x = torch.randn(1000, requires_grad=True)
    for step in ("left", "settled", "coming"):
        loss, work = offloaded(offloader, lambda: (x * 1).exp().sum())
        if step != "left":
            offloader.settle()
        if step == "coming":
            work.prefetch()
        work.drop()
        assert work.empty and offloader.held_bytes() == 0 and not offloader.leaving
        offloader.copies.wait(offloader.copies.start([]))  # no copy is left that would write to memory of others
        with pytest.raises(AssertionError, match="dropped before their backward"):
            loss.backward()


def test_a_backward_frees_what_came_back_as_it_goes(offloader):
    places, alive = [], []
    original = offloader.copies.start

    def start(copies):
        places.extend(StorageWeakRef(to.untyped_storage()) for to, _ in copies)
        return original(copies)

    def function():
        results = [x.exp()]
        for _ in range(3):
            results.append(results[-1].sin().exp())
        for result in results[:-1]:
            result.register_hook(lambda grad: alive.append(sum(not place.expired() for place in places)))
        return results[-1].sum()

    x = torch.randn(1000, requires_grad=True)
    loss, _ = offloaded(offloader, function)
    offloader.settle()
    offloader.copies.start = start
    loss.backward()
    assert len(places) == 4  # each result, which `exp` keeps, and the `sin` after it
    assert alive == [3, 2, 1]


def test_blocks_without_a_word_of_a_work_offload_by_the_default():
    """A chunk that is called directly, as measurements do."""
    call = Call(model_config(None), "language", section=SECTIONS["offload"])
    x = call.input()
    loss = call.forward(x)
    assert call.memory.offloader.held_bytes() > 0
    loss.backward()
    assert call.memory.offloader.held_bytes() == 0
    found = {"input": x.grad} | call.gradients()
    x = call.input()
    call.forward(x, "keep").backward()
    check_equal(found, {"input": x.grad} | call.gradients())


# --------------------------------------------------------------------------------------------- device


class Layers(nn.Module):
    """Enough work for each byte that copies are done before the next layer ends."""

    def __init__(self, width, depth, device):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(depth)
        ).to(device)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def cuda():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda", torch.cuda.current_device())


def device_steps(layers, memory, x, how, num_works):
    """Gradients of several works that are all under way, and the peak of the memory above the start."""
    layers.zero_grad(set_to_none=True)
    strategy = StageMemory.uniform(how, len(layers.layers))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    losses, leaves = [], []
    for work in range(num_works):
        leaves.append((x * (1 + work)).requires_grad_())
        memory.offloader.settle()
        with memory.of(strategy, work):
            losses.append(layers(leaves[-1]).square().mean())
    for work in reversed(range(num_works)):
        memory.prefetch(work)
        memory.offloader.settle()
        losses.pop().backward()
        memory.finish(work)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - start
    return [p.grad for p in layers.parameters()] + [leaf.grad for leaf in leaves], peak


@pytest.mark.gpu
def test_on_a_device_gradients_are_equal_and_the_peak_falls(cuda):
    torch.manual_seed(0)
    layers = Layers(1024, 6, cuda)
    memory = ActivationMemory(list(layers.layers), ActivationCheckpointConfig())
    x = torch.randn(8192, 1024, device=cuda)
    device_steps(layers, memory, x, BlockMemory.KEEP, 3)  # makes what stays: workspaces of the products
    wanted, kept = device_steps(layers, memory, x, BlockMemory.KEEP, 3)
    for _ in range(5):  # a race would not show every time
        found, peak = device_steps(layers, memory, x, BlockMemory.OFFLOAD, 3)
        for mine, theirs in zip(found, wanted, strict=True):
            assert torch.equal(mine, theirs)
    assert peak < 0.5 * kept, (peak, kept)
    assert memory.offloader.held_bytes() == 0


@pytest.mark.gpu
def test_on_a_device_copies_run_beside_the_computation(cuda):
    torch.manual_seed(0)
    layers = Layers(4096, 6, cuda)
    memory = ActivationMemory(list(layers.layers), ActivationCheckpointConfig())
    x = torch.randn(4096, 4096, device=cuda)
    for how in (BlockMemory.OFFLOAD, BlockMemory.KEEP):
        device_steps(layers, memory, x, how, 1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        device_steps(layers, memory, x, BlockMemory.OFFLOAD, 1)
    rows = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    kernels = [(start, end) for name, start, end in rows if not name.startswith("Mem")]
    for direction in ("Memcpy DtoH", "Memcpy HtoD"):
        copies = [(start, end) for name, start, end in rows if name.startswith(direction) and "Pinned" in name]
        assert copies, direction
        beside = [c for c in copies if any(start < c[1] and c[0] < end for start, end in kernels)]
        assert len(beside) >= len(copies) // 2, direction
