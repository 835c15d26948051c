"""Jobs on two nodes that have a network of their own: what nodes must share, and what happens when one is lost.

pytest -m nightly tests/faults/test_two_nodes.py
"""

import json
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs import SHALLOW, layout, metrics, write_config
from tests.launched import Job, kill
from tests.two_nodes import TwoNodes, two_nodes

pytestmark = [pytest.mark.nightly, pytest.mark.ranks]

TIMEOUT_S = 20
"""comm.timeout_seconds."""
ENDS_S = 60.0
"""After the timeout: ranks ask each other, and the store may not answer."""
SAVING = ("--checkpoint.enable=true", "--checkpoint.interval=2", "--checkpoint.keep_latest_k=2")


@pytest.fixture
def nodes() -> Iterator[TwoNodes]:
    with two_nodes() as made:
        yield made


@pytest.fixture
def words(tmp_path: Path, charts: Path) -> list[str]:
    job = write_config(tmp_path, charts)
    degrees = [f"--{word}" for word in (*layout(pp=2), *SHALLOW)]
    return ["--config", str(job), *degrees, f"--comm.timeout_seconds={TIMEOUT_S}", "--planner.search.patience_s=2"]


def started(nodes: TwoNodes, folder: Path, words: list[str], *second: str, torchrun: tuple[str, ...] = ()) -> list[Job]:
    """The job on both nodes. Args: second: further overrides of the second one."""
    parts = [words, [*words, *second]]
    return [nodes.start(i, folder / f"node{i}", *part, torchrun=torchrun) for i, part in enumerate(parts)]


def ended(jobs: list[Job]) -> None:
    for job in jobs:
        job.__exit__()


def errors(job: Job) -> list[str]:
    return [line.partition(": ")[2] for line in job.output.splitlines() if line.startswith("error")]


def said(jobs: list[Job]) -> str:
    """What both nodes say, once each, before any step."""
    try:
        assert [job.end(300) for job in jobs] == [1, 1]
        (first,), (second,) = map(errors, jobs)
    finally:
        ended(jobs)
    assert first == second
    assert all("step:" not in job.output and "Traceback (most" not in job.output.split("error")[0] for job in jobs)
    return first


def test_equal_nodes_train_and_save(nodes, tmp_path, words):
    jobs = started(nodes, tmp_path, [*words, "--training.steps=4", *SAVING])
    try:
        assert [job.end(300) for job in jobs] == [0, 0], "\n".join(job.output for job in jobs)
    finally:
        ended(jobs)
    assert sorted(metrics(tmp_path)) == [1, 2, 3, 4]
    assert (tmp_path / "run" / "checkpoint" / "step-4").is_dir()


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("--optimizer.lr=1e-4", "optimizer.lr = 0.003 on rank 0 (node0), but 0.0001 on rank 1 (node1)"),
        ("--debug.seed=4", "debug.seed = 3 on rank 0 (node0), but 4 on rank 1 (node1)"),
        ("--training.steps=7", "training.steps = 6 on rank 0 (node0), but 7 on rank 1 (node1)"),
        ("--checkpoint.interval=5", "checkpoint.interval = "),
        ("--comm.share_device=true", "comm.share_device = false on rank 0 (node0), but true on rank 1 (node1)"),
    ],
)
def test_nodes_with_different_configs_say_so_before_they_train(nodes, tmp_path, words, override, told):
    message = said(started(nodes, tmp_path, words, override))
    assert message.startswith(f"the processes of this job differ in config: {told}")
    assert not (tmp_path / "run").exists()


def test_a_run_folder_that_nodes_do_not_share_is_noticed_at_the_start(nodes, tmp_path, words):
    message = said(started(nodes, tmp_path, [*words, *SAVING], f"--job.dump_folder={tmp_path}/other"))
    assert f"rank 1 (node1) does not see what rank 0 writes in '{tmp_path}/other'" in message


def test_a_run_folder_that_nodes_do_not_share_is_harmless_without_checkpoints(nodes, tmp_path, words):
    jobs = started(nodes, tmp_path, [*words, "--training.steps=2", "--checkpoint.enable=false"],
                   f"--job.dump_folder={tmp_path}/other", "--data.num_workers=1", "--metrics.log_freq=2")  # fmt: skip
    try:
        assert [job.end(300) for job in jobs] == [0, 0], "\n".join(job.output for job in jobs)
    finally:
        ended(jobs)


def test_a_node_that_is_killed_ends_the_other(nodes, tmp_path, words):
    jobs = started(nodes, tmp_path, [*words, "--training.steps=100000"])
    try:
        jobs[0].wait_for("step:    2")
        for process in jobs[1].processes():
            kill(process)
        assert jobs[0].end(TIMEOUT_S + ENDS_S) == 1
        (line,) = errors(jobs[0])
    finally:
        ended(jobs)
    assert "rank 1 (process " in line
    assert "on node1) does not answer" in line


def test_the_ranks_on_both_sides_of_a_cut_cable_end(nodes, tmp_path, words):
    """On the far side, which has no store, torchrun itself waits for TCP to give up (docs/multi_node.md)."""
    jobs = started(nodes, tmp_path, [*words, "--training.steps=100000"])
    try:
        jobs[0].wait_for("step:    2")
        (far,) = jobs[1].ranks()
        nodes.cut()
        assert jobs[0].end(TIMEOUT_S + ENDS_S) == 1
        deadline = time.monotonic() + ENDS_S
        while not errors(jobs[1]):
            assert time.monotonic() < deadline, jobs[1].output
            time.sleep(0.1)
        time.sleep(3)
        assert far not in jobs[1].ranks()
        assert "on node1) does not answer" in errors(jobs[0])[0]
        assert "the job's store does not answer either" in errors(jobs[1])[0]
    finally:
        ended(jobs)


@pytest.mark.parametrize("victim", [0, 1])
def test_max_restarts_resumes_after_a_rank_was_killed(nodes, tmp_path, words, victim):
    """The store survives, with the keys of the first start, and each node counts restarts for itself."""
    steps = 40
    job = [*words, f"--training.steps={steps}", *SAVING]
    jobs = started(nodes, tmp_path, job, torchrun=("--max-restarts", "2"))
    try:
        jobs[0].wait_for("step:    5")
        kill(jobs[victim].ranks()[0], signal.SIGKILL)
        assert [job.end(400) for job in jobs] == [0, 0], "\n".join(job.output for job in jobs)
    finally:
        ended(jobs)
    assert "resumed from step" in jobs[0].output
    assert sorted(metrics(tmp_path)) == list(range(1, steps + 1))


def test_a_job_with_other_files_on_a_node_says_so(nodes, tmp_path, words, charts):
    shutil.copytree(charts, tmp_path / "copy")
    (tmp_path / "copy" / "more.jsonl").write_text(json.dumps({}))
    degrees = [f"--{word}" for word in layout(shard=2)]
    message = said(started(nodes, tmp_path, [*words, *degrees], f"--data.source={tmp_path}/copy"))
    assert message.startswith("the processes of this job differ in data: data.source: more.jsonl = nothing on rank 0")
