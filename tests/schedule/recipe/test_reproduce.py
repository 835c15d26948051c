"""The tutorial's recipes reproduce named schedules, in few lines."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mmtrain.errors import PlanError
from mmtrain.schedule.chain import plain_chain
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.schedule.plan import check
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.recipe import Recipe, Traversal
from mmtrain.schedule.recipe.policy import plan_of
from mmtrain.schedule.simulate import simulate
from tests.schedule.problems import halves, two_modules
from tests.schedule.recipe.recipes import TUTORIAL, tutorial

SIZES = [(P, M) for P in range(2, 9) for M in range(P, 4 * P + 1)]
UNEVEN = (1.0, 1.3, 0.7)
MOST_LINES = 15
CIRCULAR = (("breadth", 0), ("depth", 0), ("breadth", 4), ("depth", 4))
"""(order, every)."""


def numbers(problem: PlanningProblem, plan) -> tuple[float, float, float]:
    """Makespan, span and peak of a checked plan."""
    check(plan, problem)
    timeline = simulate(problem, plan)
    return round(timeline.makespan_s, 9), round(max(timeline.span_s), 9), max(timeline.peak_bytes)


def pairs(tmp_path, file: str, named: str, sizes=SIZES, **chain) -> Iterator[tuple]:
    """(problem, plan of a recipe, plan of a named schedule) on chains."""
    for num_ranks, microbatches in sizes:
        problem = plain_chain(num_ranks, microbatches, tutorial(tmp_path, file, num_ranks), **chain)
        yield problem, tutorial(tmp_path, file, num_ranks).make(problem), CATALOGUE[named].make(problem)


def test_the_tutorials_recipes_have_at_most_15_lines():
    assert len(TUTORIAL) == 9
    assert "def four(P):" in TUTORIAL["interleaved.py"]  # the tenth
    for name, text in TUTORIAL.items():
        body = text.partition("\n\n\ndef four")[0]
        assert len([line for line in body.splitlines() if line.strip()]) <= MOST_LINES, name


@pytest.mark.parametrize(
    ("file", "named"), [("gpipe.py", "GPipe"), ("one_f_one_b.py", "1F1B"), ("interleave.py", "interleave")]
)
@pytest.mark.parametrize("seconds", [(1.0, 1.0, 1.0), UNEVEN])
def test_action_for_action_on_chains(tmp_path, file, named, seconds):
    for problem, ours, theirs in pairs(tmp_path, file, named, seconds=seconds):
        assert ours.orders == theirs.orders, len(problem.graph.works)


@pytest.mark.parametrize("file", ["interleaved.py", "interleaved.py:four"])
@pytest.mark.parametrize("seconds", [(1.0, 1.0, 1.0), UNEVEN])
def test_interleaved_in_makespan_span_and_peak(tmp_path, file, seconds):
    sizes = [(P, M) for P, M in SIZES if M % P == 0]
    for problem, ours, theirs in pairs(tmp_path, file, "Interleaved1F1B", sizes, seconds=seconds):
        assert numbers(problem, ours) == numbers(problem, theirs)


def test_zb_h2_in_makespan_span_and_peak(tmp_path):
    for problem, ours, theirs in pairs(tmp_path, "zb_h2.py", "ZB-H2"):
        got, wanted = numbers(problem, ours), numbers(problem, theirs)
        assert got[1:] == wanted[1:]
        enough = len(problem.graph.works) >= 2 * problem.graph.num_ranks - 1
        assert got[0] == wanted[0] if enough else got[0] <= wanted[0]


@pytest.mark.parametrize(("limit", "stuck"), [(None, 14), ([11, 9, 7, 5], 16), (4, 24)])
def test_interval_traversal_gets_stuck_only_where_it_waits(limit, stuck):
    """The 32 circular settings of FlexPipe's grid, P = 4, M = 8; docs/log.md has these numbers."""
    problem = plain_chain(4, 8, CATALOGUE["Interleaved1F1B"])
    for wait, wanted in ((True, stuck), (False, 0)):
        found = 0
        for first, forward, backward in itertools.product(("backward", "alternate"), *[CIRCULAR] * 2):
            sides = [Traversal(order, every, wait and every > 0) for order, every in (forward, backward)]
            recipe = Recipe(first=first, forward=sides[0], backward=sides[1], in_flight=limit, clock="lockstep")
            try:
                plan_of(recipe, problem)
            except PlanError:
                found += 1
        assert found == wanted, wait


HELD_TO = {
    "gpipe.py": ("GPipe", 1.00, 1.00),
    "one_f_one_b.py": ("1F1B", 1.04, 1.14),
    "interleaved.py": ("Interleaved1F1B", 1.06, 0.92),
    "interleaved.py:four": ("Interleaved1F1B", 1.06, 0.92),
    # Shorter for more memory: all ranks may hold as much as the first one, where ZB-H2 allows 2 pairs less a rank.
    "zb_h2.py": ("ZB-H2", 0.99, 1.47),
    "interleave.py": ("interleave", 1.00, 1.00),
    "separated.py": ("ZB-H2", 1.02, 1.13),
}
"""File -> the schedule that it claims to be, and by what factors its makespan and peak may be those of that schedule on
an encoder and a language model, each of up to 4 chunks a rank; the largest measured, rounded up."""


@pytest.mark.parametrize("path", sorted(Path("benchmarks/problems").glob("vlm_*.json.gz")), ids=lambda path: path.name)
def test_the_examples_keep_their_promise_for_two_modules(tmp_path, path):
    given = PlanningProblem.read(path)
    problem = replace(given, memory_limit_bytes=(None,) * given.graph.num_ranks)
    for file, (named, most_time, most_peak) in HELD_TO.items():
        ours = numbers(problem, tutorial(tmp_path, file, given.graph.num_ranks).make(problem))
        theirs = numbers(problem, CATALOGUE[named].make(problem))
        assert ours[0] <= most_time * theirs[0] and ours[2] <= most_peak * theirs[2], file


def test_interleave_action_for_action_on_batches_of_two_modules():
    draw = random.Random(0)
    recipe = Recipe(first="alternate", forward="oldest", backward="oldest", memory=True)
    for _ in range(100):
        costs = [halves(*(draw.choice([0.37, 0.5, 1.0, 1.25, 2.1]) for _ in range(3))) for _ in range(2)]
        images = [draw.randint(0, 4) for _ in range(draw.randint(1, 10))]
        problem = two_modules(draw.randint(1, 6), images, vision=costs[0], language=costs[1])
        assert plan_of(recipe, problem).orders == CATALOGUE["interleave"].make(problem).orders
