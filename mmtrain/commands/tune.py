"""`mmtrain tune`: the settings that make a job fastest on some GPUs, by simulation, as a TOML file that trains."""

import argparse
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mmtrain.config import config
from mmtrain.costs.job_costs import on_hardware
from mmtrain.errors import ConfigError

if TYPE_CHECKING:
    from mmtrain.simulator.allocation.space import Space
    from mmtrain.simulator.allocation.tune import Tuned
    from mmtrain.simulator.drawn_steps import StepMicrobatches

EVALUATIONS = 200
"""Plans that a search of the last look tries, at most."""


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "tune",
        help="find the fastest settings of a job on some GPUs",
        usage="mmtrain tune [-h] --config CONFIG --cluster NAMExN [options] [--section.key=value ...]",
        description="Which degrees, cut, memory, schedule and blocks make a job fastest on some GPUs, by simulated "
        "iterations; the best as TOML. It changes everything that the axes name, and keeps the samples of a step; "
        "`mmtrain allocate` changes degrees and ranks of modules alone, and says how many samples show their ratio. "
        "Trains nothing. A --section.key=value overrides the file, and stays as it is.",
    )
    parser.add_argument("--config", required=True, help="TOML file; a bare name is looked up in configs/")
    parser.add_argument(
        "--cluster", required=True, metavar="NAMExN", help="such as h800x32, all used; sets planner.hardware"
    )
    parser.add_argument(
        "--axes", metavar="A,B", help="of degrees, cut, memory, schedule, braid (default: all that the job may have)"
    )
    parser.add_argument(
        "--schedules", metavar="S,T", help="tried in place of searched plans: names, or files of recipes"
    )
    parser.add_argument("--tokens", metavar="N,M", help="also other training.seq_len, with as many tokens a step")
    parser.add_argument("--replicate", action="store_true", help="also try data_parallel_replicate_degree")
    parser.add_argument("--keep", type=int, default=3, metavar="N", help="candidates of the last look (default 3)")
    parser.add_argument("--iterations", type=int, default=3, metavar="N", help="steps of the last look (default 3)")
    parser.add_argument(
        "--evaluations",
        type=int,
        metavar="N",
        help=f"plans that its searches try (default: planner.search.budget_evaluations, at most {EVALUATIONS})",
    )
    parser.add_argument(
        "--samples", type=Path, metavar="FILE", help="of `mmtrain profile --samples` (default: a drawn workload)"
    )
    parser.add_argument("--workload", metavar="NAME", help="without --samples (default mix, or video_captions)")
    parser.add_argument(
        "--image-side", type=int, metavar="PX", help="of drawn images or clips (default: four images fit, 256 of clips)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of all draws (default 0)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write the TOML; it extends the config")
    parser.set_defaults(run=_tune, takes_overrides=True, overrides=[])


def _tune(args: argparse.Namespace) -> int:
    from mmtrain.errors import for_terminal
    from mmtrain.planner.search.search import warm
    from mmtrain.simulator.allocation.candidate_judge import Effort, Judge
    from mmtrain.simulator.allocation.degrees import check_grid
    from mmtrain.simulator.allocation.tune import Tuner
    from mmtrain.simulator.allocation.tune_report import table, toml

    _check(args)
    overrides = [*args.overrides, f'planner.hardware="{args.cluster}"']
    job = on_hardware(config.load(args.config, overrides))
    check_grid(job, "tune")
    space = _space(args, job)
    steps = _steps(args, job)
    effort = Effort(
        num_steps=args.iterations,
        evaluations=args.evaluations or min(EVALUATIONS, job.planner.search.budget_evaluations or EVALUATIONS),
    )
    warm()
    with tempfile.TemporaryDirectory() as folder, _progress() as progress:
        judge = Judge(config=job, steps=steps, seed=args.seed)
        recipes = Path(folder)
        tuner = Tuner(space=space, judge=judge, keep=args.keep, effort=effort, recipes=recipes, progress=progress)
        tuned = tuner.run()
        print(for_terminal(f"{job.job.description or 'a job'} on {args.cluster}: {tuned.num_tried} candidates tried"))
        print(table(tuned).replace(f"{folder}/", ""))
        schedule = Path(tuned.best.candidate.job(job).parallelism.pipeline_parallel_schedule)
        recipe = schedule.read_text() if recipes in schedule.parents else ""
    name = _schedule_name(args.out or Path("best")) if recipe else ""
    if args.out is None:
        print(toml(tuned, overrides, recipe=name), end="")
        print(f"\n# {name}:\n{recipe}" if recipe else "", end="")
        return 0
    beside = str(args.out.parent / name) if name else ""
    if beside:
        Path(beside).write_text(recipe)
    base = os.path.relpath(config.find_file(args.config), args.out.parent)
    args.out.write_text(toml(tuned, overrides, base=base, recipe=beside))
    same = "" if args.samples else f"; the same iterations: {_simulated_by(args, tuned, beside)}"
    print(f"written to {args.out}{f' and {beside}' if beside else ''}{same}")
    return 0


