"""The metrics of a training step: under which names files, the log and the page know each, and how ranks share it.

A new metric is a line here and a `Metrics.record` (`observe/metrics.py`) where its value is known.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

Values = Mapping[str, float]
"""The values of a step, by key."""


class Reduce(StrEnum):
    """How the values of all ranks become one."""

    LAST = "last"
    """Rank 0 has it."""
    SUM = "sum"
    """The sum over the replicas, of the value on their first rank."""
    MEAN = "mean"
    """The mean over the replicas."""
    SPREAD = "spread"
    """Standard deviation over the replicas."""
    MAX = "max"
    """The largest over all ranks."""


def is_known(values: Values, value: float) -> bool:
    """Whether a value is a number."""
    return math.isfinite(value)


def _always(values: Values, value: float) -> bool:
    return True


def _if_any(*keys: str) -> Callable[[Values, float], bool]:
    """Whether one of these values is above 0."""
    return lambda values, value: any(values[key] > 0 for key in keys)


def _if_no_clips(values: Values, value: float) -> bool:
    return not values["clips"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric. In `name`, `tag` and `text` of a metric of each module or source, `{}` stands for that one's name."""

    name: str
    """Key in a line of metrics.jsonl."""
    unit: str = ""
    """Empty: a count or a fraction."""
    note: str = ""
    """What the name leaves open."""
    reduce: Reduce = Reduce.LAST
    tag: str = ""
    """The tag in tensorboard and wandb; empty: it is not there."""
    scale: float = 1.0
    """The scale of the value under its tag."""
    when: Callable[[Values, float], bool] = is_known
    """Whether a step's value is under its tag and in the log line."""
    text: str | Callable[[Values, str], str] = ""
    """The metric's part of the log line: a form for the step's values, or a function of these and of the name for
    `{}`."""
    of: Callable[[Values], float] | None = None
    """Computes it from the other values of the step; else it is recorded."""
    over_run: str = ""
    """How the steps of this process are summed up. "sum": their sum; "steps": in how many of them it was above 0."""
    in_file: bool = True
    """Whether it is in metrics.jsonl."""
    on_page: bool = False
    """Whether the page of a run reads it."""


def _ratio(a: float, b: float) -> float:
    return a / b if b > 0 else math.nan


def _images_text(values: Values, _: str) -> str:
    shown = not values["clips"] and (values["images_per_s"] or not values["sounds"])
    return f"images/s: {values['images_per_s']:.1f}" if shown else ""


def _samples_text(values: Values, _: str) -> str:
    """Samples of the step and of the job so far."""
    done, epoch = values["samples_done"], values["epoch"]
    parts = [f"{int(done):,} so far"] if math.isfinite(done) else []
    parts += [f"epoch {epoch:.2f}"] if math.isfinite(epoch) else []
    return f"samples: {int(values['samples'])}" + (f" ({', '.join(parts)})" if parts else "")


def _sounds_text(values: Values, _: str) -> str:
    return f"sounds/s: {values['sounds'] / values['step_time_s']:.1f} ({values['sound_s']:.1f}s of sound)"


def _memory_text(values: Values, _: str) -> str:
    """Predicted and measured memory next to the limit."""
    known = math.isfinite(values["memory_measured_gib"])
    measured = f"{values['memory_measured_gib']:.2f}" if known else "-"
    limit = values["memory_limit_gib"]
    return f"predicted: {values['memory_predicted_gib']:.2f} measured: {measured} of {limit:.2f}GiB"


def _plan_text(values: Values, _: str) -> str:
    """What is known of the search."""
    made, first, gap = values["plan_makespan_s"], values["plan_first_makespan_s"], values["plan_gap"]
    parts = [f"{_percent(made / first - 1):+.1f}% vs first"] if first > 0 else []
    parts += [f"gap {_percent(gap):.1f}%"] if math.isfinite(gap) else []
    tried = values["plan_evaluations"]
    parts += [f"{tried} tried in {values['plan_search_s']:.2f}s"] if tried else []
    text = f"plan: {', '.join(parts) or 'first'}"
    late, failed, invalid = (values[f"plan_{kind}"] for kind in ("late", "failed", "invalid"))
    if late or failed or invalid:
        text += f"; first plans: {late} timed out, {failed} failed, {invalid} invalid"
    return text


