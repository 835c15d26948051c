"""Seconds of layers, transfers and the optimizer: the interface `CostModel`, and FLOPs over one rate. Pure."""

from dataclasses import dataclass, replace
from typing import Protocol, Self

from mmtrain.config.planner import DeviceConfig, PlannerConfig
from mmtrain.costs.noise import EXACT, Noise
from mmtrain.costs.overheads import NO_OVERHEADS, Overheads
from mmtrain.schedule.problem import P2P
from mmtrain.spec.layer import LayerSpec
from mmtrain.spec.recomputation import Recomputation
from mmtrain.spec.spec import ModuleSpec
from mmtrain.spec.work_size import WorkSize


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Seconds of one layer for one work, on one rank of the submesh (cp x tp ranks) that divides it."""

    forward_s: float = 0.0
    backward_input_s: float = 0.0
    """I: the backward without the weight gradients of linear layers and without recomputation."""
    backward_weight_s: float = 0.0
    """W: the weight gradients of linear layers; 0 for a frozen layer."""
    split_s: float = 0.0
    """The seconds that a split backward takes longer than a whole one, the forward included."""
    forward_exchange_s: float = 0.0
    """The part of `forward_s` that is exchanges of tensor parallelism; 0 if they are unknown."""
    backward_exchange_s: float = 0.0
    """The part of `backward_input_s` that is exchanges of tensor parallelism; 0 if they are unknown."""

    @property
    def deferred(self) -> "LayerTimes":
        """The times of a layer whose backward also does what the forward would."""
        return replace(
            self,
            forward_s=0.0,
            backward_input_s=self.backward_input_s + self.forward_s,
            forward_exchange_s=0.0,
            backward_exchange_s=self.backward_exchange_s + self.forward_exchange_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCopy:
    """The rate of copies of activations to host memory, or back."""

    bytes_per_s: float
    overlaps: bool = True
    """Copies run during compute (a GPU's copy engine), and cost time only if they take longer than it."""


PCIE = HostCopy(bytes_per_s=DeviceConfig().host_bytes_per_s)
"""The default where no measurement or profile is given."""


class CostModel(Protocol):
    """Seconds of layers, transfers and the optimizer on some hardware.

    Layers of a module whose specs differ only in their name take the same time. Several threads may use one model.
    """

    def layer(self, module: ModuleSpec, index: int, size: WorkSize, *, input_grad: bool) -> LayerTimes:
        """Seconds of the `index`-th layer of a module for a work of this size.

        Args:
            size: the whole work, before the ranks of a submesh divide it.
            input_grad: whether the layer's backward has to compute the gradient of its input. Without it a frozen layer
                has no backward.
        """
        ...

    def repeated_s(self, module: ModuleSpec, index: int, size: WorkSize, recomputation: Recomputation) -> float:
        """Seconds of the part of the forward that the layer's backward repeats."""
        ...

    def repeated_exchange_s(
        self, module: ModuleSpec, index: int, size: WorkSize, recomputation: Recomputation
    ) -> float:
        """The part of `repeated_s` that is exchanges of tensor parallelism; 0 if they are unknown."""
        ...

    @property
    def contention(self) -> float:
        """How far exchanges and compute at one time slow each other down, as in `Load`; 1 if it is unknown."""
        ...

    @property
    def overheads(self) -> Overheads:
        """Seconds of actions and messages in addition to layers and transfers."""
        ...

    @property
    def noise(self) -> Noise:
        """How far actual seconds lie from these."""
        ...

    @property
    def p2p(self) -> P2P:
        """Latency and rate of a transfer between two pipeline ranks."""
        ...

    @property
    def host_copy(self) -> HostCopy:
        """Rate of copies between a rank's device and host memory."""
        ...

    def step_s(self, num_params: int) -> float:
        """Seconds of the optimizer on a rank whose shard has `num_params` trainable parameters."""
        ...

    def without_exchanges(self) -> "CostModel | None":
        """The costs if collectives within layers took no time; None: they cannot be told apart."""
        ...


def equal_layers(module: ModuleSpec) -> list[int]:
    """[layer] -> the first layer of the module with an equal spec, names without their number: both cost the same."""
    first_index: dict[tuple[LayerSpec, str], int] = {}
    return [
        first_index.setdefault((replace(layer, name=""), layer.name.partition(".")[0]), index)
        for index, layer in enumerate(module.layers)
    ]


class ExchangesUnknown:
    """The part of a `CostModel` that tells exchanges from compute, of costs that know only their sum."""

    __slots__ = ()

    shares: int
    """Ranks of a stage's submesh (context x tensor parallel); several exchange within a layer."""

    def repeated_exchange_s(
        self, module: ModuleSpec, index: int, size: WorkSize, recomputation: Recomputation
    ) -> float:
        """Zero: exchanges are unknown."""
        return 0.0

    @property
    def contention(self) -> float:
        """One: exchanges are unknown, so none is hidden."""
        return 1.0

    def without_exchanges(self) -> Self | None:
        """These costs where one rank computes a layer; else None, as its seconds may contain exchanges."""
        return self if self.shares == 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopsCosts(ExchangesUnknown):
    """Seconds as FLOPs over one rate: exact up to a factor if every product has the same efficiency."""

    flops_per_s: float
    """Achieved floating-point operations a second of one rank."""
    p2p: P2P
    host_copy: HostCopy = PCIE
    overheads: Overheads = NO_OVERHEADS
    """The overheads, none by default: only FLOPs cost time."""
    noise: Noise = EXACT
    shares: int = 1
    """Ranks of a stage's submesh (context x tensor parallel), which divide each work evenly."""

    @classmethod
    def of(cls, section: PlannerConfig, shares: int = 1) -> "FlopsCosts":
        """The nominal device of a `[planner]` section."""
        return cls(
            flops_per_s=section.device.flops_per_s,
            p2p=P2P(latency_s=section.device.p2p_latency_s, bytes_per_s=section.device.p2p_bytes_per_s),
            host_copy=HostCopy(bytes_per_s=section.device.host_bytes_per_s),
            noise=Noise.uniform(section.search.noise),
            shares=shares,
        )

    def layer(self, module: ModuleSpec, index: int, size: WorkSize, *, input_grad: bool) -> LayerTimes:
        """Seconds of a layer; if W has nothing to do (a convolution, a head in pieces), I computes the weight
        gradients. A part of a head in pieces repeats its product."""
        layer = module.layers[index]
        flops = layer.flops(size, input_grad=input_grad)
        weight_flops = flops.backward_weight if layer.splits_backward else 0.0
        inside_flops = flops.backward_input
        if input_grad or layer.trainable:
            inside_flops += layer.repeated_flops(size)
        rate = self.flops_per_s * (1 if module.is_whole else self.shares)
        return LayerTimes(
            forward_s=flops.forward / rate,
            backward_input_s=(inside_flops + flops.backward_weight - weight_flops) / rate,
            backward_weight_s=weight_flops / rate,
        )

    def repeated_s(self, module: ModuleSpec, index: int, size: WorkSize, recomputation: Recomputation) -> float:
        """Seconds of the part of the forward that the layer's backward repeats."""
        layer = module.layers[index]
        repeated_share = recomputation.repeated_share(layer, size)
        return repeated_share * layer.flops(size).forward / (self.flops_per_s * self.shares)

    def step_s(self, num_params: int) -> float:
        """Zero: only the FLOPs of layers cost time."""
        return 0.0
