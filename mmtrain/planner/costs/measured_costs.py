"""Costs from a measured profile. Pure."""

from dataclasses import dataclass, replace
from itertools import pairwise

from mmtrain.config.config import Config
from mmtrain.planner.costs.cost_model import PCIE, HostCopy, LayerTimes
from mmtrain.planner.partition.partition import Partition
from mmtrain.planner.plan import job_schedule
from mmtrain.planner.profile.profile import Profile, check_fits
from mmtrain.schedule.action import Kind
from mmtrain.schedule.problem import P2P
from mmtrain.spec.recomputation import Recomputation
from mmtrain.spec.spec import LayerSpec, ModelSpec, ModuleSpec, WorkSize


@dataclass(frozen=True, kw_only=True)
class MeasuredCosts:
    """What a profile says that layers, actions and transfers take: a `CostModel`."""

    profile: Profile
    p2p: P2P
    host_copy: HostCopy = PCIE
    splits_backward: bool = False
    """Whether the schedule splits backwards: layers that keep what W needs are a little slower."""
    transfers_per_action: float = 0.0
    """Ends of transfers that a rank posts for each F (and each backward)."""
    several_ranks: bool = False
    """Whether there are several pipeline ranks."""

    @classmethod
    def of(cls, config: Config, spec: ModelSpec, partition: Partition | None = None) -> "MeasuredCosts":
        """The costs of a job from the file that its planner.profile names.

        A profile of one pipeline rank has no transfers: those are then as `[planner]` says.

        Args: partition: None: actions post no transfer; see `on`.
        Raises:
            ConfigError: the profile is of another model, dtype or submesh of ranks.
            PlanError: the file cannot be read.
        """
        section = config.planner
        profile = Profile.read(section.profile)
        check_fits(profile, config, spec, section.profile)
        p2p = P2P(latency_s=section.p2p_latency_s, bytes_per_s=section.p2p_bytes_per_s)
        if profile.transfer:
            p2p = P2P(latency_s=profile.transfer.latency_s, bytes_per_s=1 / profile.transfer.byte_s)
        found = cls(
            profile=profile,
            p2p=p2p,
            host_copy=profile.host_copy or HostCopy(bytes_per_s=section.host_bytes_per_s),
            splits_backward=job_schedule(config).splits_backward,
            several_ranks=config.parallelism.pipeline_parallel_degree > 1,
        )
        return found if partition is None else found.on(partition)

    def on(self, partition: Partition) -> "MeasuredCosts":
        """The same costs, where actions post the transfers of a partition."""
        return replace(self, transfers_per_action=transfers_per_action(partition))

    def layer(self, module: ModuleSpec, index: int, size: WorkSize, *, input_grad: bool) -> LayerTimes:
        """Seconds of a layer as fitted. Measured with the gradient of its input where that is not wanted, or the other
        way round, its backward is scaled by FLOPs."""
        layer = module.layers[index]
        found = self.profile.layer(module.name, layer)
        if not (input_grad or layer.trainable):
            return LayerTimes(forward_s=found.at("forward", size))
        if self.splits_backward:
            forward, inside = found.at("split_forward", size), found.at("backward_input", size)
            later = found.at("backward_weight", size)
        else:
            whole = found.at("backward", size)
            forward, later = found.at("forward", size), min(whole, found.at("backward_weight", size))
            inside = whole - later
        inside = max(0.0, inside - self._repeated(layer, forward, size, self.profile.recomputation))
        if input_grad != found.input_grad:
            ours, theirs = (layer.flops(size, input_grad=g).backward_input for g in (input_grad, found.input_grad))
            per_flop = forward / max(1.0, layer.flops(size).forward)
            inside = inside * ours / theirs if theirs else inside + ours * per_flop
        return LayerTimes(forward_s=forward, backward_input_s=inside, backward_weight_s=later)

    def repeated_s(self, module: ModuleSpec, index: int, size: WorkSize, recomputation: Recomputation) -> float:
        """The part of the layer's forward that recomputation repeats: as measured, or else by FLOPs."""
        layer = module.layers[index]
        name = "split_forward" if self.splits_backward else "forward"
        return self._repeated(layer, self.profile.layer(module.name, layer).at(name, size), size, recomputation)

    def _repeated(self, layer: LayerSpec, forward_s: float, size: WorkSize, recomputation: Recomputation) -> float:
        if not recomputation.recomputes(layer):
            return 0.0
        measured = self.profile.repeats.get(recomputation.name)
        return forward_s * (recomputation.repeated_share(layer, size) if measured is None else measured)

    def action_s(self, kind: Kind) -> float:
        """Seconds of an action beside its layers, posting its transfers included; W has none."""
        posted = self.profile.transfer.end_s * self.transfers_per_action if self.profile.transfer else 0.0
        return self.profile.actions.get(kind.value, 0.0) + (posted if kind is not Kind.W else 0.0)

    def step_s(self, num_params: int) -> float:
        """Seconds of the end of a step on a rank with so many trainable parameters."""
        step = self.profile.step
        return step.fixed_s + step.param_s * num_params + (step.pipeline_s if self.several_ranks else 0.0)


def transfers_per_action(partition: Partition) -> float:
    """Ends of transfers for each forward on the chain of all stages, one module after the other."""
    ranks = partition.stage_rank
    remote = sum(before != after for before, after in pairwise(ranks))
    return 2 * remote / len(ranks)
