import json
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from mmtrain.errors import PlanError
from mmtrain.planner.judge import judge
from mmtrain.planner.make_plan import make_plan
from mmtrain.planner.plan_json import plan_to_json
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.schedule.problem import P2P, PlanningProblem
from tests.examples import examples
from tests.schedule.problems import chain, problems, two_modules

CHAIN = chain(2, 2, p2p=P2P(latency_s=0.5, bytes_per_s=1.0), memory_limit_bytes=[2.0, 2.0])


def table_of(problem: PlanningProblem, schedule: str) -> dict[str, Any]:
    return json.loads(plan_to_json(make_plan(problem, schedule)))


@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(problem=problems(), schedule=st.sampled_from(list(CATALOGUE)))
def test_plans_of_the_catalogue_are_valid(problem: PlanningProblem, schedule: str) -> None:
    result = make_plan(problem, schedule)
    verdict = judge(problem, plan_to_json(result))
    assert verdict.feasible
    assert verdict.makespan_s == result.timeline.makespan_s >= verdict.lower_bound_s * (1 - 1e-9)
    assert verdict.peak_bytes == result.timeline.peak_bytes


def test_idle_time_is_allowed() -> None:
    table = table_of(CHAIN, "1F1B")
    last = max((row for order in table["orders"] for row in order), key=lambda row: row["end_s"])
    last["start_s"] += 3.0
    last["end_s"] += 3.0
    table["makespan_s"] += 3.0
    assert judge(CHAIN, json.dumps(table)).makespan_s == table_of(CHAIN, "1F1B")["makespan_s"] + 3.0


@pytest.mark.parametrize(
    ("rank", "step", "change", "message"),
    [
        (0, 1, {"start_s": 0.75, "end_s": 1.75}, r"orders\[0\]\[1\]\.start_s = 0\.75: 0F1\.0 starts before the action"),
        (0, 1, {"end_s": 2.5}, r"orders\[0\]\[1\]: 0F1\.0 takes 1\.5 s, but its option says 1"),
        (1, 0, {"start_s": 1.25, "end_s": 2.25}, r"1F0\.0 starts before 0F0\.0 has arrived at 1\.5"),
    ],
)
def test_times_that_cannot_be_are_refused(rank: int, step: int, change: dict[str, Any], message: str) -> None:
    table = table_of(CHAIN, "1F1B")
    table["orders"][rank][step] |= change
    with pytest.raises(PlanError, match=message):
        judge(CHAIN, json.dumps(table))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"makespan_s": 3.0}, r"makespan_s = 3, but the time from the first start to the last end is \d"),
        ({"peak_bytes": [9.0, 1.0]}, r"peak_bytes\[0\] = 9, but the activations of that rank reach 2"),
        ({"peak_bytes": [2.0]}, r"peak_bytes has 1 entries for 2 ranks; give one a rank"),
        ({"status": "infeasible"}, r'status = "infeasible": .* but the order of schedule interleave is one'),
    ],
)
def test_claims_that_are_false_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        judge(CHAIN, json.dumps(table_of(CHAIN, "1F1B") | change))


def test_a_problem_without_a_plan_is_judged_too() -> None:
    problem = two_modules(2, [1], memory_limit_bytes=[1.0, 9.0])
    table = table_of(problem, "interleave")
    assert not judge(problem, json.dumps(table)).feasible
    table["orders"] = [[], []]
    with pytest.raises(PlanError, match="but it has orders"):
        judge(problem, json.dumps(table))


def test_limits_are_part_of_the_judgement() -> None:
    wide, tight = chain(2, 3), chain(2, 3, memory_limit_bytes=[1.5, 1.5])
    with pytest.raises(PlanError, match=r"rank 0, step 1: 0F1\.0 raises activations to 2 bytes"):
        judge(tight, json.dumps(table_of(wide, "1F1B")))


