import pytest

from mmtrain.errors import ConfigError, PlanError
from mmtrain.planner.bound import lower_bound_s
from mmtrain.planner.make_plan import make_plan
from mmtrain.schedule.action import Kind
from mmtrain.schedule.chain import plain_chain
from mmtrain.schedule.library.catalogue import CATALOGUE
from tests.schedule.problems import chain, option, two_modules

PROBLEM = two_modules(2, [1, 0])


@pytest.mark.parametrize("schedule", ["1F1B", "interleave"])
def test_result_has_a_checked_plan_and_its_timeline(schedule: str) -> None:
    result = make_plan(PROBLEM, schedule)
    assert result.status == "first"
    assert schedule in result.message
    assert len(result.timeline.rows) == sum(map(len, result.plan.orders))


@pytest.mark.parametrize("schedule", ["1F1B", "interleave"])
def test_forward_only_iterations_are_planned_too(schedule: str) -> None:
    result = make_plan(chain(2, 3, cost=option(backward_s=0.0)), schedule)
    assert {a.kind for order in result.plan.orders for a in order} == {Kind.F}
    assert "forward_only" in result.message


def test_a_schedule_with_separated_gradients_is_never_longer() -> None:
    chain = plain_chain(4, 8, CATALOGUE["1F1B"])
    result = make_plan(chain, CATALOGUE["1F1B"].separated())
    assert result.message == "the order of schedule 1F1B, gradients separated"
    assert result.timeline.makespan_s == 27  # that of ZB-H1; 1F1B: 33


def test_unknown_schedule_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"schedule 'gpipe' does not exist; choose one of GPipe, 1F1B, .*, inter"):
        make_plan(PROBLEM, "gpipe")


@pytest.mark.parametrize("schedule", ["ZB-AutoSchedule", "interleave"])
def test_infeasible_is_a_status_with_rank_and_bytes(schedule: str) -> None:
    problem = two_modules(2, [1], memory_limit_bytes=[1.0, 9.0])
    result = make_plan(problem, schedule)
    assert (result.status, result.has_plan) == ("infeasible", False)
    assert result.message.startswith("rank 0: microbatch 0")
    assert "bytes" in result.message


def test_a_schedule_that_looks_at_no_limit_says_who_does() -> None:
    problem = chain(2, 3, memory_limit_bytes=[2.0, 2.0])
    message = r"schedule GPipe does not look at memory limits \(ZB-AutoSchedule and interleave do\): rank 0, step 2"
    with pytest.raises(PlanError, match=message):
        make_plan(problem, "GPipe")
    assert make_plan(problem, "interleave").has_plan


def test_bound_is_exact_where_one_rank_does_everything() -> None:
    problem = chain(1, 5)
    result = make_plan(problem, "1F1B")
    assert lower_bound_s(problem) == result.timeline.makespan_s == 15.0


def test_bound_counts_the_way_to_the_last_rank_and_back() -> None:
    # 1F1B on a plain chain is optimal, and the first rank's load plus the way there and back says so nearly.
    assert lower_bound_s(chain(2, 8, cost=option(1.0, 2.0))) == 8 * 3.0 + 1.0
