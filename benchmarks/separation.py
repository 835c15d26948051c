"""python benchmarks/separation.py [PP] [MICROBATCHES]

What gradient separation makes of plans: their makespan before and after, the mean of the ranks' peaks of activations
after over before, the share of backwards that were split, and seconds of CPU time. The plans are named schedules on a
plain chain of equal stages with F = I = W = 1 second a rank (8 ranks and 64 microbatches unless told otherwise), and on
batches of a vision encoder and a language model, the problems of `benchmarks/problems`. Of these, interleave keeps the
memory limits, before and after; the others ignore them.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

from mmtrain.schedule.action import Kind
from mmtrain.schedule.chain import plain_chain
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.schedule.passes.separate import separate_gradients
from mmtrain.schedule.plan import check
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.simulate import simulate

NAMES = ("GPipe", "1F1B", "Interleaved1F1B", "interleave", "ZB-H1")


def problems(num_ranks: int, num_microbatches: int) -> Iterator[tuple[str, str, PlanningProblem]]:
    """(name, schedule, problem)."""
    for name in NAMES:
        yield f"chain {num_ranks}x{num_microbatches}", name, plain_chain(num_ranks, num_microbatches, CATALOGUE[name])
    for path in sorted((Path(__file__).parent / "problems").glob("*.json.gz")):
        problem = PlanningProblem.read(path)
        for name in ("1F1B", "interleave"):
            yield path.name.partition(".")[0], name, problem


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("num_ranks", metavar="PP", type=int, nargs="?", default=8)
    parser.add_argument("num_microbatches", metavar="MICROBATCHES", type=int, nargs="?", default=64)
    given = parser.parse_args()
    num_ranks, num_microbatches = given.num_ranks, given.num_microbatches
    head = f"{'actions':>8s} {'before s':>9s} {'after s':>9s} {'ratio':>6s} {'peak':>5s} {'split %':>8s} {'pass s':>7s}"
    print(f"{'problem':14s} {'schedule':16s} {head}")
    for problem_name, name, problem in problems(num_ranks, num_microbatches):
        plan = CATALOGUE[name].make(problem)
        start = time.process_time()
        separated = separate_gradients(plan, problem)
        seconds = time.process_time() - start
        check(separated, problem if CATALOGUE[name].keeps_memory_limits else None)
        before, after = simulate(problem, plan), simulate(problem, separated)
        peak = sum(after.peak_bytes) / sum(before.peak_bytes)
        wholes = sum(action.kind is Kind.B for order in plan.orders for action in order)
        share = 100 * len(separated.split - plan.split) / max(wholes, 1)
        figures = f"{before.makespan_s:9.3f} {after.makespan_s:9.3f} {after.makespan_s / before.makespan_s:6.3f}"
        actions = sum(map(len, plan.orders))
        print(f"{problem_name:14s} {name:16s} {actions:8d} {figures} {peak:5.2f} {share:8.1f} {seconds:7.3f}")


if __name__ == "__main__":
    main()
