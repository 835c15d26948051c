"""`mmtrain allocate`: the degrees of parallelism and pipeline ranks of each module on some GPUs, by simulation."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mmtrain.config import config

if TYPE_CHECKING:
    from mmtrain.simulator.allocation.allocate import Allocation

DRAWN = 4096
"""Samples that are drawn without --samples."""
MOST_GPUS = 1 << 20
"""Of --gpus."""


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "allocate",
        help="choose degrees of parallelism for a number of GPUs",
        usage="mmtrain allocate [-h] --config CONFIG --gpus N [options] [--section.key=value ...]",
        description="Which degrees of parallelism, and which pipeline ranks of each module, make a job fastest on N "
        "GPUs (Entrain's algorithms 2 and 3): how many samples show the ratio of the modules' work, candidates by "
        "simulated seconds with the GiB of the most loaded rank, and the fastest one as TOML. `mmtrain tune` finds "
        "cut, memory and schedule, too. Trains nothing. Any --section.key=value overrides the file.",
    )
    parser.add_argument("--config", required=True, help="TOML file; a bare name is looked up in configs/")
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="all of them are used")
    parser.add_argument("--cluster", metavar="NAME", help="such as h800 or a40; sets planner.hardware")
    parser.add_argument(
        "--samples", type=Path, metavar="FILE", help="of `mmtrain profile --samples` (default: a drawn workload)"
    )
    parser.add_argument("--workload", metavar="NAME", help="without --samples (default mix, or video_captions)")
    parser.add_argument(
        "--alpha", type=float, default=0.05, metavar="A", help="1 - confidence, at least 0.0001 (default 0.05)"
    )
    parser.add_argument(
        "--p-error",
        type=float,
        default=0.05,
        metavar="P",
        help="fraction of batches that may ask for another allocation, at least 0.0001 (default 0.05)",
    )
    parser.add_argument("--finalists", type=int, default=6, metavar="N", help="candidates to simulate (default 6)")
    parser.add_argument("--iterations", type=int, default=1, metavar="N", help="to simulate of each (default 1)")
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
    from tqdm import tqdm

    from mmtrain.commands.sample_files import drawn_costs
    from mmtrain.errors import ConfigError, for_terminal
    from mmtrain.planner.assignment.sample_costs import SampleCosts
    from mmtrain.simulator.allocation.allocate import HEADER, allocate, described
    from mmtrain.simulator.allocation.judge import GIB
    from mmtrain.simulator.allocation.stable_batch import check_probabilities

    for name in ("gpus", "finalists", "iterations", "evaluations"):
        if getattr(args, name) < 1:
            raise ConfigError(f"allocate: --{name} {getattr(args, name)}; it is at least 1")
    if args.gpus > MOST_GPUS:
        raise ConfigError(f"allocate: --gpus {args.gpus}; it is at most {MOST_GPUS}")
    if args.seed < 0:
        raise ConfigError(f"allocate: --seed {args.seed}; it is at least 0")
    check_probabilities(args.alpha, args.p_error)
    if args.samples and args.workload:
        raise ConfigError("allocate: --samples and --workload are two sources of samples; give one of the two")
    if args.cluster and any("planner.hardware" in override for override in args.overrides):
        raise ConfigError("allocate: --cluster sets planner.hardware; give one of the two")
    job = config.load(args.config, [*args.overrides, *([f'planner.hardware="{args.cluster}"'] if args.cluster else [])])
    if args.samples:
        costs = SampleCosts.read(args.samples)
        costs.check_fits(job, str(args.samples))
    else:
        costs = drawn_costs(job, DRAWN, args.workload or "", args.seed)
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
    return 0


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
