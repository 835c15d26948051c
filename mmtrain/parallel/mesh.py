"""Process groups of one rank: built once, named by mesh axis."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mmtrain.config.sections import CommConfig
from mmtrain.config.topology import AXES, Coordinates, MeshShape
from mmtrain.errors import ConfigError
from mmtrain.launch.launched import Launched
from mmtrain.parallel.meeting import Patience
from mmtrain.parallel.titan import ParallelDims, parallel_dims


def pick_device(comm: CommConfig) -> torch.device:
    """This process's device: its own CUDA device (with `comm.share_device`: one of them), or the CPU where none is.

    Raises: ConfigError: more processes on this machine than CUDA devices, on each of them if the launcher says so.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    launched, count = Launched.from_environment(), torch.cuda.device_count()
    num_processes = launched.local_world_size or launched.local_rank + 1
    if num_processes > count and not comm.share_device:
        raise ConfigError(
            f"{num_processes} processes on this machine, but it has {count} CUDA devices and each takes its own; start "
            "fewer processes a machine, set comm.share_device = true to try a layout on fewer devices, or hide the "
            "devices with CUDA_VISIBLE_DEVICES= to run on the CPU"
        )
    return torch.device("cuda", launched.local_rank % count)


def backend_of(comm: CommConfig, device: torch.device) -> str:
    """The backend of process groups: gloo carries CPU tensors, NCCL those of a device that is not shared."""
    return "gloo" if device.type == "cpu" or comm.share_device else "cpu:gloo,cuda:nccl"


def init_process_group(comm: CommConfig, device: torch.device, store: dist.Store) -> None:
    """Joins the job's default process group, with the patience of the start.

    Args: store: where the ranks have met (`meet`).
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    launched, timeout = Launched.from_environment(), timedelta(seconds=Patience.at_start(comm).seconds)
    backend = backend_of(comm, device)
    dist.init_process_group(backend, timeout=timeout, store=store, rank=launched.rank, world_size=launched.world_size)


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The coordinates of this rank, and a process group for every axis that communicates."""

    shape: MeshShape
    rank: int
    place: Coordinates
    device: torch.device
    dims: ParallelDims
    pp_group: dist.ProcessGroup
    """Ranks that differ only in pp: one model replica's pipeline. Also carries its transfers on gloo."""
    pp_ranks: tuple[int, ...]
    """Global rank of each pp_rank of this replica."""
    replica_group: dist.ProcessGroup | None
    """Ranks of one model replica, pp x cp x tp: they run one program on one batch; None for one rank."""
    replica_ranks: tuple[int, ...]
    """Their global ranks; the first is the leader."""
    submesh_group: dist.ProcessGroup | None
    """Ranks that differ only in cp or tp, cp outermost: the submesh of this pp_rank; None for one rank."""
    cp_group: dist.ProcessGroup | None
    """Ranks that differ only in cp; None for one."""
    encoder_mesh: DeviceMesh | None
    """(pp, dp_replicate, dp_shard x cp x tp), where tp ranks hold whole encoders."""
    batch_group: dist.ProcessGroup | None
    """Ranks that read different data and hold the same stages; None for one replica."""
    whole_rows: bool
    """Whether tp ranks each have all rows between layers."""
    channels: "Channels"
    tie_group: dist.ProcessGroup | None
    """The pp_ranks of this replica that hold the language model's first and last stage, which may share the tied
    embedding; None on others, and where they are one."""

    @property
    def pp_rank(self) -> int:
        """Place in the pipeline."""
        return self.place.pp

    @property
    def dp_rank(self) -> int:
        """Which replica's data this rank reads."""
        return self.shape.dp_rank(self.rank)

    @property
    def is_leader(self) -> bool:
        """Whether this rank reads the data of its replica."""
        return self.place.pp == 0 and self.place.cp == 0 and self.place.tp == 0

    @property
    def data_encoder(self) -> bool:
        """Whether each tp rank holds the whole encoder."""
        return self.encoder_mesh is not None

    @property
    def tp(self) -> DeviceMesh:
        """The tensor-parallel mesh; only for a degree above 1."""
        return self.dims.get_mesh("tp")

    def fsdp(self, *, over_tp: bool = False) -> DeviceMesh:
        """The mesh that FSDP2 shards a module over: dp_shard x cp, with dp_replicate before it for HSDP.

        Args: over_tp: x tp, for an encoder that each tp rank holds whole (`data_encoder`).
        """
        if over_tp and self.encoder_mesh is not None:
            hybrid = self.shape.dp_replicate > 1
            return self.encoder_mesh["dp_replicate", "fsdp"] if hybrid else self.encoder_mesh["fsdp"]
        axes = ["dp_replicate", "fsdp"] if self.shape.dp_replicate > 1 else ["fsdp"]
        return self.dims.get_mesh(axes if len(axes) > 1 else axes[0])

    def broadcast_object(self, value: Any) -> Any:
        """The leader's value, on every rank of its replica. Collective over the replica."""
        return _broadcast(value, self.replica_ranks[0], self.replica_group, len(self.replica_ranks))

    def broadcast_over_submesh(self, value: Any) -> Any:
        """The value of the submesh's first rank, on all of its ranks. Collective over the submesh."""
        if self.submesh_group is None:
            return value
        first = Coordinates(pp=self.place.pp, dp_replicate=self.place.dp_replicate, dp_shard=self.place.dp_shard)
        return _broadcast(value, self.shape.rank(first), self.submesh_group, self.shape.cp * self.shape.tp)

    def send_object(self, value: Any, pp_rank: int) -> None:
        """Sends a value to another rank of this pipeline, which must call `receive_object`."""
        dist.send_object_list([value], dst=self.pp_ranks[pp_rank], group=self.pp_group, device=torch.device("cpu"))

    def receive_object(self, pp_rank: int) -> Any:
        """The value that another rank of this pipeline sends."""
        box: list[Any] = [None]
        dist.recv_object_list(box, src=self.pp_ranks[pp_rank], group=self.pp_group, device=torch.device("cpu"))
        return box[0]


