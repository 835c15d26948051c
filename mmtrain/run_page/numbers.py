"""The numbers at the top of a run's page."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from mmtrain.run_page.runs import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """One number with its name."""

    label: str
    value: str
    note: str = ""
    """What it is beside it: of which steps, compared with what."""


def numbers(run: Run) -> list[Number]:
    """The numbers of a run; what it does not know is left out. Rates are medians of the later half of its steps."""
    goal = run.setting("training", "steps")
    found = [
        Number(
            label="steps",
            value=f"{run.last_step:,}",
            note=f"of {goal:,}" if isinstance(goal, int) and goal != run.last_step else "",
        ),
        _number("loss", _mean_of_last(run.column("loss"), 10), "{:.4f}", note="mean of the last 10 steps"),
        *_validation(run),
        _number("tokens", _sum(run.column("tokens")), "{:,.0f}"),
        _number("training time", _sum(run.column("step_time_s")), "{}", note="without validation", show=_duration),
        _rate(run, "throughput", "tps", "{:,.0f} /s", note="tokens a device"),
        _rate(run, "step", "step_time_s", "{}", show=_duration),
        _rate(run, "MFU", "mfu", "{:.1%}"),
        *(_rate(run, f"MFU {module}", f"mfu_{module}", "{:.1%}") for module in run.modules),
        _rate(run, "bubble", "bubble", "{:.1%}", note=_most_waited_for(run)),
        _rate(run, "measured / planned", "makespan_ratio", "{:.2f}", note="makespan"),
        _rate(run, "planner gap", "plan_gap", "{:.1%}", note="over the lower bound"),
        *_fallbacks(run),
        *_memory(run),
        *_waits(run),
    ]
    return [number for number in found if number is not None]


def _number(label: str, value: float | None, form: str, note: str = "", show: object = None) -> Number | None:
    if value is None:
        return None
    shown = form.format(show(value) if callable(show) else value)
    if not any(digit in shown for digit in "123456789"):
        shown = shown.removeprefix("-")  # what rounds to nothing has no sign
    return Number(label=label, value=shown, note=note)


def _later_half(values: Sequence[float | None]) -> list[float]:
    return [value for value in values[len(values) // 2 :] if value is not None]


def _rate(run: Run, label: str, key: str, form: str, note: str = "", show: object = None) -> Number | None:
    known = _later_half(run.column(key))
    return _number(label, median(known) if known else None, form, note, show)


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _mean_of_last(values: Sequence[float | None], count: int) -> float | None:
    known = [value for value in values[-count:] if value is not None]
    return sum(known) / len(known) if known else None


def _validation(run: Run) -> list[Number]:
    known = [line for line in run.validations if isinstance(line["validation_loss"], float)]
    if not known:
        return []
    last = known[-1]
    return [Number(label="validation loss", value=f"{last['validation_loss']:.4f}", note=f"step {last['step']:,}")]


def _most_waited_for(run: Run) -> str:
    """The module that costs most idle time."""
    parts = {module: _later_half(run.column(f"bubble_{module}")) for module in run.modules}
    medians = {module: median(values) for module, values in parts.items() if values}
    if not medians:
        return ""
    most = max(medians, key=lambda module: medians[module])
    return f"{medians[most]:.1%} for {most}"


def _fallbacks(run: Run) -> list[Number]:
    last = run.steps[-1]
    counts = {name: last.get(f"plan_{name}") for name in ("late", "failed", "invalid")}
    known = {name: count for name, count in counts.items() if count is not None}
    if not known:
        return []
    words = ", ".join(f"{count} {name}" for name, count in known.items() if count)
    return [Number(label="first plans run", value=f"{sum(known.values()):,}", note=words or "every search was used")]


def _memory(run: Run) -> list[Number]:
    both = list(zip(run.column("memory_measured_gib"), run.column("memory_predicted_gib"), strict=True))
    measured = [pair for pair in both if pair[0] is not None]
    if not measured:
        return []
    peak, predicted = max(measured, key=lambda pair: pair[0] or 0.0)
    note = "" if predicted is None else f"predicted {predicted:.2f}"
    return [Number(label="peak memory", value=f"{peak:.2f} GiB", note=note)]


def _waits(run: Run) -> list[Number]:
    """Of the later half of the steps: at the start kernels are compiled."""
    total = sum(_later_half(run.column("step_time_s")))
    keys = (("data_time_s", "data"), ("plan_time_s", "plans"))
    parts = [(sum(_later_half(run.column(key))), name) for key, name in keys]
    if not total or not any(seconds for seconds, _ in parts):
        return []
    words = ", ".join(f"{seconds / total:.1%} {name}" for seconds, name in parts)
    return [Number(label="time lost to waits", value=f"{sum(s for s, _ in parts) / total:.1%}", note=words)]


def _duration(seconds: float) -> str:
    """Seconds in words that suit them."""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
