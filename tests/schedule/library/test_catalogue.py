"""What every schedule must do on every work graph."""

import typing

import pytest
from hypothesis import HealthCheck, given, settings

from mmtrain.schedule.action import Kind
from mmtrain.schedule.library import catalogue, names
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.schedule.library.forward_only import forward_only
from mmtrain.schedule.library.v_shape import v_chunks
from mmtrain.schedule.library.weights import worth_splitting
from mmtrain.schedule.passes.lower import lower
from mmtrain.schedule.plan import Plan, check
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.simulate import simulate
from mmtrain.schedule.transport import check_transport
from tests.examples import examples
from tests.schedule.problems import as_units, problems

RANDOM = settings(max_examples=examples(25), deadline=None, suppress_health_check=list(HealthCheck))
MEMORY_BOUNDED = [name for name, schedule in CATALOGUE.items() if schedule.keeps_memory_limits]
V_SHAPED = [name for name, schedule in CATALOGUE.items() if schedule.placement == "v"]


def assert_runs(problem: PlanningProblem, plan: Plan) -> None:
    timeline = simulate(problem, plan)
    assert len(timeline.rows) == sum(map(len, plan.orders))
    assert all(row.end_s >= row.start_s >= 0 for row in timeline.rows)
    check_transport(lower(plan, problem, sharded=True))
    assert Plan.parse(problem.graph, str(plan), plan.options) == plan


def assert_sound(name: str, problem: PlanningProblem) -> None:
    plan = CATALOGUE[name].make(problem)
    check(plan)
    assert_runs(problem, plan)
    worth = {n for n in problem.graph.nodes() if worth_splitting(plan.option(problem, *n))}
    assert plan.split <= (worth if CATALOGUE[name].splits_backward else set())
    assert CATALOGUE[name].make(problem) == plan


@pytest.mark.parametrize("name", CATALOGUE)
@RANDOM
@given(problem=problems())
def test_plans_of_random_work_graphs_are_sound(name: str, problem: PlanningProblem) -> None:
    assert_sound(name, problem)


@pytest.mark.parametrize("name", V_SHAPED)
@RANDOM
@given(problem=problems(v=True))
def test_plans_of_random_v_placements_are_sound(name: str, problem: PlanningProblem) -> None:
    assert_sound(name, problem)


@pytest.mark.parametrize("name", V_SHAPED)
@RANDOM
@given(problem=problems(joined=True))
def test_plans_of_random_modules_as_one_v_are_sound(name: str, problem: PlanningProblem) -> None:
    assert v_chunks(problem.graph) is not None
    assert_sound(name, as_units(problem))


@pytest.mark.parametrize("name", MEMORY_BOUNDED)
@RANDOM
@given(problem=problems(limits=True))
def test_memory_limits_are_kept_without_deadlock(name: str, problem: PlanningProblem) -> None:
    plan = CATALOGUE[name].make(problem)
    check(plan, problem)
    assert_runs(problem, plan)


@pytest.mark.parametrize("name", CATALOGUE)
@RANDOM
@given(problem=problems(forward_only=True))
def test_plans_without_any_backward_have_forwards_alone(name: str, problem: PlanningProblem) -> None:
    for plan in (forward_only(problem), CATALOGUE[name].make(problem)):
        check(plan)
        assert {action.kind for order in plan.orders for action in order} == {Kind.F}
        assert_runs(problem, plan)


def test_config_offers_the_catalogue() -> None:
    assert set(typing.get_args(names.ScheduleName)) == set(catalogue._SCHEDULES)
