"""`mmtrain train` as a user has it: nothing open to the network, Ctrl-C, kills, and nothing left behind."""

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mmtrain.checkpoint.checkpoint import complete_steps
from tests.jobs import layout, metrics, write_config
from tests.launched import MMTRAIN, TORCHRUN, Job, is_alive, is_loopback, kill, listening

pytestmark = pytest.mark.ranks

LONG = [f"--{o}" for o in layout(pp=2)] + [
    "--training.steps=100000",
    "--checkpoint.enable=true",
    "--data.num_workers=1",
]


@pytest.fixture
def words(tmp_path, charts) -> list[str]:
    """The config of a job that lasts."""
    return ["--config", str(write_config(tmp_path, charts)), *LONG]


def left_behind(job: Job) -> list[str]:
    """What a job leaves in the folder for temporary files, but for what torch keeps for the next one."""
    return [path.name for path in job.tmp.iterdir() if not path.name.startswith("torchinductor_")]


def test_a_job_listens_to_nobody_and_ends_cleanly_at_an_interrupt(tmp_path, words):
    with Job(tmp_path, *MMTRAIN, *words) as job:
        job.wait_for("step:    2")
        addresses = listening(job.processes())
        assert addresses, "gloo listens somewhere"
        assert [address for address in addresses if not is_loopback(address)] == []
        os.killpg(job.process.pid, signal.SIGINT)  # as a terminal does
        assert job.end() == 130
    saved = complete_steps(tmp_path / "run" / "checkpoint")
    assert saved == [max(metrics(tmp_path))]
    log = [line for line in job.output.splitlines() if not re.match(r"\d\d:\d\d:\d\d \w", line)]
    stopped = f"SIGINT: stopped after step {saved[0]}, saved"
    assert log == ["Ctrl-C: the job saves and ends after this step; once more ends it at once"], job.output
    assert job.output.splitlines()[-1].endswith(stopped)
    assert left_behind(job) == []


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_alone_saves(tmp_path, words, number):
    with Job(tmp_path, *MMTRAIN, *words) as job:
        job.wait_for("step:    2")
        os.kill(job.process.pid, number)
        assert job.end() == 128 + number
    assert complete_steps(tmp_path / "run" / "checkpoint") == [max(metrics(tmp_path))]
    assert left_behind(job) == []


@pytest.mark.nightly
def test_two_interrupts_end_a_job_at_once(tmp_path, words):
    with Job(tmp_path, *MMTRAIN, *words) as job:
        job.wait_for("step:    2")
        rank = job.ranks()[1]
        kill(rank, signal.SIGSTOP)  # so that there is no end of this step
        for _ in range(2):
            os.killpg(job.process.pid, signal.SIGINT)
            time.sleep(0.5)
        assert job.end(20) == 130
        assert not is_alive(rank)
    assert "Traceback" not in job.output
    assert left_behind(job) == []


@pytest.mark.nightly
def test_an_interrupt_before_the_first_step_ends_a_job_without_a_word(tmp_path, words):
    for moment in (0.0, 0.5, 2.0):
        with Job(tmp_path, *MMTRAIN, *words) as job:
            while not job.ranks():
                assert job.process.poll() is None, job.output
            time.sleep(moment)
            os.killpg(job.process.pid, signal.SIGINT)
            assert job.end() == 130
        assert job.output == ""
        assert left_behind(job) == []


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", [MMTRAIN, (*TORCHRUN, "2", "train.py")], ids=["mmtrain", "torchrun"])
def test_ranks_die_with_their_launcher_and_the_job_starts_again_at_once(tmp_path, words, launcher):
    with Job(tmp_path, *launcher, *words, "--checkpoint.interval=1") as job:
        job.wait_for("step:    2")
        processes = job.processes()
        kill(job.process.pid)
        assert ended(processes, 5.0) == []
    with Job(tmp_path, *launcher, *words, f"--training.steps={max(metrics(tmp_path)) + 1}") as again:
        assert again.end() == 0, again.output
    assert "resumed from step" in again.output
    assert sorted(metrics(tmp_path)) == list(range(1, max(metrics(tmp_path)) + 1))


def ended(processes: dict[int, str], seconds: float) -> list[str]:
    """Command lines of the processes that still run after so long."""
    deadline = time.monotonic() + seconds
    while (alive := [command for pid, command in processes.items() if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return alive


@pytest.mark.nightly
def test_a_second_job_in_the_same_folder_is_refused(tmp_path, words):
    with Job(tmp_path, *MMTRAIN, *words) as job:
        job.wait_for("step:    2")
        (tmp_path / "second").mkdir()
        with Job(tmp_path / "second", *MMTRAIN, *words) as second:
            assert second.end() == 2
        assert f"belongs to process {job.ranks()[0]} on " in second.output.splitlines()[-1]
        assert "remove" in second.output.splitlines()[-1]


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_torchrun_saves_at_a_signal(tmp_path, words, number):
    with Job(tmp_path, *TORCHRUN, "2", "train.py", *words) as job:
        job.wait_for("step:    2")
        os.killpg(job.process.pid, number)
        job.end()
    assert complete_steps(tmp_path / "run" / "checkpoint") == [max(metrics(tmp_path))]
    assert ("Ctrl-C: the job saves and ends after this step" in job.output) is (number == signal.SIGINT)


def errors(job: Job) -> list[str]:
    return [line for line in job.output.splitlines() if line.startswith("error")]


Fault = Callable[[Path, Job], str]


def the_folder_of_traces_is_gone(folder: Path, job: Job) -> str:
    traces = folder / "run" / "traces"
    traces.rename(folder / "moved")
    traces.touch()
    return rf"error: rank 0 after step \d+, in .*: \[Errno \d+\] .*'{traces}.*"


def a_rank_is_killed(folder: Path, job: Job) -> str:
    kill(job.ranks()[1])
    return r"error: rank 1 was killed by SIGKILL, mostly for memory \(dmesg names it\)"


@pytest.mark.nightly
@pytest.mark.parametrize(("fault", "status"), [(the_folder_of_traces_is_gone, 2), (a_rank_is_killed, 137)])
def test_a_fault_is_one_line_and_the_last(tmp_path, words, fault, status):
    with Job(tmp_path, *MMTRAIN, *words, "--metrics.trace_freq=1") as job:
        job.wait_for("step:    3")  # the trace of a step is written after its line
        message = fault(tmp_path, job)
        assert job.end() == status, job.output
    (line,) = errors(job)
    assert re.fullmatch(message, line)
    assert job.output.splitlines()[-1] == line
    assert "Traceback" not in job.output
    assert left_behind(job) == []


@pytest.mark.nightly
def test_a_wrong_world_size_is_said_once_under_torchrun(tmp_path, words):
    with Job(tmp_path, *TORCHRUN, "3", "train.py", *words) as job:
        assert job.end() == 1
    (line,) = errors(job)
    assert "= 2 ranks, but the job has 3" in line
    assert "= 2 ranks, but the job has 3" in job.output.partition("FAILED")[2], "torchrun's summary does not show it"
