"""python benchmarks/recipes.py [PP] [MICROBATCHES]

Decisions a second of recipes: FlexPipe's 58 schedule types (`schedule.recipe.flexpipe_types`) on one model, by the
engine in Python and by the compiled kernel. A decision is an action that a rank starts. Both make equal plans; a
type that gets stuck is counted up to there. Not counted, but shown: the time of what both read, and of the kernel's
arrays, of a problem's first recipe.

Both ways are two chains, each with half of the microbatches, the second one from the last rank to the first: the same
work for the scheduler as two copies of the model, whose weights a job would have to tie.
"""

import argparse
import itertools
import time

from mmtrain.schedule.chain import chain_problem
from mmtrain.schedule.engine import Engine
from mmtrain.schedule.recipe import Recipe, kernel
from mmtrain.schedule.recipe.bound_recipe import Bound
from mmtrain.schedule.recipe.flexpipe_types import flexpipe_types, graph_of
from mmtrain.schedule.recipe.kernel_state import Arrays
from mmtrain.schedule.recipe.policy import plan_of
from mmtrain.schedule.recipe.rank_policy import Ranks
from mmtrain.schedule.recipe.shared import Shared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("num_ranks", metavar="PP", type=int, nargs="?", default=8)
    parser.add_argument("num_microbatches", metavar="MICROBATCHES", type=int, nargs="?", default=32)
    given = parser.parse_args()
    num_ranks, num_microbatches = given.num_ranks, given.num_microbatches
    start = time.process_time()
    plan_of(Recipe(), chain_problem(graph_of(Recipe(), 2, 2)), compiled=True)
    print(f"compiled in {time.process_time() - start:.1f} s of CPU time; P = {num_ranks}, M = {num_microbatches}")
    rows: dict[str, list[tuple[float, ...]]] = {}
    for name, recipe in flexpipe_types(num_ranks):
        problem = chain_problem(graph_of(recipe, num_ranks, num_microbatches))
        marks = [time.process_time()]
        bound = Bound(recipe, Shared(problem))
        marks.append(time.process_time())
        state = Arrays(bound.shared).state(bound)
        marks.append(time.process_time())
        count = kernel.compiled().run(state)
        marks.append(time.process_time())
        started = Engine(bound.items, bound.message_s).run(Ranks(bound))
        marks.append(time.process_time())
        assert state.begun[:count].tolist() == started
        made, arrays, compiled, python = (b - a for a, b in itertools.pairwise(marks))
        rows.setdefault(name.rsplit(", ", 3)[0], []).append((count, made, arrays, compiled, python))
    head = f"{'types':>5s} {'decisions':>9s} {'python/s':>10s} {'compiled/s':>11s} {'factor':>7s}"
    print(f"{'placement':14s} {head} {'bound us':>9s} {'arrays us':>9s}")
    for name, entries in [*rows.items(), ("all", list(itertools.chain(*rows.values())))]:
        count, made, arrays, compiled, python = map(sum, zip(*entries, strict=True))
        print(
            f"{name:14s} {len(entries):5d} {count:9d} {count / python:10,.0f} {count / compiled:11,.0f} "
            f"{python / compiled:7.1f} {1e6 * made / count:9.2f} {1e6 * arrays / count:9.2f}"
        )


if __name__ == "__main__":
    main()
