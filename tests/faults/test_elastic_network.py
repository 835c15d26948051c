"""Elastic jobs on nodes with a network of their own, a real lighthouse, and one torchrun each.

pytest -m nightly tests/faults/test_elastic_network.py
"""

import shutil
import signal
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest
import torch

from tests.elastic_jobs import (
    Run,
    after_step,
    check_like_resumed,
    has_line,
    stopped_and_resumed,
    stored_tensors,
    wait_until,
)
from tests.elastic_network import HEARTBEAT_MS, LIGHTHOUSE, Network, network
from tests.jobs import SHALLOW, write_config
from tests.launched import Job, is_alive, kill

pytestmark = [pytest.mark.nightly, pytest.mark.ranks]

SILENT_S = 8.0
TIMEOUT_S = 60
ANSWER_S = 3.0
"""Of the store of a generation, at most."""
LOADED_S = 10.0
"""For what takes one on a machine that others use, too."""
JOB = [*SHALLOW, "training.global_batch_size=24", "checkpoint.enable=true", "checkpoint.interval=100000"]
"""Of steps of half a second."""
ENDLESS = "training.steps=100000"
ELASTIC = [
    "elastic.enable=true", f"elastic.silent_s={SILENT_S}", "elastic.leave_wait_s=5.0",
    f"elastic.lighthouse={LIGHTHOUSE}", f"comm.timeout_seconds={TIMEOUT_S}",
]  # fmt: skip
CHANGES_S = 120.0
"""Until a node that starts has joined."""


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Network]:
    """Three nodes, and a fourth for another job, with a lighthouse that is not started."""
    with network(4, tmp_path / "output") as made:
        yield made


@pytest.fixture
def path(tmp_path: Path, charts: Path) -> Path:
    return write_config(tmp_path, charts)


def words(path: Path, *overrides: str) -> list[str]:
    return ["--config", str(path), *(f"--{word}" for word in (*JOB, *ELASTIC, *overrides))]


def started(net: Network, path: Path, *overrides: str, max_restarts: int = 3, nodes: int = 3) -> list[Job]:
    """A job that trains on all of its nodes; some may have begun before the last one came."""
    jobs = [net.node(index, *words(path, *overrides), max_restarts=max_restarts) for index in range(nodes)]
    after_step(path.parent, 3)
    wait_until(lambda: has_line(path.parent, event="membership", nodes=nodes), f"{nodes} nodes")
    steps_go_on(path.parent)
    return jobs


def steps_go_on(folder: Path, count: int = 3) -> None:
    after_step(folder, max(Run(folder, {}).curve) + count)


def changed(folder: Path, kind: str, nodes: int, times: int = 1) -> float:
    """Waits for a change. Args: times: how many of its kind there are then. Returns: seconds that it took."""
    began = time.monotonic()

    def found() -> bool:
        events = [event for event in Run(folder, {}).events if (event["kind"], event["nodes"]) == (kind, nodes)]
        return len(events) >= times

    wait_until(found, f"change {kind} to {nodes} nodes", CHANGES_S)
    return time.monotonic() - began


def stopped(jobs: list[Job]) -> None:
    """All nodes are told to end, as a scheduler tells it, and end well."""
    for pid in [pid for job in jobs for pid in job.ranks()]:
        kill(pid, signal.SIGTERM)
    assert ended(jobs) == [0] * len(jobs), "\n".join(job.output for job in jobs)


def ended(jobs: list[Job]) -> list[int]:
    """Waits for the end of jobs, and gives their exit status; -1: one does not end."""
    deadline = time.monotonic() + 2 * TIMEOUT_S
    while time.monotonic() < deadline and any(job.process.poll() is None for job in jobs):
        time.sleep(0.1)
    return [-1 if (status := job.process.poll()) is None else status for job in jobs]


def checked(path: Path) -> Run:
    """The job, which equals one that was stopped and resumed at its changes."""
    run = Run(path.parent, {})
    check_like_resumed(run, path, [*JOB, ENDLESS], last=run.saved[-1])
    return run


def nodes_of(run: Run) -> list[int]:
    """Numbers of nodes of its layouts, of equal ones in a row one: a loaded machine may look silent for a moment."""
    return [count for count, _ in groupby(len(depths) for _, depths in run.phases)]


def errors(job: Job) -> list[str]:
    return [line.partition(": ")[2] for line in job.output.splitlines() if line.startswith("error")]


# --------------------------------------------------------------------------------------------------- cables


