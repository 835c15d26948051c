"""Costs from a measured profile. Pure."""

from dataclasses import dataclass
from functools import cached_property

from mmtrain.config.config import Config
from mmtrain.costs.cost_model import PCIE, ExchangesUnknown, FlopsCosts, HostCopy, LayerTimes
from mmtrain.costs.noise import Noise
from mmtrain.costs.overheads import Overheads
from mmtrain.costs.profile.profile import SPLIT_TIMES, Profile, check_fits, role
from mmtrain.modality.submesh import Submesh
from mmtrain.schedule.problem import P2P
from mmtrain.spec.builders import DTYPE_BYTES, model_spec
from mmtrain.spec.layer import LayerSpec
from mmtrain.spec.recomputation import Recomputation
from mmtrain.spec.spec import ModelSpec, ModuleSpec
from mmtrain.spec.work_size import WorkSize


@dataclass(frozen=True, kw_only=True)
class MeasuredCosts(ExchangesUnknown):
    """Seconds of layers, actions and transfers from a profile: a `CostModel`.

    A profile has the layers of a whole vocabulary. A part of it takes the fraction of their seconds that its rows are
    of all rows; what adds and joins such parts, and the norm before the head, are in these seconds.
    """

    profile: Profile
    p2p: P2P
    host_copy: HostCopy = PCIE
    several_ranks: bool = False
    """Whether there are several pipeline ranks."""
    shares: int = 1
    """Ranks of a stage's submesh; several exchange within the measured layers."""

    @classmethod
    def of(cls, config: Config, spec: ModelSpec) -> "MeasuredCosts":
        """The costs of a job from the profile in the file `planner.profile`.

        A profile of one pipeline rank has no transfers; their latency and rate are then those of `[planner]`.

        Raises:
            ConfigError: the profile belongs to another model, dtype or submesh of ranks.
            PlanError: the file cannot be read.
        """
        section = config.planner
        profile = Profile.read(section.profile)
        whole = model_spec(config.model, dtype_bytes=DTYPE_BYTES[config.training.param_dtype])
        check_fits(profile, config, whole if spec.divides_vocabulary else spec, section.profile)
        nominal, transfer = FlopsCosts.of(section), profile.transfer
        return cls(
            profile=profile,
            p2p=P2P(latency_s=transfer.latency_s, bytes_per_s=1 / transfer.byte_s) if transfer else nominal.p2p,
            host_copy=profile.host_copy or nominal.host_copy,
            several_ranks=config.parallelism.pipeline_parallel_degree > 1,
            shares=Submesh.of(config).size,
        )

    def layer(self, module: ModuleSpec, index: int, size: WorkSize, *, input_grad: bool) -> LayerTimes:
        """Seconds of a layer as fitted; a split backward is slower where keeping the tensors for W takes time.

        If the layer was measured with the gradient of its input and is needed without it, or the other way round, its
        backward is scaled by FLOPs.
        """
        layer, rows = module.layers[index], module.vocabulary
        if not layer.is_block and (module.section, role(layer)) not in self._measured:
            return LayerTimes()
        fit = self.profile.layer(module.section, layer)
        share = (rows.last - rows.first) / rows.total if rows else 1.0

        def at(name: str) -> float:
            return share * fit.at(name, size)

        if not (input_grad or layer.trainable):
            return LayerTimes(forward_s=at("forward"))
        forward_s, backward_s, weight_s = map(at, ("forward", "backward", "backward_weight"))
        split_s = sum(map(at, SPLIT_TIMES)) - forward_s - backward_s if weight_s else 0.0
        weight_s = min(backward_s, weight_s)
        input_s = backward_s - weight_s
        if not layer.trainable:  # measured as one of its module's layers that train
            weight_s = split_s = 0.0
        input_s = max(0.0, input_s - self._repeated(layer, forward_s, size, self.profile.recomputation))
        if input_grad != fit.input_grad:
            wanted_flops, measured_flops = (
                layer.flops(size, input_grad=grad).backward_input for grad in (input_grad, fit.input_grad)
            )
            per_flop = forward_s / max(1.0, layer.flops(size).forward)
            input_s = input_s * wanted_flops / measured_flops if measured_flops else input_s + wanted_flops * per_flop
        return LayerTimes(
            forward_s=forward_s, backward_input_s=input_s, backward_weight_s=weight_s, split_s=max(0.0, split_s)
        )

    @cached_property
    def _measured(self) -> frozenset[tuple[str, str]]:
        """Module and role of each measured layer; all but those that a division of the vocabulary adds."""
        return frozenset((layer.module, layer.role) for layer in self.profile.layers)

    def repeated_s(self, module: ModuleSpec, index: int, size: WorkSize, recomputation: Recomputation) -> float:
        """Seconds of the part of the layer's forward that recomputation repeats: as measured, else by FLOPs."""
        layer = module.layers[index]
        if not recomputation.recomputes(layer):
            return 0.0
        return self._repeated(layer, self.profile.layer(module.name, layer).at("forward", size), size, recomputation)

    def _repeated(self, layer: LayerSpec, forward_s: float, size: WorkSize, recomputation: Recomputation) -> float:
        if not recomputation.recomputes(layer):
            return 0.0
        measured = self.profile.repeats.get(recomputation.name)
        return forward_s * (recomputation.repeated_share(layer, size) if measured is None else measured)

    @property
    def overheads(self) -> Overheads:
        """Seconds of actions and messages, as measured."""
        return self.profile.overheads

    @property
    def noise(self) -> Noise:
        """The residuals of the profile's fits."""
        return self.profile.noise

    def step_s(self, num_params: int) -> float:
        """Seconds of the end of a step on a rank whose shard has `num_params` trainable parameters."""
        step = self.profile.step
        return step.fixed_s + step.param_s * num_params + (step.pipeline_s if self.several_ranks else 0.0)
