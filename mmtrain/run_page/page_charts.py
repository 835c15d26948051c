"""The charts of a run's page and their curves."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mmtrain.run_page.breakdown_chart import HUES as HUES_OF_PARTS
from mmtrain.run_page.measured import breakdown
from mmtrain.run_page.metric_table import METRICS
from mmtrain.run_page.runs import RunContents
from mmtrain.schedule.action import Kind
from mmtrain.schedule.view.drawing import COLOURS
from mmtrain.simulator.breakdown import Breakdown, Parts, label

MOST_POINTS = 2000
"""Points of a curve; in a longer run each point is the mean of several steps."""

ColourPair = tuple[str, str]
"""A colour on white, and on black."""

HUES: tuple[ColourPair, ...] = tuple((kinds[Kind.B], kinds[Kind.F]) for kinds in COLOURS)
GREY: ColourPair = ("#6b7680", "#9aa5ae")
_COUNTS = frozenset(metric.name for metric in METRICS if metric.over_run)
"""The last of several steps is shown, not their mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One curve."""

    label: str
    colour: ColourPair
    x: Sequence[int]
    """Steps."""
    y: Sequence[float | None]
    dash: int = 0
    """The kind of line: 0 is solid, 1 and 2 are dashed."""
    dots: bool = False
    """Whether each point is marked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Curves over the steps of a run."""

    title: str
    unit: str
    note: str
    """A sentence about what it shows."""
    series: Sequence[Series]
    stacked: bool = False
    log: bool = False
    """Whether a logarithmic axis is offered."""
    zero: bool = True
    """The axis begins at 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Curve:
    """A curve of each run that has the numbers."""

    label: str
    of: str | Callable[[RunContents], list[float | None]]
    """Key in the metrics, or a function of the run."""
    colour: ColourPair = HUES[0]
    scale: float = 1.0
    dash: int = 0
    validation: bool = False


def charts(runs: Sequence[RunContents]) -> list[Chart]:
    """The charts of a page, those for which some run has numbers.

    With several runs each has a colour, each kind of curve a dash, and nothing is stacked.
    """
    modules = list(dict.fromkeys(name for run in runs for name in run.modules))
    made = [
        *_training_charts(runs),
        _breakdown_chart(runs),
        *_pipeline_charts(runs, modules),
        *_planner_and_data_charts(runs),
    ]
    return [chart for chart in made if chart.series]


def _training_charts(runs: Sequence[RunContents]) -> list[Chart]:
    return [
        _chart(
            runs, "Loss", "", "Mean over labelled tokens (or predicted numbers), all replicas.",
            [
                _Curve(label="training", of="loss"),
                _Curve(label="validation", of="validation_loss", colour=HUES[1], validation=True),
                _Curve(label="validation, other captions", of="shuffled_captions_loss", colour=GREY, validation=True),
            ],
            log=True, zero=False,
        ),
        _chart(
            runs, "Loss by source", "", "Mean over labelled tokens of each source; dashed: of its held-out split.",
            [
                curve
                for i, name in enumerate(_sources(runs))
                for curve in (
                    _Curve(label=name, of=f"loss/{name}", colour=_hue(i)),
                    _Curve(label=f"{name}, validation", of=_validated(name), colour=_hue(i), dash=1, validation=True),
                )
            ],
            log=True, zero=False,
        ),
        _chart(
            runs, "Samples by source", "", "In one step, all replicas.",
            [_Curve(label=name, of=f"samples/{name}", colour=_hue(i)) for i, name in enumerate(_sources(runs))],
            stacked=True,
        ),
        *_answer_charts(runs),
        _chart(
            runs, "Samples", "", "In one step, all replicas; the last step of an epoch may have few.",
            [_Curve(label="samples", of="samples")],
        ),
        _chart(
            runs, "Nodes", "", "Of an elastic job, and the pipelines on them; a node that is lost or joins changes the "
            "steps after it.",
            [_Curve(label="nodes", of="nodes"), _Curve(label="pipelines", of="pipelines", colour=HUES[1])],
        ),
        _chart(
            runs, "Throughput", "/s", "Tokens a second and device.",
            [_Curve(label="tokens", of="tps")],
        ),
        _chart(
            runs, "Step time", "s", "Whole steps, and what they waited for data and for their plan.",
            [
                _Curve(label="step", of="step_time_s"),
                _Curve(label="waits for data", of="data_time_s", colour=HUES[1]),
                _Curve(label="waits for a plan", of="plan_time_s", colour=HUES[2]),
            ],
        ),
    ]  # fmt: skip


