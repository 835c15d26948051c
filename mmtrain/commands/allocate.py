"""`mmtrain allocate`: the degrees of parallelism and pipeline ranks of each module on some GPUs, or the pipelines for
every number of nodes, by simulation."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mmtrain.config import config
from mmtrain.costs.job_costs import on_hardware

if TYPE_CHECKING:
    from mmtrain.config.config import Config
    from mmtrain.planner.assignment.sample_costs import SampleCosts
    from mmtrain.simulator.allocation.allocate import Allocation

DRAWN = 4096
"""Samples that are drawn without --samples."""
SIMULATED = 3
"""Compositions on all nodes that are simulated as one job."""
MOST_GPUS = 1 << 20
"""The largest value of --gpus."""
MOST_NODES = 256
"""The largest value of --nodes."""
OF_GPUS = {"alpha": 0.05, "p_error": 0.05, "finalists": 6, "iterations": 1}
"""Options that --nodes does not read, with their defaults."""


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "allocate",
        help="choose degrees of parallelism for a number of GPUs, or pipelines for every number of nodes",
        usage="mmtrain allocate [-h] --config CONFIG (--gpus N | --nodes N) [options] [--section.key=value ...]",
        description="Which degrees of parallelism, and which pipeline ranks of each module, make a job fastest on N "
        "GPUs (Entrain's algorithms 2 and 3): how many samples show the ratio of the modules' work, candidates by "
        "simulated seconds with the GiB of the most loaded rank, and the fastest one as TOML. With --nodes: which "
        "pipelines, of unequal depth, use N nodes best, and every smaller number of them, such that the model survives "
        "--max-failures lost nodes (Oobleck's templates). `mmtrain tune` finds cut, memory and schedule, too. Trains "
        "nothing. Any --section.key=value overrides the file.",
    )
    parser.add_argument("--config", required=True, help="TOML file; a bare name is looked up in configs/")
    parser.add_argument("--gpus", type=int, metavar="N", help="all of them are used")
    parser.add_argument("--nodes", type=int, metavar="N", help="of the hardware, at most; instead of --gpus")
    parser.add_argument(
        "--max-failures",
        type=int,
        metavar="F",
        help="with --nodes: at least F + 1 pipelines hold the model (default 1)",
    )
    parser.add_argument("--cluster", metavar="NAME", help="such as h800 or a40; sets planner.hardware")
    parser.add_argument(
        "--samples", type=Path, metavar="FILE", help="of `mmtrain profile --samples` (default: a drawn workload)"
    )
    parser.add_argument("--workload", metavar="NAME", help="without --samples (default mix, or video_captions)")
    parser.add_argument(
        "--alpha",
        type=float,
        default=OF_GPUS["alpha"],
        metavar="A",
        help="1 - confidence, at least 0.0001 (default 0.05)",
    )
    parser.add_argument(
        "--p-error",
        type=float,
        default=OF_GPUS["p_error"],
        metavar="P",
        help="fraction of batches that may ask for another allocation, at least 0.0001 (default 0.05)",
    )
    for name, what in (("finalists", "candidates to simulate"), ("iterations", "to simulate of each")):
        default = OF_GPUS[name]
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{what} (default {default})")
    parser.add_argument(
        "--evaluations",
        type=int,
        default=20,
        metavar="N",
        help="plans tried for each, with planner.enable (default 20)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of all draws (default 0)")
    parser.set_defaults(run=_allocate, takes_overrides=True, overrides=[])


def _allocate(args: argparse.Namespace) -> int:
    from mmtrain.commands.sample_files import drawn_costs
    from mmtrain.errors import ConfigError
    from mmtrain.planner.assignment.sample_costs import SampleCosts
    from mmtrain.simulator.allocation.degrees import check_grid

    _check(args)
    if args.samples and args.workload:
        raise ConfigError("allocate: --samples and --workload are two sources of samples; give one of the two")
    if args.cluster and any("planner.hardware" in override for override in args.overrides):
        raise ConfigError("allocate: --cluster sets planner.hardware; give one of the two")
    overrides = [*args.overrides, *([f'planner.hardware="{args.cluster}"'] if args.cluster else [])]
    job = on_hardware(config.load(args.config, overrides))
    if args.nodes is None:
        check_grid(job, "allocate --gpus")
    if args.samples:
        costs = SampleCosts.read(args.samples)
        costs.check_fits(job, str(args.samples))
    else:
        costs = drawn_costs(job, DRAWN, args.workload or "", args.seed)
    (_print_grid if args.nodes is None else _print_pipelines)(args, job, costs)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Checks the numbers. Raises: ConfigError: one is out of range, or has no effect."""
    from mmtrain.errors import ConfigError
    from mmtrain.simulator.allocation.stable_batch import check_probabilities

    if (args.gpus is None) == (args.nodes is None):
        given = "were both given" if args.gpus else "are both missing"
        raise ConfigError(f"allocate: --gpus and --nodes {given}; give one of the two")
    if args.nodes is None and args.max_failures is not None:
        raise ConfigError(f"allocate: --max-failures {args.max_failures} has no effect without --nodes; give both")
    for name, default in OF_GPUS.items() if args.nodes is not None else ():
        if getattr(args, name) != default:
            shown = name.replace("_", "-")
            raise ConfigError(f"allocate: --{shown} {getattr(args, name)} has no effect with --nodes; leave it out")
    for name in ("gpus", "nodes", "finalists", "iterations", "evaluations"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ConfigError(f"allocate: --{name} {getattr(args, name)}; it is at least 1")
    for name, most in (("gpus", MOST_GPUS), ("nodes", MOST_NODES)):
        if (getattr(args, name) or 0) > most:
            raise ConfigError(f"allocate: --{name} {getattr(args, name)}; it is at most {most}")
    for name in ("seed", "max_failures"):
        if (getattr(args, name) or 0) < 0:
            raise ConfigError(f"allocate: --{name.replace('_', '-')} {getattr(args, name)}; it is at least 0")
    check_probabilities(args.alpha, args.p_error)


def _print_grid(args: argparse.Namespace, job: "Config", costs: "SampleCosts") -> None:
    """Candidates on --gpus."""
    from tqdm import tqdm

    from mmtrain.errors import for_terminal
    from mmtrain.simulator.allocation.allocate import HEADER, allocate, described
    from mmtrain.simulator.allocation.candidate_judge import GIB

    with tqdm(total=args.finalists, unit="candidate", disable=not sys.stderr.isatty(), leave=False) as bar:
        answer = allocate(
            job,
            costs,
            args.gpus,
            alpha=args.alpha,
            p_error=args.p_error,
            seed=args.seed,
            finalists=args.finalists,
            iterations=args.iterations,
            evaluations=args.evaluations,
            progress=lambda: bar.update(),
        )
    print(for_terminal(f"{len(costs.samples)} samples of {costs.job['source']}, {args.gpus} GPUs"))
    print(f"{len(answer.ranked)} of {answer.num_candidates} candidates; {HEADER}")
    for one in answer.ranked:
        print(f"  {described(job, one)}")
    _print_stability(answer)
    best = answer.ranked[0].judged
    print(f"\n# {best.mean_s:.3f} s an iteration, at most {best.peak_bytes / GIB:.1f} GiB a rank, simulated")
    print(answer.toml, end="")
    if answer.best.ranks and answer.stability is not None and answer.stability.num_samples:
        print(f"\n[assignment]\nstable_samples = {answer.stability.num_samples}")


def _print_pipelines(args: argparse.Namespace, job: "Config", costs: "SampleCosts") -> None:
    """Templates, and compositions for every number of nodes up to --nodes."""
    from tqdm import tqdm

    from mmtrain.errors import for_terminal
    from mmtrain.simulator.allocation import template_report as report
    from mmtrain.simulator.allocation.templates import TemplateMaker

    failures = 1 if args.max_failures is None else args.max_failures
    with tqdm(unit="template", disable=not sys.stderr.isatty(), leave=False) as bar:
        maker = TemplateMaker(
            config=job,
            costs=costs,
            nodes=args.nodes,
            max_failures=failures,
            evaluations=args.evaluations,
            seed=args.seed,
            progress=lambda: bar.update(),
        )
        stage, templates = maker.chosen()
    smallest, found = templates.templates[0], report.compositions(templates)
    source = f"{len(costs.samples)} samples of {costs.job['source']}, {args.nodes} nodes of {maker.per_node} GPUs"
    print(for_terminal(f"{source}, at least {failures + 1} pipelines"))
    print(f"stages of {report.described(stage)}; n_0 = {smallest.nodes}: a pipeline has at least as many nodes")
    fewest, other = maker.fewest
    if fewest < smallest.nodes:
        print(f"slower, but of at least {fewest}: stages of {report.described(other)}")
    print()
    print(report.table_of_templates(templates))
    print(report.table_of_compositions(found, templates))
    few = templates.ranked(args.nodes)[:SIMULATED]
    simulated = {one.depths: (maker.simulated_s(stage, one), one) for one in few}
    print("simulated as one job, with its sums:")
    print("".join(f"  {seconds:.3f} s  {list(depths)}\n" for depths, (seconds, _) in simulated.items()))
    seconds, best = min(simulated.values(), key=lambda one: one[0])
    print(f"# {seconds:.3f} s an iteration on {sum(best.nodes)} nodes, simulated")
    print(report.toml(job, stage, best), end="")


def _print_stability(answer: "Allocation") -> None:
    """How many samples show the ratio of the modules' work, if modules have ranks of their own."""
    if answer.stability is None or answer.stable_for is None:
        return
    of = answer.stable_for.mesh
    print(f"\npipeline ranks by module for dp {of.dp}, tp {of.tp}, cp {of.cp}, pp {of.pp}:")
    for trial in answer.stability.trials:
        shown = ", ".join(f"{':'.join(map(str, one))} ({count})" for one, count in trial.allocations[:6])
        verdict = "all agree" if trial.passed else "not stable"
        print(f"  {trial.num_samples:6d} samples, {trial.num_batches:3d} batches: {shown}; {verdict}")
    print(answer.stability.message)
    if answer.stability.num_samples > answer.samples_per_step:
        print(f"a step has {answer.samples_per_step:.0f} samples, fewer than b_min: its own ratio will vary")
