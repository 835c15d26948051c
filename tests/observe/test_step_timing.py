"""Numbers of a step from a hand-made timeline."""

import pytest

from mmtrain.observe.metrics import Metrics
from mmtrain.observe.step_files import flops_of
from mmtrain.observe.step_timing import StepTiming, planned_timing
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.simulate import simulate
from mmtrain.spec.layer import Flops
from tests.observe.test_metrics import lines, recorded, reporter, step_of
from tests.schedule.problems import option, two_modules

PROBLEM = two_modules(2, [1, 0], vision=option(1.0, 2.0), language=option(2.0, 4.0))
PLAN = Plan.parse(PROBLEM.graph, "0F0.0 2F1.0 2F0.0 2B1.0 2B0.0 0B0.0\n1F0.0 3F1.0 3B1.0 3F0.0 3B0.0 1B0.0")
TIMELINE = simulate(PROBLEM, PLAN)  # 23 s, of 46 rank-seconds 6 vision, 24 language, 5 + 11 waited for them
FLOPS = {"vision": Flops(forward=1.0, backward_input=1.0, backward_weight=1.0), "language": Flops(forward=24.0)}


def measured(*, zero: float = 100.0, span_s: float = 25.0) -> StepTiming:
    """The simulated times on a clock that began earlier, in programs that last longer than their actions."""
    timing = planned_timing(PLAN, TIMELINE)
    return StepTiming(
        plan=PLAN,
        starts_s=tuple(row + zero for row in timing.starts_s),
        ends_s=tuple(row + zero for row in timing.ends_s),
        spans_s=(span_s - 1.0, span_s),
    )


def of_modules(timing: StepTiming, flops: dict[str, Flops], peak: float, metrics: Metrics) -> Metrics:
    timing.record(metrics, flops, peak, TIMELINE)
    return metrics


def test_the_parts_of_the_modules() -> None:
    timing = measured()
    line = of_modules(timing, FLOPS, 2.0, recorded()).finished().line()
    found = {key: (line[f"{key}_vision"], line[f"{key}_language"]) for key in ("compute_s", "mfu", "tflops", "bubble")}
    assert found["compute_s"] == (6.0, 24.0)
    assert found["mfu"] == (3 / (6 * 2), 24 / (24 * 2))
    assert found["tflops"] == pytest.approx((3 / 6 / 1e12, 24 / 24 / 1e12))
    # The longest program counts for both ranks, as in the bubble of the whole.
    assert found["bubble"] == (5 / 50, 11 / 50)
    assert line["bubble"] == pytest.approx(1 - 30 / 50)
    assert line["makespan_s"] == pytest.approx(23.0)
    # The second microbatch has no image.
    assert (line["spread_s_vision"], line["planned_spread_s_vision"]) == (3.0, 3.0)
    assert (line["spread_s_language"], line["planned_spread_s_language"]) == (0.0, 0.0)
    assert line["peak_s"] == (3 + 24) / (2.0 * 2)  # of two ranks


def test_metrics_have_the_parts_and_they_add_up(tmp_path):
    report = reporter(tmp_path)
    report.step(of_modules(measured(), FLOPS, 2.0, recorded()).finished())
    report.step(step_of(step=2))
    report.close()
    first, second = lines(tmp_path)
    assert (first["makespan_s"], first["planned_makespan_s"], first["makespan_ratio"]) == pytest.approx((23, 23, 1))
    assert (first["mfu_vision"], first["mfu_language"]) == (0.25, 0.5)
    assert (first["compute_s_vision"], first["compute_s_language"]) == (6.0, 24.0)
    assert first["bubble_other"] == pytest.approx((50 - 30 - 16) / 50)
    assert first["bubble_vision"] + first["bubble_language"] + first["bubble_other"] == pytest.approx(first["bubble"])
    assert second["makespan_s"] is None and "bubble_other" not in second


def test_a_module_without_work_has_no_mfu(tmp_path):
    problem = two_modules(2, [0], language=option(1.0, 2.0))
    plan = Plan.parse(problem.graph, "2F0.0 2B0.0\n3F0.0 3B0.0")
    timeline = simulate(problem, plan)
    metrics = recorded()
    planned_timing(plan, timeline).record(metrics, {"language": Flops(forward=12.0)}, 4.0, timeline)
    report = reporter(tmp_path)
    report.step(metrics.finished())
    report.close()
    (line,) = lines(tmp_path)
    assert (line["mfu_vision"], line["mfu_language"]) == (None, 0.5)


def test_the_timeline_is_that_of_the_plan():
    assert measured(zero=0.0).timeline().rows == TIMELINE.rows


def test_flops_of_an_action():
    flops = Flops(forward=1.0, backward_input=2.0, backward_weight=4.0)
    kinds = {action.kind for order in PLAN.orders for action in order}
    assert {str(kind): flops_of(kind, flops) for kind in kinds} == {"F": 1.0, "B": 6.0}
