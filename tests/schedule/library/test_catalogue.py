"""What every schedule must do on every work graph."""

import pytest
from hypothesis import HealthCheck, given, settings

from mmtrain.schedule.action import Kind
from mmtrain.schedule.library.catalogue import SCHEDULES
from mmtrain.schedule.library.forward_only import forward_only
from mmtrain.schedule.lower import lower
from mmtrain.schedule.plan import Plan, check
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.simulate import simulate
from mmtrain.schedule.transport import check_transport
from tests.schedule.problems import problems

RANDOM = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def assert_runs(problem: PlanningProblem, plan: Plan) -> None:
    timeline = simulate(problem, plan)
    assert len(timeline.rows) == sum(map(len, plan.orders))
    assert all(row.end_s >= row.start_s >= 0 for row in timeline.rows)
    check_transport(lower(plan, problem, sharded=True))
    assert Plan.parse(problem.graph, str(plan), plan.options) == plan


@pytest.mark.parametrize("name", SCHEDULES)
@RANDOM
@given(problem=problems())
def test_plans_of_random_work_graphs_are_sound(name: str, problem: PlanningProblem) -> None:
    plan = SCHEDULES[name](problem)
    check(plan)
    assert_runs(problem, plan)
    assert SCHEDULES[name](problem) == plan


@RANDOM
@given(problem=problems(limits=True))
def test_interleave_keeps_memory_limits_without_deadlock(problem: PlanningProblem) -> None:
    plan = SCHEDULES["interleave"](problem)
    check(plan, problem)
    assert_runs(problem, plan)


@RANDOM
@given(problem=problems(forward_only=True))
def test_forward_only_plans_have_forwards_alone(problem: PlanningProblem) -> None:
    for plan in (forward_only(problem), SCHEDULES["1F1B"](problem)):
        check(plan, problem)
        assert {action.kind for order in plan.orders for action in order} == {Kind.F}
        assert_runs(problem, plan)
