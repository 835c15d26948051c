"""The sides of FlexPipe's language models: FlexPipe, published baselines and ours, on any point of `flexpipe_gpt.py`.

even 1F1B       as many blocks on each rank, the embedding on the first, the head on the last
best cut        1F1B and Interleaved1F1B with 2 chunks, cut by seconds
T-1F1B          the divided vocabulary is one more stage of 1F1B, backwards whole, each rank at its own pace
1F1B, P + k     the vocabulary divided, k more microbatches in flight on each rank than 1F1B, each rank at its own pace;
                weight gradients of the head when idle (arXiv:2411.05288: k = 1 for one barrier, 2 for two)
FlexPipe        its 58 types by its clock, the vocabulary divided; the one of least bubble of each of the two best
                placements, with its gradient separation; those in both directions hold two stages' states and add them
mmtrain         cuts by seconds with 1 to 3 chunks, the vocabulary whole or divided, memory options, searched orders

Sources: FlexPipe, sections 5.2, 6 and 7.1, table 3 with heads and width in their columns.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import itemgetter

from flexpipe_gpt import MODES, Cut, Point, Result, both_ways, pipeline, total_s
from flexpipe_separation import separated_to_the_letter

from mmtrain.planner.make_plan import JobMethod, make_plan
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.recipe.flexpipe_types import WAYS, flexpipe_types
from mmtrain.schedule.recipe.grid import RecipeGrid
from mmtrain.schedule.recipe.language import Recipe, Rule
from mmtrain.schedule.recipe.policy import plan_of

FINALISTS = 2
"""Placements whose best types FlexPipe measures (section 7.1: those of the two least bubbles)."""


def of_schedule(side: str, cuts: Mapping[str, Cut], make: Callable[[PlanningProblem, Point, str], Plan]) -> "Side":
    """A side with fixed orders."""

    def run(point: Point) -> Iterator[Result]:
        for (name, cut), mode in itertools.product(cuts.items(), MODES):
            made = pipeline(point, cut, mode)
            if made is not None:
                yield made.result(side, f"{name}, recompute {mode}", make(made.problem, point, name))

    return run


def one_f_one_b(extra: int, clock: str, *, split: bool) -> Callable[[PlanningProblem, Point, str], Plan]:
    """1F1B on a divided vocabulary, its head before everything else.

    Args: extra: microbatches in flight in addition to 1F1B's. split: weight gradients of the head when a rank is idle.
    """

    def make(problem: PlanningProblem, point: Point, _: str) -> Plan:
        ranks = point.num_ranks
        limits = [ranks - rank + extra for rank in range(ranks)]
        rules: dict[str | int, Rule] = {"language": Rule(in_flight=limits)}
        if split:
            rules |= {f"head.{rank}": Rule(split_backward=True) for rank in range(ranks)}
        return plan_of(Recipe(forward="depth", backward="depth", clock=clock, overrides=rules), problem, compiled=True)

    return make


def flexpipe(point: Point) -> Iterator[Result]:
    """FlexPipe's tuner on a point."""
    for mode in MODES:
        results = list(_flexpipe(point, mode))
        yield from results
        if any(result.seconds < math.inf for result in results):
            return


def _flexpipe(point: Point, mode: str) -> Iterator[Result]:
    least = []
    for _, group in itertools.groupby(flexpipe_types(point.num_ranks), lambda named: named[1].placement):
        types = list(group)
        both = len(types[0][1].placements) > 1
        placement = types[0][1].placement_of(WAYS[0] if both else "")
        made = pipeline(point, Cut(True, placement.passes, "v" if placement.shape == "v" else "loop"), mode)
        if made is None:
            continue
        problem = both_ways(made.problem) if both else made.problem
        grid, found = RecipeGrid(problem), []
        for name, given in types:
            recipe = given if both else replace(given, placement={"language": placement})
            score = grid.score(recipe)
            if not score.stuck:
                found.append((score.bubble, name, recipe, made, problem, both))
        least += [min(found, key=itemgetter(0, 1))] if found else []
    for _, name, recipe, made, problem, both in sorted(least, key=itemgetter(0, 1))[:FINALISTS]:
        plan = plan_of(recipe, problem, compiled=True)
        for how, ordered in (("", plan), (", separated", separated_to_the_letter(plan, problem))):
            yield made.result("FlexPipe", f"{name}{how}, recompute {mode}", ordered, problem if both else None)


def ours(point: Point) -> Iterator[Result]:
    """Our searched plans on a point."""
    for divided, chunks in itertools.product((False, True), (1, 2, 3)):
        made = pipeline(point, Cut(divided, chunks), "")
        if made is not None:
            found = make_plan(made.problem, JobMethod.searching(made.job.schedule, made.job.section, seed=0))
            if found.has_plan:
                how = "divided" if divided else "whole"
                yield made.result("mmtrain", f"vocabulary {how}, K = {chunks}", found.plan)


GUIDE, CLOSER = "1F1B, P + 2", ("FlexPipe", "mmtrain")
CLOSEST = 2
"""Points."""
Side = Callable[[Point], Iterator[Result]]


def _named(problem: PlanningProblem, point: Point, name: str) -> Plan:
    return CATALOGUE[name].make(problem)


SIDES: Mapping[str, Side] = {
    "even 1F1B": of_schedule("even 1F1B", {"1F1B": Cut(False, is_even=True)}, _named),
    "best cut": of_schedule("best cut", {"1F1B": Cut(False), "Interleaved1F1B": Cut(False, 2)}, _named),
    "T-1F1B": of_schedule("T-1F1B", {"": Cut(True)}, one_f_one_b(1, "seconds", split=False)),
    "1F1B, P + 1": of_schedule("1F1B, P + 1", {"": Cut(True)}, one_f_one_b(1, "seconds", split=True)),
    "1F1B, P + 2": of_schedule("1F1B, P + 2", {"": Cut(True)}, one_f_one_b(2, "seconds", split=True)),
    "FlexPipe": flexpipe,
    "mmtrain": ours,
}


def ideal_s(point: Point) -> float:
    """Seconds of a step without a bubble, sums and optimizer; infinite: no states fit."""
    made = pipeline(point, Cut(True), "none")
    if made is None:
        return math.inf
    return total_s(made.problem) / point.num_ranks


def best(side: str, candidates: Sequence[Point]) -> Result:
    """The best of a side. Args: candidates: at least one.

    Sides of `CLOSER` only look at those points that are the best ones of `GUIDE`. No point is tried whose ideal seconds
    exceed the best.
    """
    found = Result(side, candidates[0], "does not fit")
    tried = sorted(candidates, key=guide_s)[:CLOSEST] if side in CLOSER else sorted(candidates, key=ideal_s)
    for point in tried:
        for result in SIDES[side](point) if ideal_s(point) < found.seconds else ():
            found = min(found, result, key=lambda one: one.seconds)
    return found


@lru_cache(maxsize=256)
def guide_s(point: Point) -> float:
    """Seconds of a step by the cheapest side that divides the vocabulary; infinite: it does not fit."""
    return min((result.seconds for result in SIDES[GUIDE](point)), default=math.inf)
