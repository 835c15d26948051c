"""Elastic jobs whose nodes stop (SIGSTOP) and go on later: the others do not wait for them, and take them up again."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.elastic_faults import Fault
from tests.elastic_jobs import ANY_NUMBER, JOB, check_like_resumed, has_line, run_elastic, state_of, wait_until
from tests.jobs import write_config

pytestmark = pytest.mark.ranks

LONG = [*JOB, "training.steps=16"]
"""Enough steps for a node that was stopped to come back before the last one."""


def stopped(slot: int, place: str, action: int = 0, local_rank: int = 0) -> Fault:
    return Fault(slot, 2, place, action=action, number=signal.SIGSTOP, local_rank=local_rank)


def goes_on(slot: int) -> Callable[[Any, Path], None]:
    """Lets the processes of a node go on once the others train without it."""

    def act(launcher: Any, folder: Path) -> None:
        wait_until(lambda: has_line(folder, generation=2), "a line of the second generation")
        own = [pid for name, pids in launcher.pids.items() if f"node-{slot:03d}" in name for pid in pids]
        assert any(state_of(pid) == "T" for pid in own)
        for pid in own:
            os.kill(pid, signal.SIGCONT)

    return act


@pytest.mark.parametrize(
    ("slot", "place", "action"),
    [
        (0, "reduced", 0),
        *(
            pytest.param(slot, place, action, marks=pytest.mark.nightly)
            for place, action in (("action", 5), ("reduction", 0), ("reduced", 0), ("saving", 0))
            for slot in (0, 1)
            if (slot, place) != (0, "reduced")
        ),
    ],
)
def test_a_stopped_node_joins_again(tmp_path: Path, charts: Path, slot: int, place: str, action: int) -> None:
    path = write_config(tmp_path, charts)
    run = run_elastic(path, [*LONG, *ANY_NUMBER], 3, [stopped(slot, place, action)], act=goes_on(slot))
    assert run.kinds == ["started", "lost", "joined"] and len(run.ended) == 3
    check_like_resumed(run, path, LONG)


@pytest.mark.nightly
@pytest.mark.parametrize("slot", [0, 1])
def test_a_node_stops_when_another_one_dies(tmp_path: Path, charts: Path, slot: int) -> None:
    path = write_config(tmp_path, charts)
    faults = [stopped(slot, "asking"), Fault(2, 2, "action", action=3)]
    run = run_elastic(path, [*LONG, *ANY_NUMBER], 3, faults, act=goes_on(slot))
    assert run.kinds == ["started", "lost", "joined"] and len(run.ended) == 2
    check_like_resumed(run, path, LONG)


@pytest.mark.nightly
def test_a_stopped_rank_ends_its_node(tmp_path: Path, charts: Path) -> None:
    path, job = write_config(tmp_path, charts), [*JOB, "parallelism.data_parallel_shard_degree=2"]
    run = run_elastic(path, [*job, *ANY_NUMBER], 2, [stopped(1, "action", 3, local_rank=1)], ranks=2)
    assert run.kinds == ["started", "lost"] and len(run.ended) == 1
    check_like_resumed(run, path, job, stage=2)


@pytest.mark.nightly
def test_a_node_that_stays_stopped_does_not_keep_the_job(tmp_path: Path, charts: Path) -> None:
    path = write_config(tmp_path, charts)
    run = run_elastic(path, [*JOB, *ANY_NUMBER], 2, [stopped(0, "action", 3)])
    assert run.phases == [(0, [1, 1]), (1, [1])] and len(run.ended) == 1
    check_like_resumed(run, path, JOB)


@pytest.mark.nightly
@pytest.mark.parametrize("options", [[], ["checkpoint.async_mode=async"]])
def test_rank_0_stops_when_it_publishes_a_checkpoint(tmp_path: Path, charts: Path, options: list[str]) -> None:
    path, job = write_config(tmp_path, charts), [*LONG, "checkpoint.interval=2", *options]
    fault = Fault(0, -1, "publishing", number=signal.SIGSTOP)
    run = run_elastic(path, [*job, *ANY_NUMBER], 3, [fault], act=goes_on(0))
    assert run.kinds == ["started", "lost", "joined"]
    assert run.saved == [2, 4, 6, 8, 10, 12][len(options) :]  # what is written in the background is given up
    check_like_resumed(run, path, job)


@pytest.mark.nightly
@pytest.mark.parametrize("place", ["meeting", "forming", "agreement", "build", "held", "placed", "taken up"])
def test_a_node_stops_in_a_recovery(tmp_path: Path, charts: Path, place: str) -> None:
    path = write_config(tmp_path, charts)
    faults = [stopped(0, place), Fault(2, 2, "action", action=3)]

    def act(launcher: Any, folder: Path) -> None:
        wait_until(lambda: has_line(folder, generation=3), "a line of the third generation")
        (pid,) = launcher.pids["node-000-000"]
        os.kill(pid, signal.SIGCONT)

    run = run_elastic(path, [*LONG, *ANY_NUMBER], 3, faults, act=act)
    late = place == "forming"  # it waits for others that have left, as long as for one that is late
    assert run.kinds[:2] == ["started", "lost"] and (late or run.kinds[2:] == ["joined"]) and len(run.ended) == 2
    check_like_resumed(run, path, LONG)


@pytest.mark.nightly
def test_a_node_goes_on_when_the_others_have_trained_the_last_step(tmp_path: Path, charts: Path) -> None:
    path = write_config(tmp_path, charts)
    faults = [stopped(0, "action", 3), Fault(1, 6, "parting", number=signal.SIGSTOP)]

    def act(launcher: Any, folder: Path) -> None:
        wait_until(lambda: len(launcher.pids) == 2, "the nodes")
        (early,), (other,) = launcher.pids.values()
        wait_until(lambda: state_of(other) == "T", "the end of the last step")
        os.kill(early, signal.SIGCONT)
        wait_until(lambda: not state_of(early) or state_of(early) == "Z", "the end of the node that goes on")
        os.kill(other, signal.SIGCONT)

    run = run_elastic(path, [*JOB, *ANY_NUMBER], 2, faults, act=act)
    assert run.phases == [(0, [1, 1]), (1, [1])] and run.kinds == ["started", "lost"]
    check_like_resumed(run, path, JOB)