def test_small_faults_do_not_add_up() -> None:
    problem = chain(1, 400)
    table = table_of(problem, "1F1B")
    shift = 0.9e-6 * table["makespan_s"]
    for step, row in enumerate(table["orders"][0]):
        row["start_s"] = max(0.0, row["start_s"] - step * shift)
        row["end_s"] = max(0.0, row["end_s"] - (step + 1) * shift)
    table["makespan_s"] = table["orders"][0][-1]["end_s"] - table["orders"][0][0]["start_s"]
    with pytest.raises(PlanError, match=r"cannot start before|takes"):
        judge(problem, json.dumps(table))


def test_a_late_end_does_not_widen_the_tolerance() -> None:
    table = table_of(CHAIN, "1F1B")
    for order in table["orders"]:
        for row in order:
            row["start_s"] = row["end_s"] = 0.0
    last = table["orders"][0][-1]
    last["start_s"], last["end_s"], table["makespan_s"] = 1e9 - 2.0, 1e9, 1e9
    with pytest.raises(PlanError, match=r"orders\[0\]\[0\]: 0F0\.0 takes 0 s, but its option says 1"):
        judge(CHAIN, json.dumps(table))


@settings(max_examples=examples(100), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_times_that_are_moved_are_found(data: st.DataObject) -> None:
    """One end of one action earlier or later: then it takes another time than its option says."""
    problem = data.draw(problems())
    table = table_of(problem, data.draw(st.sampled_from(list(CATALOGUE))))
    rows = [row for order in table["orders"] for row in order]
    row, key = data.draw(st.sampled_from(rows)), data.draw(st.sampled_from(["start_s", "end_s"]))
    by = data.draw(st.sampled_from([-0.3, -0.01, 1e-4, 0.01, 0.3])) * max(table["makespan_s"], 1.0)
    assume(row[key] + by >= 0)
    row[key] += by
    with pytest.raises(PlanError):
        judge(problem, json.dumps(table))


@settings(max_examples=examples(50), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    problem=problems(), key=st.sampled_from(["makespan_s", "peak_bytes"]), factor=st.sampled_from([0.5, 0.999, 1.01])
)
def test_makespans_and_peaks_that_are_moved_are_found(problem: PlanningProblem, key: str, factor: float) -> None:
    table = table_of(problem, "interleave")
    if key == "makespan_s":
        assume(table[key] > 0)
        table[key] *= factor
    else:
        assume(max(table[key]) > 0)
        table[key] = [peak * factor - 2.0 * (factor < 1) if peak else peak for peak in table[key]]
        assume(min(table[key]) >= 0)
        table[key] = [peak + 2.0 if factor > 1 else peak for peak in table[key]]
    with pytest.raises(PlanError, match=key):
        judge(problem, json.dumps(table))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lower_bound_s": 1e9}, r"lower_bound_s = 1e\+09 is above makespan_s"),
        ({"status": "optimal", "lower_bound_s": 1.0}, r'status = "optimal", but makespan_s = .* does not reach'),
    ],
)
def test_bounds_that_are_false_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        judge(CHAIN, json.dumps(table_of(CHAIN, "1F1B") | change))


def test_a_bound_above_what_is_proven_is_refused_and_one_below_is_true() -> None:
    table = table_of(CHAIN, "1F1B")
    proven, makespan = table["lower_bound_s"], table["makespan_s"]
    assert proven < makespan
    with pytest.raises(PlanError, match=rf"lower_bound_s = {makespan:g} is above {proven:g}, which is proven for"):
        judge(CHAIN, json.dumps(table | {"lower_bound_s": makespan}))
    assert judge(CHAIN, json.dumps(table | {"lower_bound_s": proven / 2})).lower_bound_s == proven


def test_no_plan_is_proven_only_where_an_option_does_not_fit_alone() -> None:
    together = two_modules(2, [1], memory_limit_bytes=[1.0, 9.0])  # each fits alone, both do not
    assert judge(together, json.dumps(table_of(together, "interleave"))).proven is False
    alone = two_modules(2, [1], memory_limit_bytes=[0.5, 9.0])
    assert judge(alone, json.dumps(table_of(alone, "interleave"))).proven is True
