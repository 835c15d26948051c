"""The choice of memory options against an integer program."""

import math
from dataclasses import replace

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.optimize import LinearConstraint, milp

from mmtrain.planner.search.evaluate import choose, fit_memory
from mmtrain.planner.search.instance import Searched
from mmtrain.planner.search.search import search
from mmtrain.planner.search.search_options import SearchOptions
from mmtrain.schedule.action import Kind
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.schedule.plan import Plan, check
from mmtrain.schedule.problem import Option, PlanningProblem
from mmtrain.schedule.simulate import simulate
from tests.examples import examples
from tests.schedule.problems import chain, halves


def recomputed(shares: int, scale: float = 1.0, weight_bytes: float | None = None) -> list[Option]:
    """Options from keeping all to recomputing all, in `shares` steps."""
    found = []
    for i in range(shares + 1):
        part = i / shares
        held = scale * (8.0 - 7.0 * part**0.7)
        found.append(
            Option(
                name=f"{part:.2f}",
                forward_s=scale,
                backward_input_s=scale * (1 + part),
                backward_weight_s=scale,
                activation_bytes=held,
                weight_bytes=None if weight_bytes is None else weight_bytes * scale,
            )
        )
    return found


def exact_seconds(problem: PlanningProblem, plan: Plan, rank: int) -> float:
    """The least seconds of a rank's nodes within its limit at every step of its order; inf: none fits."""
    nodes = [node for node in problem.graph.nodes() if problem.graph.stage_rank[node[0]] == rank]
    pairs = [(node, option) for node in nodes for option in range(len(problem.options(*node)))]
    column = {pair: i for i, pair in enumerate(pairs)}
    cost = [o.forward_s + o.duration_s(Kind.B) for node, i in pairs for o in [problem.options(*node)[i]]]
    one_each = np.zeros((len(nodes), len(pairs)))
    for row, node in enumerate(nodes):
        for option in range(len(problem.options(*node))):
            one_each[row, column[node, option]] = 1
    rows, held = [], np.zeros(len(pairs))
    for action, work in zip(plan.orders[rank], plan.works[rank], strict=True):
        node = action.stage, work
        during = held.copy()
        for i, option in enumerate(problem.options(*node)):
            if action.kind is Kind.F:
                during[column[node, i]] += option.activation_bytes
            held[column[node, i]] += option.growth_bytes(action.kind)
        rows.append(np.maximum(during, held))
    limit = problem.memory_limit_bytes[rank]
    assert limit is not None
    found = milp(
        cost,
        constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(np.array(rows), ub=limit * (1 + 1e-9))],
        integrality=np.ones(len(pairs)),
        bounds=(0, 1),
    )
    return float(found.fun) if found.success else math.inf


@st.composite
def choices(draw: st.DrawFn) -> tuple[PlanningProblem, Plan]:
    """A chain whose microbatches have different sizes and several options, and a plan for it without limits."""
    num_ranks, count = draw(st.integers(1, 2)), draw(st.integers(2, 5))
    split = draw(st.booleans())
    scales = [draw(st.sampled_from([0.5, 1.0, 1.7])) for _ in range(count)]
    base = chain(num_ranks, count)
    weight = draw(st.sampled_from([None, 0.5, 1.0]))
    limit = draw(st.sampled_from([4.0, 7.0, 11.0, 16.0]))
    problem = replace(
        base,
        costs=tuple(tuple(recomputed(draw(st.integers(1, 6)), scale, weight)) for scale in scales),
        cost_index=tuple((i,) * num_ranks for i in range(count)),
        memory_limit_bytes=(limit,) * num_ranks,
    )
    free = replace(problem, memory_limit_bytes=(None,) * num_ranks)
    return problem, CATALOGUE["ZB-H1" if split else "1F1B"].make(free)


@settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn=choices(), iterations=st.sampled_from([0, 20, 200]))
def test_choices_fit_and_nearly_reach_the_optimum(drawn: tuple[PlanningProblem, Plan], iterations: int) -> None:
    problem, plan = drawn
    exact = [exact_seconds(problem, plan, rank) for rank in range(problem.graph.num_ranks)]
    fitted = fit_memory(problem, plan, iterations=iterations)
    if fitted is None:
        assert math.inf in exact
        return
    check(fitted, problem)
    for rank, least in enumerate(exact):
        nodes = [node for node in problem.graph.nodes() if problem.graph.stage_rank[node[0]] == rank]
        options = [fitted.option(problem, *node) for node in nodes]
        seconds = sum(option.forward_s + option.duration_s(Kind.B) for option in options)
        # Of a few works each may be a step off: the more works, the less it matters (see the next test).
        assert least * (1 - 1e-6) <= seconds <= least * 1.15
    searched = Searched.of(problem)
    above = choose(searched, searched.load(plan), iterations)
    assert above >= 0  # the bound is one


def test_many_works_come_close_to_the_bound() -> None:
    problem = chain(2, 60, memory_limit_bytes=[200.0, 200.0])
    scales = [0.5 + 0.37 * (i * 7 % 5) for i in range(60)]
    many = replace(
        problem,
        costs=tuple(tuple(recomputed(9, scale)) for scale in scales),
        cost_index=tuple((i, i) for i in range(60)),
    )
    plan = CATALOGUE["GPipe"].make(chain(2, 60))
    plan = Plan(many.graph, plan.orders)
    searched = Searched.of(many)
    gaps = {n: choose(searched, searched.load(plan), n) for n in (20, 200)}
    assert gaps[200] <= gaps[20] + 1e-9
    assert gaps[20] < 0.01
    assert gaps[200] < 0.003


def test_fixed_orders_get_options_that_fit() -> None:
    base = chain(2, 4)
    problem = replace(base, costs=(tuple(recomputed(4)),), memory_limit_bytes=(12.0, 9.0))
    plan = CATALOGUE["1F1B"].make(base)
    plan = Plan(problem.graph, plan.orders)
    fitted = fit_memory(problem, plan)
    assert fitted is not None
    assert fitted.orders == plan.orders
    check(fitted, problem)
    assert max(simulate(problem, fitted).peak_bytes) <= 12.0
    assert any(stage == 0 for stage, _ in fitted.options)  # rank 0 has two microbatches in flight
    assert not any(stage == 1 for stage, _ in fitted.options)  # rank 1 has one
    tight = PlanningProblem.from_json(problem.to_json().replace("12.0", "1.5"))
    assert fit_memory(tight, Plan(tight.graph, plan.orders)) is None


def one_rank(options: list[Option], limit: float) -> PlanningProblem:
    """Three works of one stage."""
    return replace(chain(1, 3), costs=(tuple(options),), memory_limit_bytes=(limit,))


def test_an_option_that_holds_less_for_the_weight_half_and_more_before() -> None:
    few, many = halves(1.0, 1.0, 1.0, 10.0, 10.0), halves(1.0, 2.0, 1.0, 13.0, 2.0)
    problem = one_rank([few, many], 22.5)
    orders = "0F0.0 0F1.0 0I0.0 0F2.0 0W0.0 0I1.0 0W1.0 0I2.0 0W2.0"
    fitted = fit_memory(problem, Plan.parse(problem.graph, orders))
    if fitted is not None:
        check(fitted, problem)
    result = search(problem, SearchOptions(budget_evaluations=40))
    check(result.plan, problem)


def test_a_limit_of_no_byte() -> None:
    problem = one_rank([halves(1.0, 1.0, 1.0, 2.0), halves(1.0, 2.0, 1.0, 0.0)], 0.0)
    result = search(problem, SearchOptions(budget_evaluations=40))
    assert set(result.plan.options.values()) == {1}
    check(result.plan, problem)