def _answer_charts(runs: Sequence[RunContents]) -> list[Chart]:
    return [
        _chart(
            runs, "Answers right", "%", "Of held-out questions, by grade.",
            [
                _Curve(
                    label=grade or "no grade",
                    of=_validation_share("accuracy", grade),
                    colour=_hue(i),
                    scale=100,
                    validation=True,
                )
                for i, grade in enumerate(_shares(runs, "accuracy"))
            ],
        ),
        _chart(
            runs, "Pairs found", "%", "Of held-out images their caption among the 1 or 5 most similar captions of all, "
            "and of captions their image.",
            [
                _Curve(label=name, of=_validation_share("recall", name), colour=_hue(i), scale=100, validation=True)
                for i, name in enumerate(_shares(runs, "recall"))
            ],
        ),
        _chart(
            runs, "Own metric", "", "Of the answers to held-out questions (validation.metric).",
            [
                _Curve(label=name, of=_metric(name), colour=HUES[i % len(HUES)], validation=True)
                for i, name in enumerate(_metrics(runs))
            ],
            zero=False,
        ),
    ]  # fmt: skip


def _breakdown_chart(runs: Sequence[RunContents]) -> Chart:
    """The chart of one run: curves of several would not add up."""
    breakdowns = [breakdown(line) for line in runs[0].steps] if len(runs) == 1 else []
    curves = [
        _Curve(label=label(parts), of=_share(breakdowns, parts), colour=HUES_OF_PARTS[parts[0]], scale=100)
        for parts in dict.fromkeys(parts for one in breakdowns if one is not None for parts in one.shares)
    ]
    note = (
        "Of the ranks of replica 0, 100 in all. What is joined by + cannot be told apart by measuring (model FLOPs "
        "only without metrics.peak_flops)."
    )
    return _chart(runs, "Where the time of a step goes", "%", note, curves, stacked=True)


def _share(breakdowns: Sequence[Breakdown | None], parts: Parts) -> Callable[[RunContents], list[float | None]]:
    return lambda run: [None if one is None else one.shares.get(parts) for one in breakdowns]


def _pipeline_charts(runs: Sequence[RunContents], modules: Sequence[str]) -> list[Chart]:
    return [
        _chart(
            runs, "Model FLOPs utilisation", "%", "Of the whole step, and of each module while its actions run.",
            [
                _Curve(label="whole step", of="mfu", colour=GREY, scale=100),
                *(_Curve(label=m, of=f"mfu_{m}", colour=_hue(i), scale=100) for i, m in enumerate(modules)),
            ],
        ),
        _chart(
            runs, "Model FLOP/s", "GFLOP/s", "Of the whole step, a device, and of each module while its actions run. "
            "MFU needs metrics.peak_flops.",
            [
                _Curve(label="whole step", of=_without_mfu("tflops"), colour=GREY, scale=1000),
                *(
                    _Curve(label=m, of=_without_mfu(f"tflops_{m}"), colour=_hue(i), scale=1000)
                    for i, m in enumerate(modules)
                ),
            ],
        ),
        _chart(
            runs, "Bubble by what was waited for", "%", "Idle time of the pipeline ranks, charged to the module "
            "whose computation held them up; other: transfers, starts, gathers and reductions.",
            [
                *(_Curve(label=m, of=f"bubble_{m}", colour=_hue(i), scale=100) for i, m in enumerate(modules)),
                *([_Curve(label="other", of="bubble_other", colour=GREY, scale=100)] if modules else []),
                *([_Curve(label="all", of="bubble", colour=GREY, scale=100)] if len(runs) > 1 or not modules else []),
            ],
            stacked=True,
        ),
        _chart(
            runs, "Compute by module", "s", "Seconds of the actions of each module, all pipeline ranks together.",
            [_Curve(label=m, of=f"compute_s_{m}", colour=_hue(i)) for i, m in enumerate(modules)],
            stacked=True,
        ),
        _chart(
            runs, "Makespan", "s", "From the first action of the pipeline to the last: as measured, and as simulated.",
            [
                _Curve(label="measured", of="makespan_s", colour=HUES[1]),
                _Curve(label="planned", of=_planned),
                _Curve(label="lower bound", of="plan_lower_bound_s", colour=GREY, dash=1),
            ],
        ),
        _chart(
            runs, "Error of costs", "%", "How far the seconds of a module's actions on a rank are from their costs, "
            "made as long in all, as a part of all: learned ones, and as modelled (planner.learn_costs).",
            [
                _Curve(label="learned", of="cost_error", scale=100),
                _Curve(label="modelled", of="cost_error_unlearned", colour=GREY, scale=100),
            ],
        ),
    ]  # fmt: skip


