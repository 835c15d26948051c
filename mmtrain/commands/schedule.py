"""`mmtrain schedule`: named schedules listed, drawn and compared, for a chain, a problem or a batch of a job."""

import argparse
import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mmtrain.commands.scheduled_iteration import (
    MIB,
    Planner,
    PlannerSearch,
    ScheduledPlan,
    add_options,
    chain_costs,
    check_options,
    planner_of,
)
from mmtrain.errors import ConfigError, MMTrainError, PlanError

if TYPE_CHECKING:
    from mmtrain.schedule.timeline import Timeline

_T = TypeVar("_T")


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser."""
    schedule = commands.add_parser("schedule", help="list, draw and compare schedules")
    verbs = schedule.add_subparsers(dest="verb", required=True, metavar="VERB")
    listing = verbs.add_parser(
        "list", help="name the schedules", description="Names the schedules, a line each, or those of files."
    )
    listing.add_argument("files", nargs="*", metavar="FILE", help="FILE.py[:FUNCTION] or FILE.csv (default: all names)")
    listing.add_argument(
        "--pp", type=int, default=4, metavar="P", help="pipeline ranks of a file's schedule (default 4)"
    )
    listing.set_defaults(run=_list)
    show = verbs.add_parser(
        "show",
        help="plan one iteration and draw it",
        description="Plans one iteration and draws the simulated timeline, or draws a plan from a file.",
    )
    show.add_argument(
        "name",
        nargs="?",
        help="schedule (see `mmtrain schedule list`; default: the config's, else 1F1B), or a file: a recipe's "
        ".py[:FUNCTION], torch's .csv, or with --problem a plan's .json",
    )
    add_options(show)
    show.add_argument(
        "--format",
        choices=["text", "svg", "png", "trace", "csv", "csv-comms", "json", "problem", "program"],
        default="text",
        help="trace: for Perfetto; csv, csv-comms: as torch's pipelining reads it, compute alone or with transfers; "
        "json: the plan; problem: what there is to plan, for `mmtrain plan`; program: the lowered actions (default "
        "text)",
    )
    show.add_argument("--out", type=Path, metavar="FILE", help="file to write; needed for png")
    show.set_defaults(run=_show, takes_overrides=True, overrides=[])
    compare = verbs.add_parser(
        "compare",
        help="compare schedules on one iteration",
        description="Plans one iteration by several schedules, and prints a line each: makespan, bubble, the longest "
        "idle time of a rank between its first and last action, peak of activations of the most and the least loaded "
        "rank. A chain or a config's model is cut as each schedule wants it; a problem's stages stay where they are. "
        "`planned` is what the planner's search makes of the stages of the best schedule named before it.",
    )
    compare.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="schedules, files (.py[:FUNCTION], .csv), or planned (default: all names)",
    )
    compare.add_argument(
        "--evaluations", type=int, default=1000, metavar="N", help="plans that planned tries (default 1000)"
    )
    compare.add_argument("--seed", type=int, default=0, metavar="S", help="of the search (default 0)")
    add_options(compare)
    compare.add_argument("--format", choices=["text", "csv", "json"], default="text", help="(default text)")
    compare.add_argument("--out", type=Path, metavar="FILE", help="file to write")
    compare.set_defaults(run=_compare, takes_overrides=True, overrides=[])


# ------------------------------------------------------------------------------------------- list


def _list(args: argparse.Namespace) -> int:
    from mmtrain.schedule.library.catalogue import CATALOGUE
    from mmtrain.schedule.recipe.schedule_files import schedule_of

    for schedule in [schedule_of(name, args.pp) for name in args.files] or CATALOGUE.values():
        print(f"{schedule.name:22s} {schedule.idea}")
    return 0


# ------------------------------------------------------------------------------------------- show


def _show(args: argparse.Namespace) -> int:
    from mmtrain.planner.plan_json import plan_to_json
    from mmtrain.schedule.io import torch_csv
    from mmtrain.schedule.plan import entry_costs
    from mmtrain.schedule.view import draw

    check_options(args, "show")
    if args.format == "png" and args.out is None:
        raise ConfigError("schedule show: --format png needs --out FILE")
    planned = _from_file(args) if _brings_iteration(args) else planner_of(args)(args.name)
    if args.format == "json":  # also without a plan
        _write(plan_to_json(planned.result), args.out)
        return 0
    if args.format == "problem":
        _write(planned.result.problem.to_json(), args.out)
        return 0
    plan, timeline, title = planned.plan, planned.timeline, planned.name
    if args.format == "png":
        args.out.write_bytes(draw.png(timeline, title=_summary(title, timeline)))
        return 0
    exposed = ""
    if planned.result.problem.runs_units:
        per_rank = (sum(cost.exposed_s for cost in costs) for costs in entry_costs(plan, planned.result.problem))
        exposed = f"exposed exchanges s {', '.join(f'{seconds:.4g}' for seconds in per_rank)}\n"
    text = {
        "text": lambda: draw.text(timeline) + f"\n{_summary(title, timeline)}\n{exposed}",
        "svg": lambda: draw.svg(timeline, title=_summary(title, timeline)),
        "trace": lambda: json.dumps(draw.trace_events({title: timeline})),
        "csv": lambda: torch_csv.write_plan(plan),
        "csv-comms": lambda: torch_csv.write_program(planned.lower(plan)),
        "program": lambda: f"{planned.lower(plan)}\n",
    }[args.format]()
    _write(text, args.out)
    return 0


def _summary(name: str, timeline: "Timeline") -> str:
    peaks = ", ".join(f"{peak / MIB:.1f}" for peak in timeline.peak_bytes)
    return f"{name}: makespan {timeline.makespan_s:.4g} s, bubble {100 * timeline.bubble:.1f} %, peak MiB {peaks}"


def _brings_iteration(args: argparse.Namespace) -> bool:
    """Whether the name is a plan's file, with what it plans; orders as CSV can be those of a config or problem, too."""
    name = args.name or ""
    return name.endswith((".json", ".json.gz")) or (name.endswith(".csv") and not (args.config or args.problem))