@pytest.mark.parametrize(("victim", "at_once"), [(0, False), (2, False), (1, True)])
def test_the_others_go_on_without_a_node_whose_cable_is_cut_until_it_is_mended(net, path, victim, at_once):
    """Node 0 has the store in which all meet. `at_once`: the network is back before the node has given up."""
    net.lighthouse()
    jobs = started(net, path, ENDLESS)
    net.cut(victim)
    (far,) = jobs[victim].ranks()
    assert changed(path.parent, kind="lost", nodes=2) < SILENT_S + ANSWER_S + HEARTBEAT_MS / 1e3 + LOADED_S
    if not at_once:
        wait_until(lambda: errors(jobs[victim]), "the end of the ranks of the cut node")
        assert f"lighthouse = {LIGHTHOUSE!r} does not answer this machine (node{victim})" in errors(jobs[victim])[0]
        wait_until(lambda: not is_alive(far), "the end of the cut node's rank")
    steps_go_on(path.parent)
    net.mend(victim)
    changed(path.parent, kind="joined", nodes=3)
    steps_go_on(path.parent)
    stopped(jobs)
    assert nodes_of(checked(path))[-3:] == [3, 2, 3]


# ----------------------------------------------------------------------------------------------- lighthouse


def test_a_job_needs_the_lighthouse_at_its_changes_alone(net, path):
    lighthouse = net.lighthouse()
    jobs = started(net, path, ENDLESS)
    lighthouse.__exit__()
    before = Run(path.parent, {}).kinds
    steps_go_on(path.parent, 6)
    lighthouse = net.lighthouse()
    steps_go_on(path.parent, 6)
    kill(jobs[1].ranks()[0])
    changed(path.parent, kind="lost", nodes=2)
    changed(path.parent, kind="joined", nodes=3)
    stopped(jobs)
    assert checked(path).kinds[-3:] == [*before[-1:], "lost", "joined"], "its start changes nothing"


def test_a_job_that_loses_a_node_without_a_lighthouse_ends_with_one_line(net, path):
    lighthouse = net.lighthouse()
    jobs = started(net, path, ENDLESS, "checkpoint.interval=2", "checkpoint.keep_latest_k=2", max_restarts=0)
    lighthouse.__exit__()
    steps_go_on(path.parent)
    kill(jobs[1].ranks()[0])
    assert ended([jobs[0], jobs[2]]) == [1, 1]
    for index in (0, 2):
        (line,) = errors(jobs[index])
        assert line.startswith(f"elastic.lighthouse = {LIGHTHOUSE!r} does not answer this machine (node{index}): ")
    run = Run(path.parent, {})
    assert "lost" not in run.kinds
    assert f"the newest checkpoint is step {run.saved[-1]} in " in errors(jobs[0])[0]
    theirs, _ = stopped_and_resumed(path, [*JOB, ENDLESS], run.phases, run.saved[-1])
    ours, other = stored_tensors(run), stored_tensors(theirs)
    assert ours.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in ours.items())


# -------------------------------------------------------------------------------------------------- crashes


def test_a_killed_rank_joins_again_and_a_killed_launcher_does_not(net, path):
    net.lighthouse()
    jobs = started(net, path, ENDLESS)
    kill(jobs[0].ranks()[0])
    changed(path.parent, kind="lost", nodes=2)
    changed(path.parent, kind="joined", nodes=3)
    steps_go_on(path.parent)
    kill(jobs[2].process.pid)
    changed(path.parent, kind="lost", nodes=2, times=2)
    steps_go_on(path.parent)
    stopped(jobs[:2])
    assert nodes_of(checked(path))[-4:] == [3, 2, 3, 2]


# ----------------------------------------------------------------------------------- nodes that do not fit


def refused(job: Job) -> str:
    """What a node says that ends without a step, each thing once."""
    assert ended([job]) == [1] and "step:" not in job.output
    return "\n".join(errors(job))


def test_nodes_that_do_not_fit_are_refused_alone(net, path, charts):
    """Another config, as of another job under the same lighthouse; another number of ranks; other data."""
    net.lighthouse()
    jobs = started(net, path, ENDLESS, max_restarts=0)
    line = refused(net.node(3, *words(path, ENDLESS, "optimizer.lr=1e-4")))
    assert "cannot be in one job: the first has config=" in line and "a lighthouse of its own" in line
    line = refused(net.node(3, *words(path, ENDLESS), ranks=2))
    assert "they have 1 and 2 ranks" in line and "--nproc-per-node" in line
    shutil.copytree(charts, path.parent / "copy")
    (path.parent / "copy" / "more.jsonl").write_text("{}")
    line = refused(net.node(3, *words(path, ENDLESS, f"data.source='{path.parent}/copy'")))
    assert line.startswith("elastic: node node3-") and "differs from the running job in its data" in line
    steps_go_on(path.parent)
    stopped(jobs)
    assert [job.output.count("Traceback") for job in jobs] == [0, 0, 0]