def _schedule_name(out: Path) -> str:
    """Name of the recipe beside a TOML file."""
    return f"{out.stem}_schedule.py"


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A bar on a terminal, of what is looked at."""
    from tqdm import tqdm

    with tqdm(unit=" candidates", disable=not sys.stderr.isatty(), leave=False) as bar:

        def progress(what: str) -> None:
            bar.set_description(what, refresh=False)
            bar.update()

        yield progress


def _simulated_by(args: argparse.Namespace, tuned: "Tuned", recipe: str) -> str:
    """The command that simulates the same iterations of the written file. Args: recipe: of it, written beside."""
    job, effort = tuned.best.candidate.job(tuned.config), tuned.effort
    schedule = "planned" if job.planner.enable else recipe or job.parallelism.pipeline_parallel_schedule
    words = ["mmtrain", "simulate", "--config", str(args.out), "--schedule", schedule]
    words += ["--iterations", str(effort.num_steps), "--replicas", str(job.parallelism.layout.dp)]
    words += ["--evaluations", str(effort.evaluations)]
    for option in ("workload", "image_side", "seed"):
        if value := getattr(args, option):
            words += [f"--{option.replace('_', '-')}", str(value)]
    return shlex.join(words)


def _check(args: argparse.Namespace) -> None:
    """Refuses numbers, files and pairs of options that cannot be."""
    for name in ("keep", "iterations", "evaluations", "image_side"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"tune: --{name.replace('_', '-')} {value}; it is at least 1")
    if args.seed < 0:
        raise ConfigError(f"tune: --seed {args.seed}; it is at least 0")
    for option in ("workload", "image_side"):
        if args.samples and getattr(args, option):
            raise ConfigError(f"tune: --samples and --{option.replace('_', '-')} both say what samples are; give one")
    if any("planner.hardware" in override for override in args.overrides):
        raise ConfigError("tune: --cluster sets planner.hardware; give one of the two")
    if args.out is None:
        return
    if args.out.suffix != ".toml":
        raise ConfigError(f"tune: --out {args.out}; name a file that ends in .toml")
    for path in (args.out, args.out.with_name(_schedule_name(args.out))):
        if path.exists():
            raise ConfigError(f"tune: --out {args.out}: {path} exists; name another file, or remove it")
    if not args.out.parent.is_dir():
        raise ConfigError(f"tune: --out {args.out}: there is no folder {args.out.parent}; make it, or name another")


def _space(args: argparse.Namespace, job: config.Config) -> "Space":
    """What tuning may change. Raises: ConfigError: an axis, schedule or number that cannot be."""
    from mmtrain.costs.operators.cluster import Cluster
    from mmtrain.schedule.library.names import check_name
    from mmtrain.simulator.allocation.space import AXES, SCHEDULES, Space

    cluster = Cluster.of(args.cluster)
    if args.cluster == cluster.hardware.name or not args.cluster.rpartition("x")[2].isdigit():
        raise ConfigError(f"tune: --cluster {args.cluster} names no number of GPUs; write {args.cluster}x16")
    schedules = args.schedules.split(",") if args.schedules else SCHEDULES
    for name in schedules:
        check_name(name)
    space = Space(
        config=job,
        num_gpus=cluster.num_gpus,
        axes=tuple(args.axes.split(",") if args.axes else AXES),
        fixed=frozenset(override.removeprefix("--").partition("=")[0].strip() for override in args.overrides),
        replicate=args.replicate,
        tokens=_tokens(args.tokens, job),
        schedules=tuple(schedules),
    )
    space.check()
    return space.without_those_it_cannot_have(asked=bool(args.axes))


def _tokens(text: str | None, job: config.Config) -> tuple[int, ...]:
    numbers = text.split(",") if text else []
    if not all(number.strip().isdigit() and int(number) for number in numbers):
        raise ConfigError(f"tune: --tokens {text}; give numbers of tokens, as in 4096,8192")
    total = job.training.seq_len * job.training.global_batch_size
    for number in numbers:
        if total % int(number):
            raise ConfigError(
                f"tune: --tokens {number} does not divide the {total} tokens of a step (training.seq_len = "
                f"{job.training.seq_len} x training.global_batch_size = {job.training.global_batch_size}); choose a "
                "divisor"
            )
    return tuple(map(int, numbers))


def _steps(args: argparse.Namespace, job: config.Config) -> "Callable[[config.Config], Sequence[StepMicrobatches]]":
    """The steps of a job, from samples or from a workload."""
    from mmtrain.modality.typical import typical_side
    from mmtrain.planner.assignment.sample_costs import SampleCosts
    from mmtrain.simulator.drawn_steps import StepMicrobatches, drawn_steps, packed_step
    from mmtrain.simulator.typical_iterations import usual_workload

    workload = args.workload or usual_workload(job)
    if job.model.encoders or job.model.reads_clips:
        args.image_side = args.image_side or typical_side(job)
    costs = SampleCosts.read(args.samples) if args.samples else None
    if costs is not None:
        costs.check_fits(job, str(args.samples))

    def made(of: config.Config) -> list[StepMicrobatches]:
        if costs is None:
            return drawn_steps(of, workload, args.iterations, seed=args.seed, image_side=args.image_side or 0)
        limits = (of.training.seq_len, *costs.limits[1:]) if not of.model.reads_clips else costs.limits
        return [packed_step(of, replace(costs, limits=limits), (args.seed, i)) for i in range(args.iterations)]

    known: dict[tuple[int, int], list[StepMicrobatches]] = {}

    def steps(of: config.Config) -> list[StepMicrobatches]:
        key = of.training.seq_len, of.training.global_batch_size
        if key not in known:
            known[key] = made(of)
        return known[key]

    steps(job)  # refuses a workload that does not exist before anything is judged
    return steps
