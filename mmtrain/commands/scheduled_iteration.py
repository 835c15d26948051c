"""The iteration that `mmtrain schedule` plans, a chain, a problem or a batch of a job: its options and its planner."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mmtrain.errors import ConfigError, MMTrainError

if TYPE_CHECKING:
    from mmtrain.config.planner import PlannerConfig
    from mmtrain.planner.result import PlanResult
    from mmtrain.schedule.library.catalogue import Schedule
    from mmtrain.schedule.passes.lower import Program
    from mmtrain.schedule.plan import Plan
    from mmtrain.schedule.problem import PlanningProblem
    from mmtrain.schedule.timeline import Timeline

MIB = 2.0**20


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that describe an iteration."""
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
        "--planner.search.braid=true)",
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


def check_options(args: argparse.Namespace, verb: str) -> None:
    """Checks the combination of options before anything is read. Raises: ConfigError: they do not go together."""
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
    for option, key in (("separate_gradients", "parallelism.separate_gradients"), ("braid", "planner.search.braid")):
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
class ScheduledPlan:
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


@dataclass(frozen=True)
class PlannerSearch:
    """The planner's search instead of a schedule's order."""

    evaluations: int
    seed: int

    def section(self, given: "PlannerConfig | None" = None) -> "PlannerConfig":
        """The [planner] section of a job that searches. Args: given: of the job."""
        from mmtrain.config.planner import PlannerConfig

        section = replace(given or PlannerConfig(), enable=True)
        return section.with_evaluations(self.evaluations)


class Planner(Protocol):
    """Plans the iteration."""

    def __call__(self, name: str | None, search: PlannerSearch | None = None) -> ScheduledPlan:
        """Args: name: of a schedule; None: the config's, else 1F1B. search: on its stages."""
        ...


def planner_of(args: argparse.Namespace) -> Planner:
    """The planner of the iteration that the options describe."""
    if args.config:
        return _of_config(args)
    from mmtrain.schedule.chain import plain_chain
    from mmtrain.schedule.problem import PlanningProblem
    from mmtrain.schedule.recipe.schedule_files import schedule_of

    given = PlanningProblem.read(args.problem) if args.problem else None
    costs = chain_costs(args.costs)

    def plan(name: str | None, search: PlannerSearch | None = None) -> ScheduledPlan:
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
        section = search.section().with_search(braid=args.braid) if search else None
        return _plan(schedule, problem, None, search, section)

    return plan


def _of_config(args: argparse.Namespace) -> Planner:
    from mmtrain.config import config
    from mmtrain.costs.job_costs import on_hardware
    from mmtrain.data.loader import Loader
    from mmtrain.planner.assignment.dealing import Dealer
    from mmtrain.planner.assignment.step_assigner import StepAssigner
    from mmtrain.planner.iteration import IterationPlanner
    from mmtrain.planner.joint import search_iteration
    from mmtrain.planner.search.search import search as search_orders
    from mmtrain.planner.search_settings import search_options
    from mmtrain.simulator.make_job import make_job

    job, number = on_hardware(config.load(args.config, args.overrides)), args.batch or 0
    layout = job.parallelism.layout
    jobs = config.each_pipeline(job, make_job) if job.assignment.assigns or not layout.is_even else ()
    assigner, dealer = StepAssigner.of(job, jobs), Dealer.of(job, jobs)
    with Loader(
        job, dp_degree=layout.dp, num_workers=0, num_steps=number + 1, assigner=assigner, dealer=dealer
    ) as loader:
        *_, (_, meta, _) = loader

    def plan(name: str | None, search: PlannerSearch | None = None) -> ScheduledPlan:
        chosen = job
        if name:
            words = [*args.overrides, f"parallelism.pipeline_parallel_schedule={name}"]
            chosen = on_hardware(config.load(args.config, words))
        if search:
            chosen = replace(chosen, planner=search.section(chosen.planner))
            config.check(chosen)
        made = make_job(config.of_pipeline(chosen, 0))  # which the first replica runs in
        searched = bool(search) or (args.verb == "show" and args.format == "problem")
        planner = IterationPlanner(made)
        if search and made.section.search.regroup:
            options = search_options(made.section, seed=search.seed, threads=1, noise=made.costs.noise)
            result = search_iteration(planner, planner.prepare(meta, searched=True), options, search_orders)[1]
            return ScheduledPlan(made.schedule.name, result, lambda plan: made.lower(plan, result.problem))
        problem = planner.problem(meta, searched=searched)[1]
        return _plan(made.schedule, problem, lambda plan: made.lower(plan, problem), search, made.section)

    return plan


def _plan(
    schedule: "Schedule",
    problem: "PlanningProblem",
    lower: "Callable[[Plan], Program] | None",
    search: PlannerSearch | None,
    section: "PlannerConfig | None",
) -> ScheduledPlan:
    from mmtrain.planner.make_plan import JobMethod, make_plan
    from mmtrain.schedule.passes import lower as lowering

    method = JobMethod.searching(schedule, section, seed=search.seed) if search and section else schedule
    result = make_plan(problem, method)
    return ScheduledPlan(
        schedule.name, result, lower or (lambda plan: lowering.lower(plan, result.problem, sharded=False))
    )


def chain_costs(text: str | None) -> dict[str, Any]:
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
