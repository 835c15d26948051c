"""python benchmarks/schedules.py [PP] [MICROBATCHES]

What each named schedule costs and gives on a plain chain of equal stages with F = I = W = 1 second a rank, 16 ranks
and 256 microbatches unless told otherwise: seconds of CPU time to make the plan; its bubble; the idle time of the
rank that idles longest between its first and last action; the most microbatches' activations on a rank.
"""

import argparse
import time

from mmtrain.schedule.chain import plain_chain
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.schedule.plan import check
from mmtrain.schedule.simulate import simulate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("num_ranks", metavar="PP", type=int, nargs="?", default=16)
    parser.add_argument("num_microbatches", metavar="MICROBATCHES", type=int, nargs="?", default=256)
    given = parser.parse_args()
    num_ranks, num_microbatches = given.num_ranks, given.num_microbatches
    print(f"{num_ranks} ranks, {num_microbatches} microbatches")
    print(f"{'schedule':22s} {'plan s':>7s} {'bubble %':>9s} {'idle s':>7s} {'peak':>6s}")
    for name, schedule in CATALOGUE.items():
        problem = plain_chain(num_ranks, num_microbatches, schedule)
        start = time.process_time()
        plan = schedule.make(problem)
        seconds = time.process_time() - start
        check(plan, problem)
        timeline = simulate(problem, plan)
        idle = max(span - busy for span, busy in zip(timeline.span_s, timeline.busy_s, strict=True))
        print(f"{name:22s} {seconds:7.2f} {100 * timeline.bubble:9.2f} {idle:7.1f} {max(timeline.peak_bytes):6.1f}")


if __name__ == "__main__":
    main()
