"""[assignment]: which microbatch of which replica each sample of a step goes to."""

from dataclasses import dataclass
from typing import Literal

from mmtrain.config.bounds import at_least, at_most
from mmtrain.config.toml_sections import shown
from mmtrain.errors import ConfigError

AssignmentPolicy = Literal["none", "balanced", "entrain"]
LEVELS = 4096
"""Default of `levels`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignmentConfig:
    """[assignment]: samples of a step by what they cost, over replicas and microbatches; see docs/planner.md."""

    policy: AssignmentPolicy = "none"
    """none: the first microbatch with room. balanced: equal seconds of replicas and microbatches, then what makes
    simulated iterations shorter. entrain: Entrain's hierarchical assignment."""
    samples_per_step: int = 0
    """Samples of one step over all replicas; 0: as many as fill its microbatches. A step ends earlier where the next
    sample fits into no microbatch."""
    stable_samples: int = 0
    """Samples from which on a step shows the ratio of the modules' work for which `mmtrain allocate` gave them their
    ranks (its b_min); the log says if steps have fewer. 0: unknown."""
    defer: bool = False
    """The language model processes some samples with the microbatch after the one that their images are encoded with
    (Entrain)."""
    fewer_microbatches: bool = False
    """A replica may have fewer microbatches: with entrain where one sample takes longer than an equal share (Entrain's
    K_eff), with balanced where that makes its simulated iteration shorter."""
    levels: int = LEVELS
    """Steps to which the language model's seconds of a microbatch are rounded where samples to defer are chosen."""
    evaluations: int = 16
    """Simulated iterations by which `balanced` improves its start on each replica; 0: none."""

    def __post_init__(self) -> None:
        at_most("assignment", self, samples_per_step=2**24, levels=2**16, evaluations=2**16)
        at_least("assignment", self, samples_per_step=0, stable_samples=0, levels=2, evaluations=0)
        for key, policies in _OF_POLICY.items():
            value, default = getattr(self, key), AssignmentConfig.__dataclass_fields__[key].default
            if value != default and self.policy not in policies:
                raise ConfigError(
                    f'assignment.{key} = {shown(value)} has no effect with policy = "{self.policy}"; remove it, or set '
                    f"policy = {' or '.join(map(shown, policies))}"
                )
        if self.policy == "balanced" and self.fewer_microbatches and not self.evaluations:
            raise ConfigError(
                'assignment.fewer_microbatches = true has no effect with policy = "balanced" and evaluations = 0, as '
                "simulated iterations decide on their number; remove it, or set evaluations to at least 2"
            )

    @property
    def assigns(self) -> bool:
        """Whether it changes the number of a step's samples, or where they go."""
        return self.policy != "none" or self.samples_per_step > 0


_OF_POLICY: dict[str, tuple[AssignmentPolicy, ...]] = {
    "defer": ("entrain",),
    "fewer_microbatches": ("entrain", "balanced"),
    "levels": ("entrain",),
    "evaluations": ("balanced",),
}
"""Key -> the policies that follow it."""
