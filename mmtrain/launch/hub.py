"""The membership service of a job on one machine: its launcher collects what nodes ask, and answers round by round.

`Hub` is a state machine without clock, processes or pipes; `HubPipes` connects it to pipes, over which JSON travels.
A node is a *member* from its first round on. A round is complete when all members have asked. A node that starts, or
that was silent, is not waited for, but is part of the next round once it has asked: a member asks in each step. So an
answer that a stopped node finds when it goes on can mislead nobody but itself: it fails, and asks anew. Only where no
member is left, as at the start of a job, does a round wait for all nodes that are starting.
"""

import json
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection

from mmtrain.errors import ConfigError, RankLostError
from mmtrain.launch.membership import Node, node_of, nodes_of, read_object

START_S = 120.0
"""How long a round waits for a node that starts and was not heard yet, where no member is left."""

_LOOK_S = 0.1
"""How often a node that waits for an answer looks whether it was closed."""
_MOST_BYTES = 2**23


@dataclass(slots=True)
class _NodeEntry:
    """What a hub knows of a node."""

    heard_s: float
    was_heard: bool = False
    is_member: bool = False
    request: Node | None = None
    """What it asked in the present round."""


class Hub:
    """The rounds of the nodes of one job. All times are in seconds of one clock of the caller."""

    def __init__(self, silent_s: float, start_s: float = START_S) -> None:
        """Args: silent_s: after which a node without a beat is left out. start_s: see `START_S`."""
        self._silent_s, self._start_s = silent_s, start_s
        self._entries: dict[str, _NodeEntry] = {}
        self.last_round: tuple[Node, ...] = ()
        """What the nodes of the last complete round said."""

    def start(self, name: str, now_s: float) -> None:
        """The processes of a node start. Raises: ConfigError: the name is in use."""
        if name in self._entries:
            raise ConfigError(f"two nodes have the name {name!r}; each start of a node has a name of its own")
        self._entries[name] = _NodeEntry(now_s)

    def hear(self, name: str, now_s: float) -> None:
        """A node gave a sign of life."""
        entry = self._entries[name]
        entry.heard_s, entry.was_heard = now_s, True

    def ask(self, node: Node, now_s: float) -> None:
        """A node asks for the next round."""
        self.hear(node.name, now_s)
        self._entries[node.name].request = node

    def lose(self, name: str) -> None:
        """A node has ended, for whatever reason; it may be unknown."""
        self._entries.pop(name, None)

    def shift(self, seconds: float) -> None:
        """Forgives a silence in which this process itself was stopped."""
        for entry in self._entries.values():
            entry.heard_s += seconds

    def next_round(self, now_s: float) -> tuple[Node, ...] | None:
        """What the nodes of a round said, in the order of their names, once it is complete."""
        live = {}
        for name, entry in self._entries.items():
            patience_s = self._silent_s if entry.was_heard else self._start_s
            if now_s - entry.heard_s <= patience_s:
                live[name] = entry
            else:
                entry.is_member = False
        awaited = [entry for entry in live.values() if entry.is_member] or list(live.values())
        if not awaited or any(entry.request is None for entry in awaited):
            return None
        asked = []
        for _, entry in sorted(live.items()):
            if entry.request is not None:
                asked.append(entry.request)
                entry.request, entry.is_member = None, True
        self.last_round = tuple(asked)
        return self.last_round


class HubPipes:
    """A hub whose nodes are at the other ends of pipes, each as a `PipeSource`."""

    def __init__(self, hub: Hub, silent_s: float, now_s: float) -> None:
        """Args: silent_s: of the hub. now_s: the present time."""
        self._hub, self._silent_s, self._now_s = hub, silent_s, now_s
        self._pipes: dict[str, Connection] = {}

    @property
    def pipes(self) -> list[Connection]:
        """The pipes of nodes that have not ended: wait for them, then call `serve`."""
        return list(self._pipes.values())

    @property
    def pause_s(self) -> float:
        """How long a caller may wait between two calls of `serve`."""
        return self._silent_s / 8

    def add(self, name: str, pipe: Connection, now_s: float) -> None:
        """A node starts. Raises: ConfigError: the name is in use."""
        self._hub.start(name, now_s)
        self._pipes[name] = pipe

    def remove(self, name: str) -> None:
        """A node has ended."""
        self._hub.lose(name)
        pipe = self._pipes.pop(name, None)
        if pipe is not None:
            pipe.close()

    def serve(self, now_s: float) -> None:
        """Reads what nodes sent, and answers them if a round is complete.

        Raises: ConfigError: a node sent something else than `PipeSource` does.
        """
        gap_s, self._now_s = now_s - self._now_s, now_s
        if gap_s > self._silent_s / 2:
            self._hub.shift(gap_s)
        for name, pipe in list(self._pipes.items()):
            try:
                while pipe.poll():
                    self._receive(name, pipe.recv_bytes(_MOST_BYTES), now_s)
            except (EOFError, OSError):
                self.remove(name)
        asked = self._hub.next_round(now_s)
        if asked is not None:
            answer = json.dumps({"nodes": [asdict(node) for node in asked]}).encode()
            for node in asked:
                with suppress(OSError):  # it has just ended, which the next look at its pipe finds
                    self._pipes[node.name].send_bytes(answer)

    def _receive(self, name: str, message: bytes, now_s: float) -> None:
        where = f"message of node {name}"
        said = read_object(message, where, {"ask"})["ask"]
        if said is None:
            self._hub.hear(name, now_s)
            return
        node = node_of(said, where)
        if node.name != name:
            raise ConfigError(f"{where}: name = {node.name!r}; it is the name that the launcher gave")
        self._hub.ask(node, now_s)


class PipeSource:
    """A node's end of a pipe to the launcher."""

    def __init__(self, pipe: Connection) -> None:
        """Args: pipe: a duplex one, used by this object alone."""
        self._pipe, self._sending, self._asking, self._closed = (
            pipe,
            threading.Lock(),
            threading.Lock(),
            threading.Event(),
        )

    def ask(self, node: Node) -> tuple[Node, ...]:
        """What all nodes of this round said; blocks until each live one has. Raises: RankLostError, ConfigError."""
        with self._asking:
            self._send(asdict(node))
            try:
                while not self._pipe.poll(_LOOK_S):
                    if self._closed.is_set():
                        raise RankLostError(f"node {node.name} was closed while it asked")
                answer = self._pipe.recv_bytes(_MOST_BYTES)
            except (EOFError, OSError):
                raise RankLostError(f"node {node.name} got no answer: the launcher of this job has ended") from None
        where = "answer of the launcher"
        return nodes_of(read_object(answer, where, {"nodes"})["nodes"], where)

    def beat(self, name: str) -> None:
        """Says that this node lives. Raises: RankLostError: the launcher has ended."""
        self._send(None)

    def close(self) -> None:
        """Ends a call of `ask` in another thread soon, then the pipe: nobody waits for this node any more."""
        self._closed.set()
        with self._asking, self._sending:
            self._pipe.close()

    def _send(self, said: dict[str, object] | None) -> None:
        try:
            with self._sending:
                self._pipe.send_bytes(json.dumps({"ask": said}).encode())
        except OSError:
            raise RankLostError("the launcher of this job has ended, and with it its membership") from None