Route = tuple[dist.ProcessGroup, int]
"""A process group, and the rank in it of the other end of a transfer."""


class Channels:
    """The process group and the global peer rank of each directed transfer between pipeline ranks.

    gloo: one group serves all, since it matches by pair and keeps no order between directions. NCCL:
    a group for each directed pair of neighbours (with the wrap-around that segments and modules use),
    so that the two directions never wait for each other; another pair uses the pipeline's group.
    """

    through_host: bool
    """Whether messages go through host memory: gloo sends no memory of a device from one rank to another."""

    def __init__(
        self,
        pp_ranks: tuple[int, ...],
        pp_group: dist.ProcessGroup,
        directed: dict[tuple[int, int], dist.ProcessGroup],
        *,
        through_host: bool = False,
    ) -> None:
        self.through_host = through_host
        self._pp_ranks = pp_ranks
        self._pp_group = pp_group
        self._directed = directed
        self._routes: dict[tuple[int, int], Route] = {}

    def route(self, source: int, target: int, *, pp_rank: int) -> Route:
        """The group that carries transfers from one pp_rank to another, and the rank in it of the other end.

        Args: pp_rank: of this process, one of the two.
        """
        if (source, target) not in self._routes:
            group, peer = self.group(source, target), target if pp_rank == source else source
            self._routes[source, target] = group, dist.get_group_rank(group, self.global_rank(peer))
        return self._routes[source, target]

    def group(self, source: int, target: int) -> dist.ProcessGroup:
        """The group that carries transfers from one pp_rank to another."""
        return self._directed.get((source, target), self._pp_group)

    def global_rank(self, pp_rank: int) -> int:
        """The job-wide rank of a pp_rank."""
        return self._pp_ranks[pp_rank]


