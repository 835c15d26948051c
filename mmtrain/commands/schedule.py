"""`mmtrain schedule`: named schedules listed, drawn and compared, for a chain, a problem or a batch of a job."""

import argparse
import csv
import io
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from mmtrain.errors import ConfigError, MMTrainError, PlanError

if TYPE_CHECKING:
    from mmtrain.config.planner import PlannerConfig
    from mmtrain.planner.result import PlanResult
    from mmtrain.schedule.library.catalogue import Schedule
    from mmtrain.schedule.passes.lower import Program
    from mmtrain.schedule.plan import Plan
    from mmtrain.schedule.problem import PlanningProblem
    from mmtrain.schedule.timeline import Timeline

MIB = 2.0**20

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
    _add_iteration(show)
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
    _add_iteration(compare)
    compare.add_argument("--format", choices=["text", "csv", "json"], default="text", help="(default text)")
    compare.add_argument("--out", type=Path, metavar="FILE", help="file to write")
    compare.set_defaults(run=_compare, takes_overrides=True, overrides=[])


def _add_iteration(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "the iteration",
        "a batch of a config's data (with any --section.key=value), a planning problem in a file, or a plain chain",
    )
    group.add_argument("--config", help="TOML file; its first batches are read, nothing is trained")
    group.add_argument("--batch", type=int, metavar="K", help="with --config: which batch (default 0)")
    group.add_argument("--problem", type=Path, metavar="FILE", help="planning problem, .json or .json.gz")
    group.add_argument("--pp", type=int, metavar="P", help="chain: pipeline ranks (default 4)")
    group.add_argument("--microbatches", type=int, metavar="M", help="chain: microbatches (default 8)")
    group.add_argument(
        "--segments", type=int, metavar="K", help="chain: chunks a rank (default: what a schedule needs)"
    )
    group.add_argument(
        "--separate-gradients",
        action="store_true",
        help="chain, problem: split backwards of each plan where that shortens it (a config: "
        "--parallelism.separate_gradients=true)",
    )
    group.add_argument(
        "--braid",
        action="store_true",
        help="chain, problem: a forward and a backward of each plan run as one block where that shortens it (a config: "
        "--planner.braid=true)",
    )
    group.add_argument(
        "--costs",
        metavar="F,I,W[,COMM]",
        help="chain: seconds of F, I and W (forward, input and weight gradient) of a rank's stages for one microbatch, "
        "and of a transfer (default 1,1,1,0); a rank holds 1 MiB of each",
    )
    group.add_argument(
        "--exchange",
        type=float,
        metavar="AR",
        help="chain: seconds of a chunk's exchanges (tensor parallelism) in its forward, and again in its backward, in "
        "addition to --costs; blocks and whole backwards hide them (default: none)",
    )


@dataclass(frozen=True)
class _Planned:
    """One schedule's plan for the iteration."""

    name: str
    result: "PlanResult"
    lower: "Callable[[Plan], Program]"

    @property
    def plan(self) -> "Plan":
        """Raises: MMTrainError: there is none."""
        if not self.result.has_plan:
            raise MMTrainError(f"no plan: {self.result.message}")
        return self.result.plan

    @property
    def timeline(self) -> "Timeline":
        """The simulated timeline of a plan that there is."""
        return self.result.timeline


# ------------------------------------------------------------------------------------------- list


def _list(args: argparse.Namespace) -> int:
    from mmtrain.schedule.library.catalogue import CATALOGUE
    from mmtrain.schedule.recipe.files import schedule_of

    for schedule in [schedule_of(name, args.pp) for name in args.files] or CATALOGUE.values():
        print(f"{schedule.name:22s} {schedule.idea}")
    return 0


# ------------------------------------------------------------------------------------------- show


def _show(args: argparse.Namespace) -> int:
    from mmtrain.planner.plan_json import plan_to_json
    from mmtrain.schedule.io import torch_csv
    from mmtrain.schedule.plan import entry_costs
    from mmtrain.schedule.view import draw

    _check(args, "show")
    if args.format == "png" and args.out is None:
        raise ConfigError("schedule show: --format png needs --out FILE")
    planned = _from_file(args) if _is_file(args.name) else _planner(args)(args.name)
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


