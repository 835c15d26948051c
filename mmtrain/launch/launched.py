"""The rank of this process in its job, by the variables that its launcher sets: RANK, WORLD_SIZE and so on. Pure."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from mmtrain.errors import ConfigError, shown

_NUMBERS = {
    "RANK": ("the number of this process in the job, from 0", 0),
    "WORLD_SIZE": ("the job's number of processes", 1),
    "LOCAL_RANK": ("the number of this process on its machine, from 0", 0),
    "LOCAL_WORLD_SIZE": ("the job's number of processes on this machine", 1),
    "MASTER_PORT": ("the port where the job's processes meet", 1),
    "OMP_NUM_THREADS": ("the number of threads of each process", 1),
}
"""Variable -> what it is, its least value."""
_BELOW = {"RANK": "WORLD_SIZE", "LOCAL_RANK": "LOCAL_WORLD_SIZE"}
"""Variable -> the one that must be above it."""
_MOST_PORT = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """The position of this process in its job; without a launcher it is the only one."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None
    """The processes of this machine; None: the launcher does not say."""

    @classmethod
    def from_environment(cls, variables: Mapping[str, str] = os.environ) -> "Launched":
        """What the launcher says.

        Raises: ConfigError: a variable is no whole number, or two of them contradict each other.
        """
        found = {
            name: whole_number(name, variables) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        }
        rank, world_size, local_rank, local_world_size = found.values()
        for name, other in _BELOW.items():
            value, limit = found[name], found[other]
            if value is not None and limit is not None and value >= limit:
                raise ConfigError(_says(name, value) + f"; it must be below {other} = {limit}. {_REMEDY}")
        if rank is not None and world_size is None:
            raise ConfigError(_says("RANK", rank) + ", but WORLD_SIZE is not set; set both, as torchrun does, or none")
        if world_size is not None and world_size > 1 and rank is None:
            raise ConfigError(
                _says("WORLD_SIZE", world_size) + ", but RANK is not set; set both, as torchrun does, or none"
            )
        if local_world_size is not None and local_world_size > (world_size or 1):
            where = _says("LOCAL_WORLD_SIZE", local_world_size)
            raise ConfigError(f"{where}; it must be at most WORLD_SIZE = {world_size or 1}. {_REMEDY}")
        return cls(
            rank=rank or 0,
            world_size=world_size or 1,
            local_rank=local_rank or 0,
            local_world_size=local_world_size,
        )


def local_world_size(world_size: int) -> int:
    """Ranks of the job on this machine; all of them if the launcher does not say it."""
    return Launched.from_environment().local_world_size or world_size


def meeting_point(variables: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Host and port where the processes of a launched job meet.

    Raises: ConfigError: a variable of them is missing or no port, or GLOO_SOCKET_IFNAME names no network interface.
    """
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not variables.get(name):
            size = variables.get("WORLD_SIZE")
            raise ConfigError(
                f"the environment says WORLD_SIZE = {size}, but {name} is not set; set it, as torchrun does, or unset "
                "WORLD_SIZE and RANK to run one process"
            )
    port = whole_number("MASTER_PORT", variables)
    if port is None or port > _MOST_PORT:
        raise ConfigError(_says("MASTER_PORT", port) + f"; a port is from 1 to {_MOST_PORT}. {_REMEDY}")
    interfaces = [name for _, name in socket.if_nameindex()]
    for name in filter(None, variables.get("GLOO_SOCKET_IFNAME", "").split(",")):
        if name not in interfaces:
            raise ConfigError(
                _says("GLOO_SOCKET_IFNAME", name) + f", but this machine ({socket.gethostname()}) has the network "
                f"interfaces {', '.join(interfaces)}; name the one that reaches the other machines, or unset it"
            )
    return variables["MASTER_ADDR"], port


def whole_number(name: str, variables: Mapping[str, str] = os.environ) -> int | None:
    """The whole number that a variable of `_NUMBERS` holds; None: it is not set, or empty.

    Raises: ConfigError: it holds something else.
    """
    text = variables.get(name, "")
    if not text:
        return None
    what, least = _NUMBERS[name]
    if not (text.isascii() and text.isdecimal() and len(text) < 10) or int(text) < least:
        raise ConfigError(
            _says(name, text) + f"; it is {what}, a whole number of at least {least}; correct or unset it"
        )
    return int(text)


_REMEDY = "torchrun sets these variables; correct them, or unset them to run one process"


def _says(name: str, value: object) -> str:
    return f"the environment says {name} = {shown(value)}"
