"""From which state the ranks of a new generation go on."""

import json

import pytest

from mmtrain.errors import TrainingError
from mmtrain.parallel.agreement import Mark, RankReport, agree, differing_inputs


def report(
    mark: Mark | None, reached: Mark | None = None, totals: bool = True, began: int = 0, **other: object
) -> RankReport:
    return RankReport(node="n", mark=mark, reached=reached, has_totals=totals, began=began, **other)  # type: ignore[arg-type]


def found(*reports: RankReport) -> tuple[int | None, tuple[int, ...], tuple[tuple[Mark, tuple[int, ...]], ...], int]:
    agreed = agree(reports)
    return agreed.source, agreed.appliers, agreed.marks, agreed.redone


def test_nobody_has_a_state() -> None:
    assert found(report(None, totals=False), report(None, totals=False)) == (None, (), (), 0)


def test_a_step_whose_last_reduction_nobody_has_is_done_again() -> None:
    """Gradients may be complete on some ranks, and not on others."""
    early, late = report((1, 4), began=5), report((1, 4), (1, 5), totals=False, began=5)
    assert found(early, late, report(None, totals=False)) == (None, (), (((1, 4), (0, 1)),), 1)


def test_a_step_whose_last_reduction_one_rank_has_counts_for_all() -> None:
    lacks, has = report((1, 4), (1, 5), totals=False, began=5), report((1, 4), (1, 5), began=5)
    applied = report((1, 5), began=5)
    assert found(lacks, lacks, has) == (2, (0, 1, 2), (((1, 5), (0, 1, 2)),), 0)
    assert found(lacks, applied, lacks) == (1, (0, 2), (((1, 5), (0, 1, 2)),), 0)
    assert found(applied, applied) == (None, (), (((1, 5), (0, 1)),), 0)


def test_a_node_that_was_left_out_is_behind() -> None:
    """It may hold a step that the others have done again in a later generation: theirs counts."""
    outcast = report((3, 5), began=6)
    assert found(report((4, 5), began=6), outcast)[2] == (((4, 5), (0,)), ((3, 5), (1,)))
    behind = report((3, 4), (3, 5), totals=False, began=5)
    assert found(report((4, 6), began=6), behind)[:2] == (None, ())
    assert found(report((4, 4), (4, 5), began=5), behind)[:3] == (0, (0,), (((4, 5), (0,)), ((3, 4), (1,))))


def test_totals_of_an_older_step_complete_nothing() -> None:
    assert found(report((1, 4), (1, 5), totals=False, began=5), report((1, 4), began=5))[:2] == (None, ())


def test_a_newcomer_that_differs_from_those_with_the_state_is_named() -> None:
    same, other = (("data", "a"), ("config", "b")), (("data", "x"), ("config", "b"))
    reports = [
        report((1, 1), inputs=same),
        RankReport(node="new", inputs=other),
        RankReport(node="fine", inputs=same[:1]),
    ]
    assert differing_inputs(reports, [0]) == {"new": "data"}
    assert differing_inputs(reports, [0, 1]) == {"fine": "data"}, "those with the state are never refused"


def test_a_report_passes_json_and_nothing_else_does() -> None:
    one = report((1, 2), (1, 3), began=3, layers=(("vision", 0),), inputs=(("data", "a"),), device_bytes=1.5)
    assert RankReport.parse(json.loads(json.dumps(one.to_dict()))) == one
    raw = one.to_dict()
    for broken in ({**raw, "more": 1}, {**raw, "mark": [1]}, {**raw, "began": "x"}, None, [], {**raw, "layers": 3}):
        with pytest.raises(TrainingError, match="another version of mmtrain"):
            RankReport.parse(broken)
