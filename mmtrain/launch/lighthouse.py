"""The membership service of a job on several machines: torchft's lighthouse. The only file that calls torchft. Pure.

A quorum of the lighthouse is a round: it is complete when all nodes of the last one have asked again, or else all that
have sent a heartbeat lately. It knows nothing of generations: each node's `Node` travels as the data of its member.
The answer of a round may be lost on the way, and then the node says that nothing has changed, as where the lighthouse
is gone: if something has, it fails and asks anew.

A lighthouse that starts, or starts again, knows no node. So a node asks only when it has sent heartbeats for a while:
then the lighthouse has those of all nodes, and waits for all.
"""

import ipaddress
import logging
import os
import re
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from mmtrain.config.elastic import ElasticConfig
from mmtrain.errors import ConfigError, RankLostError, one_line, shown
from mmtrain.launch.board import Board
from mmtrain.launch.launched import Launched, meeting_point
from mmtrain.launch.member import Member, beat_s
from mmtrain.launch.membership import Node, new_name, node_of

logger = logging.getLogger("mmtrain")

START_S = 120.0
"""How long a node that starts waits for the lighthouse, which may start later."""

_ROUND = timedelta(days=365)
"""A round takes as long as its slowest node."""
_LOOK_S = 0.1
"""How often a node that waits for an answer looks whether the lighthouse is gone."""


def member(section: ElasticConfig, launched: Launched, *, digest: str, board: Board) -> Member:
    """This rank's part in the membership of its node, which torchrun has started.

    Args:
        digest: of version, config and data, as `make_digest` writes it.
        board: the store of torchrun; the part of it that belongs to this start of the ranks.
    Raises: ConfigError: torchft is not installed, or other machines do not reach the store of this node.
    """
    source = LighthouseSource(section.lighthouse, section.silent_s) if launched.local_rank == 0 else None
    if source is not None:
        board.set("name", new_name())
    while not board.check(["name"]):
        time.sleep(_LOOK_S / 10)
    name = board.get("name").decode()
    ranks = launched.local_world_size or launched.world_size
    node = Node(name=name, ranks=ranks, store=node_store(section.lighthouse), digest=digest)
    return Member(node, local_rank=launched.local_rank, board=board, source=source, silent_s=section.silent_s)