def _planner_and_data_charts(runs: Sequence[RunContents]) -> list[Chart]:
    return [
        _chart(
            runs, "Planner", "%", "How much longer the plan is than the lower bound, and how much shorter than the "
            "first plan.",
            [
                _Curve(label="gap to the bound", of="plan_gap", scale=100),
                _Curve(label="gain over the first plan", of=_gain, colour=HUES[2], scale=100),
            ],
        ),
        _chart(
            runs, "Steps with their first plan", "", "Search timed out (late), failed or was invalid; in the run.",
            [
                _Curve(label=label, of=f"plan_{label}", colour=HUES[i])
                for i, label in enumerate(("late", "failed", "invalid"))
            ],
            stacked=True,
        ),
        _chart(
            runs, "Memory of the most loaded rank", "GiB", "Peak of the step, as predicted and as measured.",
            [
                _Curve(label="measured", of="memory_measured_gib", colour=HUES[1]),
                _Curve(label="predicted", of="memory_predicted_gib"),
                _Curve(label="limit", of="memory_limit_gib", colour=GREY, dash=1),
            ],
        ),
        _chart(
            runs, "Tokens by modality", "", "In one step, all replicas.",
            [
                _Curve(label="text", of=_text_tokens, colour=HUES[1]),
                _Curve(label="image", of=_some("image_tokens")),
                _Curve(label="video", of=_some("video_tokens"), colour=HUES[2]),
                _Curve(label="sound", of=_some("sound_tokens"), colour=HUES[3]),
            ],
            stacked=True,
        ),
        _chart(
            runs, "Learning rate", "", "Of optimizer.lr, and of groups with a rate of their own.",
            [
                _Curve(label="all others" if _rates(runs) else "learning rate", of="lr"),
                *(
                    _Curve(label=name, of=_rate(name), colour=_hue(i), dash=i // len(HUES))
                    for i, name in enumerate(_rates(runs), 1)
                ),
            ],
        ),
        _chart(
            runs, "Gradient norm", "", "Before clipping.", [_Curve(label="gradient norm", of="grad_norm")], log=True,
        ),
    ]  # fmt: skip


def chart_json(chart: Chart) -> dict[str, Any]:
    """A chart as the page's script reads it, with 5 digits a number."""
    record = asdict(chart)
    for series in record["series"]:
        series["y"] = [None if value is None else float(f"{value:.5g}") for value in series["y"]]
    return record


def _chart(
    runs: Sequence[RunContents],
    title: str,
    unit: str,
    note: str,
    curves: Sequence[_Curve],
    *,
    stacked: bool = False,
    log: bool = False,
    zero: bool = True,
) -> Chart:
    several = len(runs) > 1
    series = []
    for number, run in enumerate(runs):
        for dash, curve in enumerate(curves):
            if (points := _points(run, curve)) is None:
                continue
            label, colour = curve.label, curve.colour
            if several:
                label, colour = f"{run.name}: {label}", _hue(number)
            dash = dash if several else curve.dash
            series.append(
                Series(label=label, colour=colour, x=points[0], y=points[1], dash=dash, dots=curve.validation)
            )
    return Chart(title=title, unit=unit, note=note, series=series, stacked=stacked and not several, log=log, zero=zero)


def _points(run: RunContents, curve: _Curve) -> tuple[list[int], list[float | None]] | None:
    """Steps and values of a curve; None if the run has none."""
    lines = run.validations if curve.validation else run.steps
    if callable(curve.of):
        values = curve.of(run)
    elif curve.validation:
        values = [line.get(curve.of) for line in lines]
    else:
        values = run.column(curve.of)
    if all(value is None for value in values):
        return None
    scaled = [None if value is None else value * curve.scale for value in values]
    last = curve.of in _COUNTS
    return thinned([line["step"] for line in lines], scaled, last=last)


def thinned(
    x: Sequence[int], y: Sequence[float | None], *, last: bool = False, most: int = MOST_POINTS
) -> tuple[list[int], list[float | None]]:
    """At most `most` points: each the mean of equally many neighbours, at the last of their steps.

    Args: last: takes the last value instead of the mean.
    """
    size = math.ceil(len(x) / most) if x else 1
    xs, ys = [], []
    for low in range(0, len(x), size):
        known = [value for value in y[low : low + size] if value is not None]
        xs.append(x[min(low + size, len(x)) - 1])
        ys.append(None if not known else known[-1] if last else sum(known) / len(known))
    return xs, ys


def _hue(module: int) -> ColourPair:
    return HUES[module % len(HUES)]


def _shares(runs: Iterable[RunContents], key: str) -> list[str]:
    lines = (line for run in runs for line in run.validations)
    return list(dict.fromkeys(name for line in lines for name in line.get(key) or ()))


def _validation_share(key: str, name: str) -> Callable[[RunContents], list[float | None]]:
    return lambda run: [(line.get(key) or {}).get(name) for line in run.validations]


def _metrics(runs: Iterable[RunContents]) -> list[str]:
    tables = (line.get("metric") for run in runs for line in run.validations)
    return list(dict.fromkeys(str(name) for table in tables if isinstance(table, dict) for name in table))


def _metric(name: str) -> Callable[[RunContents], list[float | None]]:
    def values(run: RunContents) -> list[float | None]:
        found = [(line.get("metric") or {}).get(name) for line in run.validations]
        return [value if isinstance(value, int | float) else None for value in found]

    return values


def _sources(runs: Iterable[RunContents]) -> list[str]:
    keys = (key for run in runs for key in run.keys if key.startswith("samples/"))
    return list(dict.fromkeys(key.removeprefix("samples/") for key in keys))


def _validated(source: str) -> Callable[[RunContents], list[float | None]]:
    return lambda run: [(line.get("loss_by_source") or {}).get(source) for line in run.validations]


def _rates_of(run: RunContents) -> dict[str, float]:
    """Name of each group of a run with a rate of its own -> its rate relative to that of all others."""
    groups, lr = run.setting("optimizer", "groups") or [], run.setting("optimizer", "lr")
    names = ((" ".join(filter(None, (g.get("module"), g.get("pattern")))), g.get("lr")) for g in groups)
    return {name: rate / lr for name, rate in names if rate is not None and lr}


def _rates(runs: Iterable[RunContents]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in _rates_of(run)))


