"""Leaving a step that cannot be finished: whoever leaves hangs up, so that its peers leave, too.

gloo's `abort` releases nobody. A rank that shuts down the connected sockets of its process groups gives every peer that
waits for it an error, and these do the same, until nobody waits. Listening sockets stay: shutting one down ends the
process. A crashed peer's sockets are closed by the kernel; a stopped one, or one behind a cut link, is noticed by the
ring: each rank gets a beat from the next one, on a group of its own.
"""

import os
import socket
import struct
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

BEATS = 4
"""Beats within the time after which a rank counts as silent."""

LEAST_MEETING_S = 10.0
"""Ranks of a new generation wait so long for each other, at least."""

LEAST_ANSWER_S = 3.0
"""A store has so long for an answer, at least; it takes milliseconds."""

_DESCRIPTORS = "/proc/self/fd"


def connections() -> dict[str, int]:
    """Connected TCP sockets of this process: identity -> file descriptor."""
    found = {}
    for name in os.listdir(_DESCRIPTORS):
        with suppress(OSError):  # closed meanwhile, or not connected
            identity = os.readlink(f"{_DESCRIPTORS}/{name}")
            if identity.startswith("socket:") and _connected(int(name)):
                found[identity] = int(name)
    return found


def hang_up(spared: Collection[str], ports: Collection[int] = ()) -> int:
    """Shuts down this process' connected TCP sockets; returns how many.

    Args:
        spared: identities of those that stay, as of `connections`: made before the process groups.
        ports: connections to these ports of others stay, too: of stores and of the membership service.
    """
    count = 0
    for identity, descriptor in connections().items():
        if identity in spared:
            continue
        with suppress(OSError), _socket(descriptor) as own:
            if own.getpeername()[1] not in ports:
                own.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def meeting_s(silent_s: float) -> float:
    """Seconds that ranks of a new generation wait for each other. Args: silent_s: after which one counts as lost."""
    return max(2 * silent_s, LEAST_MEETING_S)


def bound_answers(before: Collection[str], silent_s: float) -> None:
    """Makes reading from connections fail where the other side is silent: a store's client has no timeout of its own.

    Args: before: identities of older connections, as of `connections`, which stay as they are.
    """
    answer_s = max(silent_s / BEATS, LEAST_ANSWER_S)
    timeval = struct.pack("@ll", int(answer_s), int(answer_s % 1 * 1e6))
    for identity, descriptor in connections().items():
        if identity not in before:
            with suppress(OSError), _socket(descriptor) as own:
                own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)


def _connected(descriptor: int) -> bool:
    with _socket(descriptor) as own:
        if own.family not in (socket.AF_INET, socket.AF_INET6) or own.type != socket.SOCK_STREAM:
            return False
        own.getpeername()
        return True


def _socket(descriptor: int) -> socket.socket:
    """A socket object of a copy of a descriptor."""
    return socket.socket(fileno=os.dup(descriptor))


class Ring:
    """Beats between neighbours. Collective over the ranks of the group.

    Args:
        group: gloo's, used by nothing else, whose timeout is the time after which a rank counts as silent.
        silent_s: that time.
        on_loss: called once by a thread when the next rank is silent or gone.
    """

    def __init__(self, group: dist.ProcessGroup, silent_s: float, on_loss: Callable[[], None]) -> None:
        self._group, self._silent_s, self._on_loss = group, silent_s, on_loss
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for name, run in (("beats-out", self._send), ("beats-in", self._receive))
        ]
        for thread in self._threads if group.size() > 1 else ():
            thread.start()

    def end(self) -> None:
        """Ends without a call of `on_loss`. The threads end once their sockets are shut down."""
        self._ended.set()

    def join(self) -> None:
        """Waits for the threads. Call it after the sockets were shut down."""
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(2 * self._silent_s)

    def _beats(self) -> Iterator[torch.Tensor]:
        while not self._ended.is_set():
            yield torch.zeros(1)

    def _send(self) -> None:
        before = (self._group.rank() - 1) % self._group.size()
        with suppress(RuntimeError):  # of the rank before: it is the one whose next notices it
            for beat in self._beats():
                self._group.send([beat], before, 0).wait()
                self._ended.wait(self._silent_s / BEATS)

    def _receive(self) -> None:
        after = (self._group.rank() + 1) % self._group.size()
        try:
            for beat in self._beats():
                self._group.recv([beat], after, 0).wait(timedelta(seconds=self._silent_s))
        except RuntimeError:
            if not self._ended.is_set():
                self._on_loss()
