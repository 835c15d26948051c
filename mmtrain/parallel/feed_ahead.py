"""The inputs of coming forwards, copied to the device while earlier actions run.

A forward's inputs (pixels, sounds, tokens, indices) are made on the host, and copied from pinned memory on a stream of
their own. The forward waits on the device for its own copies alone, and the host for none. When a forward of a rank
begins, the next two that are not under way follow, in the order of the rank's program, unless the inputs that wait hold
as many bytes as are allowed; the last of them may be in excess. Not more of them, since the host makes them before it
starts that forward.

Device memory is allocated on the compute stream, as that of offloaded activations (`parallel/offload.py`): it is free
when the last one that refers to the inputs is done with them, in the order of that stream.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmtrain.models.transfer import pinned
from mmtrain.parallel.offload import Copies, TensorCopy
from mmtrain.parallel.runtime import Feed
from mmtrain.schedule.action import Kind
from mmtrain.schedule.passes.lower import Program


class Uploads:
    """Copies of a rank's inputs to its device; those since the last start are started together."""

    def __init__(self, device: torch.device, copies: Copies | None) -> None:
        """Args: copies: how they are made; None: the device is the host, which needs none."""
        self._device, self._copies = device, copies
        self._open: list[TensorCopy] = []

    def add(self, values: Tensor | np.ndarray[Any, Any]) -> Tensor:
        """Values of the host on the device, undefined there until a later `start` is waited for; without copies the
        values themselves."""
        x = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
        if self._copies is None:
            return x
        on_device = torch.empty(x.shape, dtype=x.dtype, device=self._device)
        if x.numel():
            self._open.append((on_device, pinned(x.contiguous(), self._device)))
        return on_device

    def start(self) -> tuple[int, Any]:
        """Starts the copies. Returns: their bytes, and the argument of `wait`."""
        copies, self._open = self._open, []
        if self._copies is None or not copies:
            return 0, None
        return sum(to.nbytes for to, _ in copies), self._copies.start(copies)

    def drop(self) -> None:
        """Forgets the copies since the last start."""
        self._open = []

    def wait(self, started: Any) -> None:
        """What is computed from now on comes after these copies. Args: started: of `start`."""
        if self._copies is not None and started is not None:
            self._copies.wait(started)


_AT_ONCE = 2
"""Forwards whose inputs are made when one begins."""


@dataclass(frozen=True, slots=True)
class _Ahead:
    """The arguments of a forward, on their way."""

    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    num_bytes: int
    started: Any


class FeedAhead:
    """A feed whose results are made ahead, in the order in which a rank's program asks for them."""

    def __init__(self, feed: Feed, uploads: Uploads, forwards: Sequence[tuple[int, int]], *, most_bytes: float) -> None:
        """Args:
        feed: copies by `uploads` alone.
        forwards: (stage, work) of the rank's forwards, in the order of its program.
        most_bytes: inputs are made ahead while fewer wait; 0: those of each forward when it begins.
        """
        self._feed, self._uploads, self._most_bytes = feed, uploads, most_bytes
        self._coming = deque(forwards)
        self._waiting: dict[tuple[int, int], _Ahead] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of inputs on the device whose forward has not begun."""
        return sum(ahead.num_bytes for ahead in self._waiting.values())

    def __call__(self, stage: int, work: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a forward, which must be the next one."""
        if not self._waiting:
            self._make()
        ahead = self._waiting.pop((stage, work))
        self._uploads.wait(ahead.started)
        for _ in range(_AT_ONCE):
            if self._coming and self.num_bytes < self._most_bytes:
                self._make()
        return ahead.arguments

    def close(self) -> None:
        """Drops what waits, of a step that failed; memory that a copy writes to is not used again before its end."""
        self._coming.clear()
        self._uploads.drop()
        while self._waiting:
            _, ahead = self._waiting.popitem()
            self._uploads.wait(ahead.started)

    def _make(self) -> None:
        forward = self._coming.popleft()
        arguments = self._feed(*forward)
        self._waiting[forward] = _Ahead(arguments, *self._uploads.start())


def forwards_of(program: Program, pp_rank: int) -> list[tuple[int, int]]:
    """(stage, work) of the forwards of a pipeline rank, in the order of its program."""
    parts = (part for action in program.actions[pp_rank] for part in action.parts)
    return [(part.stage, program.graph.work_of(part)) for part in parts if part.kind is Kind.F]