def _is_file(name: str | None) -> bool:
    return name is not None and name.endswith((".csv", ".json", ".json.gz"))


def _from_file(args: argparse.Namespace) -> _Planned:
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
        if args.problem or args.config or args.pp or args.microbatches or args.segments:
            raise ConfigError(
                f"schedule show: {path} brings its own chain; of the iteration only --costs and --exchange go with it"
            )
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"schedule show: {path}: cannot be read: {error}") from error
        if _named(path, lambda: has_transfers(text)):
            _named(path, lambda: read_program(text))
        plan = _named(path, lambda: read_plan(text))
        problem = chain_problem(plan.graph, **_chain_costs(args.costs), exchange_s=args.exchange)
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
    return _Planned(path.name, result, lambda plan: lower(plan, problem, sharded=False))


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
    from mmtrain.schedule.recipe.files import schedule_of

    _check(args, "compare")
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
    plan, note = _planner(args), ""
    rows: list[dict[str, Any]] = []
    for name in names:
        base, search = name, None
        if name == PLANNED:
            named = [row for row in rows if not row["refused"]]
            base = min(named, key=lambda row: row["makespan_s"])["schedule"] if named else None
            search = _Search(args.evaluations, args.seed)
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
        return config.load(args.config, args.overrides).parallelism.pipeline_parallel_degree
    return PlanningProblem.read(args.problem).graph.num_ranks if args.problem else args.pp or 4


def _row(name: str, base: str | None, search: "_Search | None", plan: "_Planner") -> dict[str, Any]:
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


# ---------------------------------------------------------------------------------- the iteration


def _check(args: argparse.Namespace, verb: str) -> None:
    """Checks the combination of options before anything is read."""
    where = f"schedule {verb}"
    if args.config and args.problem:
        raise ConfigError(f"{where}: give --config or --problem, not both")
    if args.overrides and not args.config:
        raise ConfigError(f"{where}: {args.overrides[0]} overrides a config; name it with --config")
    if args.batch is not None and not args.config:
        raise ConfigError(f"{where}: --batch picks a batch of a config's data; give --config")
    if args.batch is not None and args.batch < 0:
        raise ConfigError(f"{where}: --batch {args.batch}; batches count from 0")
    chain = {"--pp": args.pp, "--microbatches": args.microbatches, "--segments": args.segments, "--costs": args.costs}
    chain["--exchange"] = args.exchange
    given = [key for key, value in chain.items() if value is not None]
    if (args.config or args.problem) and given:
        raise ConfigError(
            f"{where}: {given[0]} is for a plain chain; leave it out, or --config and --problem (a config's degree is "
            "--parallelism.pipeline_parallel_degree=P)"
        )
    for key in ("--pp", "--microbatches", "--segments"):
        if chain[key] is not None and chain[key] < 1:
            raise ConfigError(f"{where}: {key} {chain[key]}; it is at least 1")
    if args.exchange is not None and not 0 <= args.exchange <= 1e9:
        raise ConfigError(f"{where}: --exchange {args.exchange}; it is between 0 and 1e9 seconds")
    for option, key in (("separate_gradients", "parallelism.separate_gradients"), ("braid", "planner.braid")):
        if args.config and getattr(args, option):
            raise ConfigError(
                f"{where}: --{option.replace('_', '-')} is for a chain or a problem; with --config write it as "
                f"--{key}=true"
            )
    if args.braid and not args.problem and args.exchange is None:
        raise ConfigError(f"{where}: --braid without --exchange: blocks hide exchanges; give the chain some")
    if args.out is not None and not args.out.parent.is_dir():
        raise ConfigError(f"{where}: --out {args.out}: the folder {args.out.parent} does not exist; make it")


@dataclass(frozen=True)
class _Search:
    """The planner's search instead of a schedule's order."""

    evaluations: int
    seed: int

    def section(self, given: "PlannerConfig | None" = None) -> "PlannerConfig":
        """The [planner] section of a job that searches. Args: given: of the job."""
        from mmtrain.config.planner import PlannerConfig

        return replace(given or PlannerConfig(), enable=True, budget_evaluations=self.evaluations, budget_s=0.0)