def _rate(group: str) -> Callable[[RunContents], list[float | None]]:
    def values(run: RunContents) -> list[float | None]:
        factor = _rates_of(run).get(group)
        return [None if value is None or factor is None else factor * value for value in run.column("lr")]

    return values


def _some(key: str) -> Callable[[RunContents], list[float | None]]:
    """A count, if it is ever above 0."""

    def values(run: RunContents) -> list[float | None]:
        counts = run.column(key)
        return counts if any(counts) else [None] * len(counts)

    return values


def _without_mfu(key: str) -> Callable[[RunContents], list[float | None]]:
    """A metric, of runs without MFU."""
    return lambda run: [None] * len(run.steps) if "mfu" in run.keys else run.column(key)


def _text_tokens(run: RunContents) -> list[float | None]:
    columns = (run.column(key) for key in ("tokens", "image_tokens", "video_tokens", "sound_tokens"))
    rows = zip(*columns, strict=True)
    return [None if tokens is None else tokens - sum(part or 0 for part in parts) for tokens, *parts in rows]


def _planned(run: RunContents) -> list[float | None]:
    """Older runs have it only with the planner on."""
    both = zip(run.column("planned_makespan_s"), run.column("plan_makespan_s"), strict=True)
    return [of_all if of_all is not None else of_planner for of_all, of_planner in both]


def _gain(run: RunContents) -> list[float | None]:
    first, made = run.column("plan_first_makespan_s"), run.column("plan_makespan_s")
    return [1 - b / a if a and b is not None else None for a, b in zip(first, made, strict=True)]