def build_mesh(
    shape: MeshShape,
    device: torch.device,
    *,
    data_encoder: bool = False,
    whole_rows: bool = False,
    tie_ranks: tuple[int, int] = (0, -1),
    share_device: bool = False,
) -> Mesh:
    """All process groups of this rank. Every rank of the job must call it.

    Args:
        data_encoder: tensor-parallel ranks hold whole encoders (`parallelism.encoder_tensor_parallel = "data"`).
        whole_rows: they have all rows between layers (`parallelism.tensor_parallel_rows = "whole"`).
        tie_ranks: pp_ranks of the language model's first and last stage; the last may be counted from the end.
        share_device: all groups are gloo's (`comm.share_device`).
    """
    rank = dist.get_rank()
    dims = parallel_dims(shape)
    coordinates = shape.coordinates(rank)
    pipelines = _groups(shape, ("pp",))
    first, last = (pp_rank % shape.pp for pp_rank in tie_ranks)
    pp_group: dist.ProcessGroup | None = None
    tie_group: dist.ProcessGroup | None = None
    for ranks in pipelines:  # every rank makes every group
        group = dist.new_group(list(ranks))
        tie = dist.new_group([ranks[first], ranks[last]]) if first != last else None
        if rank in ranks:
            pp_group = group
        if rank in (ranks[first], ranks[last]):
            tie_group = tie
    directed = {} if device.type == "cpu" or share_device else _directed_groups(pipelines, rank)
    replica_ranks, replica_group = _join(shape, ("pp", "cp", "tp"), rank)
    _, submesh_group = _join(shape, ("cp", "tp"), rank)
    _, cp_group = _join(shape, ("cp",), rank)
    encoder_mesh = None
    if data_encoder and shape.tp > 1:
        degrees = (shape.pp, shape.dp_replicate, shape.dp_shard * shape.cp * shape.tp)
        encoder_mesh = init_device_mesh(device.type, degrees, mesh_dim_names=("pp", "dp_replicate", "fsdp"))
    pp_ranks = next(ranks for ranks in pipelines if rank in ranks)
    assert pp_group is not None
    return Mesh(
        shape=shape,
        rank=rank,
        place=coordinates,
        device=device,
        dims=dims,
        pp_group=pp_group,
        pp_ranks=pp_ranks,
        replica_group=replica_group,
        replica_ranks=replica_ranks,
        submesh_group=submesh_group,
        cp_group=cp_group,
        encoder_mesh=encoder_mesh,
        whole_rows=whole_rows,
        batch_group=dims.get_mesh("batch").get_group() if shape.dp > 1 else None,
        channels=Channels(pp_ranks, pp_group, directed, through_host=share_device),
        tie_group=tie_group,
    )


def _directed_groups(pipelines: Sequence[tuple[int, ...]], rank: int) -> dict[tuple[int, int], dist.ProcessGroup]:
    """(source, target) of neighbouring pp_ranks -> their group in this rank's pipeline. Collective over the job."""
    directed: dict[tuple[int, int], dist.ProcessGroup] = {}
    for ranks in pipelines:
        hops = {(s, t % len(ranks)) for s in range(len(ranks)) for t in (s + 1, s - 1) if len(ranks) > 1}
        for source, target in sorted(hops):
            pair = dist.new_group([ranks[source], ranks[target]])
            if rank in ranks:
                directed[source, target] = pair
    return directed


def second_replica_group(mesh: Mesh, timeout: timedelta) -> dist.ProcessGroup | None:
    """Another group of the ranks of this replica, on gloo for any device, for another thread: collectives of two
    threads on one group would be paired by their order. None for one rank. Every rank of the job must call it.

    Args: timeout: of a collective on it.
    """
    own_group = None
    for ranks in _groups(mesh.shape, ("pp", "cp", "tp")):
        if len(ranks) > 1:
            group = dist.new_group(list(ranks), timeout=timeout, backend="gloo")
            own_group = group if mesh.rank in ranks else own_group
    return own_group


def _groups(shape: MeshShape, axes: tuple[str, ...]) -> list[tuple[int, ...]]:
    """The global ranks of each group of ranks that differ only in these axes, in rank order."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(shape.world_size):
        coordinates = shape.coordinates(rank)
        groups.setdefault(tuple(getattr(coordinates, axis) for axis in AXES if axis not in axes), []).append(rank)
    return [tuple(ranks) for ranks in groups.values()]


def _join(shape: MeshShape, axes: tuple[str, ...], rank: int) -> tuple[tuple[int, ...], dist.ProcessGroup | None]:
    """This rank's group along some axes, None for a group of one. Collective: every rank makes every group."""
    joined = None
    for ranks in _groups(shape, axes):
        if len(ranks) == shape.world_size > 1:
            return ranks, dist.group.WORLD
        group = dist.new_group(list(ranks)) if len(ranks) > 1 else None
        if rank in ranks:
            joined = ranks, group
    assert joined is not None
    return joined


def _broadcast(value: Any, source: int, group: dist.ProcessGroup, size: int) -> Any:
    if size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=source, group=group, device=torch.device("cpu"))
    return box[0]
