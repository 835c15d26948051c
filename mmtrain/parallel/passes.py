"""Passes over a chunk that yield to each other where ranks exchange, so that compute hides the exchanges of tensor
parallelism.

The compute between two exchanges is a *unit*. A pass starts an exchange, lets other compute run, and waits then: the
units of the other pass of a block, and weight gradients that wait. So units follow from the exchanges, whatever a
layer computes between them, and hooks, recomputation and offloading stay where they are.

The two passes of a block are two threads, since autograd runs a backward to its end; exactly one of them runs at any
time. They take turns at exchanges alone, so that all ranks of a group start their exchanges in one order, which follows
from the program and not from a clock.

Between divided rows two exchanges follow each other, with only a norm between them: a reduce-scatter and an all-gather.
The other pass covers both if it pauses once in its unit.

Source: Qi et al., Synergistic Tensor and Pipeline Parallelism, section 4.1; exchanges under the weight gradients of
their own backward: Megatron-LM.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from mmtrain.parallel.torch_private import without_modes

Fill = Callable[[bool], None]
"""Computes while an exchange is under way. Args: whether another exchange follows at once, and needs compute, too."""


class SharedPassState(Protocol):
    """Something that both passes of a block use, each with a state of its own."""

    pass_state: Any


class _Stopped(BaseException):
    """Raised in a pass because the other pass of its block has failed."""


class Pass:
    """One pass over a chunk."""

    def __init__(self) -> None:
        self.num_exchanges = 0
        self.fill: Fill | None = None
        """What is computed during its exchanges."""
        self._peer: Pass | None = None
        """The other pass of its block, unless that is over."""
        self._turn = threading.Lock()
        """Locked while the other pass runs."""
        self._turn.acquire()
        self._scatters = False
        """Whether it waits for the first of two exchanges."""
        self._states: list[Any] = []
        """The states of what both passes use, while the other pass runs."""
        self._shared: Sequence[SharedPassState] = ()
        self._stopped = False

    def exchange(self, work: dist.Work, scatters: bool) -> None:
        """Waits for an exchange, after other compute."""
        self.num_exchanges += 1
        self._scatters = scatters
        if self._peer is not None:
            self._yield_turn()
        if self.fill is not None:
            with without_modes():  # of a recomputation, which would take what is computed here for its own
                self.fill(scatters)
        work.wait()
        self._scatters = False

    def pause(self) -> None:
        """Lets the other pass continue if it waits for the first of two exchanges: the second needs compute, too."""
        if self._peer is not None and self._peer._scatters:
            self._yield_turn()

    def run(self, compute: Callable[[], None]) -> None:
        """A pass of a block from its first turn to its end; the rest of the block belongs to the other one."""
        stopped = True
        try:
            self._await_turn()
            compute()
            stopped = False
        finally:
            peer = self._peer
            if peer is not None:
                peer._peer, peer._stopped = None, stopped
                self._hand_over(peer)

    def _yield_turn(self) -> None:
        assert self._peer is not None
        self._hand_over(self._peer)
        self._await_turn()

    def _hand_over(self, peer: "Pass") -> None:
        global _current
        self._states = [shared.pass_state for shared in self._shared]
        for shared, state in zip(self._shared, peer._states, strict=True):
            shared.pass_state = state
        _current = peer
        peer._turn.release()

    def _await_turn(self) -> None:
        self._turn.acquire()
        if self._stopped:
            raise _Stopped


_current = Pass()
"""The pass that runs, of the process: a backward may run in threads of autograd's. Outside of blocks it has no peer."""


def exchange(work: dist.Work, *, scatters: bool = False) -> None:
    """Waits for an exchange, after other compute of this rank. Args: scatters: another exchange follows at once."""
    _current.exchange(work, scatters)


def pause() -> None:
    """The middle of a unit, where the other pass of a block may go on."""
    _current.pause()


def num_exchanges() -> int:
    """The exchanges of the pass that runs, so far."""
    return _current.num_exchanges


@contextmanager
def filled(fill: Fill) -> Iterator[None]:
    """Inside, this is computed during the exchanges of the pass that runs."""
    own = _current
    outer, own.fill = own.fill, fill
    try:
        yield
    finally:
        own.fill = outer


class Block:
    """Runs pairs of passes; one for each rank of a pipeline."""

    def __init__(self, device: torch.device) -> None:
        start = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, "mmtrain-pass", start)

    def run(self, first: Callable[[], None], second: Callable[[], None], shared: Sequence[SharedPassState]) -> None:
        """Runs two passes in turns, the first of them in this thread. Args: shared: what both may use."""
        global _current
        outer = _current
        one, other = Pass(), Pass()
        one._peer, other._peer = other, one
        one._shared = other._shared = shared
        other._states = [each.pass_state for each in shared]
        _current = one
        one._turn.release()
        rest = self._thread.submit(other.run, second)
        try:
            one.run(first)
        except _Stopped:
            pass  # the other one's error follows
        finally:
            error = rest.exception()
            _current = outer
        if error is not None:
            raise error