def _from_file(args: argparse.Namespace) -> ScheduledPlan:
    """A plan from a file."""
    from mmtrain.planner.plan_json import plan_from_json
    from mmtrain.planner.result import PlanResult
    from mmtrain.schedule.chain import chain_problem
    from mmtrain.schedule.io.strict_json import read_text
    from mmtrain.schedule.io.torch_csv import has_transfers, read_plan, read_program
    from mmtrain.schedule.passes.braid import braid
    from mmtrain.schedule.passes.lower import lower
    from mmtrain.schedule.passes.separate import separate_gradients
    from mmtrain.schedule.problem import PlanningProblem

    path = Path(args.name)
    if path.suffix == ".csv":
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"schedule show: {path}: cannot be read: {error}") from error
        if _named(path, lambda: has_transfers(text)):
            _named(path, lambda: read_program(text))
        plan = _named(path, lambda: read_plan(text))
        ranks, stages = plan.graph.num_ranks, len(plan.graph.stage_rank)
        for option, value, own in (
            ("--pp", args.pp, ranks),
            ("--microbatches", args.microbatches, len(plan.graph.works)),
            ("--segments", args.segments, stages // ranks),
        ):
            if value not in (None, own):
                raise ConfigError(f"schedule show: {option} {value}, but {path} is for {own}; leave it out")
        problem = chain_problem(plan.graph, **chain_costs(args.costs), exchange_s=args.exchange)
    elif args.problem:
        problem = PlanningProblem.read(args.problem)
        text = read_text(path)
        plan = _named(path, lambda: plan_from_json(problem, text))
    else:
        raise ConfigError(f"schedule show: {path} is a plan for some problem; name it with --problem FILE")
    if args.separate_gradients:
        plan = separate_gradients(plan, problem)
    if args.braid:
        plan = braid(plan, problem)
    result = PlanResult(problem=problem, status="first", message=f"the order of {path}", plan_or_none=plan)
    return ScheduledPlan(path.name, result, lambda plan: lower(plan, problem, sharded=False))


def _named(path: Path, read: Callable[[], _T]) -> _T:
    try:
        return read()
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error


# ---------------------------------------------------------------------------------------- compare


def _compare(args: argparse.Namespace) -> int:
    from mmtrain.planner.search_settings import PLANNED
    from mmtrain.schedule.library.catalogue import CATALOGUE
    from mmtrain.schedule.library.names import check_name, file_of
    from mmtrain.schedule.recipe.schedule_files import schedule_of

    check_options(args, "compare")
    if args.evaluations < 1 or args.seed < 0:
        raise ConfigError(
            f"schedule compare: --evaluations {args.evaluations} --seed {args.seed}; the first is at least 1, the "
            "second at least 0"
        )
    names = args.names or [*CATALOGUE, PLANNED]
    for name in names:
        check_name(name, (PLANNED,))
        if name != PLANNED and file_of(name):
            schedule_of(name, _num_ranks(args))  # a broken file is no row of the table
    plan, note = planner_of(args), ""
    rows: list[dict[str, Any]] = []
    for name in names:
        base, search = name, None
        if name == PLANNED:
            named = [row for row in rows if not row["refused"]]
            base = min(named, key=lambda row: row["makespan_s"])["schedule"] if named else None
            search = PlannerSearch(args.evaluations, args.seed)
            note = (
                f"planned: what planner.enable makes of the stages of {base or 'the default schedule'}; "
                f"{args.evaluations} plans tried, seed {args.seed} (--evaluations, --seed)\n"
            )
        rows.append(_row(name, base, search, plan))
    if args.format == "json":
        text = json.dumps(rows, indent=1) + "\n"
    elif args.format == "csv":
        file = io.StringIO()
        table = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
        text = file.getvalue()
    else:
        text = _table(rows) + note
    _write(text, args.out)
    return 0


def _num_ranks(args: argparse.Namespace) -> int:
    """Pipeline ranks of the iteration."""
    from mmtrain.config import config
    from mmtrain.schedule.problem import PlanningProblem

    if args.config:
        return config.load(args.config, args.overrides).parallelism.layout.depths[0]
    return PlanningProblem.read(args.problem).graph.num_ranks if args.problem else args.pp or 4


def _row(name: str, base: str | None, search: PlannerSearch | None, plan: Planner) -> dict[str, Any]:
    """One row of the comparison; a schedule that cannot plan this iteration has only the reason."""
    row: dict[str, Any] = {"schedule": name}
    numbers = ("makespan_s", "bubble", "idle_s", "peak_bytes", "least_peak_bytes")
    try:
        timeline = plan(base, search).timeline
    except MMTrainError as error:
        return row | dict.fromkeys(numbers) | {"refused": str(error).splitlines()[0]}
    idle = max(span - busy for span, busy in zip(timeline.span_s, timeline.busy_s, strict=True))
    peaks = timeline.peak_bytes
    values = (timeline.makespan_s, timeline.bubble, max(idle, 0.0), max(peaks), min(peaks))
    return row | dict(zip(numbers, values, strict=True)) | {"refused": None}


def _table(rows: list[dict[str, Any]]) -> str:
    best = min((row["makespan_s"] for row in rows if not row["refused"]), default=0.0)
    lines = [f"{'schedule':22s} {'makespan s':>11s} {'x best':>7s} {'bubble %':>9s} {'idle s':>9s} {'peak MiB':>20s}"]
    for row in rows:
        if row["refused"]:
            lines.append(f"{row['schedule']:22s} {row['refused']}")
            continue
        peak = f"{row['peak_bytes'] / MIB:.1f} ({row['least_peak_bytes'] / MIB:.1f})"
        ratio = row["makespan_s"] / best if best else 1.0
        lines.append(
            f"{row['schedule']:22s} {row['makespan_s']:11.5g} {ratio:7.3f} {100 * row['bubble']:9.2f} "
            f"{row['idle_s']:9.4g} {peak:>20s}"
        )
    lines.append(
        "idle s: of the rank that idles longest between its first and last action; peak: most (least) loaded rank"
    )
    return "\n".join(lines) + "\n"


def _write(text: str, out: Path | None) -> None:
    if out:
        out.write_text(text)
    else:
        print(text, end="" if text.endswith("\n") else "\n")
