from dataclasses import replace

import pytest

from mmtrain.errors import PlanError
from mmtrain.schedule.plan import Plan, check, held_bytes
from mmtrain.schedule.problem import Option
from tests.schedule.problems import chain, halves, option, two_modules

CHAIN = chain(2, 2)
GOOD = "0F0.0 0F1.0 0B0.0 0B1.0\n1F0.0 1B0.0 1F1.0 1B1.0"


def test_plan_is_read_and_written_back() -> None:
    plan = Plan.parse(CHAIN.graph, GOOD)
    assert str(plan) == GOOD
    check(plan, CHAIN)


def test_backward_may_be_split() -> None:
    plan = Plan.parse(CHAIN.graph, "0F0.0 0F1.0 0B0.0 0I1.0 0W1.0\n1F0.0 1I0.0 1F1.0 1W0.0 1B1.0")
    check(plan, CHAIN)
    assert plan.split == {(1, 0), (0, 1)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + " 1B1.0", r"rank 1, step 4: 1B1.0 is already step 3 of this rank"),
        (
            GOOD.replace(" 0B1.0", ""),
            r"rank 0: the backward of 0F1.0 must be B, or I and W, but the plan has none",
        ),
        (GOOD.replace(" 0B1.0", " 0I1.0"), "but the plan has I"),
        (GOOD.replace(" 0B1.0", " 0B1.0 0W1.0"), "but the plan has B, W"),
        (GOOD.replace("0F0.0 ", ""), "rank 0: 0F0.0 is missing"),
        (GOOD.replace("0F0.0 ", "1F0.0 "), r"rank 0, step 0: 1F0.0 belongs on rank 1"),
        (GOOD + " 1SEND_B0.0>0", r"rank 1, step 4: 1SEND_B0.0>0 is not a compute action"),
        (GOOD + " 1F7.0", r"action 1F7.0: .* has no sub-microbatch 7.0"),
    ],
)
def test_unsound_plans_are_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check(Plan.parse(CHAIN.graph, text))


def test_backward_of_a_frozen_stage_is_refused() -> None:
    problem = two_modules(1, [1], vision=option(backward_s=0.0))
    check(Plan.parse(problem.graph, "0F0.0 1F0.0 1B0.0"), problem)
    with pytest.raises(PlanError, match=r"rank 0, step 3: 0B0.0 cannot run"):
        check(Plan.parse(problem.graph, "0F0.0 1F0.0 1B0.0 0B0.0"))


def test_deadlock_names_both_actions_and_marks_the_steps() -> None:
    plan = Plan.parse(CHAIN.graph, "0F0.0 0B0.0 0F1.0 0B1.0\n1F0.0 1F1.0 1B0.0 1B1.0")
    with pytest.raises(PlanError) as error:
        check(plan)
    assert str(error.value) == (
        "deadlock: rank 0, step 1: 0B0.0 waits for 1B0.0, which is step 2 of rank 1, which never gets there; "
        "move one of them\n"
        "  rank 0: 0F0.0 >>0B0.0<< 0F1.0 0B1.0\n"
        "  rank 1: 1F0.0 >>1F1.0<< 1B0.0 1B1.0"
    )


def test_weight_half_before_its_input_half_is_a_deadlock() -> None:
    problem = chain(1, 1)
    with pytest.raises(PlanError, match=r"deadlock: rank 0, step 1: 0W0.0 waits for 0I0.0"):
        check(Plan.parse(problem.graph, "0F0.0 0W0.0 0I0.0"))


def test_memory_limit_is_enforced_to_the_byte() -> None:
    order = "0F0.0 0F1.0 0B0.0 0B1.0"
    roomy, tight = (chain(1, 2, memory_limit_bytes=[limit]) for limit in (2.0, 1.9))
    check(Plan.parse(roomy.graph, order), roomy)
    with pytest.raises(PlanError, match=r"rank 0, step 1: 0F1.0 raises activations to 2 bytes, over the limit of 1.9"):
        check(Plan.parse(tight.graph, order), tight)


def test_split_backward_keeps_the_weight_bytes_until_w() -> None:
    cost = Option(name="a", forward_s=1, backward_input_s=1, backward_weight_s=1, activation_bytes=5, weight_bytes=2)
    problem = chain(1, 1, cost=cost)
    plan = Plan.parse(problem.graph, "0F0.0 0I0.0 0W0.0")
    assert held_bytes(plan, problem) == (((5, 5), (5, 2), (2, 0)),)
    whole = Plan.parse(problem.graph, "0F0.0 0B0.0")
    assert held_bytes(whole, problem) == (((5, 5), (5, 0)),)


@pytest.mark.parametrize(("order", "held"), [("0F0.0 0I0.0 0W0.0", (5, 3)), ("0F0.0 0B0.0", (5, 0))])
def test_both_kinds_of_backward_bring_back_what_they_recompute(order: str, held: tuple[float, float]) -> None:
    cost = replace(halves(1, 1, 1, activation_bytes=1, weight_bytes=3), restored_bytes=4)
    plan = Plan.parse(chain(1, 1).graph, order)
    assert held_bytes(plan, chain(1, 1, cost=cost))[0][1] == held
    check(plan, chain(1, 1, cost=cost, memory_limit_bytes=[5.0]))
    with pytest.raises(
        PlanError, match=r"rank 0, step 1: 0[IB]0.0 raises activations to 5 bytes, over the limit of 4.9"
    ):
        check(plan, chain(1, 1, cost=cost, memory_limit_bytes=[4.9]))


def test_stage_without_backward_frees_its_memory_at_once() -> None:
    problem = chain(1, 2, cost=option(backward_s=0.0, activation_bytes=3.0))
    assert held_bytes(Plan.parse(problem.graph, "0F0.0 0F1.0"), problem) == (((3, 0), (3, 0)),)


def test_options_are_checked_against_the_problem() -> None:
    plan = Plan.parse(CHAIN.graph, GOOD, {(0, 0): 1})
    with pytest.raises(PlanError, match=r"options\[0, 0\] = 1 is outside of 0 \.\. 0"):
        check(plan, CHAIN)
    with pytest.raises(PlanError, match="does not pass through"):
        check(replace(plan, options={(9, 0): 0}), CHAIN)
    with pytest.raises(PlanError, match="not the problem's"):
        check(plan, chain(2, 3))


def test_number_of_ranks_is_checked() -> None:
    with pytest.raises(PlanError, match="one line a rank, but there are 1"):
        Plan.parse(CHAIN.graph, "0F0.0")
    with pytest.raises(PlanError, match="1 orders for 2 ranks"):
        check(Plan(CHAIN.graph, ((),)))
