"""python benchmarks/recipes.py [PP] [MICROBATCHES]

Decisions a second of recipes: FlexPipe's grid of schedule types (58 by its table 2 and section 6: backward-first and
alternate; placements one-to-one, circular with and without intervals of P, V, both ways, and V both ways) on one model,
by the engine in Python and by the compiled kernel. A decision is an action that a rank starts. Both make equal plans; a
type that gets stuck is counted up to there. Not counted, but shown: the time of what both read, and of the kernel's
arrays, of a problem's first recipe.

Both ways are two chains, each with half of the microbatches, the second one from the last rank to the first: the same
work for the scheduler as two copies of the model, whose weights a job would have to tie.
"""

import argparse
import itertools
import time
from collections.abc import Iterator

from mmtrain.schedule.chain import chain_problem
from mmtrain.schedule.engine import Engine
from mmtrain.schedule.graph import ModuleStages, Work, WorkGraph
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.recipe import Placement, Recipe, Traversal, kernel
from mmtrain.schedule.recipe.arrays import Arrays
from mmtrain.schedule.recipe.bound import Bound
from mmtrain.schedule.recipe.policy import plan_of
from mmtrain.schedule.recipe.ranks import Ranks
from mmtrain.schedule.recipe.shared import Shared

CHUNKS = 2
"""On each rank, of all placements but one-to-one."""


def problem_of(placement: Placement, num_ranks: int, num_microbatches: int, *, ways: int) -> PlanningProblem:
    """A chain in one direction, or two in opposite directions."""
    down = placement.stage_ranks(num_ranks)
    chains = [down, [num_ranks - 1 - rank for rank in down]][:ways]
    count = len(down)
    modules = tuple(ModuleStages(name=f"way{i}", stages=tuple(range(i * count, (i + 1) * count))) for i in range(ways))
    graph = WorkGraph(
        num_ranks=num_ranks,
        modules=modules,
        stage_rank=tuple(itertools.chain(*chains)),
        works=tuple(Work(module=m % ways, microbatch=m, sub_microbatch=0) for m in range(num_microbatches)),
        backward=((True,) * count,) * num_microbatches,
    )
    return chain_problem(graph)


def grid(num_ranks: int) -> Iterator[tuple[str, Placement, int, Recipe]]:
    """(name, placement, ways, recipe) of the 58 types."""
    orders = [Traversal("breadth"), Traversal("depth")]
    stepped = [*orders, *(Traversal(order.order, every=num_ranks) for order in orders)]
    placements = {
        "one-to-one": (Placement("one-to-one"), 1, orders[:1]),
        "circular": (Placement("circular", CHUNKS), 1, stepped),
        "v": (Placement("v"), 1, orders),
        "both ways": (Placement("one-to-one"), 2, orders),
        "v, both ways": (Placement("v"), 2, orders),
    }
    for name, (placement, ways, traversals) in placements.items():
        for first, forward, backward in itertools.product(["backward", "alternate"], traversals, traversals):
            limit = 2 * num_ranks * placement.passes
            recipe = Recipe(first=first, forward=forward, backward=backward, in_flight=limit, clock="lockstep")
            yield name, placement, ways, recipe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("num_ranks", metavar="PP", type=int, nargs="?", default=8)
    parser.add_argument("num_microbatches", metavar="MICROBATCHES", type=int, nargs="?", default=32)
    given = parser.parse_args()
    num_ranks, num_microbatches = given.num_ranks, given.num_microbatches
    start = time.process_time()
    plan_of(Recipe(), problem_of(Placement(), 2, 2, ways=1), compiled=True)
    print(f"compiled in {time.process_time() - start:.1f} s of CPU time; P = {num_ranks}, M = {num_microbatches}")
    rows: dict[str, list[tuple[float, ...]]] = {}
    for name, placement, ways, recipe in grid(num_ranks):
        problem = problem_of(placement, num_ranks, num_microbatches, ways=ways)
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
        rows.setdefault(name, []).append((count, made, arrays, compiled, python))
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
