import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from mmtrain.errors import PlanError
from mmtrain.planner.bound import lower_bound_s
from mmtrain.planner.plan import KEYS, PlanResult, make_plan, plan_from_json, plan_to_json
from mmtrain.schedule.action import Kind
from mmtrain.schedule.problem import PlanningProblem
from tests.schedule.problems import chain, option, problems, two_modules

PROBLEM = two_modules(2, [1, 0])


@pytest.mark.parametrize("schedule", ["1F1B", "interleave"])
def test_result_has_a_checked_plan_and_its_timeline(schedule: str) -> None:
    result = make_plan(PROBLEM, schedule)
    assert result.status == "first"
    assert schedule in result.message
    assert result.plan is not None
    assert result.timeline is not None
    assert len(result.timeline.rows) == sum(map(len, result.plan.orders))


@pytest.mark.parametrize("schedule", ["1F1B", "interleave"])
def test_forward_only_iterations_are_planned_too(schedule: str) -> None:
    result = make_plan(chain(2, 3, cost=option(backward_s=0.0)), schedule)
    assert result.plan is not None
    assert {a.kind for order in result.plan.orders for a in order} == {Kind.F}
    assert "forward_only" in result.message


def test_unknown_schedule_is_refused() -> None:
    with pytest.raises(PlanError, match=r"schedule 'gpipe' does not exist; choose one of GPipe, 1F1B, .*, interleave"):
        make_plan(PROBLEM, "gpipe")


@pytest.mark.parametrize(("schedule", "words"), [("1F1B", "rank 0, step"), ("interleave", "rank 0: microbatch 0")])
def test_infeasible_is_a_status_with_rank_and_bytes(schedule: str, words: str) -> None:
    problem = two_modules(2, [1], memory_limit_bytes=[1.0, 9.0])
    result = make_plan(problem, schedule)
    assert (result.status, result.plan, result.timeline) == ("infeasible", None, None)
    assert result.message.startswith(words)
    assert "bytes" in result.message
    table = json.loads(plan_to_json(problem, result))
    assert (table["status"], table["orders"], table["peak_bytes"]) == ("infeasible", [], [])
    with pytest.raises(PlanError, match="the file holds no plan: rank 0"):
        plan_from_json(problem, json.dumps(table))


def test_json_has_the_format_s_keys_and_reads_back() -> None:
    result = make_plan(PROBLEM, "1F1B")
    table = json.loads(plan_to_json(PROBLEM, result, search_s=0.25, seed=7))
    assert tuple(table) == KEYS
    assert (table["search_s"], table["seed"], table["evaluations"]) == (0.25, 7, 1)
    assert table["orders"][0][0] == {
        "op": "F",
        "stage": 0,
        "work": 0,
        "option": 0,
        "start_s": 0.0,
        "end_s": 1.0,
    }
    assert plan_from_json(PROBLEM, json.dumps(table)) == result.plan


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(problem=problems(limits=True))
def test_plans_read_back_and_never_beat_the_bound(problem: PlanningProblem) -> None:
    result = make_plan(problem, "interleave")
    assert isinstance(result, PlanResult)
    assert result.timeline is not None
    assert plan_from_json(problem, plan_to_json(problem, result)) == result.plan
    assert lower_bound_s(problem) <= result.timeline.makespan_s * (1 + 1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": 1}, "colour is unknown"),
        ({"version": 9}, "version = 9"),
        ({"status": "best"}, "status = 'best'"),
        ({"orders": [[], []]}, "0F0.0 is missing"),
        ({"orders": [5, []]}, r"orders\[0\] must be an array"),
        ({"orders": [[{"op": "F"}], []]}, r"orders\[0\]\[0\]\.stage is missing"),
    ],
)
def test_faulty_plan_files_are_refused(change: dict[str, Any], message: str) -> None:
    table = json.loads(plan_to_json(PROBLEM, make_plan(PROBLEM, "1F1B"))) | change
    with pytest.raises(PlanError, match=message):
        plan_from_json(PROBLEM, json.dumps(table))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("op", "FB", r"orders\[0\]\[0\]\.op = 'FB'"),
        ("work", 9, r"orders\[0\]\[0\]\.work = 9"),
        ("stage", 3, r"orders\[0\]\[0\]\.stage = 3: work 0 does not pass"),
        ("option", 1, r"orders\[0\]\[\d+\]\.option = 0, but another action"),
        ("stage", 0.5, r"orders\[0\]\[0\]\.stage = 0.5 must be an integer"),
    ],
)
def test_faulty_rows_are_refused_with_their_path(key: str, value: Any, message: str) -> None:
    table = json.loads(plan_to_json(PROBLEM, make_plan(PROBLEM, "1F1B")))
    table["orders"][0][0][key] = value
    with pytest.raises(PlanError, match=message):
        plan_from_json(PROBLEM, json.dumps(table))


def test_bound_is_exact_where_one_rank_does_everything() -> None:
    problem = chain(1, 5)
    result = make_plan(problem, "1F1B")
    assert result.timeline is not None
    assert lower_bound_s(problem) == result.timeline.makespan_s == 15.0


def test_bound_counts_the_way_to_the_last_rank_and_back() -> None:
    # 1F1B on a plain chain is optimal, and the first rank's load plus the way there and back says so nearly.
    assert lower_bound_s(chain(2, 8, cost=option(1.0, 2.0))) == 8 * 3.0 + 1.0
