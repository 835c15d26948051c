"""The result of a study as text, and as JSON. Pure."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mmtrain.config.config import Config
from mmtrain.config.topology import JobLayout
from mmtrain.costs.machine import Machine
from mmtrain.planner.search_settings import PLANNED
from mmtrain.simulator.breakdown import label
from mmtrain.simulator.study import Report, ScheduleForecast

GIB = 2.0**30
_COLUMNS = ("schedule", "iteration s", "min", "max", "MFU", "bubble", "gather s", "reduce s", "step s", "peak GiB")


def table(report: Report) -> str:
    """The report as text: the job, one line for each schedule, schedules that do not fit, and notes."""
    question, machine = report.question, report.machine
    config, shape = question.config, question.config.parallelism.layout
    degrees = ", ".join(f"{axis} {degree}" for axis, degree in shape.degrees.items())
    lines = [
        config.job.description or "a job",
        f"{shape.world_size} ranks of {machine.name} ({degrees}); costs: {machine.costs}",
        f"workload {question.drawn_workload}, seed {question.seed}: {question.num_iterations} iterations of "
        f"{config.training.global_batch_size} microbatches{_most_tokens(config)}, "
        f"{_span(report.images)} {question.counted} a microbatch",
        "",
    ]
    answers = [answer for answer in report.answers if not answer.problem]
    lines += aligned([_COLUMNS, *(_row(answer, machine, shape) for answer in answers)])
    if answers:
        lines += ["", "% of ranks x seconds, 100 in all:", *aligned(breakdown_rows(answers))]
        lines += ["", "standard deviation in seconds, of the microbatches of a module and of the replicas:"]
        lines += aligned(_spread_rows(answers))
    lines += _budgets(report)
    lines += [""] * any((report.notes, _faults(report)))
    lines += _faults(report)
    lines += [f"note: {note}" for note in report.notes]
    return "\n".join(lines).rstrip() + "\n"


def breakdown_rows(answers: Sequence[ScheduleForecast]) -> list[tuple[str, ...]]:
    """The names of the parts, and a row of percentages for each schedule. Args: answers: without problems."""
    shares = {answer.schedule: answer.breakdown.shares for answer in answers}
    labels = [label(parts) for parts in next(iter(shares.values()))]
    rows = [(name, *(f"{100 * share:.1f}" for share in parts.values())) for name, parts in shares.items()]
    return [("schedule", *labels), *rows]


def _spread_rows(answers: Sequence[ScheduleForecast]) -> list[tuple[str, ...]]:
    """What is uneven under each schedule, and how many documents of a step are deferred."""
    modules = list(answers[0].iterations[0].spread_s)
    rows = [("schedule", *modules, "replicas", "deferred")]
    for answer in answers:
        spreads = [statistics.fmean(step.spread_s.get(name, 0.0) for step in answer.iterations) for name in modules]
        numbers = [*spreads, answer.mean("replica_spread_s")]
        rows.append((answer.schedule, *(f"{number:.4f}" for number in numbers), f"{answer.mean('num_deferred'):.1f}"))
    return rows


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """A line for each row, with columns of one width: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]).rstrip()
        for row in rows
    ]


def _most_tokens(config: Config) -> str:
    if config.model.reads_clips or config.model.reads_pairs:
        return ""
    return f" of up to {config.training.seq_len} tokens"


def _row(answer: ScheduleForecast, machine: Machine, shape: JobLayout) -> tuple[str, ...]:
    times = [step.iteration_s for step in answer.iterations]
    rank, peak = answer.most_loaded
    mfu = "-" if machine.peak_flops is None else f"{100 * answer.mfu(_ranks(shape), machine.peak_flops):.1f} %"
    return (
        answer.schedule,
        f"{sum(times) / len(times):.3f}",
        f"{min(times):.3f}",
        f"{max(times):.3f}",
        mfu,
        f"{100 * answer.mean('bubble'):.1f} %",
        f"{answer.mean('gather_s'):.3f}",
        f"{answer.mean('reduce_s'):.3f}",
        f"{answer.mean('optimizer_s'):.3f}",
        f"{peak / GIB:.3g} ({_described(rank, shape)})",
    )


