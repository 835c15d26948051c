"""Elastic jobs whose nodes are told to end (SIGTERM): the others go on with their layers, or the job is saved."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmtrain.errors import TrainingError
from tests.elastic_faults import Fault
from tests.elastic_jobs import ANY_NUMBER, JOB, Run, after_step, check_like_resumed, run_elastic
from tests.jobs import write_config

pytestmark = pytest.mark.ranks

LONG = [*JOB, "training.steps=16"]
PAIRS = ["elastic.min_nodes=2", "elastic.max_failures=0"]
ONE_IN_ALL = "training.global_batch_size=1"
"""One pipeline of one node: all others are idle."""


def told_to_end(*slots: int, apart_s: float = 0.5) -> Callable[[Any, Path], None]:
    """Signals nodes after the second step, one after the other."""

    def act(launcher: Any, folder: Path) -> None:
        after_step(folder, 2)
        for slot in slots:
            for pid in next(pids for name, pids in launcher.pids.items() if f"node-{slot:03d}" in name):
                os.kill(pid, signal.SIGTERM)
            time.sleep(apart_s)  # as schedulers do

    return act


@pytest.mark.parametrize(
    ("slots", "last"),
    [
        pytest.param((0, 2), [1], id="two of three"),
        *(pytest.param((slot,), [1, 1], marks=pytest.mark.nightly, id=f"node {slot}") for slot in (0, 1, 2)),
    ],
)
def test_nodes_leave(tmp_path: Path, charts: Path, slots: tuple[int, ...], last: list[int]) -> None:
    path = write_config(tmp_path, charts)
    run = run_elastic(path, [*LONG, *ANY_NUMBER, "elastic.leave_wait_s=3.0"], 3, act=told_to_end(*slots))
    assert run.kinds == ["started", "left"] and len(run.ended) == 3
    assert [depths for _, depths in run.phases] == [[1, 1, 1], last]
    check_like_resumed(run, path, LONG)


@pytest.mark.nightly
def test_the_layers_of_a_node_that_leaves_are_moved(tmp_path: Path, charts: Path) -> None:
    path = write_config(tmp_path, charts)
    run = run_elastic(path, [*LONG, *PAIRS], 3, act=told_to_end(1))
    assert run.kinds == ["started", "left"] and run.events[1]["bytes"] > 0
    assert [depths for _, depths in run.phases] == [[3], [2]]
    check_like_resumed(run, path, LONG)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("nodes", "options", "slots"),
    [
        pytest.param(2, ANY_NUMBER, (0, 1), id="all"),
        pytest.param(3, PAIRS, (1, 2), id="fewer than a pipeline stay"),
        pytest.param(2, ["elastic.min_nodes=1", "elastic.max_failures=1"], (1,), id="fewer than f + 1 pipelines stay"),
    ],
)
def test_too_many_leave(tmp_path: Path, charts: Path, nodes: int, options: list[str], slots: tuple[int, ...]) -> None:
    path = write_config(tmp_path, charts)
    run = run_elastic(path, [*LONG, *options, "elastic.leave_wait_s=3.0"], nodes, act=told_to_end(*slots))
    assert run.kinds == ["started"] and len(run.ended) == nodes
    assert run.saved == [max(run.curve)] and run.saved[0] < 16
    check_like_resumed(run, path, LONG)


@pytest.mark.nightly
def test_an_idle_node_leaves(tmp_path: Path, charts: Path) -> None:
    path, job = write_config(tmp_path, charts), [*LONG, ONE_IN_ALL]
    run = run_elastic(path, [*job, *ANY_NUMBER], 2, act=told_to_end(1))
    assert run.kinds == ["started", "left"] and len(run.ended) == 2
    check_like_resumed(run, path, job, phases=[(0, [1])])


@pytest.mark.nightly
@pytest.mark.parametrize("slot", [0, 1])
def test_a_node_is_told_to_end_in_the_last_step(tmp_path: Path, charts: Path, slot: int) -> None:
    path, job = write_config(tmp_path, charts), [*JOB, ONE_IN_ALL]
    fault = Fault(slot, 6, "action", action=1, number=signal.SIGTERM)
    run = run_elastic(path, [*job, *ANY_NUMBER], 2, [fault], timeout=50)
    assert len(run.ended) == 2, "nobody may wait for the others until comm.timeout_seconds"
    check_like_resumed(run, path, job, phases=[(0, [1])])


@pytest.mark.nightly
def test_all_are_told_to_end_and_one_dies(tmp_path: Path, charts: Path) -> None:
    path = write_config(tmp_path, charts)
    faults = [Fault(slot, 3, "action", action=1, number=signal.SIGTERM) for slot in (0, 1, 2)]
    run = run_elastic(path, [*LONG, *ANY_NUMBER], 3, [*faults, Fault(1, 3, "asking")])
    assert run.saved == [3] and len(run.ended) == 2


def killed(*slots: int) -> list[Fault]:
    return [Fault(slot, 4, "action", action=3) for slot in slots]


@pytest.mark.nightly
@pytest.mark.parametrize(("interval", "first"), [(2, 2), (100, 0)])
def test_a_layer_without_a_holder_comes_from_the_newest_checkpoint(
    tmp_path: Path, charts: Path, interval: int, first: int
) -> None:
    path, job = write_config(tmp_path, charts), [*JOB, f"checkpoint.interval={interval}", "training.steps=10"]
    run = run_elastic(path, [*job, *PAIRS], 3, killed(1))
    assert run.kinds == ["started", "lost"] and run.events[1]["step"] == first
    check_like_resumed(run, path, job)


@pytest.mark.nightly
def test_an_idle_node_goes_back_to_a_checkpoint_with_the_others(tmp_path: Path, charts: Path) -> None:
    path, job = write_config(tmp_path, charts), [*JOB, ONE_IN_ALL, "checkpoint.interval=2"]
    run = run_elastic(path, [*job, *ANY_NUMBER], 3, killed(0), timeout=50)
    assert [event["step"] for event in run.events] == [0, 2] and len(run.ended) == 2
    check_like_resumed(run, path, job, phases=[(0, [1])])


@pytest.mark.nightly
@pytest.mark.parametrize(("interval", "saved"), [(2, [2, 3]), (100, [3])])
def test_too_few_nodes_save(tmp_path: Path, charts: Path, interval: int, saved: list[int]) -> None:
    path, job = write_config(tmp_path, charts), [*JOB, f"checkpoint.interval={interval}"]
    with pytest.raises(
        TrainingError, match=r'need 4; add nodes, or set elastic.below = "go_on"; the newest .* step 3 '
    ):
        run_elastic(path, [*job, "elastic.min_nodes=2", "elastic.max_failures=1"], 4, killed(1))
    run = Run(tmp_path, {})
    assert run.saved == saved
    check_like_resumed(run, path, job, phases=[(0, [2, 2])])
