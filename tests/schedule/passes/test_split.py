"""Backwards cut in two, as a pass over plans."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmtrain.errors import PlanError
from mmtrain.schedule.action import Kind
from mmtrain.schedule.library.interleave import interleave
from mmtrain.schedule.library.one_f_one_b import one_f_one_b
from mmtrain.schedule.passes.split import split_backwards
from mmtrain.schedule.plan import check
from mmtrain.schedule.problem import Option
from mmtrain.schedule.simulate import simulate
from tests.schedule.problems import chain, problems

KEEPS_HALF = Option(
    name="keep", forward_s=1, backward_input_s=1, backward_weight_s=1, activation_bytes=2, weight_bytes=1
)
GROWS = Option(
    name="recompute", forward_s=1, backward_input_s=2, backward_weight_s=1, activation_bytes=1, weight_bytes=3
)


def test_each_weight_half_comes_that_many_actions_after_its_input_half():
    problem = chain(2, 3)
    plan = one_f_one_b(problem)
    assert str(split_backwards(plan, problem, 0)) == (
        "0F0.0 0F1.0 0I0.0 0W0.0 0F2.0 0I1.0 0W1.0 0I2.0 0W2.0\n1F0.0 1I0.0 1W0.0 1F1.0 1I1.0 1W1.0 1F2.0 1I2.0 1W2.0"
    )
    assert str(split_backwards(plan, problem, 2)) == (
        "0F0.0 0F1.0 0I0.0 0F2.0 0I1.0 0W0.0 0I2.0 0W1.0 0W2.0\n1F0.0 1I0.0 1F1.0 1I1.0 1W0.0 1F2.0 1I2.0 1W1.0 1W2.0"
    )


def test_only_the_chosen_backwards_are_split():
    problem = chain(1, 3)
    plan = split_backwards(one_f_one_b(problem), problem, 9, nodes={(0, 1)})
    assert str(plan) == "0F0.0 0B0.0 0F1.0 0I1.0 0F2.0 0B2.0 0W1.0"


def test_weight_halves_come_earlier_where_memory_is_short():
    problem = chain(1, 4, cost=KEEPS_HALF, memory_limit_bytes=[4])
    plan = split_backwards(one_f_one_b(problem), problem, 99)
    assert str(plan) == "0F0.0 0I0.0 0F1.0 0I1.0 0F2.0 0I2.0 0W0.0 0F3.0 0I3.0 0W1.0 0W2.0 0W3.0"
    check(plan, problem)


def test_a_backward_stays_whole_where_its_halves_do_not_fit():
    problem = chain(1, 2, cost=GROWS, memory_limit_bytes=[2.5])
    assert str(split_backwards(one_f_one_b(problem), problem, 0)) == "0F0.0 0B0.0 0F1.0 0B1.0"


@settings(deadline=None)
@given(problem=problems(limits=True), delay=st.integers(0, 30))
def test_split_plans_are_plans_and_do_no_other_work(problem, delay):
    try:
        plan = interleave(problem)
    except PlanError:
        return  # one microbatch alone does not fit
    split = split_backwards(plan, problem, delay)
    check(split, problem)
    busy = simulate(problem, split).busy_s
    assert busy == pytest.approx(simulate(problem, plan).busy_s)
    for order, whole in zip(split.orders, plan.orders, strict=True):
        others = [action for action in order if action.kind is not Kind.W]
        assert [(a.stage, a.microbatch, a.sub_microbatch) for a in others] == [
            (a.stage, a.microbatch, a.sub_microbatch) for a in whole
        ]


def test_a_delay_below_zero_is_refused():
    problem = chain(1, 1)
    with pytest.raises(PlanError, match="delay = -1"):
        split_backwards(one_f_one_b(problem), problem, -1)