def _percent(fraction: float) -> float:
    """A fraction in percent, rounded to one digit; never -0."""
    return round(100 * fraction, 1) + 0.0


def source_text(name: str, samples: float, loss: float | None) -> str:
    """What the log says of one of several sources. Args: loss: None: not known."""
    return f"{name}: {samples} samples" if loss is None else f"{name}: {loss:.4f} ({samples} samples)"


_SUM, _MAX = Reduce.SUM, Reduce.MAX

METRICS: tuple[Metric, ...] = (
    Metric(name="step", text="step: {step:4d}", on_page=True),
    Metric(name="loss", tag="loss_metrics/global_avg_loss", when=_always, text="loss: {loss:7.4f}", on_page=True),
    Metric(
        name="max_loss", note="largest mean of one replica", reduce=_MAX, tag="loss_metrics/global_max_loss",
        when=_always, in_file=False,
    ),
    Metric(name="grad_norm", tag="grad_norm", when=_always, text="grad_norm: {grad_norm:7.4f}", on_page=True),
    Metric(name="lr", tag="lr", on_page=True),
    Metric(name="step_time_s", unit="s", tag="time_metrics/end_to_end(s)", on_page=True),
    Metric(name="data_time_s", unit="s", note="waited for the loader", tag="time_metrics/data_loading(s)",
           on_page=True),
    Metric(name="data_percent", unit="%", tag="time_metrics/data_loading(%)", in_file=False,
           of=lambda v: 100 * v["data_time_s"] / v["step_time_s"]),
    Metric(name="plan_time_s", unit="s", note="planning; with the planner on, waited for it",
           tag="time_metrics/planning(s)", on_page=True),
    # ------------------------------------------------------------------------------------------ memory
    Metric(name="memory_gib", unit="GiB", reduce=_MAX, tag="memory/max_reserved(GiB)", in_file=False,
           text="memory: {memory_gib:.2f}GiB({memory_percent:.1f}%)"),
    Metric(name="memory_percent", unit="%", note="of the device", reduce=_MAX, tag="memory/max_reserved(%)",
           in_file=False),
    Metric(name="memory_predicted_gib", unit="GiB", note="static memory and the plan's peak of activations",
           reduce=_MAX, tag="memory/predicted(GiB)", on_page=True),
    Metric(name="memory_measured_gib", unit="GiB", note="NaN: not known on this system", reduce=_MAX,
           tag="memory/measured(GiB)", on_page=True),
    Metric(name="memory_limit_gib", unit="GiB", note="of a rank; NaN: no limit", tag="memory/limit(GiB)",
           text=_memory_text, on_page=True),
    # ------------------------------------------------------------------------------------------ rates
    Metric(name="tokens", reduce=_SUM, on_page=True),
    Metric(name="ranks", in_file=False),
    Metric(name="flops", unit="FLOP", note="no weight gradients of frozen parts, no padding", reduce=_SUM,
           in_file=False),
    Metric(name="peak_flops", unit="FLOP/s", note="of one device; NaN: not known", in_file=False),
    Metric(name="tps", unit="tokens/s", note="a device", tag="throughput(tps)", text="tps: {tps:,.0f}",
           of=lambda v: v["tokens"] / v["step_time_s"] / v["ranks"], on_page=True),
    Metric(name="tflops", unit="TFLOP/s", note="a device", tag="tflops", text="tflops: {tflops:.4f}",
           of=lambda v: v["flops"] / v["ranks"] / v["step_time_s"] / 1e12, on_page=True),
    Metric(name="mfu", tag="mfu(%)", scale=100, text="mfu: {mfu:.1%}",
           of=lambda v: v["tflops"] * 1e12 / v["peak_flops"], on_page=True),
    # ------------------------------------------------------------------------------------------ the batch
    Metric(name="clips", reduce=_SUM, tag="modality/video/count", when=_if_any("clips")),
    Metric(name="images", reduce=_SUM, tag="modality/image/count", when=_if_no_clips),
    Metric(name="sounds", reduce=_SUM, tag="modality/audio/count", when=_if_any("sounds")),
    Metric(name="clips_per_s", unit="1/s", tag="throughput(clips/s)", when=_if_any("clips"), in_file=False,
           text="clips/s: {clips_per_s:.1f}", of=lambda v: v["clips"] / v["step_time_s"]),
    Metric(name="images_per_s", unit="1/s", tag="throughput(images/s)", when=_if_no_clips, in_file=False,
           text=_images_text, of=lambda v: v["images"] / v["step_time_s"]),
    Metric(name="sound_s", unit="s", note="without the silence that fills windows", reduce=_SUM,
           tag="modality/audio/seconds", when=_if_any("sounds"), text=_sounds_text),
    Metric(name="patches", note="encoder rows", reduce=_SUM, tag="modality/image/patches", when=_if_no_clips),
    Metric(name="frames", note="latent frames", reduce=_SUM, tag="modality/video/frames", when=_if_any("clips")),
    Metric(name="image_tokens", reduce=_SUM, tag="modality/image/tokens", when=_if_no_clips, on_page=True),
    Metric(name="sound_tokens", reduce=_SUM, tag="modality/audio/tokens", when=_if_any("sounds"), on_page=True),
    Metric(name="video_tokens", reduce=_SUM, tag="modality/video/tokens", when=_if_any("clips"), on_page=True),
    Metric(name="text_tokens", tag="modality/text/tokens", in_file=False,
           of=lambda v: v["tokens"] - v["image_tokens"] - v["sound_tokens"] - v["video_tokens"]),
    Metric(name="skipped_samples", reduce=_SUM, tag="data/skipped_samples", over_run="sum"),
    Metric(name="samples", note="of the step", reduce=_SUM, tag="data/samples", text=_samples_text, on_page=True),
    Metric(name="samples_done", note="of the job up to the step", tag="data/samples_done", on_page=True),
    Metric(name="epoch", note="epochs done; NaN: of a stream or of several sources", tag="data/epoch", on_page=True),
    Metric(name="total_steps", note="of the job; of one of epochs, as the samples so far say", in_file=False),
    # ------------------------------------------------------------------------------------------ the pipeline
    Metric(name="bubble", tag="pipeline/bubble(%)", scale=100, text="bubble: {bubble:.0%}", on_page=True),
    Metric(name="program_s", unit="s", note="longest program of replica 0, of which `bubble` is a part", on_page=True),
    Metric(name="peak_s", unit="s", note="what the model FLOPs of replica 0 take at the peak", on_page=True),
    Metric(name="makespan_s", unit="s", tag="pipeline/makespan_measured(s)", on_page=True),
    Metric(name="planned_makespan_s", unit="s", tag="pipeline/makespan_planned(s)", on_page=True),
    Metric(name="makespan_ratio", tag="pipeline/makespan_ratio",
           of=lambda v: _ratio(v["makespan_s"], v["planned_makespan_s"]), on_page=True),
    Metric(name="cost_error", note="how far seconds of a module's actions on a rank are from their learned costs, "
           "made as long in all, as a part of all", tag="planner/cost_error(%)", scale=100, on_page=True),
    Metric(name="cost_error_unlearned", note="the same of costs as modelled",
           tag="planner/cost_error_unlearned(%)", scale=100, on_page=True),
    Metric(name="compute_s_{}", unit="s", note="of the actions of all pipeline ranks", tag="modality/{}/compute(s)",
           on_page=True),
    Metric(name="tflops_{}", unit="TFLOP/s", note="a pipeline rank while its actions run", tag="modality/{}/tflops",
           on_page=True),
    Metric(name="mfu_{}", tag="modality/{}/mfu(%)", scale=100, on_page=True),
    Metric(name="bubble_{}", note="part of the time in which ranks waited for this module",
           tag="modality/{}/bubble(%)", scale=100, on_page=True),
    Metric(name="spread_s_{}", unit="s", note="of its seconds for one microbatch",
           tag="modality/{}/microbatch_spread(s)"),
    Metric(name="planned_spread_s_{}", unit="s", tag="modality/{}/microbatch_spread_planned(s)"),
    Metric(name="bubble_other", note="transfers, starts of actions, gathers and reductions",
           tag="pipeline/bubble_other(%)", scale=100, on_page=True),
    # ------------------------------------------------------------------------------------------ elastic jobs
    Metric(name="nodes", note="of an elastic job, idle ones included", tag="elastic/nodes", on_page=True),
    Metric(name="pipelines", note="of an elastic job", tag="elastic/pipelines", on_page=True),
    Metric(name="time_in_steps", note="part of the time since an elastic job began that is in finished steps",
           tag="elastic/time_in_steps(%)", scale=100, on_page=True),
    # ------------------------------------------------------------------------------------------ assignment, deferral
    Metric(name="replica_spread_s", unit="s", note="of the makespans", reduce=Reduce.SPREAD,
           tag="assignment/replica_spread(s)"),
    Metric(name="planned_replica_spread_s", unit="s", reduce=Reduce.SPREAD, tag="assignment/replica_spread_planned(s)"),
    Metric(name="deferred_samples", note="their images were encoded with the microbatch before", reduce=_SUM,
           tag="assignment/deferred_samples", when=_if_any("deferred_samples")),
    Metric(name="deferred_gib", unit="GiB", note="activations of these works on replica 0",
           tag="assignment/deferred(GiB)", when=_if_any("deferred_gib")),
    Metric(name="deferred_images", reduce=_SUM, tag="pipeline/deferred_images",
           when=_if_any("deferred_images", "not_deferred")),
    Metric(name="not_deferred", note="microbatches, for lack of memory", reduce=_SUM, tag="pipeline/not_deferred",
           when=_if_any("deferred_images", "not_deferred")),
    Metric(name="assignment_s", unit="s", note="where the batch was made", tag="assignment/seconds",
           when=_if_any("assignment_s")),
    Metric(name="unassigned", note="the policy could not place the samples", reduce=_SUM, over_run="steps"),
    # ------------------------------------------------------------------------------------------ the planner
    Metric(name="plan_evaluations", note="0: not known", tag="planner/evaluations", when=_always, text=_plan_text),
    Metric(name="plan_microbatches", note="into which the replica's samples are grouped", tag="planner/microbatches",
           when=_always),
    Metric(name="plan_search_s", unit="s", note="during the step before", tag="planner/search_s", when=_always),
    Metric(name="plan_makespan_s", unit="s", note="simulated", tag="planner/makespan_s", when=_always, on_page=True),
    Metric(name="plan_first_makespan_s", unit="s", note="simulated; NaN: no first plan fits",
           tag="planner/first_makespan_s", when=_always, on_page=True),
    Metric(name="plan_lower_bound_s", unit="s", note="of any plan; NaN: not known", tag="planner/lower_bound_s",
           when=_always, on_page=True),
    Metric(name="plan_gap", note="over the bound", tag="planner/gap", when=_always, on_page=True),
    Metric(name="plan_late", note="replicas whose search timed out", reduce=_SUM, tag="planner/late", over_run="sum",
           on_page=True),
    Metric(name="plan_failed", note="it raised or found no plan", reduce=_SUM, tag="planner/failed", over_run="sum",
           on_page=True),
    Metric(name="plan_invalid", note="its plan broke a rule", reduce=_SUM, tag="planner/invalid", over_run="sum",
           on_page=True),
    Metric(name="plan_age_s", unit="s", note="the searched plan was ready before its use", tag="planner/age_s"),
    # ------------------------------------------------------------------------------------------ several sources
    Metric(name="loss/{}", tag="sources/{}/loss", when=_always, on_page=True),
    Metric(name="samples/{}", tag="sources/{}/samples", on_page=True,
           text=lambda v, name: source_text(name, v[f"samples/{name}"], v.get(f"loss/{name}"))),
    Metric(name="tokens/{}", tag="sources/{}/tokens"),
)  # fmt: skip

BY_NAME = {metric.name: metric for metric in METRICS}