def node_store(lighthouse: str, variables: Mapping[str, str] = os.environ) -> str:
    """The address of this node's store for other machines: torchrun's, which by itself says that it is at localhost.

    Args: lighthouse: its address; the route to it tells by which address this machine is known.
    Raises: ConfigError: the launcher's variables are wrong, or no route leads to the lighthouse.
    """
    host, port = meeting_point(variables)
    parts = urllib.parse.urlsplit(lighthouse)
    if _is_loopback(host) and not _is_loopback(parts.hostname or ""):
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_DGRAM)[
                0
            ]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # sends nothing
                host = probe.getsockname()[0]
        except OSError as error:
            raise ConfigError(
                f"elastic.lighthouse = {shown(lighthouse)}: this machine ({socket.gethostname()}) does not reach it "
                f"({error}); correct the address, or name this machine's by torchrun --master-addr"
            ) from None
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port}"


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class LighthouseSource:
    """Asks the lighthouse, and sends it heartbeats."""

    def __init__(self, address: str, silent_s: float) -> None:
        """Args: silent_s: after which a lighthouse that does not answer is gone.

        Raises: ConfigError: torchft is not installed.
        """
        self._connect = _client_of(address, silent_s)
        self._address, self._silent_s = address, silent_s
        self._client: Any = None
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._came_s: float | None = None
        """The time at which the first of the present series of heartbeats arrived; None: the last one did not."""
        self._lost_s, self._reason = time.monotonic(), "it has not heard this node for long enough"
        """The time at which the first of a series of heartbeats did not arrive, and why the last one did not."""

    def ask(self, node: Node) -> tuple[Node, ...]:
        """What all nodes of this round said; blocks until each live one has.

        A node that can go on asks once. Else it asks until the lighthouse has not answered for `silent_s`, or, before
        its first generation, for `START_S`.

        Raises: RankLostError: the lighthouse does not answer. ConfigError: its answer is malformed.
        """
        patience_s = START_S if not node.generation else self._silent_s if node.anew else 0.0
        deadline = time.monotonic() + patience_s
        while True:
            try:
                return self._round(node)
            except RankLostError:
                if time.monotonic() >= deadline or self._closed.wait(_LOOK_S):
                    raise

    def beat(self, name: str) -> None:
        """Sends a heartbeat. Raises: RankLostError: it does not arrive."""
        try:
            self._connected().heartbeat(name, timeout=timedelta(seconds=self._silent_s / 2))
        except Exception as error:
            with self._lock:
                self._lost_s = self._lost_s if self._came_s is None else time.monotonic()
                self._came_s, self._client, self._reason = None, None, _reason(error)
            raise self._gone(error) from error
        with self._lock:
            self._came_s = self._came_s or time.monotonic()

    def close(self) -> None:
        """Ends a call of `ask` in another thread soon; its request ends with the process."""
        self._closed.set()

    def _round(self, node: Node) -> tuple[Node, ...]:
        """The nodes of one round, asked once."""
        if not self._is_known():
            raise self._gone(self._reason)
        found: list[Any] = []
        thread = threading.Thread(target=self._request, args=(node, found), name="quorum", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(_LOOK_S)
            if self._closed.is_set() or self._is_silent():
                raise self._gone(self._reason)
        if isinstance(found[0], Exception):
            raise self._gone(found[0]) from found[0]
        return _nodes_of(found[0].participants, node)

    def _request(self, node: Node, found: list[Any]) -> None:
        """Asks; the answer or the error is the new item of `found`."""
        try:
            found.append(
                self._connected().quorum(
                    node.name,
                    timeout=_ROUND,
                    store_address=node.store,
                    step=node.step or 0,
                    world_size=node.ranks,
                    data={"node": asdict(node)},
                )
            )
        except Exception as error:
            found.append(error)

    def _connected(self) -> Any:
        with self._lock:
            if self._client is not None:
                return self._client
        client = self._connect()  # without the lock: this may take a while
        with self._lock:
            self._client = self._client or client
            return self._client

    def _is_known(self) -> bool:
        """Whether the lighthouse has had time to hear all nodes that hear it."""
        with self._lock:
            return self._came_s is not None and time.monotonic() - self._came_s >= 2 * beat_s(self._silent_s)

    def _is_silent(self) -> bool:
        with self._lock:
            return self._came_s is None and time.monotonic() - self._lost_s >= self._silent_s

    def _gone(self, reason: object) -> RankLostError:
        return RankLostError(
            f"elastic.lighthouse = {shown(self._address)} does not answer this machine ({socket.gethostname()}): "
            f"{_reason(reason)}; look whether torchft_lighthouse runs there, and at the network between them"
        )


def _client_of(address: str, silent_s: float) -> Callable[[], Any]:
    """What connects to the lighthouse. Raises: ConfigError: torchft is not installed."""
    os.environ.setdefault("RUST_LOG", "warn")  # else it prints a line for each connection
    try:
        from torchft.coordination import LighthouseClient
    except ImportError as error:
        raise ConfigError(
            f"elastic.lighthouse = {shown(address)} needs torchft ({error}); install it by "
            'pip install "mmtrain[elastic]", or use mmtrain train --nodes on one machine'
        ) from None
    return lambda: LighthouseClient(address, timedelta(seconds=silent_s / 2))


def _reason(error: object) -> str:
    """What an error of torchft says: the innermost of its texts."""
    message = re.search(r'message: "(.*?)", details: ', text := one_line(error, 10_000))  # of a gRPC status
    return one_line(message[1] if message else text.rpartition("error: ")[2], 200)


def _nodes_of(members: list[Any], node: Node) -> tuple[Node, ...]:
    """The nodes of a quorum. Members that are none of this job's version are left out, but by a newcomer refused.

    Raises: ConfigError: a member is none, and this node is a newcomer. RankLostError: this node is not in it.
    """
    nodes = []
    for one in members:
        try:
            nodes.append(_node_of(one.replica_id, one.data))
        except ConfigError as error:
            if not node.generation:
                raise ConfigError(
                    f"{error}; start all nodes with one version, and give each job a lighthouse"
                ) from None
            logger.warning("%s; the job goes on without it", error)
    if not any(one.name == node.name for one in nodes):
        raise RankLostError(f"node {node.name} is not part of its own round")
    return tuple(sorted(nodes, key=lambda one: one.name))


def _node_of(name: str, data: object) -> Node:
    where = f"member {shown(name)} of the lighthouse"
    if not isinstance(data, dict) or set(data) != {"node"}:
        raise ConfigError(f"{where}: {shown(data)} is no node of an elastic job")
    node = node_of(data["node"], where)
    if node.name != name:
        raise ConfigError(f"{where}: it calls itself {node.name!r}")
    return node
