"""The peer of `benchmarks/flexpipe.py` on small pipelines, against closed forms and the paper's figures."""

import math
from dataclasses import replace

import pytest

from benchmarks import flexpipe, flexpipe_clip, flexpipe_gpt, flexpipe_sides
from benchmarks.flexpipe_gpt import Cut, Pipeline, Point, both_ways
from benchmarks.flexpipe_separation import separated_to_the_letter
from mmtrain.errors import ConfigError
from mmtrain.planner.make_plan import make_plan
from mmtrain.planner.search.search_options import SearchOptions
from mmtrain.schedule.action import Kind
from mmtrain.schedule.chain import plain_chain
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.schedule.plan import check
from mmtrain.schedule.simulate import simulate

SMALL = Point("5b", 64, 4, 8, 4)


@pytest.mark.parametrize(("num_ranks", "count"), [(2, 4), (4, 4), (4, 8), (6, 13)])
def test_separation_to_the_letter_keeps_the_work_and_is_never_longer(num_ranks, count):
    problem = plain_chain(num_ranks, count, CATALOGUE["1F1B"])
    plan = CATALOGUE["1F1B"].make(problem)
    separated = separated_to_the_letter(plan, problem)
    check(separated)
    before, after = simulate(problem, plan), simulate(problem, separated)
    assert after.makespan_s < before.makespan_s
    assert sum(after.busy_s) == pytest.approx(sum(before.busy_s))
    # Without its weight gradients a backward on the way down takes 1 instead of 2: no plan of these orders is shorter.
    assert after.makespan_s >= 3 * count + num_ranks - 1
    kinds = [action.kind for order in separated.orders for action in order]
    assert kinds.count(Kind.I) == kinds.count(Kind.W) > 0


def test_separation_splits_nothing_where_no_rank_idles():
    problem = plain_chain(1, 5, CATALOGUE["1F1B"])
    plan = CATALOGUE["1F1B"].make(problem)
    assert separated_to_the_letter(plan, problem).orders == plan.orders


@pytest.mark.parametrize(("ranks", "bubble"), [(4, 1 / 4), (8, 1 / 3)])
def test_two_copies_in_opposite_directions_reach_the_bubble_of_chimera(ranks, bubble):
    """(P - 2) / (3M / 2 + P - 2) for M = P and whole backwards of twice a forward (Chimera, arXiv:2107.06925)."""
    problem = both_ways(plain_chain(ranks, ranks, CATALOGUE["1F1B"]))
    found = make_plan(problem, SearchOptions(budget_evaluations=300, split=False))
    assert found.timeline.bubble == pytest.approx(bubble)


def test_the_head_makes_stages_as_unequal_as_in_figure_2():
    """5.63 times the seconds and 4.87 times the bytes at a vocabulary of 1M: within 15 %."""
    *_, last = flexpipe.figure2([1000])
    seconds, num_bytes = (float(cell) for cell in last.strip("| ").split(" | ")[1:])
    assert seconds == pytest.approx(5.63, rel=0.15)
    assert num_bytes == pytest.approx(4.87, rel=0.15)


def test_states_of_a_whole_head_do_not_fit_where_the_paper_runs_out_of_memory():
    point = Point("16.1b", 1000, 16, 2, 1)
    with pytest.raises(ConfigError, match="pp_rank"):
        Pipeline(point, Cut(False, is_even=True), "full")
    assert Pipeline(replace(point, vocabulary=512), Cut(False, is_even=True), "full").problem.graph.num_ranks == 16
    assert Pipeline(point, Cut(True), "full").problem.graph.num_ranks == 16


def test_two_copies_are_charged_for_both_states_and_their_sum():
    made = Pipeline(SMALL, Cut(True), "none")
    problem = both_ways(made.problem)
    plan = CATALOGUE["interleave"].make(problem)
    check(plan, problem)
    timeline = simulate(problem, plan)
    (one_s, one_bytes), (two_s, two_bytes) = made.step(timeline), made.step(timeline, both=True)
    assert one_s < two_s < math.inf
    blocks = sum(layer.num_params for layer in made.job.spec.text.layers) / SMALL.num_ranks
    assert two_bytes - one_bytes == pytest.approx(18 * blocks, rel=0.15)  # 4 + 2 + 4 + 8 bytes a parameter


@pytest.mark.nightly
def test_every_side_of_the_language_models_has_a_step(monkeypatch):
    monkeypatch.setattr(flexpipe_sides, "CLOSEST", 1)
    monkeypatch.setattr(flexpipe_gpt, "EVALUATIONS", 5)
    steps = {side: flexpipe_sides.best(side, [SMALL]) for side in flexpipe_sides.SIDES}
    ideal = flexpipe_sides.ideal_s(SMALL)
    assert all(ideal < result.seconds < math.inf for result in steps.values())
    assert steps["mmtrain"].seconds < steps["even 1F1B"].seconds


@pytest.mark.nightly
def test_towers_share_a_loss_after_every_few_microbatches():
    made = flexpipe_clip.towers("9.7b", 8, 2, (1, 1), "none")
    assert made is not None
    graph = made.problem.graph
    losses = [work for work in graph.works if work.module == 2]
    assert [len(work.after) for work in losses] == [2 * flexpipe_clip.GROUP] * 2
    assert graph.num_ranks == 5
    results = [result for side in ("DistMM-Pipe", "FlexPipe") for result in flexpipe_clip.SIDES[side]("9.7b", 8, 2)]
    assert all(result.seconds > flexpipe_clip.ideal_s("9.7b", 8, 2) for result in results)
    assert min(result.seconds for result in results) < math.inf
