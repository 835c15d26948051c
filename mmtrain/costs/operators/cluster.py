"""Nodes of accelerators, and the seconds of transfers between them. Pure.

Global ranks fill one node after the other. Inside of a node every pair of accelerators has the full NVLink rate (a
switch). Between nodes each accelerator has its own network card, and cards with the same index in their nodes share a
switch (rails): a group with g ranks in each node uses g cards there, as NCCL's rings do.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mmtrain.costs.operators.hardware import DeviceLink, Hardware, hardware_names, load_hardware
from mmtrain.costs.operators.operator_graph import DeviceKind, OpKind, Phase
from mmtrain.errors import ConfigError

_CLUSTER = re.compile(r"(?P<hardware>.+?)x(?P<gpus>\d+)")

_SENT = {OpKind.ALL_GATHER: 1, OpKind.REDUCE_SCATTER: 1, OpKind.ALL_REDUCE: 2}
"""How many times each rank sends (n - 1) / n of a buffer."""


def sent_bytes(kind: OpKind, num_bytes: float, ranks: int) -> float:
    """Bytes that each rank sends in a collective whose whole buffer has `num_bytes`.

    A ring all-gather or reduce-scatter sends (n - 1) / n of it, an all-reduce twice that.
    Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, 2009.
    """
    return _SENT[kind] * num_bytes * (ranks - 1) / ranks


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal nodes of one kind of accelerator."""

    hardware: Hardware
    num_gpus: int
    """Total number in all nodes."""

    def __post_init__(self) -> None:
        per_node = self.hardware.gpus_per_node
        if self.num_gpus < 1 or (self.num_gpus > per_node and self.num_gpus % per_node):
            raise ConfigError(
                f"a cluster of {self.num_gpus} {self.hardware.name}: a node has {per_node} of them; take fewer than "
                "that, or a multiple"
            )

    @classmethod
    def of(cls, name: str, num_gpus: int = 1) -> "Cluster":
        """The cluster of a name such as `h800x16` (16 accelerators in nodes of 8) or `h800` (`num_gpus` of them).

        Args: num_gpus: number for a name without a number, rounded up to whole nodes.
        Raises: ConfigError: the hardware does not exist, or the number does not fill its nodes.
        """
        match = _CLUSTER.fullmatch(name)
        if match and (match["hardware"] in hardware_names() or match["hardware"].endswith(".toml")):
            return cls(hardware=load_hardware(match["hardware"]), num_gpus=int(match["gpus"]))
        hardware = load_hardware(name)
        per_node = hardware.gpus_per_node
        rounded_up = num_gpus if num_gpus <= per_node else -(-num_gpus // per_node) * per_node
        return cls(hardware=hardware, num_gpus=rounded_up)

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return -(-self.num_gpus // self.hardware.gpus_per_node)

    def device(self, ranks: Sequence[int]) -> DeviceKind:
        """The kind of link between some ranks: NVLink if one node holds them all, else the network."""
        nodes = {rank // self.hardware.gpus_per_node for rank in ranks}
        return DeviceKind.NVLINK if len(nodes) <= 1 else DeviceKind.NETWORK

    def link(self, ranks: Sequence[int]) -> DeviceLink:
        """Rate and latency at which each of some global ranks sends to the others.

        Over the network they use the cards of all their ranks in a node, but at most at the rate of NVLink.
        """
        device = self.device(ranks)
        link = self.hardware.links[device]
        if device is DeviceKind.NVLINK:
            return link
        per_node = self.hardware.gpus_per_node
        ranks_per_node = len(ranks) // len({rank // per_node for rank in ranks})
        nvlink_rate = self.hardware.links[DeviceKind.NVLINK].bytes_per_s
        rate = min(link.bytes_per_s * ranks_per_node, max(nvlink_rate, link.bytes_per_s))
        return DeviceLink(bytes_per_s=rate, latency_s=link.latency_s)

    def collective_s(self, kind: OpKind, num_bytes: float, ranks: Sequence[int]) -> float:
        """Seconds of a collective among some global ranks, whose whole buffer has `num_bytes`; 0 for one rank."""
        if len(ranks) < 2:
            return 0.0
        link = self.link(ranks)
        efficiency = self.hardware.efficiency_of(kind, Phase.FORWARD).network
        return link.latency_s + sent_bytes(kind, num_bytes, len(ranks)) / (link.bytes_per_s * efficiency)
