"""What a step's batch has, and what became of its plans: the metrics that every replica counts for itself."""

import math

from mmtrain.modality.metadata import IterationMeta, without_deferral
from mmtrain.observe.metrics import Metrics
from mmtrain.parallel.planning import Planned, PlanStatus
from mmtrain.planner.iteration import IterationPlan


def record_batch(metrics: Metrics, meta: IterationMeta, plan: IterationPlan) -> None:
    """Records the sizes of a replica's batch."""
    batching, assignment = plan.batching, meta.assignment
    metrics.record("images", meta.num_images)
    metrics.record("patches", meta.num_patches)
    metrics.record("image_tokens", _tokens(meta, sound=False))
    metrics.record("sounds", meta.num_sounds)
    metrics.record("sound_s", meta.sound_s)
    metrics.record("sound_tokens", _tokens(meta, sound=True))
    metrics.record("frames", meta.num_frames)
    metrics.record("video_tokens", meta.num_video_tokens)
    metrics.record("skipped_samples", meta.num_skipped)
    metrics.record("deferred_images", sum(len(item.units) for item in batching.items if item.deferred))
    metrics.record("not_deferred", len(batching.not_deferred))
    metrics.record("deferred_samples", without_deferral(meta, batching.not_deferred).num_deferred)
    metrics.record("deferred_gib", plan.deferred_bytes / 2**30)
    metrics.record("assignment_s", assignment.seconds if assignment else 0.0)
    metrics.record("unassigned", int(assignment is not None and bool(assignment.reason)))


def record_plan(metrics: Metrics, planned: Planned) -> None:
    """Records what a user sees of a plan that was searched."""
    status = planned.status
    metrics.record("plan_microbatches", len(planned.plan.grouped_meta.microbatches))
    metrics.record("plan_evaluations", planned.evaluations)
    metrics.record("plan_search_s", planned.search_s)
    metrics.record("plan_makespan_s", planned.makespan_s)
    metrics.record("plan_first_makespan_s", planned.first_s)
    metrics.record("plan_lower_bound_s", planned.bound_s)
    metrics.record("plan_gap", planned.makespan_s / planned.bound_s - 1 if planned.bound_s > 0 else math.nan)
    metrics.record("plan_late", int(status is PlanStatus.TIMED_OUT))
    metrics.record("plan_failed", int(status in (PlanStatus.FAILED, PlanStatus.BROKEN)))
    metrics.record("plan_invalid", int(status is PlanStatus.INVALID))
    metrics.record("plan_age_s", planned.age_s)


def _tokens(meta: IterationMeta, *, sound: bool) -> int:
    """Tokens of all sounds, or of all images and videos."""
    return sum(image.num_tokens for m in meta.microbatches for image in m.images if image.is_sound == sound)
