"""[assignment]: which microbatch of which replica each sample of a step goes to."""

from dataclasses import dataclass
from typing import Literal

from mmtrain.config.bounds import at_least, at_most
from mmtrain.errors import ConfigError

Policy = Literal["none", "balanced", "entrain", "disttrain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignmentConfig:
    """[assignment]: samples of a step by what they cost, over replicas and microbatches; see docs/assignment.md."""

    policy: Policy = "none"
    """none: the first microbatch with room. balanced: equal seconds of replicas and microbatches, then what makes
    simulated iterations shorter. entrain: Entrain's hierarchical assignment. disttrain: DistTrain's reordering."""
    samples_per_step: int = 0
    """Samples of one step over all replicas; 0: as many as fill its microbatches. A step ends earlier where the next
    sample fits into no microbatch."""
    defer: bool = False
    """The language model processes some samples with the microbatch after the one that their images are encoded with
    (Entrain)."""
    fewer_microbatches: bool = False
    """A replica may have fewer microbatches where one sample takes longer than an equal share (Entrain's K_eff)."""
    levels: int = 256
    """Steps to which seconds are rounded where samples to defer are chosen."""
    evaluations: int = 16
    """Simulated iterations by which `balanced` improves its start on each replica; 0: none."""

    def __post_init__(self) -> None:
        at_most("assignment", self, samples_per_step=2**24, levels=2**16, evaluations=2**16)
        at_least("assignment", self, samples_per_step=0, levels=2, evaluations=0)
        default = AssignmentConfig.__dataclass_fields__
        for key in ("defer", "fewer_microbatches", "levels", "evaluations"):
            if self.policy == "none" and getattr(self, key) != default[key].default:
                raise ConfigError(
                    f'assignment.{key} = {str(getattr(self, key)).lower()} has no effect with policy = "none"; remove '
                    'it, or set policy = "balanced" or "entrain"'
                )
