"""One generation of an elastic job on one rank: all ranks of all its nodes, until one of them fails or is to change.

They meet in the store of the first node, and have two gloo groups that torch's registry does not know: one for what
they agree about and for the state that moves, one for the ring. The default process group has the ranks of the layout
alone: nodes that leave, or are of no use, are not in it.
"""

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mmtrain import errors
from mmtrain.errors import MMTrainError, RankLostError
from mmtrain.launch.membership import Membership, members_digest
from mmtrain.parallel import leave
from mmtrain.parallel.torch_private import abort_device_groups, end_all_groups

_PAUSE_S = 0.01
"""The pause between two checks for the other ranks, seconds."""


class Generation:
    """The process groups and the store of one membership. Its threads and sockets end with `end`."""

    def __init__(
        self,
        membership: Membership,
        *,
        node: str,
        local_rank: int,
        store: dist.Store,
        ports: Sequence[int],
        timeout_s: float,
        silent_s: float,
        left: Callable[[], None],
    ) -> None:
        """Meets the other ranks. Collective over all ranks of the membership.

        Args:
            node: name of this rank's.
            store: of the first node, in which all meet.
            ports: of stores and services, whose connections stay when this rank hangs up.
            timeout_s: of collectives.
            silent_s: after which a rank that gives no sign counts as lost.
            left: called once, by any thread, when this rank has hung up.
        Raises: RankLostError: others do not come, or have left meanwhile.
        """
        self.number, self.membership = membership.generation, membership
        names, self.per_node = [one.name for one in membership.nodes], membership.nodes[0].ranks
        self.rank, self.size = names.index(node) * self.per_node + local_rank, len(names) * self.per_node
        self._node, self._local_rank, self._names = node, local_rank, names
        self._ports, self._left, self._timeout_s, self._silent_s = tuple(ports), left, timeout_s, silent_s
        self._spared = frozenset(leave.connections())
        self._gone = threading.Event()
        self._ring: leave.Ring | None = None
        self._group: dist.ProcessGroup | None = None
        key = f"generation {self.number} of {members_digest(membership.nodes)}"
        self._opened = store  # torch keeps a store of Python no longer than Python does
        self.store = dist.PrefixStore(key, store)
        self._patience_s = leave.meeting_s(silent_s)
        try:
            self._come(self._patience_s)
            self._form("all")
        except RuntimeError as error:
            self.hang_up()
            raise RankLostError(f"rank {self.rank} of generation {self.number}: {error}") from error
        except RankLostError:
            self.hang_up()
            raise

    @property
    def group(self) -> dist.ProcessGroup:
        """The group of all its ranks, not registered with torch."""
        assert self._group is not None
        return self._group

    def _come(self, patience_s: float) -> None:
        """Waits for all ranks. Raises: RankLostError: naming those that do not come."""
        self.store.set(f"here {self.rank}", "")
        deadline, everybody = time.monotonic() + patience_s, [f"here {rank}" for rank in range(self.size)]
        while True:
            met = self.store.check(everybody)
            if self.store.check(["left"]) or self._gone.is_set():  # a rank that was stopped comes when all have left
                raise RankLostError(f"another rank has left generation {self.number} while its ranks met")
            if met:
                return
            if time.monotonic() > deadline:
                absent = [rank for rank in range(self.size) if not self.store.check([f"here {rank}"])]
                nodes = sorted({self.membership.nodes[rank // self.per_node].name for rank in absent})
                raise RankLostError(
                    f"generation {self.number}: rank {self.rank} waited {patience_s:g} s, but ranks {absent} of nodes "
                    f"{', '.join(nodes)} did not come"
                )
            time.sleep(_PAUSE_S)

    def _form(self, name: str) -> None:
        """Makes the groups. Collective."""
        self._group = self._made(f"state of {name}", self._timeout_s)
        self._ring = leave.Ring(self._made(f"beats of {name}", self._silent_s), self._silent_s, self.hang_up)

    def _made(self, name: str, timeout_s: float) -> dist.ProcessGroup:
        """A group, in a thread: a rank that dies while the others connect keeps them for the timeout of the group.

        Raises: RankLostError: it does not stand in time.
        """
        made: list[dist.ProcessGroup | RuntimeError] = []

        def make() -> None:
            try:
                store, timeout = dist.PrefixStore(name, self.store), timedelta(seconds=timeout_s)
                made.append(dist.ProcessGroupGloo(store, self.rank, self.size, timeout))
            except RuntimeError as error:
                made.append(error)

        thread = threading.Thread(target=make, name="connect", daemon=True)
        thread.start()
        thread.join(self._patience_s)
        if not made:
            raise RankLostError(f"generation {self.number}: the ranks did not connect within {self._patience_s:g} s")
        if isinstance(made[0], RuntimeError):
            raise made[0]
        return made[0]

    # ------------------------------------------------------------------------------------------ together

    def gather(self, value: Any) -> list[Any]:
        """[rank] -> its value, which JSON can hold. Collective."""
        own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self.group.allgather([sizes], [torch.tensor([own.numel()])]).wait()
        most = max(int(size) for size in sizes)
        padded = torch.zeros(most, dtype=torch.uint8)
        padded[: own.numel()] = own
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        self.group.allgather([parts], [padded]).wait()
        return [json.loads(part[: int(size)].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]

    def barrier(self) -> None:
        """Waits for all ranks. Collective."""
        self.gather(None)

    def narrow(self, names: Sequence[str]) -> None:
        """Goes on without some nodes, whose ranks may then end. Collective. Args: names: of the nodes that stay."""
        self._still()
        self._names = [name for name in self._names if name in names]
        if self._node in self._names:
            self.rank = self._names.index(self._node) * self.per_node + self._local_rank
            self.size = len(self._names) * self.per_node
            self._form("those that stay")

    def part(self) -> None:
        """Comes to the point where all ranks may hang up. Collective."""
        self._still()

    def _still(self) -> None:
        """No rank watches another one from now on."""
        self.barrier()
        if self._ring is not None:
            self._ring.end()
        self.barrier()

    def ranks_of(self, nodes: Sequence[str]) -> list[int]:
        """The ranks of some nodes, in the order of the nodes."""
        return [self._names.index(name) * self.per_node + local for name in nodes for local in range(self.per_node)]

    def join(self, backend: str, order: Sequence[int]) -> None:
        """Makes the default process group. Collective over the ranks that it will have.

        Args: order: [rank of the layout] -> rank of the generation.
        """
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("world", self.store),
            rank=order.index(self.rank),
            world_size=len(order),
            timeout=timedelta(seconds=self._timeout_s),
        )

    def report_error(self, error: MMTrainError) -> None:
        """Leaves for the others why this rank ends the job."""
        with suppress(RuntimeError):
            self.store.set("reason", json.dumps([type(error).__name__, str(error)]))

    def reported_error(self) -> MMTrainError | None:
        """Why another rank ended the job, if one did."""
        with suppress(RuntimeError, ValueError, TypeError):
            if self.store.check(["reason"]):
                kind, text = json.loads(self.store.get("reason"))
                found = getattr(errors, str(kind), MMTrainError)
                return found(str(text)) if issubclass(found, MMTrainError) else MMTrainError(str(text))
        return None

    # ------------------------------------------------------------------------------------------- the end

    def hang_up(self) -> None:
        """Leaves at once, so that all others leave, too. From any thread; only the first call does something."""
        if self._gone.is_set():
            return
        self._gone.set()
        if self._ring is not None:
            self._ring.end()
        leave.hang_up(self._spared, self._ports)
        if torch.cuda.is_available():
            abort_device_groups()
        self._left()
        with suppress(RuntimeError):
            self.store.set("left", "")

    def end(self) -> None:
        """Ends groups and threads, once this rank has hung up."""
        end_all_groups()
        if self._ring is not None:
            self._ring.join()
        self._ring = self._group = None
