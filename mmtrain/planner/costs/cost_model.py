"""What layers, transfers and the end of a step take: the interface, and plain FLOPs over one rate. Pure."""

from dataclasses import dataclass, replace
from typing import Protocol

from mmtrain.config.sections import PlannerConfig
from mmtrain.schedule.action import Kind
from mmtrain.schedule.problem import P2P
from mmtrain.spec.recomputation import Recomputation
from mmtrain.spec.spec import LayerSpec, ModuleSpec, WorkSize


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Seconds of one layer for one work, on one rank of the submesh (cp x tp ranks) that shares it."""

    forward_s: float = 0.0
    backward_input_s: float = 0.0
    """I: all of the backward but the weight gradients of linear layers; nothing that is recomputed."""
    backward_weight_s: float = 0.0
    """W: the weight gradients of linear layers; of a frozen layer 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCopy:
    """What it takes to move activations to host memory, or back."""

    bytes_per_s: float
    overlaps: bool = True
    """Copies run beside compute (a GPU's copy engine), and cost time only where they take longer."""

    def with_compute_s(self, compute_s: float, num_bytes: float) -> float:
        """Seconds of compute and so many bytes of copies together."""
        copies_s = num_bytes / self.bytes_per_s
        return max(compute_s, copies_s) if self.overlaps else compute_s + copies_s


PCIE = HostCopy(bytes_per_s=PlannerConfig().host_bytes_per_s)
"""Where nothing else is known."""


class CostModel(Protocol):
    """What layers, transfers and the end of a step take on some hardware.

    Layers of a module whose specs differ in their name alone take the same.
    """

    def layer(self, module: ModuleSpec, index: int, size: WorkSize, *, input_grad: bool) -> LayerTimes:
        """Seconds of the `index`-th layer of a module for a work of this size.

        Args:
            size: the whole work, before the ranks of a submesh share it.
            input_grad: whether a gradient has to leave the layer towards what comes before it. Without it a frozen
                layer has no backward.
        """
        ...

    def repeated_s(self, module: ModuleSpec, index: int, size: WorkSize, recomputation: Recomputation) -> float:
        """Seconds of the forward that the layer's backward does again."""
        ...

    def action_s(self, kind: Kind) -> float:
        """Fixed seconds that each compute action of this kind costs beside its layers (dispatch)."""
        ...

    @property
    def p2p(self) -> P2P:
        """What a transfer between two pipeline ranks takes."""
        ...

    @property
    def host_copy(self) -> HostCopy:
        """What copies between a rank's device and host memory take."""
        ...

    def step_s(self, num_params: int) -> float:
        """Seconds of the optimizer on a rank that updates so many parameters (those of its own shard)."""
        ...


def equal_layers(module: ModuleSpec) -> list[int]:
    """[layer] -> the first layer of the module that equals it but for its number: they cost the same."""
    first: dict[tuple[LayerSpec, str], int] = {}
    return [
        first.setdefault((replace(layer, name=""), layer.name.partition(".")[0]), index)
        for index, layer in enumerate(module.layers)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopsCosts:
    """Seconds as FLOPs over one rate: right up to a factor where every product runs equally well."""

    flops_per_s: float
    """Achieved floating-point operations a second of one rank."""
    p2p: P2P
    host_copy: HostCopy = PCIE
    shares: int = 1
    """Ranks of a stage's submesh (context x tensor parallel), which divide each work evenly."""

    @classmethod
    def of(cls, section: PlannerConfig, shares: int = 1) -> "FlopsCosts":
        """The nominal device of a `[planner]` section."""
        return cls(
            flops_per_s=section.flops_per_s,
            p2p=P2P(latency_s=section.p2p_latency_s, bytes_per_s=section.p2p_bytes_per_s),
            host_copy=HostCopy(bytes_per_s=section.host_bytes_per_s),
            shares=shares,
        )

    def layer(self, module: ModuleSpec, index: int, size: WorkSize, *, input_grad: bool) -> LayerTimes:
        """Seconds of a layer; of a layer without linear layers (a convolution) I makes the weight gradients."""
        layer = module.layers[index]
        flops = layer.flops(size, input_grad=input_grad)
        later = flops.backward_weight if layer.splits_backward else 0.0
        rate = self.flops_per_s * (1 if module.is_whole else self.shares)
        return LayerTimes(
            forward_s=flops.forward / rate,
            backward_input_s=(flops.backward_input + flops.backward_weight - later) / rate,
            backward_weight_s=later / rate,
        )

    def repeated_s(self, module: ModuleSpec, index: int, size: WorkSize, recomputation: Recomputation) -> float:
        """Seconds of the forward that the layer's backward does again."""
        layer = module.layers[index]
        share = recomputation.repeated_share(layer, size)
        return share * layer.flops(size).forward / (self.flops_per_s * self.shares)

    def action_s(self, kind: Kind) -> float:
        """0: only FLOPs cost time."""
        return 0.0

    def step_s(self, num_params: int) -> float:
        """0: only the FLOPs of layers cost time."""
        return 0.0
