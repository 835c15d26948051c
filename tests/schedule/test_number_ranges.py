from pathlib import Path

import pytest

from mmtrain.errors import PlanError
from mmtrain.schedule import number_ranges
from mmtrain.schedule.number_ranges import BYTES_PER_S, RANKS, SECONDS, Range, show

PAGE = Path(__file__).resolve().parents[2] / "docs" / "planner.md"


def test_the_page_of_the_planner_has_the_table() -> None:
    ranges = [value for value in vars(number_ranges).values() if isinstance(value, Range)]
    rows = [f"| {limit.what} | {show(limit.least)} | {show(limit.most)} | {limit.unit} |" for limit in ranges]
    assert "\n".join(["|---|---|---|---|", *rows]) in PAGE.read_text()


@pytest.mark.parametrize("value", [-1e-9, 1.1e9, float("inf"), float("nan")])
def test_values_outside_are_refused_with_value_and_unit(value: float) -> None:
    with pytest.raises(PlanError, match=r"^latency = .*; it must be between 0 and 1e\+09 s$"):
        SECONDS.check("latency", value)


def test_both_ends_are_inside() -> None:
    for limit in (SECONDS, BYTES_PER_S, RANKS):
        limit.check("x", limit.least)
        limit.check("x", limit.most)