def _ranks(shape: JobLayout) -> float:
    """Ranks of one replica, mean over them."""
    return shape.world_size / shape.dp


def _described(rank: int, shape: JobLayout) -> str:
    """A pipeline rank in words. Args: rank: as of `ScheduleForecast.most_loaded`."""
    place = shape.coordinates(rank * shape.stage_size)
    return f"pp_rank {place.pp}" + ("" if shape.is_even else f" of pipeline {place.pipeline}")


def _budgets(report: Report) -> list[str]:
    """The memory budgets under a limit, once for all schedules with equal budgets."""
    schedules: dict[str, list[str]] = {}
    for answer in report.answers:
        for budget in answer.budgets:
            depth = "" if len(answer.budgets) == 1 else f" (pipelines of {len(budget.ranks)} ranks)"
            schedules.setdefault(budget.table(), []).append(answer.schedule + depth)
    return [line for text, names in schedules.items() for line in ("", f"{', '.join(names)}: {text}")]


def _faults(report: Report) -> list[str]:
    """One line for each schedule that has no plan or does not fit into the device's memory."""
    faults = []
    searched = any(answer.schedule == PLANNED and not answer.problem for answer in report.answers)
    fits = f"; {PLANNED} fits: planner.enable = true trains it" * searched
    for answer in report.answers:
        if answer.problem:
            faults.append(f"{answer.schedule}: NO PLAN: {answer.problem}{fits}")
            continue
        rank, peak = answer.most_loaded
        limit = report.machine.memory_bytes
        if limit is not None and peak > limit:
            where = _described(rank, report.question.config.parallelism.layout)
            fixed = peak - max(step.activation_bytes[rank] for step in answer.iterations)
            faults.append(
                f"{answer.schedule}: OUT OF MEMORY: {where} needs {peak / GIB:.3g} GiB ({fixed / GIB:.3g} of "
                "them parameters, gradients and optimizer state), but a device of "
                f"{report.machine.name} has {limit / GIB:.3g}; recompute more (activation_checkpoint.mode), raise a "
                "degree, or set planner.memory_limit"
            )
    return faults


def _span(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.1f}" if round(low, 1) == round(high, 1) else f"{low:.1f} to {high:.1f}"


def to_json(report: Report) -> dict[str, Any]:
    """The report as values for JSON, in seconds and bytes, with every iteration."""
    question, machine = report.question, report.machine
    shape = question.config.parallelism.layout
    return {
        "description": question.config.job.description,
        "ranks": shape.world_size,
        "hardware": machine.name,
        "costs": machine.costs,
        "workload": question.drawn_workload,
        "seed": question.seed,
        "replicas": question.simulated_replicas,
        "notes": list(report.notes),
        f"{question.counted}_per_microbatch": list(report.images),
        "schedules": [_answer_json(answer, machine, shape) for answer in report.answers],
    }


def _answer_json(answer: ScheduleForecast, machine: Machine, shape: JobLayout) -> dict[str, Any]:
    if answer.problem:
        return {"schedule": answer.schedule, "problem": answer.problem}
    rank, peak = answer.most_loaded
    place = shape.coordinates(rank * shape.stage_size)
    return {
        "schedule": answer.schedule,
        "iteration_s": answer.mean("iteration_s"),
        "mfu": None if machine.peak_flops is None else answer.mfu(_ranks(shape), machine.peak_flops),
        "bubble": answer.mean("bubble"),
        "breakdown": answer.breakdown.by_label,
        "spread_s": {
            name: statistics.fmean(s.spread_s[name] for s in answer.iterations)
            for name in answer.iterations[0].spread_s
        },
        "replica_spread_s": answer.mean("replica_spread_s"),
        "deferred": answer.mean("num_deferred"),
        "peak_bytes": peak,
        "peak_pp_rank": place.pp,
        **({} if shape.is_even else {"peak_pipeline": place.pipeline}),
        "fits": None if machine.memory_bytes is None else peak <= machine.memory_bytes,
        "iterations": [asdict(step) | {"breakdown": step.breakdown.by_label} for step in answer.iterations],
    }
