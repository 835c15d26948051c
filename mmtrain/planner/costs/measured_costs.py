"""Costs from a measured profile. Pure."""

from dataclasses import dataclass, replace
from itertools import pairwise

from mmtrain.config.config import Config
from mmtrain.modality.submesh import Submesh
from mmtrain.planner.costs.cost_model import PCIE, FlopsCosts, HostCopy, LayerTimes
from mmtrain.planner.job_schedule import job_schedule
from mmtrain.planner.partition.partition import Partition
from mmtrain.planner.profile.profile import Profile, check_fits
from mmtrain.schedule.action import Kind
from mmtrain.schedule.problem import P2P
from mmtrain.spec.recomputation import Recomputation
from mmtrain.spec.spec import LayerSpec, ModelSpec, ModuleSpec, WorkSize


@dataclass(frozen=True, kw_only=True)
class MeasuredCosts:
    """Seconds of layers, actions and transfers from a profile: a `CostModel`."""

    profile: Profile
    p2p: P2P
    host_copy: HostCopy = PCIE
    splits_backward: bool = False
    """Whether the schedule splits backwards: layers that keep the tensors for W are a little slower."""
    transfers_per_action: float = 0.0
    """Sends and receives that a rank posts for each F (and each backward), on average."""
    several_ranks: bool = False
    """Whether there are several pipeline ranks."""
    shares: int = 1
    """Ranks of a stage's submesh; several exchange within the measured layers."""

    @classmethod
    def of(cls, config: Config, spec: ModelSpec, partition: Partition | None = None) -> "MeasuredCosts":
        """The costs of a job from the profile in the file `planner.profile`.

        A profile of one pipeline rank has no transfers; their latency and rate are then those of `[planner]`.

        Args: partition: None: actions post no transfer; see `on`.
        Raises:
            ConfigError: the profile belongs to another model, dtype or submesh of ranks.
            PlanError: the file cannot be read.
        """
        section = config.planner
        profile = Profile.read(section.profile)
        check_fits(profile, config, spec, section.profile)
        nominal, transfer = FlopsCosts.of(section), profile.transfer
        costs = cls(
            profile=profile,
            p2p=P2P(latency_s=transfer.latency_s, bytes_per_s=1 / transfer.byte_s) if transfer else nominal.p2p,
            host_copy=profile.host_copy or nominal.host_copy,
            splits_backward=job_schedule(config).splits_backward,
            several_ranks=config.parallelism.pipeline_parallel_degree > 1,
            shares=Submesh.of(config).size,
        )
        return costs if partition is None else costs.on(partition)

    def on(self, partition: Partition) -> "MeasuredCosts":
        """The same costs, with the transfers that actions post on a partition."""
        return replace(self, transfers_per_action=transfers_per_action(partition))

    def layer(self, module: ModuleSpec, index: int, size: WorkSize, *, input_grad: bool) -> LayerTimes:
        """Seconds of a layer as fitted.

        If the layer was measured with the gradient of its input and is needed without it, or the other way round, its
        backward is scaled by FLOPs.
        """
        layer = module.layers[index]
        fit = self.profile.layer(module.name, layer)
        if not (input_grad or layer.trainable):
            return LayerTimes(forward_s=fit.at("forward", size))
        if self.splits_backward:
            forward_s, input_s = fit.at("split_forward", size), fit.at("backward_input", size)
            weight_s = fit.at("backward_weight", size)
        else:
            backward_s = fit.at("backward", size)
            forward_s, weight_s = fit.at("forward", size), min(backward_s, fit.at("backward_weight", size))
            input_s = backward_s - weight_s
        input_s = max(0.0, input_s - self._repeated(layer, forward_s, size, self.profile.recomputation))
        if input_grad != fit.input_grad:
            wanted_flops, measured_flops = (
                layer.flops(size, input_grad=grad).backward_input for grad in (input_grad, fit.input_grad)
            )
            per_flop = forward_s / max(1.0, layer.flops(size).forward)
            input_s = input_s * wanted_flops / measured_flops if measured_flops else input_s + wanted_flops * per_flop
        return LayerTimes(forward_s=forward_s, backward_input_s=input_s, backward_weight_s=weight_s)

    def repeated_s(self, module: ModuleSpec, index: int, size: WorkSize, recomputation: Recomputation) -> float:
        """Seconds of the part of the layer's forward that recomputation repeats: as measured, else by FLOPs."""
        layer = module.layers[index]
        name = "split_forward" if self.splits_backward else "forward"
        return self._repeated(layer, self.profile.layer(module.name, layer).at(name, size), size, recomputation)

    def _repeated(self, layer: LayerSpec, forward_s: float, size: WorkSize, recomputation: Recomputation) -> float:
        if not recomputation.recomputes(layer):
            return 0.0
        measured = self.profile.repeats.get(recomputation.name)
        return forward_s * (recomputation.repeated_share(layer, size) if measured is None else measured)

    def action_s(self, kind: Kind) -> float:
        """Seconds of an action in addition to its layers; posting its transfers is included, of which W has none."""
        posted = self.profile.transfer.end_s * self.transfers_per_action if self.profile.transfer else 0.0
        return self.profile.actions.get(kind.value, 0.0) + (posted if kind is not Kind.W else 0.0)

    def step_s(self, num_params: int) -> float:
        """Seconds of the end of a step on a rank whose shard has `num_params` trainable parameters."""
        step = self.profile.step
        return step.fixed_s + step.param_s * num_params + (step.pipeline_s if self.several_ranks else 0.0)

    def without_exchanges(self) -> "MeasuredCosts | None":
        """These costs where one rank computes a layer; else None, as layers were measured with their exchanges."""
        return self if self.shares == 1 else None


def transfers_per_action(partition: Partition) -> float:
    """Sends and receives for each forward, on average over the chain of all stages in the order of the modules."""
    ranks = partition.stage_rank
    remote = sum(source != target for source, target in pairwise(ranks))
    return 2 * remote / len(ranks)
