"""Jobs that lose nodes while they run, and go on as if they had been stopped, saved and resumed there."""

from pathlib import Path

import pytest

from tests.elastic_faults import Fault
from tests.elastic_jobs import JOB, check_like_resumed, run_elastic
from tests.jobs import write_config

pytestmark = pytest.mark.ranks


def fault(place: str, slot: int = 1, **kwargs: int) -> Fault:
    return Fault(slot=slot, step=3, place=place, **kwargs)


@pytest.mark.parametrize(
    ("faults", "phases"),
    [
        pytest.param([fault("action", action=5)], [(0, [1, 1, 1]), (2, [1, 1])], id="in an action"),
        pytest.param(
            [fault("action", slot=0, action=5)], [(0, [1, 1, 1]), (2, [1, 1])], id="rank 0", marks=pytest.mark.nightly
        ),
        pytest.param(
            [fault("reduction")],
            [(0, [1, 1, 1]), (2, [1, 1])],
            id="before the last reduction",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            [fault("reduced")], [(0, [1, 1, 1]), (3, [1, 1])], id="after the last reduction", marks=pytest.mark.nightly
        ),
        pytest.param(
            [fault("reduced"), fault("forgotten", slot=2)],
            [(0, [1, 1, 1]), (3, [1, 1])],
            id="after the last reduction on some ranks",
        ),
        pytest.param([fault("saving")], [(0, [1, 1, 1]), (3, [1, 1])], id="when it saves", marks=pytest.mark.nightly),
    ],
)
def test_a_killed_node(tmp_path: Path, charts: Path, faults: list[Fault], phases: list[tuple[int, list[int]]]) -> None:
    path = write_config(tmp_path, charts)
    run = run_elastic(path, [*JOB, "elastic.min_nodes=1"], 3, faults)
    assert run.phases == phases
    assert run.kinds == ["started", "lost"]
    check_like_resumed(run, path, JOB)


def test_two_nodes_one_of_them_while_the_state_moves(tmp_path: Path, charts: Path) -> None:
    path = write_config(tmp_path, charts)
    faults = [fault("action", action=3), fault("held", slot=2)]
    run = run_elastic(path, [*JOB, "elastic.min_nodes=2", "elastic.max_failures=0"], 4, faults)
    assert run.phases[0] == (0, [2, 2])
    check_like_resumed(run, path, JOB)
