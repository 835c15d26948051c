"""How the ranks of a job meet: in a store, which works before there are process groups, and where these do not."""

import os
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from mmtrain.config.sections import CommConfig
from mmtrain.errors import ConfigError, RankLostError
from mmtrain.launch.launched import Launched, meeting_point
from mmtrain.launch.processes import LOOPBACK

_START_S = 120.0
"""Ranks may start this long after each other, whatever comm.timeout_seconds says."""

_LONGEST_PAUSE_S = 0.25
"""The longest pause between two checks for a key, seconds."""

_LOOK_S = 1.0
"""How often a rank looks whether rank 0 has come later than itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long ranks wait for each other."""

    seconds: float
    rule: str
    """The key that sets it, for messages."""

    @classmethod
    def at_start(cls, comm: CommConfig) -> "Patience":
        """The patience before the first step: processes start, and rank 0 works alone, for longer than steps take."""
        if comm.timeout_seconds >= _START_S:
            return cls.later(comm)
        return cls(seconds=_START_S, rule="comm.timeout_seconds, but at least 120 before the first step")

    @classmethod
    def later(cls, comm: CommConfig) -> "Patience":
        """The patience from the first step on."""
        return cls(seconds=comm.timeout_seconds, rule="comm.timeout_seconds")


def meet(comm: CommConfig, store: dist.Store | None = None) -> dist.Store:
    """The store of this start of the job, in which all of its ranks have met.

    Args: store: where they meet; None: as the launcher's variables say. One process without a launcher is alone.
    Raises:
        ConfigError: the launcher's variables are wrong, or the port that they name is taken or cannot be reached.
        RankLostError: other ranks did not come; it names them.
    """
    launched, start_s = Launched.from_environment(), Patience.at_start(comm).seconds
    if store is None:
        store = _rendezvous(start_s) if launched.world_size > 1 else _alone()
    store.set_timeout(timedelta(seconds=start_s))
    return own_store(store, launched.rank, launched.world_size, start_s)


def _rendezvous(start_s: float) -> dist.Store:
    """The store that a launcher's variables name."""
    host, port = meeting_point()
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=start_s)))
    except (ValueError, dist.DistError) as error:
        given = ", ".join(f"{name}={os.environ.get(name, '')}" for name in ("RANK", "WORLD_SIZE"))
        raise ConfigError(
            f"the ranks cannot meet at {given}, MASTER_ADDR={host}, MASTER_PORT={port}: {str(error).splitlines()[0]}; "
            "is the port taken by another job, or the address wrong or behind a firewall?"
        ) from None
    return store


def _alone() -> dist.Store:
    os.environ.update(LOOPBACK)
    return dist.HashStore()


def own_store(store: dist.Store, rank: int, world_size: int, wait_s: float) -> dist.Store:
    """The part of a store that belongs to this start of the job, once all ranks of it have come.

    The store may have the keys of an earlier start: torchrun keeps it over a restart of the processes, and what it
    says of restarts differs between nodes. So rank 0 names this start at random, each other rank answers under that
    name with a random one of its own, and rank 0 repeats these. Nobody can repeat a name that was not yet given.

    Raises: RankLostError: naming the ranks that did not come.
    """
    store, own_name = dist.PrefixStore("mmtrain", store), uuid.uuid4().hex
    start = dist.PrefixStore(own_name, store)
    deadline = time.monotonic() + wait_s
    if rank == 0:
        store.set("start", own_name)
        others = [f"{other}" for other in range(1, world_size)]
        if not others or _has(start, others, wait_s):
            for other in others:
                start.set(start.get(other).decode(), "")
            return start
    while rank and (left_s := deadline - time.monotonic()) > 0 and _has(store, ["start"], left_s):
        start = dist.PrefixStore(store.get("start").decode(), store)
        start.set(f"{rank}", own_name)
        if _has(start, [own_name], min(_LOOK_S, left_s)):
            return start
    raise RankLostError(
        f"rank {rank} waited {wait_s:g} s for the job to start, but of its {world_size} ranks these did not come: "
        f"{_absent(store, start, rank, world_size)}; look for errors of their processes, and whether all machines "
        "reach each other"
    )


def _absent(store: dist.Store, start: dist.Store, rank: int, world_size: int) -> str:
    """The ranks that did not come, of which others know only through rank 0."""
    try:
        silent = [f"{other}" for other in range(1, world_size) if other != rank and not start.check([f"{other}"])]
        return ", ".join(silent) if silent and store.check(["start"]) else "0"
    except RuntimeError:
        return "0, or the store where they meet"


def _has(store: dist.Store, keys: list[str], wait_s: float) -> bool:
    """Whether a store gets all of these keys within so many seconds; False at once if it does not answer.

    It asks again and again: a wait in a store that ends without the keys prints lines of warnings.
    """
    deadline, pause_s = time.monotonic() + wait_s, 0.005
    try:
        while not store.check(keys):
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    except RuntimeError:  # each store raises another one
        return False
    return True
