"""Activations that wait in host memory from a block's forward to its backward.

While a block runs forward, autograd hands every tensor that it keeps to a hook. When the block is done, each storage
among them is copied to host memory, once, whatever views of it are kept; its memory on the device is free when the
copy is done, at the end of the block after at the latest. When the backward of a block begins, the offloaded block
before it starts to come back. So at most two blocks of a rank are on the device while one runs; a third, if the last
block of a coming backward was called ahead (`Offloaded.prefetch`).

Only autograd refers to the storages that come back, so that a backward frees each one after its use, and the
weight-gradient pass (W) of a split backward holds as much as without offloading.

Streams: all copies of a rank follow each other on one stream. Device memory is allocated and freed on the compute
stream, which waits for a copy before it frees what the copy reads, or uses what it wrote; only copies touch a
buffer in host memory, so it is free again as soon as the copy that empties it is in the queue.

Source: Rhu et al., vDNN, arXiv:1602.08124, section 3: release after the layer that made them, prefetch one ahead.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

TensorCopy = tuple[Tensor, Tensor]
"""Where a tensor of bytes is copied to, and where from."""


class Copies(Protocol):
    """How bytes get from a device to host memory and back."""

    least_bytes: int
    """Smaller storages stay on the device."""

    def buffer(self, num_bytes: int) -> Tensor:
        """Host memory that copies reach, uint8."""

    def start(self, copies: Sequence[TensorCopy]) -> Any:
        """Starts copies, after all that was computed so far; returns the argument of `wait`."""

    def wait(self, started: Any) -> None:
        """What is computed from now on comes after these copies."""


class PlainCopies:
    """Copies inside of host memory, done when they return: offloading on a CPU, which saves no memory."""

    least_bytes = 1

    def buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def start(self, copies: Sequence[TensorCopy]) -> None:
        for to, source in copies:
            to.copy_(source)

    def wait(self, started: None) -> None: ...


class StreamCopies:
    """Copies between a CUDA device and pinned host memory, on a stream of their own."""

    least_bytes = 1 << 17
    """A copy takes some microseconds to start, in which a link of 25 GB/s moves about as much: for less (statistics
    of norms) the time buys nearly no memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def start(self, copies: Sequence[TensorCopy]) -> Any:
        # After the tensors are computed, or after the former use of the memory that they come back to.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for to, source in copies:
                to.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def wait(self, started: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(started)


def copies_to(device: torch.device) -> Copies | None:
    """Copies between host memory and a device, on a stream of their own; None: it is the host."""
    return StreamCopies(device) if device.type == "cuda" else None


class _Buffers:
    """Host memory that is reused, since pinning takes longer than filling it."""

    def __init__(self, make: Callable[[int], Tensor]) -> None:
        self._make = make
        self._free: list[Tensor] = []

    def take(self, num_bytes: int) -> Tensor:
        """The smallest free buffer that is large enough; else a new one instead of the largest free one, so that
        there are never more buffers than were in use at one time."""
        fitting = [buffer for buffer in self._free if buffer.numel() >= num_bytes]
        chosen = min(fitting, key=Tensor.numel) if fitting else max(self._free, key=Tensor.numel, default=None)
        if chosen is not None:
            self._free = [buffer for buffer in self._free if buffer is not chosen]
        return chosen if chosen is not None and fitting else self._make(num_bytes)

    def give(self, buffer: Tensor) -> None:
        """Takes a buffer back."""
        self._free.append(buffer)


class Offloader:
    """The host memory and the copies of one rank."""

    def __init__(self, device: torch.device, copies: Copies | None = None) -> None:
        """Args: copies: default: those of the device."""
        self.device = device
        self.copies: Copies = copies or copies_to(device) or PlainCopies()
        self.buffers = _Buffers(self.copies.buffer)
        self.leaving: deque[_Block] = deque()
        """Blocks whose copy to host memory was started and whose memory on the device is still held."""
        self.waiting: set[_Block] = set()
        """Blocks whose activations are in host memory, or on their way there."""

    def held_bytes(self) -> int:
        """Bytes of the activations that wait in host memory."""
        return sum(block.num_bytes for block in self.waiting)

    def settle(self, at_most: int = 0) -> None:
        """Frees the device memory of all blocks that left but the last `at_most`; later computation waits for their
        copies."""
        while len(self.leaving) > at_most:
            self.leaving.popleft().release()


class Offloaded:
    """The offloaded activations of one work in the blocks of one chunk."""

    def __init__(self, offloader: Offloader) -> None:
        self._offloader = offloader
        self._blocks: list[_Block] = []

    @property
    def empty(self) -> bool:
        """Whether no block waits for its backward."""
        return not self._blocks

    @contextmanager
    def block(self, stays: Collection[int]) -> Iterator[None]:
        """A context around the forward of a block; at its end the tensors that autograd keeps are offloaded.

        Args: stays: `data_ptr` of storages that are used outside of the block, too.
        """
        block = _Block(self._offloader, self._landed, stays)
        try:
            with torch.autograd.graph.saved_tensors_hooks(block.pack, unpack):
                yield
        except BaseException:
            block.drop()
            raise
        if block.leave():
            self._blocks.append(block)
            self._offloader.settle(at_most=1)

    def prefetch(self) -> None:
        """Starts to bring back the block whose backward comes next, if there is one that has not started yet."""
        if self._blocks:
            self._blocks[-1].bring_back()

    def drop(self) -> None:
        """Drops the blocks that no backward has used."""
        while self._blocks:
            self._blocks.pop().drop()

    def _landed(self, block: "_Block") -> None:
        self._blocks.remove(block)
        self.prefetch()


@dataclass(slots=True, eq=False)
class _Storage:
    """One storage that a block keeps."""

    num_bytes: int
    storage: torch.UntypedStorage | None
    """The storage on the device, before it left and after it came back."""
    tensor: Tensor | None
    """A tensor that has it, until it left, for its version."""
    version: int
    """The version of the tensor as autograd kept it."""
    changed: bool = False
    """Whether it was changed in place after that."""
    host: Tensor | None = None

    def check(self) -> None:
        """Notes a change in place."""
        assert self.tensor is not None
        self.changed |= self.tensor._version != self.version


@dataclass(slots=True, eq=False)
class _View:
    """A tensor that autograd keeps, as a view of a storage."""

    block: "_Block"
    of: _Storage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Block:
    """The storages that autograd keeps of one call of a block, on the device or in host memory.

    pack* -> leave -> release -> bring_back -> land; `bring_back` may come before `release`, and `drop` at any time.
    """

    def __init__(self, offloader: Offloader, landed: Callable[["_Block"], None], stays: Collection[int]) -> None:
        self._offloader, self._landed, self._stays = offloader, landed, stays
        self._storages: dict[tuple[int, int], _Storage] = {}
        """(data_ptr, version) -> storage; until it landed, since then it belongs to autograd."""
        self._buffer: Tensor | None = None
        self._left: Any = None
        self._coming: Any = None
        self._on_device = True
        self.num_bytes = 0

    def pack(self, tensor: Tensor) -> Any:
        """The pack hook of autograd: the object that it keeps instead of a tensor."""
        storage = self._find(tensor)
        if storage is None:
            return tensor.detach()  # without its graph, which may lead back here
        return _View(self, storage, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())

    def _find(self, tensor: Tensor) -> _Storage | None:
        """The storage of a tensor; None: it stays."""
        if type(tensor) is not Tensor or tensor.layout is not torch.strided:
            return None  # parameters, DTensors
        if tensor.device.type != self._offloader.device.type:
            return None
        if not tensor.is_floating_point():
            return None  # indices and masks, which all blocks share
        storage = tensor.untyped_storage()
        address, num_bytes = storage.data_ptr(), storage.nbytes()
        if num_bytes < self._offloader.copies.least_bytes or address in self._stays:
            return None
        key = (address, tensor._version)
        if key not in self._storages:
            self._storages[key] = _Storage(num_bytes, storage, tensor.detach(), tensor._version)
        return self._storages[key]

    def leave(self) -> bool:
        """Starts the copies to host memory. Returns: whether there is anything to copy."""
        if not self._storages:
            return False
        storages = self._storages.values()
        self.num_bytes = sum(each.num_bytes for each in storages)
        self._buffer = self._offloader.buffers.take(self.num_bytes)
        copies, start = [], 0
        for each in storages:
            each.check()
            assert each.storage is not None
            each.host = self._buffer[start : start + each.num_bytes]
            start += each.num_bytes
            copies.append((each.host, _bytes_of(each.storage, self._offloader.device)))
        self._left = self._offloader.copies.start(copies)
        self._offloader.leaving.append(self)
        self._offloader.waiting.add(self)
        return True

    def release(self) -> None:
        """Frees the device memory of the offloaded storages, once they are copied."""
        self._offloader.copies.wait(self._left)
        for each in self._storages.values():
            each.check()
            each.storage = each.tensor = None
        self._on_device = False

    def bring_back(self) -> None:
        """Starts the copies to the device, unless they have started or the storages did not leave yet."""
        if self._buffer is None:
            return
        if self._on_device:
            self._offloader.leaving.remove(self)
            for each in self._storages.values():
                each.check()
                each.tensor = None
        else:
            copies = []
            for each in self._storages.values():
                assert each.host is not None
                buffer = torch.empty(each.num_bytes, dtype=torch.uint8, device=self._offloader.device)
                each.storage = buffer.untyped_storage()
                copies.append((buffer, each.host))
            self._coming = self._offloader.copies.start(copies)
            self._on_device = True
        self._leave_host()

    def land(self) -> None:
        """Makes the storages that came back ready for use; from now on only autograd refers to them."""
        self.bring_back()
        if self._storages:
            if self._coming is not None:
                self._offloader.copies.wait(self._coming)
            self._storages = {}
            self._landed(self)

    def drop(self) -> None:
        """Drops all storages, on the device and in host memory."""
        # Memory of the device must not be used again while a copy reads or writes it.
        for started in (self._left, self._coming):
            if started is not None:
                self._offloader.copies.wait(started)
        for each in self._storages.values():
            each.storage = each.tensor = None
        self._storages = {}
        if self in self._offloader.leaving:
            self._offloader.leaving.remove(self)
        self._leave_host()

    def _leave_host(self) -> None:
        if self._buffer is not None:
            self._offloader.buffers.give(self._buffer)
            self._buffer = None
            for each in self._storages.values():
                each.host = None
        self._offloader.waiting.discard(self)


def unpack(packed: Any) -> Tensor:
    """The unpack hook of autograd: the tensor that was given to `pack`, at every call.

    Raises: RuntimeError: it was changed in place since then.
    """
    if isinstance(packed, Tensor):
        return packed
    view: _View = packed
    view.block.land()
    if view.of.changed:
        raise RuntimeError(
            f"an activation of shape {tuple(view.size)} that the backward needs was changed in place after a forward "
            "whose activations are offloaded"
        )
    storage = view.of.storage
    assert storage is not None, "activations were dropped before their backward"
    empty = torch.empty(0, dtype=view.dtype, device=storage.device)
    return empty.set_(storage, view.offset, view.size, view.stride)


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
