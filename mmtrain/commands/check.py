"""`mmtrain check`: whether a plan is valid for a problem. Exit status 0 or 1, and one sentence."""

import argparse
from pathlib import Path

from mmtrain.errors import PlanError, for_terminal


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "check",
        help="judge a plan",
        description="Judges a plan by its problem (docs/schedule.md): complete, without deadlock, within the memory "
        "limits, with times, makespan and peaks that are true. Exit status 1 and one sentence if it is wrong, 2 if a "
        "file cannot be read.",
    )
    parser.add_argument("problem", type=Path, metavar="PROBLEM", help="planning problem, .json or .json.gz")
    parser.add_argument("plan", type=Path, metavar="PLAN", help="plan, .json or .json.gz")
    parser.set_defaults(run=_check)


def _check(args: argparse.Namespace) -> int:
    from mmtrain.planner.judge import judge
    from mmtrain.planner.memory_bound import over_bounds
    from mmtrain.schedule.io.strict_json import read_text
    from mmtrain.schedule.problem import PlanningProblem

    problem, text = PlanningProblem.read(args.problem), read_text(args.plan)
    try:
        verdict = judge(problem, text)
    except PlanError as error:
        print(for_terminal(f"{args.plan}: wrong: {str(error).splitlines()[0]}"))
        return 1
    if not verdict.feasible:
        text = "right: the problem has" if verdict.proven else "not proven, but no schedule found another: there is"
        print(f"{args.plan}: {text} no plan within the memory limits")
        return 0
    gap = over_bounds(verdict.makespan_s, problem)
    peaks = ", ".join(f"{peak:.4g}" for peak in verdict.peak_bytes)
    print(f"{args.plan}: right: makespan {verdict.makespan_s:.6g} s{gap}, peak bytes {peaks}")
    return 0