class _Planner(Protocol):
    """Plans the iteration."""

    def __call__(self, name: str | None, search: _Search | None = None) -> _Planned:
        """Args: name: of a schedule; None: the config's, else 1F1B. search: on its stages."""
        ...


def _planner(args: argparse.Namespace) -> _Planner:
    """The planner of the iteration that the options describe."""
    if args.config:
        return _of_config(args)
    from mmtrain.schedule.chain import plain_chain
    from mmtrain.schedule.problem import PlanningProblem
    from mmtrain.schedule.recipe.files import schedule_of

    given = PlanningProblem.read(args.problem) if args.problem else None
    costs = _chain_costs(args.costs)

    def plan(name: str | None, search: _Search | None = None) -> _Planned:
        name = name or "1F1B"
        num_ranks = given.graph.num_ranks if given else args.pp or 4
        schedule = schedule_of(name, num_ranks)
        schedule = schedule.separated() if args.separate_gradients else schedule
        schedule = schedule.braided() if args.braid else schedule
        problem = given or plain_chain(
            num_ranks,
            args.microbatches or 8,
            schedule,
            num_segments=args.segments or 0,
            exchange_s=args.exchange,
            **costs,
        )
        section = replace(search.section(), braid=args.braid) if search else None
        return _plan(schedule, problem, None, search, section)

    return plan


def _of_config(args: argparse.Namespace) -> _Planner:
    from mmtrain.config import config
    from mmtrain.data.loader import Loader
    from mmtrain.planner.assignment.step_assigner import StepAssigner
    from mmtrain.planner.iteration import IterationPlanner
    from mmtrain.simulator.job import make_job

    job, number = config.load(args.config, args.overrides), args.batch or 0
    assigner = StepAssigner.of(job, make_job(job)) if job.assignment.assigns else None
    degree = job.parallelism.mesh_shape.dp
    with Loader(job, dp_degree=degree, num_workers=0, num_steps=number + 1, assigner=assigner) as loader:
        *_, (_, meta, _) = loader

    def plan(name: str | None, search: _Search | None = None) -> _Planned:
        chosen = job
        if name:
            chosen = config.load(args.config, [*args.overrides, f"parallelism.pipeline_parallel_schedule={name}"])
        if search:
            chosen = replace(chosen, planner=search.section(chosen.planner))
            config.check(chosen)
        made = make_job(chosen)
        searched = bool(search) or (args.verb == "show" and args.format == "problem")
        problem = IterationPlanner(made).problem(meta, searched=searched)[1]
        return _plan(made.schedule, problem, lambda plan: made.lower(plan, problem), search, made.section)

    return plan


def _plan(
    schedule: "Schedule",
    problem: "PlanningProblem",
    lower: "Callable[[Plan], Program] | None",
    search: _Search | None,
    section: "PlannerConfig | None",
) -> _Planned:
    from mmtrain.planner.plan import JobMethod, make_plan
    from mmtrain.schedule.passes import lower as lowering

    method = JobMethod.searching(schedule, section, seed=search.seed) if search and section else schedule
    result = make_plan(problem, method)
    return _Planned(schedule.name, result, lower or (lambda plan: lowering.lower(plan, problem, sharded=False)))


def _chain_costs(text: str | None) -> dict[str, Any]:
    """The arguments of a chain for `--costs`."""
    try:
        values = [float(word) for word in ("1,1,1" if text is None else text).split(",")]
    except ValueError:
        values = []
    if len(values) not in (3, 4) or not all(value == 0 or 1e-9 <= value <= 1e9 for value in values):
        raise ConfigError(
            f"--costs {text}: give three or four numbers, each 0 or between 1e-9 and 1e9, as in 1,1.2,0.8,0.05"
        )
    return {"seconds": tuple(values[:3]), "transfer_s": values[3] if len(values) == 4 else 0.0, "activation_bytes": MIB}


def _write(text: str, out: Path | None) -> None:
    if out:
        out.write_text(text)
    else:
        print(text, end="" if text.endswith("\n") else "\n")
