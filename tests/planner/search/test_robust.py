"""Searches that know the overheads of actions and the noise of their seconds."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmtrain.costs.noise import Noise
from mmtrain.costs.overheads import Overheads, charged
from mmtrain.planner.judge import judge
from mmtrain.planner.plan_json import plan_to_json
from mmtrain.planner.search.evaluate import cost_of, evaluate, join
from mmtrain.planner.search.instance import Searched
from mmtrain.planner.search.orders import by_component, component_orders
from mmtrain.planner.search.search import search
from mmtrain.planner.search.search_options import SearchOptions
from mmtrain.schedule.action import Kind
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import Option, PlanningProblem
from mmtrain.schedule.simulate import simulate
from tests.examples import examples
from tests.planner.search.test_search import mixed
from tests.schedule.problems import problems

NOISE = Noise(forward=0.08, backward=0.08, backward_weight=0.08, shared=0.3)
LOUD = SearchOptions(budget_evaluations=300, noise=NOISE)
DISPATCH = Overheads(
    forward_s=0.1, backward_s=0.1, backward_input_s=0.1, backward_weight_s=0.3, send_s=0.05, receive_s=0.05
)


def mean_makespan_s(problem: PlanningProblem, plan: Plan, draws: int, seed: int) -> float:
    """The mean over draws, by the simulator: each node gets an option list of its own."""
    nodes = list(problem.graph.nodes())
    rank = np.array([problem.graph.stage_rank[stage] for stage, _ in nodes])
    total = 0.0
    for factors in NOISE.factors(rank, draws, seed):
        costs: list[tuple[Option, ...]] = []
        index = [[0] * len(row) for row in problem.cost_index]
        for (stage, work), (f, i, w) in zip(nodes, factors.tolist(), strict=True):
            index[work][problem.graph.position[stage]] = len(costs)
            listed = problem.options(stage, work)
            costs.append(tuple(_slower(option, f, i, w) for option in listed))
        drawn = replace(problem, costs=tuple(costs), cost_index=tuple(map(tuple, index)))
        total += simulate(drawn, plan).makespan_s
    return total / draws


def _slower(option: Option, f: float, i: float, w: float) -> Option:
    return replace(
        option,
        forward_s=f * option.forward_s,
        backward_input_s=i * option.backward_input_s,
        backward_weight_s=w * option.backward_weight_s,
        split_s=w * option.split_s,
    )


def test_plans_are_chosen_by_their_mean_makespan():
    problem, options = mixed(limit=None), replace(LOUD, budget_evaluations=1000)
    plain, robust = search(problem, replace(options, noise=Noise())), search(problem, options)
    assert robust.expected_s is not None
    assert plain.expected_s is None
    means = [mean_makespan_s(problem, result.plan, 100, seed=9) for result in (plain, robust)]
    assert means[1] < means[0]
    assert robust.expected_s == pytest.approx(means[1], rel=0.02)  # by other draws
    assert robust.expected_s > robust.timeline.makespan_s  # a rank waits for the slowest of several


def test_threads_do_not_change_a_robust_plan_and_seeds_do():
    problem = mixed()
    found = [search(problem, replace(LOUD, budget_evaluations=1000, threads=threads)) for threads in (1, 2, 5)]
    assert len({plan_to_json(result) for result in found}) == 1
    assert found[0].expected_s == found[2].expected_s
    assert search(problem, replace(LOUD, seed=1)).expected_s != search(problem, replace(LOUD, seed=2)).expected_s


def test_backwards_are_split_only_where_it_pays():
    """Where a second action costs more than it can save, nothing is split; where it costs nothing, as before."""
    problem = mixed(limit=None)
    free = search(problem, SearchOptions(budget_evaluations=200)).plan
    assert free is not None and free.split
    counts = []
    for weight_s in (0.0, 0.2, 50.0):
        paid = charged(problem, Overheads(backward_weight_s=weight_s))
        plan = search(paid, SearchOptions(budget_evaluations=200)).plan
        assert plan is not None
        counts.append(len(plan.split))
    assert counts[0] == len(free.split)
    assert counts[0] > counts[1] > counts[2] == 0


def test_the_kernels_cost_of_a_plan_is_its_makespan():
    paid = charged(mixed(limit=None), DISPATCH)
    searched = Searched.of(paid)
    w = searched.workspace()
    order = by_component(searched, component_orders(searched)[0])
    for backward_first in (False, True):
        evaluate(searched, w, order, searched.decoder(0.0, 0.0, 0.5, backward_first, True), 20)
        counts = []
        for joined in (False, True):
            if joined:
                join(searched, w)
            plan = searched.plan(w, join=False)
            assert cost_of(searched, w) == pytest.approx(simulate(paid, plan).makespan_s, rel=1e-12)
            counts.append(len(plan.split))
        assert counts[0] > counts[1] > 0


@settings(max_examples=examples(40), deadline=None, suppress_health_check=list(HealthCheck))
@given(problem=problems(limits=True), noisy=st.booleans())
def test_plans_of_charged_problems_are_valid(problem: PlanningProblem, noisy: bool) -> None:
    paid = charged(problem, DISPATCH)
    result = search(paid, SearchOptions(budget_evaluations=60, noise=NOISE if noisy else Noise()))
    if not result.has_plan:
        assert result.status == "infeasible"
        return
    verdict = judge(paid, plan_to_json(result))
    assert verdict.makespan_s >= verdict.lower_bound_s * (1 - 1e-9)
    taken = [row.end_s - row.start_s for row in result.timeline.rows if row.action.kind is Kind.F]
    assert min(taken, default=0.1) >= 0.1 - 1e-9
