"""The numbers at the top of a run's page, with advice where one is far off."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from mmtrain.run_page.runs import RunContents


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """One number with its name."""

    label: str
    value: str
    note: str = ""
    """Small text below it: of which steps, compared with what."""
    advice: str = ""
    """What to do about it; empty: the number is not far off."""


_FAR_OFF: dict[str, tuple[Callable[[float], bool], str]] = {
    "mfu": (
        lambda mfu: mfu < 0.2,
        "The devices reach little of their peak: if neither the bubble nor waits explain it, make works larger "
        "(model.encoder.sub_microbatch_size, training.seq_len).",
    ),
    "bubble": (
        lambda bubble: bubble > 0.4,
        "Pipeline ranks are idle for long: more microbatches a step (training.global_batch_size), other segments "
        "(docs/parallelism.md), or ranks that have a core or device of their own.",
    ),
    "makespan_ratio": (
        lambda ratio: not 0.5 <= ratio <= 2,
        "Costs are not of this machine and its load, so plans do not suit it: run mmtrain profile.",
    ),
    "plan_gap": (lambda gap: gap > 0.1, "The search may find better plans: raise planner.search.budget_evaluations."),
}
"""Key in the metrics -> whether its number is far off, and what to do about it."""
_MOST_LOST = 0.1
"""Tolerated part of the steps, or of their time."""


def numbers(run: RunContents) -> list[Number]:
    """The known numbers of a run. Rates are medians of the second half of its steps."""
    goal = run.setting("training", "steps")
    shown = [
        Number(
            label="steps",
            value=f"{run.last_step:,}",
            note=f"of {goal:,}" if isinstance(goal, int) and goal not in (0, run.last_step) else "",
        ),
        _samples(run),
        _number("loss", _mean_of_last_ten(run.column("loss")), "{:.4f}", note="mean of the last 10 steps"),
        *_validation(run),
        _number("tokens", _sum(run.column("tokens")), "{:,.0f}"),
        _number("training time", _sum(run.column("step_time_s")), "{}", note="without validation", show=_duration),
        _rate(run, "throughput", "tps", "{:,.0f} /s", note="tokens a device"),
        _rate(run, "step", "step_time_s", "{}", show=_duration),
        _rate(run, "MFU", "mfu", "{:.1%}"),
        *([] if "mfu" in run.keys else [_flops_per_s(run)]),
        *(_rate(run, f"MFU {module}", f"mfu_{module}", "{:.1%}") for module in run.modules),
        _rate(run, "bubble", "bubble", "{:.1%}", note=_most_waited_for(run)),
        _rate(run, "measured / planned", "makespan_ratio", "{:.2f}", note="makespan"),
        _rate(run, "planner gap", "plan_gap", "{:.1%}", note="over the lower bound"),
        *_fallbacks(run),
        *_memory(run),
        *_waits(run),
        *_changes(run),
    ]
    return [number for number in shown if number is not None]


def _number(label: str, value: float | None, form: str, note: str = "", show: object = None) -> Number | None:
    if value is None:
        return None
    shown = form.format(show(value) if callable(show) else value)
    if not any(digit in shown for digit in "123456789"):
        shown = shown.removeprefix("-")  # no -0
    return Number(label=label, value=shown, note=note)


def _second_half(values: Sequence[float | None]) -> list[float]:
    return [value for value in values[len(values) // 2 :] if value is not None]


def _rate(run: RunContents, label: str, key: str, form: str, note: str = "", show: object = None) -> Number | None:
    known = _second_half(run.column(key))
    if not known:
        return None
    number = _number(label, median(known), form, note, show)
    is_far_off, advice = _FAR_OFF.get(key, (bool, ""))
    return replace(number, advice=advice) if number and is_far_off(median(known)) else number


def _flops_per_s(run: RunContents) -> Number | None:
    """Shown instead of MFU where the peak FLOP/s of the device are not known."""
    note = "a device; MFU needs metrics.peak_flops"
    return _rate(run, "model FLOP/s", "tflops", "{:.3g} G", note=note, show=lambda tera: 1000 * tera)


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _mean_of_last_ten(values: Sequence[float | None]) -> float | None:
    known = [value for value in values[-10:] if value is not None]
    return sum(known) / len(known) if known else None


def _validation(run: RunContents) -> list[Number]:
    known = [line for line in run.validations if isinstance(line["validation_loss"], float)]
    if not known:
        return []
    last = known[-1]
    note = f"step {last['step']:,}"
    loss = Number(label="validation loss", value=f"{last['validation_loss']:.4f}", note=note)
    found = [loss]
    if last.get("answers"):
        right = f"{last.get('answers_right')} of {last['answers']}"
        found.append(Number(label="exact answers", value=right, note=note))
    if last.get("samples_judged"):
        right = f"{last.get('samples_right')} of {last['samples_judged']}"
        found.append(Number(label="samples as their prompts say", value=right, note=note))
    for name, value in _table(last.get("metric")):
        found.append(Number(label=name, value=f"{value:.4f}", note=note))
    if isinstance(best := last.get("best"), int | float):
        of_step = f"step {last.get('best_step')}"
        found.append(Number(label=f"best: {last.get('best_by')}", value=f"{best:.4f}", note=of_step))
    return found


def _table(value: object) -> list[tuple[str, float]]:
    """The numbers by name of a value of JSON."""
    pairs = value.items() if isinstance(value, dict) else ()
    return [(str(name), number) for name, number in pairs if isinstance(number, int | float)]


def _samples(run: RunContents) -> Number | None:
    """Samples and epochs done."""
    last, goal = run.steps[-1], run.setting("training", "epochs")
    done, epoch = last.get("samples_done"), last.get("epoch")
    of = f" of {goal:g}" if isinstance(goal, int | float) and goal else ""
    note = f"epoch {epoch:.2f}{of}" if isinstance(epoch, int | float) else ""
    return _number("samples", done if isinstance(done, int | float) else None, "{:,.0f}", note)


def _most_waited_for(run: RunContents) -> str:
    """The module that causes most idle time, with its part."""
    parts = {module: _second_half(run.column(f"bubble_{module}")) for module in run.modules}
    medians = {module: median(values) for module, values in parts.items() if values}
    if not medians:
        return ""
    most = max(medians, key=lambda module: medians[module])
    return f"{medians[most]:.1%} for {most}"


def _fallbacks(run: RunContents) -> list[Number]:
    last = run.steps[-1]
    counts = {name: last.get(f"plan_{name}") for name in ("late", "failed", "invalid")}
    known = {name: count for name, count in counts.items() if count is not None}
    if not known:
        return []
    counts_text = ", ".join(f"{count} {name}" for name, count in known.items() if count)
    total, advice = sum(known.values()), ""
    if total > _MOST_LOST * run.last_step:
        advice = (
            "Searches end too late: lower planner.search.budget_evaluations, or raise planner.search.threads or "
            "planner.search.patience_s."
            if 2 * known.get("late", 0) > total
            else "Searches fail: the log says why."
        )
    note = counts_text or "every search was used"
    return [Number(label="first plans run", value=f"{total:,}", note=note, advice=advice)]


def _memory(run: RunContents) -> list[Number]:
    columns = (run.column(f"memory_{name}_gib") for name in ("measured", "predicted", "limit"))
    measured = [row for row in zip(*columns, strict=True) if row[0] is not None]
    if not measured:
        return []
    peak, predicted, limit = max(measured, key=lambda row: row[0] or 0.0)
    note, advice = "" if predicted is None else f"predicted {predicted:.2f}", ""
    if limit is not None and peak is not None and peak > limit:
        advice = f"It was above the limit of {limit:.2f} GiB: raise planner.memory_margin (docs/memory.md)."
    return [Number(label="peak memory", value=f"{peak:.2f} GiB", note=note, advice=advice)]


def _waits(run: RunContents) -> list[Number]:
    """The waits over the second half of the steps, as kernels are compiled in the first ones."""
    total = sum(_second_half(run.column("step_time_s")))
    keys = (("data_time_s", "data"), ("plan_time_s", "plans"))
    parts = [(sum(_second_half(run.column(key))), name) for key, name in keys]
    if not total or not any(seconds for seconds, _ in parts):
        return []
    parts_text = ", ".join(f"{seconds / total:.1%} {name}" for seconds, name in parts)
    lost, advice = sum(seconds for seconds, _ in parts) / total, ""
    if lost > _MOST_LOST:
        advice = {
            "data": "Steps wait for data: raise data.num_workers or data.prefetch.",
            "plans": "Steps wait for plans: lower planner.search.budget_evaluations, or raise planner.search.threads.",
        }[max(parts)[1]]
    return [Number(label="time lost to waits", value=f"{lost:.1%}", note=parts_text, advice=advice)]


def _changes(run: RunContents) -> list[Number]:
    """How much of an elastic job's time led to steps."""
    known = [value for value in run.column("time_in_steps") if value is not None]
    if not known:
        return []
    changes = [event for event in run.events if event.get("kind") != "started"]
    redone = sum(count for event in changes if isinstance(count := event.get("redone_steps"), int))
    note = f"of the job's; changes of nodes: {len(changes)}, steps redone: {redone}"
    return [Number(label="time in finished steps", value=f"{known[-1]:.1%}", note=note)]


def _duration(seconds: float) -> str:
    """Seconds as text in a suitable unit."""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
