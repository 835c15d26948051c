import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.run_page.measured import breakdown
from mmtrain.run_page.page_charts import charts
from mmtrain.run_page.runs import read_run
from mmtrain.simulator.breakdown import TimePart
from tests.run_page.test_runs import STEP, write_run

MEASURED = {
    "step_time_s": 10.0, "data_time_s": 0.5, "plan_time_s": 0.5, "makespan_s": 7.5, "program_s": 8.0, "bubble": 0.25,
    "bubble_other": 0.125, "peak_s": 3.0,
}  # fmt: skip


def test_a_step_is_divided_as_far_as_measurements_tell() -> None:
    found = breakdown(MEASURED)
    assert found is not None
    assert found.by_label == pytest.approx(
        {
            "model FLOPs": 0.3,
            "below peak + recomputation + exchanges": 0.3,  # 6 s of actions, 3 of them at the peak
            "bubble": 0.1,
            "transfers": 0.05,
            "gather, reduce + optimizer": 0.15,
            "data, plan": 0.1,
        }
    )
    unknown = breakdown(MEASURED | {"peak_s": None})
    assert unknown is not None
    assert unknown.by_label["model FLOPs + below peak + recomputation + exchanges"] == pytest.approx(0.6)


@given(parts=st.lists(st.floats(0, 1), min_size=7, max_size=7), modules=st.booleans(), peak=st.booleans())
def test_parts_of_a_measured_step_add_up(parts: list[float], modules: bool, peak: bool) -> None:
    data, plan, makespan, program, busy, waited, at_peak = parts
    line = {"data_time_s": data, "plan_time_s": plan, "makespan_s": makespan, "program_s": makespan + program + 0.01}
    line["bubble"] = 1 - busy * makespan / line["program_s"]
    line["step_time_s"] = makespan + data + 0.01  # a part of planning was beside the pipeline
    if modules:
        line["bubble_other"] = line["bubble"] - waited * (makespan - busy * makespan) / line["program_s"]
    line["peak_s"] = at_peak * busy * makespan if peak else None
    found = breakdown(line)
    assert found is not None
    assert sum(found.shares.values()) == pytest.approx(1, abs=1e-9)
    assert {part for parts in found.shares for part in parts} == set(TimePart)


def test_a_peak_that_a_step_exceeds_gives_no_breakdown() -> None:
    assert breakdown(MEASURED | {"peak_s": 6.1}) is None


@pytest.mark.parametrize("key", ["step_time_s", "plan_time_s", "makespan_s", "program_s", "bubble"])
def test_an_older_run_has_no_breakdown(key: str) -> None:
    assert breakdown({name: value for name, value in MEASURED.items() if name != key}) is None
    assert breakdown(MEASURED | {key: None}) is None


def test_the_chart_of_a_run_adds_up_at_each_step(tmp_path) -> None:
    lines = [{"step": 1} | STEP, {"step": 2} | STEP | MEASURED, {"step": 3} | STEP | MEASURED | {"peak_s": None}]
    run = read_run(write_run(tmp_path / "run", lines))
    (chart,) = (chart for chart in charts([run]) if chart.title == "Where the time of a step goes")
    assert chart.stacked and chart.unit == "%"
    sums = [sum(filter(None, values)) for values in zip(*(series.y for series in chart.series), strict=True)]
    assert sums == pytest.approx([0, 100, 100])
    assert not any("goes" in chart.title for chart in charts([run, run]))
