"""The machine on which a job's iterations are simulated: its network, peak rate and memory. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mmtrain.config.config import Config
from mmtrain.costs.cost_model import FlopsCosts
from mmtrain.costs.operators.cluster import Cluster, sent_bytes
from mmtrain.costs.operators.operator_graph import OpKind
from mmtrain.errors import ConfigError
from mmtrain.schedule.problem import P2P
from mmtrain.spec.builders import DTYPE_BYTES


class RankNetwork(Protocol):
    """The network between the ranks."""

    def collective_s(self, kind: OpKind, num_bytes: float, ranks: Sequence[int]) -> float:
        """Seconds of a collective among some global ranks, whose whole buffer has `num_bytes`; 0 for one rank."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NominalNetwork:
    """A network in which every rank sends to every other rank at one rate."""

    p2p: P2P

    def collective_s(self, kind: OpKind, num_bytes: float, ranks: Sequence[int]) -> float:
        """Seconds of a ring collective at full rate plus one latency; 0 for one rank."""
        if len(ranks) < 2:
            return 0.0
        return self.p2p.latency_s + sent_bytes(kind, num_bytes, len(ranks)) / self.p2p.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The network between the ranks, the peak rate and memory of a rank's device, and names for output."""

    name: str
    costs: str
    """The source of the seconds of layers, in a few words."""
    network: RankNetwork
    peak_flops: float | None
    """FLOP/s that MFU is measured against; None: unknown."""
    memory_bytes: float | None
    """Memory of one device; None: unknown."""

    @classmethod
    def of(cls, config: Config) -> "Machine":
        """The machine of a job: that of `planner.hardware`, or a nominal one.

        Raises: ConfigError: the hardware does not exist, its number of accelerators does not fit the job's ranks, or
            pipelines of unequal depth have a stage on several nodes.
        """
        section = config.planner
        costs = f"FLOPs over planner.device.flops_per_s = {section.device.flops_per_s:.3g}"
        if section.hardware:
            costs = "operators on the hardware's profile"
        if section.profile:
            costs = f"measured, {section.profile}"
        peak = config.metrics.peak_flops or None
        if not section.hardware:
            return cls(
                name="a nominal device",
                costs=costs,
                network=NominalNetwork(p2p=FlopsCosts.of(section).p2p),
                peak_flops=peak,
                memory_bytes=None,
            )
        world = config.parallelism.layout.world_size
        cluster = Cluster.of(section.hardware, world)
        hardware = cluster.hardware
        if not world <= cluster.num_gpus < world + hardware.gpus_per_node:
            raise ConfigError(
                f"planner.hardware = {section.hardware!r} (--cluster) has {cluster.num_gpus} accelerators, but the "
                f"degrees of [parallelism] make {world} ranks; change a degree, or name {hardware.name}x{world}"
            )
        config.parallelism.layout.check_nodes(hardware.gpus_per_node)
        dtype_bytes = DTYPE_BYTES[config.training.param_dtype]
        return cls(
            name=f"{hardware.name}x{cluster.num_gpus}",
            costs=costs,
            network=cluster,
            peak_flops=peak or hardware.flops_per_s(dtype_bytes),
            memory_bytes=hardware.memory_bytes,
        )
