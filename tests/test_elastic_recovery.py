"""Elastic jobs that lose further nodes while they recover, save, validate, or take up nodes."""

from pathlib import Path

import pytest

from tests.elastic_faults import Fault
from tests.elastic_jobs import ANY_NUMBER, JOB, check_like_resumed, run_elastic
from tests.jobs import write_config

pytestmark = pytest.mark.ranks

RECOVERY = ("asking", "meeting", "forming", "agreement", "build", "held", "placed", "taken up")
BACKGROUND = "checkpoint.async_mode=async"
VALIDATING = ["validation.enable=true", "validation.freq=3", "validation.steps=1", "validation.generate=2"]


def killed(slot: int, place: str = "action", step: int = 3, *, again: bool = False) -> Fault:
    return Fault(slot, step, place, action=3 * (place == "action"), again=again)


@pytest.mark.parametrize(
    ("slot", "place"),
    [
        pytest.param(slot, place, marks=() if (slot, place) == (0, "placed") else pytest.mark.nightly)
        for place in RECOVERY
        for slot in (0, 3)
    ],
)
def test_a_node_dies_in_a_recovery(tmp_path: Path, charts: Path, place: str, slot: int) -> None:
    path = write_config(tmp_path, charts)
    run = run_elastic(path, [*JOB, "elastic.min_nodes=1"], 4, [killed(1), killed(slot, place)])
    assert run.phases == [(0, [1, 1, 2]), (2, [1, 1])]
    assert max(event["seconds"].get("meet", 0.0) for event in run.events) < 30.0, "comm.timeout_seconds is 60"
    check_like_resumed(run, path, JOB)


@pytest.mark.nightly
@pytest.mark.parametrize("slot", [0, 1])
@pytest.mark.parametrize("options", [[], [BACKGROUND]])
@pytest.mark.parametrize("place", ["writing", "saving"])
def test_a_node_dies_when_it_saves(tmp_path: Path, charts: Path, slot: int, options: list[str], place: str) -> None:
    path, job = write_config(tmp_path, charts), [*JOB, "checkpoint.interval=3", *options]
    run = run_elastic(path, [*job, *ANY_NUMBER], 3, [killed(slot, place)])
    assert run.saved == [3, 6] and run.kinds == ["started", "lost"]
    check_like_resumed(run, path, job)


@pytest.mark.nightly
@pytest.mark.parametrize("slot", [0, 1])
def test_a_node_dies_when_it_validates(tmp_path: Path, charts: Path, slot: int) -> None:
    path, job = write_config(tmp_path, charts), [*JOB, *VALIDATING]
    run = run_elastic(path, [*job, *ANY_NUMBER], 3, [killed(slot, "validating")])
    assert run.phases == [(0, [1, 1, 1]), (3, [1, 1])] and sorted(run.validations) == [0, 3, 6]
    check_like_resumed(run, path, job)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("slots", "steps"),
    [
        pytest.param((0, 1, 2), (2, 3, 4), id="the first in turn"),
        pytest.param((1, 2, 3), (2, 3, 4), id="the last in turn"),
        pytest.param((0, 2, 3), (3, 3, 3), id="at once"),
    ],
)
def test_all_but_one_node_die(tmp_path: Path, charts: Path, slots: tuple[int, ...], steps: tuple[int, ...]) -> None:
    path = write_config(tmp_path, charts)
    faults = [killed(slot, step=step) for slot, step in zip(slots, steps, strict=True)]
    run = run_elastic(path, [*JOB, *ANY_NUMBER], 4, faults)
    assert run.phases[-1] == (steps[-1] - 1, [1]) and len(run.ended) == 1
    check_like_resumed(run, path, JOB)


@pytest.mark.nightly
def test_a_node_comes_back_and_dies_again(tmp_path: Path, charts: Path) -> None:
    path, job = write_config(tmp_path, charts), [*JOB, "training.steps=16"]
    faults = [killed(1, step=2), killed(1, "placed", step=0, again=True)]
    run = run_elastic(path, [*job, *ANY_NUMBER], 2, faults, max_restarts=2)
    assert [depths for _, depths in run.phases][:2] == [[1, 1], [1]] and len(list(tmp_path.glob("fault-*"))) == 2
    assert run.phases[-1][1] == [1, 1], "it did not come back in time"
    check_like_resumed(run, path, job)
