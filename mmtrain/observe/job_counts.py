"""What all replicas of a job count: in one step, and in all steps of this process, at whatever layouts."""

from dataclasses import astuple, dataclass, fields

import torch
import torch.distributed as dist

from mmtrain.modality.metadata import IterationMeta, without_deferral
from mmtrain.observe.step_metrics import PlannerMetrics
from mmtrain.parallel.mesh import Mesh
from mmtrain.parallel.planning import Planned, PlanStatus
from mmtrain.planner.iteration import IterationPlan


@dataclass(frozen=True, slots=True)
class StepCounts:
    """What the batch of one step had, over all replicas, and what became of its plans."""

    flops: float
    measured_s: float
    """Makespan."""
    measured_s2: float
    """Its square."""
    planned_s: float
    """Simulated makespan."""
    planned_s2: float
    """Its square."""
    samples: int
    images: int
    patches: int
    image_tokens: int
    sounds: int
    sound_s: float
    sound_tokens: int
    clips: int
    frames: int
    video_tokens: int
    skipped_samples: int
    deferred_images: int
    """Encoded with the microbatch before."""
    not_deferred: int
    """Microbatches whose deferral was given up for lack of memory."""
    late: int
    """Replicas whose search was not done in time."""
    failed: int
    invalid: int
    deferred: int
    """Documents whose images were encoded with the microbatch before theirs."""
    unassigned: int
    """Replicas that kept the microbatches of first-fit, as the policy could not place the samples."""

    @classmethod
    def of(
        cls, meta: IterationMeta, plan: IterationPlan, flops: float, planned: Planned | None, measured_s: float
    ) -> "StepCounts":
        """Those of one replica.

        Args:
            flops: of its batch.
            planned: None without the planner.
            measured_s: measured makespan.
        """
        planned_s = plan.result.timeline.makespan_s
        status = planned.status if planned else PlanStatus.READY
        return cls(
            flops=flops,
            measured_s=measured_s,
            measured_s2=measured_s**2,
            planned_s=planned_s,
            planned_s2=planned_s**2,
            samples=sum(len(m.documents) + len(m.clips) for m in meta.microbatches),
            images=meta.num_images,
            patches=meta.num_patches,
            image_tokens=_tokens(meta, sound=False),
            sounds=meta.num_sounds,
            sound_s=meta.sound_s,
            sound_tokens=_tokens(meta, sound=True),
            clips=meta.num_clips,
            frames=meta.num_frames,
            video_tokens=meta.num_video_tokens,
            skipped_samples=meta.num_skipped,
            deferred_images=sum(len(item.units) for item in plan.batching.items if item.deferred),
            not_deferred=len(plan.batching.not_deferred),
            late=int(status is PlanStatus.TIMED_OUT),
            failed=int(status in (PlanStatus.FAILED, PlanStatus.BROKEN)),
            invalid=int(status is PlanStatus.INVALID),
            deferred=without_deferral(meta, plan.batching.not_deferred).num_deferred,
            unassigned=int(meta.assignment is not None and bool(meta.assignment.reason)),
        )

    def summed(self, mesh: Mesh) -> "StepCounts":
        """The sum over the leaders of all replicas. Collective over the job."""
        totals = torch.tensor(astuple(self), dtype=torch.float64)
        if not mesh.is_leader:
            totals.zero_()
        dist.all_reduce(totals)
        values = zip(fields(self), totals.tolist(), strict=True)
        return StepCounts(*(int(value) if field.type is int else value for field, value in values))

    def replica_spreads_s(self, num_replicas: int) -> tuple[float, float]:
        """Standard deviations of the measured and the simulated makespan over the replicas, if this is their sum."""
        measured_s, planned_s = (
            max(0.0, squares / num_replicas - (total / num_replicas) ** 2) ** 0.5
            for total, squares in ((self.measured_s, self.measured_s2), (self.planned_s, self.planned_s2))
        )
        return measured_s, planned_s


def _tokens(meta: IterationMeta, *, sound: bool) -> int:
    """Tokens of all sounds, or of all images and videos."""
    return sum(image.num_tokens for m in meta.microbatches for image in m.images if image.is_sound == sound)


@dataclass(slots=True)
class JobCounts:
    """Sums over the steps of this process."""

    skipped_samples: int = 0
    late: int = 0
    failed: int = 0
    invalid: int = 0
    unassigned: int = 0

    def add(self, step: StepCounts) -> None:
        """Adds a step."""
        self.skipped_samples += step.skipped_samples
        self.late += step.late
        self.failed += step.failed
        self.invalid += step.invalid
        self.unassigned += step.unassigned > 0

    def planner(self, planned: Planned) -> PlannerMetrics:
        """What a user sees of a plan, and of the searches before it."""
        return PlannerMetrics(
            evaluations=planned.evaluations,
            search_s=planned.search_s,
            makespan_s=planned.makespan_s,
            first_s=planned.first_s,
            bound_s=planned.bound_s,
            late=self.late,
            failed=self.failed,
            invalid=self.invalid,
            age_s=planned.age_s,
        )
