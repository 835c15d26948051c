"""The measured values of a step and of a validation, as `metrics.py` shows them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from mmtrain.data.questions import Answer
from mmtrain.observe.by_source import SourceTotals


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerMetrics:
    """Results of the search: of one step on this replica; of the run over all replicas where noted."""

    evaluations: int
    """Plans tried; 0: not known, as of a timed-out search."""
    search_s: float
    """Seconds that the search took, during the step before."""
    makespan_s: float
    """Simulated makespan of the plan that ran."""
    first_s: float
    """Simulated makespan of the first plan; NaN if none fits."""
    bound_s: float
    """Lower bound of the makespan of any plan; NaN: not known."""
    late: int
    """Steps of the run, over all replicas, that ran the first plan because the search timed out."""
    failed: int
    """Because the search raised or found no plan."""
    invalid: int
    """Because the searched plan broke a rule."""
    age_s: float = 0.0
    """Seconds from the time the searched plan was ready to its use; 0 for a first plan."""

    @property
    def gap(self) -> float:
        """How much longer the plan is than the bound, as a fraction of the bound."""
        return self.makespan_s / self.bound_s - 1 if self.bound_s > 0 else math.nan

    @property
    def change(self) -> float:
        """How much longer the plan is than the first one, as a fraction of that; negative if it is shorter."""
        return self.makespan_s / self.first_s - 1 if self.first_s > 0 else math.nan

    def __str__(self) -> str:
        """The planner's part of the log line, with the values that are known."""
        parts = [f"{_percent(self.change):+.1f}% vs first"] if math.isfinite(self.change) else []
        parts += [f"gap {_percent(self.gap):.1f}%"] if math.isfinite(self.gap) else []
        parts += [f"{self.evaluations} tried in {self.search_s:.2f}s"] if self.evaluations else []
        text = f"plan: {', '.join(parts) or 'first'}"
        if self.late or self.failed or self.invalid:
            text += f"; first plans: {self.late} timed out, {self.failed} failed, {self.invalid} invalid"
        return text


def _percent(fraction: float) -> float:
    """A fraction in percent, rounded to one digit; never -0."""
    return round(100 * fraction, 1) + 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleMetrics:
    """One modality module in one step, on this replica."""

    compute_s: float
    """Seconds of its actions, all pipeline ranks together."""
    flops: float
    """Model FLOPs: no weight gradients of frozen parts; recomputation does not count."""
    peak_flops: float
    """FLOP/s of all devices of one pipeline rank (cp x tp); NaN: not known."""
    bubble: float
    """Fraction of the pipeline ranks' time in which they waited for this module (`schedule/view/waits.py`)."""

    @property
    def tflops(self) -> float:
        """Model FLOPs a second of one pipeline rank while its actions run, in 10^12; NaN if none ran."""
        return self.flops / self.compute_s / 1e12 if self.compute_s > 0 else math.nan

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: achieved over peak FLOP/s; NaN: not known."""
        return self.tflops * 1e12 / self.peak_flops


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """Metrics of one step, over all replicas unless noted."""

    step: int
    loss: float
    max_loss: float
    """Largest mean loss of one replica."""
    grad_norm: float
    lr: float
    step_time_s: float
    data_time_s: float
    """Seconds waited for the loader; with the planner on, for the batch of the next step."""
    plan_time_s: float
    """Seconds of planning, lowering and checking; with the planner on, seconds waited for it."""
    tokens: int
    images: int
    image_tokens: int
    """The part of `tokens` that are image tokens."""
    patches: int
    """Encoder rows."""
    clips: int
    frames: int
    """Latent frames of the clips."""
    video_tokens: int
    """The part of `tokens` that are latents."""
    skipped_samples: int
    """Samples dropped since the run started."""
    deferred_images: int = 0
    """Images that were encoded with the microbatch before."""
    not_deferred: int = 0
    """Microbatches whose images were not, as the pair did not fit into the memory limits."""
    bubble: float
    """Idle fraction of the pipeline ranks of this replica."""
    flops: float
    """Model FLOPs of one device in this step: no weight gradients of frozen parts, no padding."""
    peak_flops: float
    """FLOP/s of one device; NaN: not known."""
    memory_gib: float
    """Largest peak of the pipeline ranks of this replica."""
    memory_percent: float
    world_size: int
    sounds: int = 0
    sound_s: float = 0.0
    """Seconds of them, without the silence that fills windows."""
    sound_tokens: int = 0
    """The part of `tokens` that are tokens of sound."""
    memory_predicted_gib: float = math.nan
    """Predicted peak of the most loaded rank: its static memory and the plan's peak of activations."""
    memory_measured_gib: float = math.nan
    """Measured peak of the most loaded rank; NaN: not known on this system."""
    memory_limit_gib: float = math.nan
    """Memory limit of a rank; NaN: no limit."""
    measured_s: float = math.nan
    """Makespan of the pipeline of this replica: from the first start of an action to the last end."""
    planned_s: float = math.nan
    """The same, simulated."""
    program_s: float = math.nan
    """Seconds of the longest program of this replica's pipeline ranks, of which `bubble` is a fraction."""
    peak_s: float = math.nan
    """Seconds that the model FLOPs of this replica take its devices at their peak; NaN: the peak is not known."""
    modules: Mapping[str, ModuleMetrics] = field(default_factory=dict)
    """Module -> its part of the step."""
    sources: Mapping[str, SourceTotals] = field(default_factory=dict)
    """Of several sources: name -> its part of the step."""
    planner: PlannerMetrics | None = None
    """None if the planner is off."""

    @property
    def tflops(self) -> float:
        """Model FLOPs of one device a second, in 10^12."""
        return self.flops / self.step_time_s / 1e12

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: achieved over peak FLOP/s; NaN: not known."""
        return self.tflops * 1e12 / self.peak_flops

    @property
    def slowdown(self) -> float:
        """Measured over planned makespan."""
        return self.measured_s / self.planned_s if self.planned_s > 0 else math.nan

    @property
    def bubble_other(self) -> float:
        """The part of the bubble that is due to no module: transfers, starts of actions, gathers and reductions."""
        return self.bubble - sum(module.bubble for module in self.modules.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """Results of one validation, over all replicas."""

    loss: float
    """Mean over labelled tokens, or over all numbers of the latents."""
    accuracy: Mapping[str, tuple[int, int]]
    """Grade -> (answers right, answers)."""
    shuffled_loss: float | None = None
    """Loss with each clip under the caption of another one; None: not measured."""
    sources: Mapping[str, SourceTotals] = field(default_factory=dict)
    """Of several sources: name -> its part of the validation."""
    answers: tuple[Answer, ...] = ()
    """To held-out questions (`validation.generate`), on rank 0."""
