import os
import signal
import threading
import time
from pathlib import Path

import pytest

from mmtrain.errors import ConfigError
from mmtrain.local.nodes import NodeJob, own_devices, run_on_nodes
from mmtrain.local.ranks import RankDiedError, Stopped
from tests import light_nodes
from tests.light_nodes import running_nodes

pytestmark = pytest.mark.ranks

A, B, C, D = (f"node-{index:03d}-{index:03d}" for index in range(4))


def wait_for(*paths: Path) -> None:
    deadline = time.monotonic() + 30
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, [path.name for path in paths if not path.exists()]
        time.sleep(0.005)


def end(folder: Path, *names: str) -> None:
    """Ends the job once all of its nodes, and no others, have met."""
    wait_for(*[folder / f"{name}-{rank}-of-{'+'.join(names)}" for name in names for rank in range(2)])
    (folder / "enough").touch()


def up_to_step_3(folder: Path, names: str) -> None:
    wait_for(*[folder / f"{name}-{rank}-3" for name in names.split() for rank in range(2)])


@pytest.fixture
def hold(tmp_path: Path) -> Path:
    """While it exists, no step after the third one is taken."""
    path = tmp_path / "hold"
    path.touch()
    return path


def test_each_node_is_as_one_that_torchrun_started_alone():
    with running_nodes(light_nodes.variables, nodes=2, ranks=2) as running:
        assert running.wait() == {name: [["0", "0", "2", "2"], ["1", "1", "2", "2"]] for name in (A, B)}


def test_a_node_that_loses_a_rank_ends_whole_and_the_others_go_on(tmp_path, hold):
    with running_nodes(light_nodes.trains, tmp_path, nodes=3, ranks=2) as running:
        up_to_step_3(tmp_path, f"{A} {B} {C}")
        pids = running.nodes.pids[B]
        os.kill(pids[1], signal.SIGKILL)
        hold.unlink()
        end(tmp_path, A, C)
        found = running.wait()
    assert found == {name: [[(1, f"{A} {B} {C}", 0), (2, f"{A} {C}", 3)]] * 2 for name in (A, C)}
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_lost_node_is_started_again_and_one_is_added(tmp_path, hold):
    again, added = "node-000-002", "node-002-003"
    with running_nodes(light_nodes.trains, tmp_path, nodes=2, ranks=2, max_restarts=1) as running:
        up_to_step_3(tmp_path, f"{A} {B}")
        running.kill(A)
        hold.unlink()
        wait_for(tmp_path / f"{B}-0-4")
        while again not in running.nodes.pids:
            time.sleep(0.005)
        running.nodes.add()
        end(tmp_path, again, B, added)
        found = running.wait()
    assert set(found) == {B, again, added}
    assert found[B][0] == found[B][1]
    assert [generation for generation, *_ in found[B][0]] == list(range(1, len(found[B][0]) + 1))
    assert found[B][0][1][1:] == (B, 3)
    assert {log[-1][1] for logs in found.values() for log in logs} == {f"{again} {B} {added}"}


def test_a_node_that_is_told_to_end_leaves_and_is_not_started_again(tmp_path, hold):
    with running_nodes(light_nodes.trains, tmp_path, nodes=2, ranks=2, max_restarts=3) as running:
        up_to_step_3(tmp_path, f"{A} {B}")
        running.kill(A, signal.SIGTERM)
        hold.unlink()
        end(tmp_path, B)
        found = running.wait()
    assert found[A] == [[(1, f"{A} {B}", 0)]] * 2
    assert [(names, generation) for generation, names, _ in found[B][0]][-1] == (B, 3)
    assert found[B][0] == found[B][1]


def test_a_stopped_node_is_left_out_and_comes_back(tmp_path, hold):
    with running_nodes(light_nodes.trains, tmp_path, nodes=2, ranks=2) as running:
        up_to_step_3(tmp_path, f"{A} {B}")
        running.kill(A, signal.SIGSTOP)
        hold.unlink()
        wait_for(tmp_path / f"{B}-0-5")
        for path in tmp_path.glob("*-of-*"):
            path.unlink()
        running.kill(A, signal.SIGCONT)
        end(tmp_path, A, B)
        found = running.wait()
    assert [names for _, names, _ in found[B][0]][:3] == [f"{A} {B}", B, f"{A} {B}"]
    assert {log[-1] for logs in found.values() for log in logs} == {found[A][0][-1]}


def test_where_all_nodes_fail_the_error_of_the_first_is_raised(tmp_path):
    refused = pytest.raises(ConfigError, match="steps = 0; make it larger")
    with running_nodes(light_nodes.fails, tmp_path, nodes=2, max_restarts=2) as running, refused:
        running.wait()
    assert len(list(tmp_path.glob("start-*"))) == 2, "a mistake of the user's is not tried again"


def test_a_job_whose_only_node_dies_says_how_unless_it_may_start_again(tmp_path):
    died = pytest.raises(RankDiedError, match="rank 0 died with exit status 7")
    with running_nodes(light_nodes.dies, tmp_path, nodes=1) as running, died:
        running.wait()
    with running_nodes(light_nodes.dies, tmp_path, nodes=1, max_restarts=1) as running:
        assert running.wait() == {"node-000-001": ["node-000-001"]}


def test_a_signal_to_the_launcher_reaches_all_ranks(tmp_path, hold):
    def stop() -> None:
        up_to_step_3(tmp_path, f"{A} {B}")
        os.kill(os.getpid(), signal.SIGTERM)
        hold.unlink()

    thread = threading.Thread(target=stop)
    thread.start()
    job = NodeJob(
        fn=light_nodes.trains,
        args=(tmp_path,),
        nodes=2,
        ranks=2,
        digest="version=1",
        silent_s=5.0,
        max_restarts=1,
    )
    with pytest.raises(Stopped) as caught:
        run_on_nodes(job)
    thread.join()
    assert caught.value.exit_status == 128 + signal.SIGTERM
    assert len(list(tmp_path.glob("*-0-3"))) == 2


def test_nodes_divide_the_devices_of_the_machine(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "null"):
        (tmp_path / name).touch()
    found = [own_devices(slot, 2, {}, str(tmp_path)) for slot in range(3)]
    assert found == [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"}, {}]
    assert own_devices(1, 1, {"CUDA_VISIBLE_DEVICES": "5,7"}, str(tmp_path)) == {"CUDA_VISIBLE_DEVICES": "7"}
    assert own_devices(0, 1, {"CUDA_VISIBLE_DEVICES": ""}, str(tmp_path)) == {}
