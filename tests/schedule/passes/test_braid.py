"""Blocks of forwards and backwards, as a pass over plans."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmtrain.schedule.action import BRAID, Kind
from mmtrain.schedule.chain import plain_chain
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.schedule.passes.braid import braid
from mmtrain.schedule.passes.lower import lower
from mmtrain.schedule.plan import Plan, check
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.simulate import simulate
from mmtrain.schedule.transport import check_transport
from tests.examples import examples
from tests.schedule.problems import as_units, chain, halves, problems

NAMES = ("GPipe", "1F1B", "ZB-H2", "ZB-AutoSchedule", "DualPipeV", "STP", "interleave")


def makespan_s(problem: PlanningProblem, plan: Plan) -> float:
    return simulate(problem, plan).makespan_s


def blocks(plan: Plan) -> list[str]:
    return [str(entry) for order in plan.orders for entry in order if entry.kind is BRAID]


@settings(max_examples=examples(200), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    problem=problems(limits=True) | problems() | problems(v=True),
    name=st.sampled_from(NAMES),
    contention=st.sampled_from([0.0, 0.19, 0.8]),
    share=st.sampled_from([0.1, 0.6, 1.0]),
)
def test_plans_become_shorter_or_stay(problem: PlanningProblem, name: str, contention: float, share: float) -> None:
    units = as_units(problem, share=share, contention=contention)
    plan = CATALOGUE[name].make(units)
    before = simulate(units, plan)
    braided = braid(plan, units)
    check(braided)
    check_transport(lower(braided, units, sharded=True))
    after = simulate(units, braided)
    if braided is not plan:
        assert after.makespan_s < before.makespan_s
        assert set(blocks(plan)) <= set(blocks(braided))
    for limit, old, new in zip(units.memory_limit_bytes, before.peak_bytes, after.peak_bytes, strict=True):
        assert limit is None or new <= max(old, limit * (1 + 1e-9))
    assert braid(plan, units) == braided
    assert makespan_s(units, braid(braided, units)) <= after.makespan_s


def test_a_forward_joins_the_backward_before_it_and_the_weight_gradient_behind_it() -> None:
    # F: 1 s of compute and 1 s of exchanges; I: 1 s and 1 s; W: 2 s. All is hidden.
    problem = as_units(chain(1, 3, cost=halves(2.0, 2.0, 2.0)), share=0.5, contention=0.0)
    whole = Plan.parse(problem.graph, "0F0.0 0F1.0 0B0.0 0F2.0 0B1.0 0B2.0")
    assert str(braid(whole, problem)) == "0F0.0 0F1.0&0B0.0 0F2.0&0B1.0 0B2.0"
    assert makespan_s(problem, braid(whole, problem)) == 2 + 4 + 4 + 3 < makespan_s(problem, whole)
    split = Plan.parse(problem.graph, "0F0.0 0I0.0 0F1.0 0W0.0 0B1.0 0F2.0 0B2.0")
    assert blocks(braid(split, problem)) == ["0F1.0&0I0.0", "0F2.0&0W0.0"]


def test_an_action_joins_one_further_on_that_overtakes_others() -> None:
    problem = as_units(chain(1, 3, cost=halves(2.0, 2.0, 2.0)), share=0.5, contention=0.0)
    plan = Plan.parse(problem.graph, "0F0.0 0F1.0 0F2.0 0B0.0 0B1.0 0B2.0")
    braided = braid(plan, problem)
    assert len(blocks(braided)) == 2
    assert makespan_s(problem, braided) == 2 + 4 + 4 + 3


def test_no_block_exceeds_the_memory_limit() -> None:
    cost = halves(2.0, 2.0, 2.0)
    limited = as_units(chain(1, 3, cost=cost, memory_limit_bytes=[1.0]), share=0.5, contention=0.0)
    # A block holds the activations of both, and only one microbatch fits.
    plan = Plan.parse(limited.graph, "0F0.0 0B0.0 0F1.0 0B1.0 0F2.0 0B2.0")
    assert braid(plan, limited) is plan
    wide = as_units(chain(1, 3, cost=cost, memory_limit_bytes=[2.0]), share=0.5, contention=0.0)
    assert len(blocks(braid(Plan(wide.graph, plan.orders), wide))) == 2


def test_without_exchanges_to_hide_the_plan_itself_comes_back() -> None:
    problem = chain(2, 4)
    plan = CATALOGUE["1F1B"].make(problem)
    assert braid(plan, problem) is plan
    nothing = as_units(problem, share=0.0)
    assert braid(plan, nothing) is plan


def test_1f1b_has_no_time_for_blocks() -> None:
    # Each forward waits for the backward before it, and each backward for a forward of the next rank.
    problem = plain_chain(4, 16, CATALOGUE["1F1B"], exchange_s=0.5)
    plan = CATALOGUE["1F1B"].make(problem)
    assert braid(plan, problem) is plan


@pytest.mark.parametrize("name", ["interleave", "ZB-H2"])
def test_plans_with_forwards_in_reserve_become_much_shorter(name: str) -> None:
    problem = plain_chain(4, 16, CATALOGUE[name], exchange_s=0.5)
    plan = CATALOGUE[name].make(problem)
    braided = braid(plan, problem)
    check(braided, problem)
    assert makespan_s(problem, braided) < 0.97 * makespan_s(problem, plan)
    joined = CATALOGUE[name].braided().make(problem)
    assert joined.orders == braided.orders
    assert {entry.parts[0].kind for order in joined.orders for entry in order if entry.kind is BRAID} == {Kind.F}
