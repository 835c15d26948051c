import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from mmtrain.errors import PlanError
from mmtrain.planner.bound import lower_bound_s
from mmtrain.planner.make_plan import make_plan
from mmtrain.planner.plan_json import KEYS, plan_from_json, plan_to_json
from mmtrain.planner.result import PlanResult
from mmtrain.schedule.problem import PlanningProblem
from tests.examples import examples
from tests.schedule.problems import problems, two_modules

PROBLEM = two_modules(2, [1, 0])


def test_json_has_the_format_s_keys_and_reads_back() -> None:
    result = make_plan(PROBLEM, "1F1B")
    table = json.loads(plan_to_json(replace(result, seed=7), search_s=0.25))
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


@settings(max_examples=examples(30), deadline=None, suppress_health_check=list(HealthCheck))
@given(problem=problems(limits=True))
def test_plans_read_back_and_never_beat_the_bound(problem: PlanningProblem) -> None:
    result = make_plan(problem, "interleave")
    assert isinstance(result, PlanResult)
    assert plan_from_json(problem, plan_to_json(result)) == result.plan
    assert lower_bound_s(problem) <= result.timeline.makespan_s * (1 + 1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": 1}, "colour is unknown"),
        ({"version": 9}, "version = 9"),
        ({"status": "best"}, "status = 'best'"),
        ({"orders": [[], []]}, "0F0.0 is missing"),
        ({"makespan_s": "3"}, "makespan_s = '3' must be a number, not a string"),
        ({"seed": 0.5}, "seed = 0.5 must be an integer"),
        ({"evaluations": -5}, "evaluations = -5 must not be negative"),
        ({"orders": [5, []]}, r"orders\[0\] must be an array"),
        ({"orders": [[{"op": "F"}], []]}, r"orders\[0\]\[0\]\.stage is missing"),
    ],
)
def test_faulty_plan_files_are_refused(change: dict[str, Any], message: str) -> None:
    table = json.loads(plan_to_json(make_plan(PROBLEM, "1F1B"))) | change
    with pytest.raises(PlanError, match=message):
        plan_from_json(PROBLEM, json.dumps(table))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("op", "FB", r"orders\[0\]\[0\]\.op = 'FB'"),
        ("work", 9, r"orders\[0\]\[0\]\.work = 9"),
        ("stage", 3, r"orders\[0\]\[0\]\.stage = 3: work 0 does not pass"),
        ("option", 1, r"orders\[0\]\[\d+\]\.option = 0, but another action"),
        ("start_s", -1.0, r"orders\[0\]\[0\]\.start_s = -1.0 must be a finite number, and not negative"),
        ("stage", 0.5, r"orders\[0\]\[0\]\.stage = 0.5 must be an integer"),
    ],
)
def test_faulty_rows_are_refused_with_their_path(key: str, value: Any, message: str) -> None:
    table = json.loads(plan_to_json(make_plan(PROBLEM, "1F1B")))
    table["orders"][0][0][key] = value
    with pytest.raises(PlanError, match=message):
        plan_from_json(PROBLEM, json.dumps(table))


def test_a_file_without_a_plan_is_no_plan() -> None:
    problem = two_modules(2, [1], memory_limit_bytes=[1.0, 9.0])
    result = make_plan(problem, "interleave")
    table = json.loads(plan_to_json(result))
    assert (table["status"], table["orders"], table["peak_bytes"]) == ("infeasible", [], [])
    with pytest.raises(PlanError, match=r"the file holds no plan, since 'rank 0: .*; plan the problem again"):
        plan_from_json(problem, json.dumps(table))
