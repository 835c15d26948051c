"""Nodes that join a running elastic job, and nodes that must not."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.elastic_faults import Fault
from tests.elastic_jobs import ANY_NUMBER, JOB, after_step, check_like_resumed, run_elastic, state_of, wait_until
from tests.jobs import write_config

pytestmark = pytest.mark.ranks

LONG = [*JOB, "training.steps=20"]


def join(launcher: Any, folder: Path) -> None:
    after_step(folder, 2)
    launcher.add()


def test_a_node_joins(tmp_path: Path, charts: Path) -> None:
    path = write_config(tmp_path, charts)
    run = run_elastic(path, [*LONG, *ANY_NUMBER], 1, act=join)
    assert run.kinds == ["started", "joined"] and len(run.ended) == 2
    check_like_resumed(run, path, LONG)


@pytest.mark.nightly
@pytest.mark.parametrize("place", ["meeting", "forming", "agreement", "build", "held", "placed", "taken up"])
def test_a_node_dies_when_it_joins(tmp_path: Path, charts: Path, place: str) -> None:
    path = write_config(tmp_path, charts)
    run = run_elastic(path, [*LONG, *ANY_NUMBER], 1, [Fault(slot=1, step=0, place=place)], act=join)
    assert len(run.ended) == 1 and (place == "taken up" or run.kinds == ["started", "recovered"])
    check_like_resumed(run, path, LONG)


@pytest.mark.nightly
@pytest.mark.parametrize("what", ["digest", "lr", "data"])
def test_a_node_that_differs_does_not_join(
    tmp_path: Path, charts: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    path = write_config(tmp_path, charts)
    own = tmp_path / "node-1.toml"
    if what == "lr":
        own.write_text(path.read_text().replace("lr = 3e-3", "lr = 4e-3"))
    if what == "data":
        from mmtrain.data.toy.charts import make_charts

        make_charts(tmp_path / "others", 300, 8)
        own.write_text(path.read_text().replace(str(charts), str(tmp_path / "others")))

    def act(launcher: Any, folder: Path) -> None:
        after_step(folder, 2)
        if what == "digest":
            launcher._job = replace(launcher._job, digest="test=2")
        launcher.add()

    run = run_elastic(path, [*LONG, *ANY_NUMBER], 1, act=act)
    check_like_resumed(run, path, LONG, phases=[(0, [1])])
    assert len(run.ended) == 1 and any(
        ("node-001" in text and "differ" in text) or "cannot be" in text for text in caplog.messages
    )


@pytest.mark.nightly
def test_all_nodes_differ_at_the_start(tmp_path: Path, charts: Path) -> None:
    from mmtrain.errors import ConfigError

    path = write_config(tmp_path, charts)
    (tmp_path / "node-1.toml").write_text(path.read_text().replace("lr = 3e-3", "lr = 4e-3"))
    with pytest.raises(ConfigError, match="lr"):
        run_elastic(path, [*LONG, *ANY_NUMBER], 2)


@pytest.mark.nightly
def test_a_refused_node_is_faster_than_the_others(tmp_path: Path, charts: Path) -> None:
    path = write_config(tmp_path, charts)
    (tmp_path / "node-1.toml").write_text(path.read_text().replace("lr = 3e-3", "lr = 4e-3"))
    faults = [Fault(slot=0, step=-1, place="reason", number=signal.SIGSTOP)]

    def act(launcher: Any, folder: Path) -> None:
        join(launcher, folder)
        (pid,) = launcher.pids["node-000-000"]
        wait_until(lambda: state_of(pid) == "T", "the stop")
        wait_until(lambda: "node-001-001" not in launcher.pids, "the end of the refused node")
        os.kill(pid, signal.SIGCONT)

    run = run_elastic(path, [*LONG, *ANY_NUMBER], 1, faults, act=act)
    check_like_resumed(run, path, LONG, phases=[(0, [1])])
