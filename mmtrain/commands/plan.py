"""`mmtrain plan`: searches a plan for a planning problem and writes it."""

import argparse
from pathlib import Path
from typing import get_args

from mmtrain.config.memory_amount import show_bytes
from mmtrain.config.planner import Strategy
from mmtrain.errors import ConfigError
from mmtrain.schedule.number_ranges import THREADS


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "plan",
        help="search a plan",
        description="Searches a plan for a planning problem (docs/schedule.md), as training does before each step, and "
        "prints its makespan, a lower bound, the gap between them and the plans tried a second. The same problem, "
        "evaluations and seed give the same plan, whatever the threads. Exit status 1 if no plan fits the memory "
        "limits, 2 if a file cannot be read.",
    )
    parser.add_argument("problem", type=Path, metavar="PROBLEM", help="planning problem, .json or .json.gz")
    parser.add_argument("--out", type=Path, metavar="PLAN", help="file to write, .json or .json.gz")
    parser.add_argument("--budget-s", type=float, metavar="S", help="seconds to search (default 1, without another)")
    parser.add_argument("--budget-evaluations", type=int, metavar="N", help="plans to try")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the search (default 0)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of the search (default 1)")
    parser.add_argument(
        "--strategy", choices=get_args(Strategy), default="anneal", help="of the search (default anneal)"
    )
    parser.add_argument("--no-reorder", action="store_true", help="first come, first served")
    parser.add_argument("--no-split", action="store_true", help="backwards stay whole")
    parser.add_argument("--braid", action="store_true", help="forwards and backwards may run as one block")
    parser.add_argument("--no-memory", action="store_true", help="the fastest option that fits for all, none chosen")
    parser.add_argument(
        "--noise",
        type=float,
        default=0.0,
        metavar="D",
        help="choose by the mean makespan if seconds of actions deviate by this part of them, as 0.05 (default 0)",
    )
    parser.set_defaults(run=_plan)


def _plan(args: argparse.Namespace) -> int:
    import time

    from mmtrain.costs.noise import MOST, Noise
    from mmtrain.planner.make_plan import make_plan
    from mmtrain.planner.memory_bound import over_bounds
    from mmtrain.planner.plan_json import plan_to_json
    from mmtrain.planner.search.search import warm
    from mmtrain.planner.search.search_options import SearchOptions
    from mmtrain.schedule.io.strict_json import json_path, write_text
    from mmtrain.schedule.problem import PlanningProblem

    for name, value in (("--budget-s", args.budget_s), ("--budget-evaluations", args.budget_evaluations)):
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"plan: {name} {value}; it must be above 0")
    if args.threads not in THREADS or args.seed < 0:
        raise ConfigError(
            f"plan: --threads {args.threads} --seed {args.seed}; the first is from 1 to {THREADS.most}, the "
            "second at least 0"
        )
    if not 0 <= args.noise <= MOST:
        raise ConfigError(f"plan: --noise {args.noise}; it must be in 0 .. {MOST:g}, a part of an action's seconds")
    if args.out:
        folder = json_path(args.out).parent  # checked before the search
        if args.out.is_dir() or not folder.is_dir():
            raise ConfigError(f"plan: --out {args.out} is a folder, or in none; name a file in a folder that exists")
        if args.out.exists() and args.problem.exists() and args.out.samefile(args.problem):
            raise ConfigError(f"plan: --out {args.out} is the problem itself and would be lost; name another file")
    seconds, evaluations = args.budget_s or 0.0, args.budget_evaluations or 0
    options = SearchOptions(
        budget_evaluations=evaluations,
        budget_s=seconds or (0.0 if evaluations else 1.0),
        seed=args.seed,
        threads=args.threads,
        strategy=args.strategy,
        reorder=not args.no_reorder,
        split=not args.no_split,
        braid=args.braid,
        memory=not args.no_memory,
        noise=Noise.uniform(args.noise),
    )
    problem = PlanningProblem.read(args.problem)
    warm()
    start = time.perf_counter()
    result = make_plan(problem, options)
    search_s = time.perf_counter() - start
    if args.out:
        write_text(args.out, plan_to_json(result, search_s=search_s))
    if not result.has_plan:
        print(f"{args.problem}: no plan: {result.message}")
        return 1
    makespan, gap = result.makespan_s, over_bounds(result.makespan_s, problem)
    print(f"{result.status}: {result.message}")
    mean = f", mean over draws {result.expected_s:.6g} s" if result.expected_s else ""
    print(f"makespan {makespan:.6g} s{gap}{mean}; bubble {100 * result.timeline.bubble:.2f} %")
    for rank, (limit, peak) in enumerate(zip(problem.memory_limit_bytes, result.timeline.peak_bytes, strict=True)):
        if limit is not None:
            print(f"pp_rank {rank}: activations take {show_bytes(peak)} of {show_bytes(limit)}")
    print(f"{result.evaluations} evaluations in {search_s:.2f} s, {result.evaluations / search_s:.0f} a second")
    return 0
