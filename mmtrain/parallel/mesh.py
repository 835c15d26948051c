"""Process groups of one rank: built once, named by what their ranks share.

Device meshes are of the ranks of one stage: FSDP2 and tensor parallelism need no others. What pipelines share is in
`layer_sums`.
"""

import io
import pickle
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from mmtrain.config.config import Config
from mmtrain.config.device_choices import on_device
from mmtrain.config.sections import CommConfig
from mmtrain.config.topology import Coordinates, JobLayout
from mmtrain.errors import ConfigError
from mmtrain.launch.launched import Launched
from mmtrain.parallel.meeting import Patience
from mmtrain.parallel.torch_private import group_of_one


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


def on_own_device(config: Config) -> Config:
    """The configuration with what "auto" stands for on this machine's devices. Raises: ConfigError."""
    if not torch.cuda.is_available():
        return on_device(config, "cpu")
    return on_device(config, "cuda", bfloat16=torch.cuda.is_bf16_supported(including_emulation=False))


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

    layout: JobLayout
    rank: int
    place: Coordinates
    device: torch.device
    stage: DeviceMesh
    """The axes (fsdp, tp): the ranks of this rank's stage, where fsdp is dp_shard x cp."""
    pp_group: dist.ProcessGroup
    """Ranks that differ only in pp: one model replica's pipeline. Also carries its transfers on gloo."""
    pp_ranks: tuple[int, ...]
    """Global rank of each pp_rank of this replica."""
    replica_group: dist.ProcessGroup | None
    """Ranks of one model replica, pp x cp x tp: they run one program on one batch; None for one rank."""
    replica_ranks: tuple[int, ...]
    """The global ranks of the replica; the first is the leader."""
    submesh_group: dist.ProcessGroup | None
    """Ranks that differ only in cp or tp, cp outermost: the submesh of this pp_rank; None for one rank."""
    cp_group: dist.ProcessGroup | None
    """Ranks that differ only in cp; None for one."""
    encoder_mesh: DeviceMesh | None
    """The ranks dp_shard x cp x tp, where tp ranks hold whole encoders."""
    column: tuple[int, ...]
    """The global ranks at this rank's place in a stage, over all stages of all pipelines."""
    column_group: dist.ProcessGroup | None
    """These; None for one rank."""
    whole_rows: bool
    """Whether tp ranks each have all rows between layers."""
    channels: "Channels"

    @property
    def pp_rank(self) -> int:
        """Place in the pipeline."""
        return self.place.pp

    @property
    def dp_rank(self) -> int:
        """The replica whose data this rank reads."""
        return self.layout.dp_rank(self.rank)

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
        return self.stage["tp"]

    @property
    def replicas_group(self) -> dist.ProcessGroup | None:
        """All ranks of the job, where replicas read different data; None for one replica."""
        return dist.group.WORLD if self.layout.dp > 1 else None

    def fsdp(self, *, over_tp: bool = False) -> DeviceMesh:
        """The mesh that FSDP2 shards a module over: dp_shard x cp.

        Args: over_tp: x tp, for an encoder that each tp rank holds whole (`data_encoder`).
        """
        return self.encoder_mesh if over_tp and self.encoder_mesh is not None else self.stage["fsdp"]

    def broadcast_object(self, value: Any) -> Any:
        """The leader's value, on every rank of its replica. Collective over the replica."""
        return _broadcast(value, self.replica_ranks[0], self.replica_group, len(self.replica_ranks))

    def broadcast_over_submesh(self, value: Any) -> Any:
        """The value of the submesh's first rank, on all of its ranks. Collective over the submesh."""
        if self.submesh_group is None:
            return value
        first = replace(self.place, cp=0, tp=0)
        return _broadcast(value, self.layout.rank(first), self.submesh_group, self.layout.cp * self.layout.tp)

    def send_object(self, value: Any, pp_rank: int) -> None:
        """Sends a value to another rank of this pipeline, which must call `receive_object`."""
        box = [packed(value)]
        dist.send_object_list(box, dst=self.pp_ranks[pp_rank], group=self.pp_group, device=torch.device("cpu"))

    def receive_object(self, pp_rank: int) -> Any:
        """The value that another rank of this pipeline sends."""
        box: list[Any] = [None]
        dist.recv_object_list(box, src=self.pp_ranks[pp_rank], group=self.pp_group, device=torch.device("cpu"))
        return pickle.loads(box[0])


Hop = tuple[int, int]
"""Two pp_ranks (source, target), of which the first sends to the second."""

Route = tuple[dist.ProcessGroup, int]
"""A process group, and the rank in it of the other end of a transfer."""


