"""What watches a job and changes nothing in it."""

from dataclasses import dataclass

from mmtrain.config.config import Config
from mmtrain.errors import MMTrainError
from mmtrain.modality.metadata import IterationMeta
from mmtrain.observe.metrics import Metrics
from mmtrain.observe.validation import Validation
from mmtrain.parallel.mesh import Mesh
from mmtrain.parallel.planning import Planned
from mmtrain.parallel.runtime import StepOutcome
from mmtrain.planner.iteration import IterationPlan
from mmtrain.planner.job import Job


@dataclass(frozen=True, kw_only=True)
class RunningStep:
    """One training step that is about to run, on one rank."""

    step: int
    meta: IterationMeta
    plan: IterationPlan
    planned: Planned | None
    """How the step was planned; None: the planner is off."""


@dataclass(frozen=True, kw_only=True)
class FinishedStep(RunningStep):
    """One training step that has run, on one rank."""

    outcome: StepOutcome
    """The outcome of the step on this rank."""
    metrics: Metrics
    """Takes more values of this step."""
    last: bool
    """Whether it is the last one by the job's number of steps or epochs."""


class Observer:
    """Hooks of a job, which all ranks call alike; each may be collective over the job."""

    def layout_begins(self, config: Config, job: Job, mesh: Mesh, step: int) -> None:
        """The steps after `step` have this layout."""

    def layout_ends(self) -> None:
        """Releases the layout: its groups have threads as long as anything refers to them."""

    def before_step(self, step: RunningStep) -> None:
        """A step has its data and its plan."""

    def after_step(self, step: FinishedStep) -> None:
        """The weights are those after a step, and are not saved yet."""

    def validated(self, step: int, result: Validation) -> None:
        """A validation has run. Args: step: the last one before it."""

    def failed(self, error: MMTrainError) -> None:
        """The run ends with an error. Not collective."""

    def close(self) -> None:
        """The run ends. Not collective."""
