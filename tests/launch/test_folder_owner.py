"""One owner a run folder: who is refused, what is taken over, and what is said."""

import errno
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mmtrain.errors import ConfigError
from mmtrain.launch.folder_owner import FILE, owned
from tests.launched import ROOT

OWNS = """
import sys, time
from pathlib import Path
from mmtrain.launch.folder_owner import owned
with owned(Path(sys.argv[1])):
    print("owns", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def other(tmp_path):
    """Another process, which owns the folder."""
    with subprocess.Popen([sys.executable, "-c", OWNS, tmp_path], cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def record(folder: Path) -> dict:
    return json.loads((folder / FILE).read_text())


def test_a_folder_is_made_owned_and_left_clean(tmp_path):
    with owned(tmp_path / "a" / "b"):
        assert record(tmp_path / "a" / "b")["pid"] == os.getpid()
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_second_owner_is_refused_by_name(tmp_path, other):
    with pytest.raises(ConfigError) as caught, owned(tmp_path, patience_s=0.0):
        pass
    found = record(tmp_path)
    assert found["pid"] == other.pid
    assert (
        f"belongs to process {other.pid} on {found['host']}, which has written into it since {found['since']}"
        in str(caught.value)
    )


def test_a_new_owner_waits_for_one_that_is_dying(tmp_path, other):
    threading.Timer(0.5, other.kill).start()
    with owned(tmp_path, patience_s=60.0):
        assert record(tmp_path)["pid"] == os.getpid()


def foreign(folder: Path, **values: object) -> None:
    """The record of a process that nobody locks any more."""
    with owned(folder):
        found = record(folder)
    (folder / FILE).write_text(json.dumps(found | values))


def test_what_a_dead_process_left_is_taken_over(tmp_path):
    foreign(tmp_path, pid=2**22 + 1)
    with owned(tmp_path, patience_s=0.0):
        assert record(tmp_path)["pid"] == os.getpid()


def test_an_id_that_another_process_has_now_is_no_owner(tmp_path):
    foreign(tmp_path, pid=1, start=-1)
    with owned(tmp_path, patience_s=0.0):
        pass


def test_a_process_whose_lock_is_not_seen_still_owns(tmp_path, other):
    text = (tmp_path / FILE).read_text()
    (tmp_path / FILE).unlink()
    (tmp_path / FILE).write_text(text)  # as on a file system without locks
    with pytest.raises(ConfigError, match=f"belongs to process {other.pid} "), owned(tmp_path, patience_s=0.0):
        pass


def test_another_machine_owns_while_it_touches_the_file(tmp_path):
    foreign(tmp_path, host="node7", boot="another")
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(0.02):
            os.utime(tmp_path / FILE)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(ConfigError, match="on node7"), owned(tmp_path, patience_s=0.0, beat_s=5.0):
            pass
    finally:
        ended.set()
        thread.join()
    with owned(tmp_path, patience_s=0.0, beat_s=0.05):  # it is silent now
        assert record(tmp_path)["host"] != "node7"


def test_an_owner_touches_the_file(tmp_path):
    with owned(tmp_path, beat_s=0.01):
        os.utime(tmp_path / FILE, ns=(0, 0))
        deadline = time.monotonic() + 60
        while (tmp_path / FILE).stat().st_mtime_ns == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (tmp_path / FILE).stat().st_mtime_ns > 0


def test_half_a_record_is_no_owner(tmp_path):
    (tmp_path / FILE).write_text('{"pid": 1')
    with owned(tmp_path, patience_s=0.0):
        pass


@pytest.mark.parametrize("call", ["write", "statvfs"])
def test_a_full_disk_is_one_line_that_names_the_folder(tmp_path, monkeypatch, call):
    """Too full for the record, or for the log and metrics that follow it."""

    def write(file, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    room = list(os.statvfs(tmp_path))
    room[4] = 1  # blocks that are free
    monkeypatch.setattr(os, call, write if call == "write" else lambda path: os.statvfs_result(room))
    message = rf"job.dump_folder = '{tmp_path}' cannot be written: No space left on device .*; name another folder, mak"
    with pytest.raises(ConfigError, match=message), owned(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "name/below"])
def test_a_file_in_the_way_is_one_line(tmp_path, text):
    (tmp_path / "file").touch()
    message = r"job.dump_folder = '.*file.*' cannot be written: .*name another folder"
    with pytest.raises(ConfigError, match=message), owned(tmp_path / "file" / text):
        pass
