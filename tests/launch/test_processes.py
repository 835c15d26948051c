"""Processes that end with the one that started them, and leave nothing behind. None of these loads torch."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mmtrain.launch.processes import environment
from tests.launched import MMTRAIN, ROOT, is_alive

CHILD = """
import time
from mmtrain.launch.processes import end_with_parent
end_with_parent()
print("up", flush=True)
time.sleep(600)
"""
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""
TESTS = {
    "a job": """
job = Job(folder, "-c", "import sys; from tests.light_ranks import *; lasts(Path(sys.argv[1]))", str(folder))
job.end(600)
""",
    "a rank": """
ranks._context.set_forkserver_preload(["tests.server"])
ranks.run_alone(lasts, folder)
""",
}
"""What a test does that is killed in the middle of it."""
HOLDS = """
import os, signal
from mmtrain.launch.processes import stops_held
came = []
signal.signal(signal.SIGINT, lambda number, frame: came.append(int(number)))
with stops_held():
    os.kill(os.getpid(), signal.SIGINT)
    print(came, end=" ")
print(came)
"""
LEAVES = """
import multiprocessing, multiprocessing.util, sys, types
from mmtrain.launch.processes import leave
sys.modules["torch"] = types.ModuleType("torch")
semaphore = multiprocessing.get_context("spawn").Semaphore()
multiprocessing.util.get_temp_dir()
leave(3)
"""
LISTENS = """
from multiprocessing.connection import Listener
from mmtrain.errors import ConfigError
from mmtrain.launch.processes import check_temporary_folder
check_temporary_folder(0)
try:
    check_temporary_folder(1)
    print("fits", end=", ")
except ConfigError:
    print("refused", end=", ")
try:
    Listener(family="AF_UNIX").close()
    print("made")
except OSError as error:
    print(error)
"""


def test_a_process_ends_when_its_parent_is_killed():
    with subprocess.Popen([sys.executable, "-c", PARENT, CHILD], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_alive(child)
        parent.kill()
    assert ended(child)


@pytest.mark.parametrize("test", TESTS)
def test_what_a_test_started_ends_when_the_tests_are_killed(tmp_path: Path, test: str):
    imports = "import sys; from pathlib import Path; from tests import ranks; from tests.launched import Job\n"
    imports += "from tests.light_ranks import lasts\nfolder = Path(sys.argv[1])"
    with subprocess.Popen([sys.executable, "-c", imports + TESTS[test], tmp_path], cwd=ROOT) as tests:
        while not (tmp_path / "pid").exists():
            assert tests.poll() is None
            time.sleep(0.01)
        started = int((tmp_path / "pid").read_text())
        assert is_alive(started)
        tests.kill()
    assert ended(started)


def ended(process: int, within_s: float = 60) -> bool:
    """Whether a process ends in time."""
    deadline = time.monotonic() + within_s
    while is_alive(process) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not is_alive(process)


def test_who_leaves_leaves_no_folder_and_no_semaphore(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-c", LEAVES], cwd=ROOT, env={**os.environ, "TMPDIR": str(tmp_path)}, capture_output=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, b"", b"")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("length", [75, 76])
def test_a_temporary_folder_has_room_for_sockets_or_is_refused_by_its_name(tmp_path: Path, length: int):
    folder = tmp_path / ("x" * (length - len(str(tmp_path)) - 1))
    folder.mkdir()
    given = {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", LISTENS], cwd=ROOT, env=given, capture_output=True, text=True)
    fits = length == 75
    assert done.stdout == ("fits, made\n" if fits else "refused, AF_UNIX path too long\n"), done.stderr
    words = [*MMTRAIN, "--config", "debug_text.toml", "--parallelism.pipeline_parallel_degree=64"]
    job = subprocess.run([sys.executable, *words], cwd=ROOT, env=given, capture_output=True, text=True)
    assert job.returncode == 2
    (line,) = job.stderr.splitlines()
    rule = f"error: TMPDIR: '{folder}' has 76 bytes, but at most 75 .* at most 107.*; set TMPDIR to a shorter folder"
    assert bool(re.match(rule, line)) != fits, line


def test_variables_hold_for_new_processes_alone(monkeypatch):
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    monkeypatch.delenv("MMTRAIN_TEST", raising=False)
    with environment({"MMTRAIN_TEST": "1"}):
        assert os.environ["MMTRAIN_TEST"] == "1"
        assert os.environ["PYTHONWARNINGS"] == "error,ignore:resource_tracker:UserWarning"
    assert os.environ["PYTHONWARNINGS"] == "error"
    assert "MMTRAIN_TEST" not in os.environ


def test_a_signal_to_stop_waits():
    # In a process of its own: another thread of this one might take the signal.
    done = subprocess.run([sys.executable, "-c", HOLDS], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[] [2]\n", "")