class Channels:
    """The process group and the global peer rank of each directed transfer between pipeline ranks.

    gloo: one group serves all, since it matches by pair and keeps no order between directions. NCCL:
    a group for each directed pair between which a job's stages send (neighbours, if no job says which),
    so that no direction waits for another one; another pair uses the pipeline's group.
    """

    through_host: bool
    """Whether messages go through host memory: gloo sends no memory of a device from one rank to another."""

    def __init__(
        self,
        pp_ranks: tuple[int, ...],
        pp_group: dist.ProcessGroup,
        directed: dict[Hop, dist.ProcessGroup],
        *,
        through_host: bool = False,
    ) -> None:
        self.through_host = through_host
        self._pp_ranks = pp_ranks
        self._pp_group = pp_group
        self._directed = directed
        self._routes: dict[Hop, Route] = {}

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
    layout: JobLayout,
    device: torch.device,
    *,
    data_encoder: bool = False,
    whole_rows: bool = False,
    share_device: bool = False,
    hops: Sequence[Collection[Hop]] | None = None,
) -> Mesh:
    """All process groups of this rank. Every rank of the job must call it.

    Args:
        data_encoder: tensor-parallel ranks hold whole encoders (`parallelism.encoder_tensor_parallel = "data"`).
        whole_rows: they have all rows between layers (`parallelism.tensor_parallel_rows = "whole"`).
        share_device: all groups are gloo's (`comm.share_device`).
        hops: [pipeline] -> the directed pairs of its ranks that send (`Partition.hops`); None: neighbours, with the
            wrap-around of segments.
    """
    rank, pipelines = dist.get_rank(), layout.groups("pp")
    pp_group: dist.ProcessGroup | None = None
    for ranks in pipelines:  # every rank makes every group
        group = dist.new_group(list(ranks))
        pp_group = group if rank in ranks else pp_group
    assert pp_group is not None
    hops = [_neighbours(depth) for depth in layout.depths] if hops is None else hops
    directed = {} if device.type == "cpu" or share_device else _directed_groups(layout, rank, hops)
    pp_ranks = next(ranks for ranks in pipelines if rank in ranks)
    replica_ranks, replica_group = _join(layout, ("pp", "cp", "tp"), rank)
    _, submesh_group = _join(layout, ("cp", "tp"), rank)
    _, cp_group = _join(layout, ("cp",), rank)
    column, column_group = _join(layout, ("pipeline", "pp"), rank)
    stage_ranks, _ = stage = _join(layout, ("dp_shard", "cp", "tp"), rank)
    of_stage = torch.tensor(stage_ranks).view(-1, layout.tp)
    axes = [_join(layout, ("dp_shard", "cp"), rank), _join(layout, ("tp",), rank)]
    return Mesh(
        layout=layout,
        rank=rank,
        place=layout.coordinates(rank),
        device=device,
        stage=_device_mesh(axes, device, of_stage, ("fsdp", "tp")),
        pp_group=pp_group,
        pp_ranks=pp_ranks,
        replica_group=replica_group,
        replica_ranks=replica_ranks,
        submesh_group=submesh_group,
        cp_group=cp_group,
        encoder_mesh=_device_mesh([stage], device, of_stage.flatten(), ("fsdp",))
        if data_encoder and layout.tp > 1
        else None,
        column=column,
        column_group=column_group,
        whole_rows=whole_rows,
        channels=Channels(pp_ranks, pp_group, directed, through_host=share_device),
    )


def _device_mesh(
    axes: Sequence[tuple[tuple[int, ...], dist.ProcessGroup | None]],
    device: torch.device,
    ranks: torch.Tensor,
    names: tuple[str, ...],
) -> DeviceMesh:
    """A device mesh of groups that exist. Args: axes: this rank's ranks and group along each axis; ranks: of all."""
    groups = [group or group_of_one() for _, group in axes]
    return DeviceMesh.from_group(
        groups if len(groups) > 1 else groups[0],
        device.type,
        mesh=ranks,
        mesh_dim_names=names,
    )


def _neighbours(depth: int) -> set[Hop]:
    """The directed pairs of neighbours in a pipeline, the last and the first rank included."""
    return {(s, t % depth) for s in range(depth) for t in (s + 1, s - 1) if depth > 1}


def _directed_groups(layout: JobLayout, rank: int, hops: Sequence[Collection[Hop]]) -> dict[Hop, dist.ProcessGroup]:
    """Each hop of this rank's pipeline -> its group. Collective over the job, in one order on all ranks.

    Args: hops: [pipeline] -> its directed pairs.
    """
    directed: dict[Hop, dist.ProcessGroup] = {}
    for ranks in layout.groups("pp"):
        for source, target in sorted(hops[layout.coordinates(ranks[0]).pipeline]):
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
    for ranks in mesh.layout.groups("pp", "cp", "tp"):
        if len(ranks) > 1:
            group = dist.new_group(list(ranks), timeout=timeout, backend="gloo")
            own_group = group if mesh.rank in ranks else own_group
    return own_group


def _join(layout: JobLayout, axes: tuple[str, ...], rank: int) -> tuple[tuple[int, ...], dist.ProcessGroup | None]:
    """This rank's group along some axes, None for a group of one. Collective: every rank makes every group."""
    joined = None
    for ranks in layout.groups(*axes):
        if len(ranks) == layout.world_size > 1:
            return ranks, dist.group.WORLD
        group = dist.new_group(list(ranks)) if len(ranks) > 1 else None
        if rank in ranks:
            joined = ranks, group
    assert joined is not None
    return joined


def _broadcast(value: Any, source: int, group: dist.ProcessGroup, size: int) -> Any:
    if size == 1:
        return value
    box = [packed(value) if dist.get_rank() == source else None]
    dist.broadcast_object_list(box, src=source, group=group, device=torch.device("cpu"))
    assert box[0] is not None
    return pickle.loads(box[0])


def packed(value: Any) -> bytes:
    """A value for `pickle.loads`, with the numbers of its tensors alone.

    torch's own way to pickle a tensor writes an archive with all of its storage: for 32 clips that share one, 32 times
    all of them.
    """
    file = io.BytesIO()
    _Pickler(file, protocol=5).dump(value)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) is Tensor and value.device.type == "cpu" and value.dtype is not torch.bfloat16:
            return torch.from_numpy, (value.detach().numpy(),)
        return NotImplemented
