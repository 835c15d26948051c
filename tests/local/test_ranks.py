import multiprocessing
import os
import pickle
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from mmtrain.config.sections import CommConfig
from mmtrain.errors import DataError
from mmtrain.local import ranks as local_ranks
from mmtrain.local.ranks import RankDiedError, run_on_ranks
from mmtrain.parallel.torch_private import set_timeout
from tests import light_ranks
from tests.ranks import run_ranks, warm_ranks

pytestmark = pytest.mark.ranks


def place(device: torch.device, base: int) -> tuple[int, int, int, str]:
    total = torch.tensor(base + dist.get_rank())
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), int(total), os.environ["LOCAL_RANK"]


def fails(device: torch.device) -> None:
    if dist.get_rank() == 1:
        raise DataError("rank 1 cannot read")
    dist.barrier()  # the others wait in vain


def waits(device: torch.device) -> list[bool]:
    """Whether a rank waits for rank 0, which is late: before and after the patience of the start has ended."""
    found = []
    for late_s in (4.0, 1.5):
        if dist.get_rank() == 0:
            time.sleep(late_s)
        try:
            dist.broadcast_object_list([None], src=0)
        except RuntimeError:
            found.append(False)
        else:
            found.append(True)
        set_timeout(timedelta(seconds=0.5))
    return found


def test_ranks_are_patient_until_the_first_step_whatever_their_timeout():
    with warm_ranks():
        found = run_on_ranks(waits, 2, comm=CommConfig(timeout_seconds=3))
    assert found[1] == [True, False]


def test_each_copy_is_a_group_of_its_own():
    found = run_on_ranks(place, 2, 10, comm=CommConfig(), copies=2)
    assert found == [(0, 2, 21, "0"), (1, 2, 21, "1")] * 2


def test_an_error_of_a_rank_is_raised_here_and_the_others_stop():
    with pytest.raises(DataError, match="rank 1 cannot read"):
        run_on_ranks(fails, 2, comm=CommConfig())


def processes(*targets):
    """Targets with arguments as the processes of ranks."""
    context = multiprocessing.get_context("spawn")
    return [context.Process(target=target, args=args) for target, *args in targets]


@pytest.mark.parametrize("status", [3, -signal.SIGKILL])
def test_the_first_rank_that_fails_ends_the_others(monkeypatch, status):
    monkeypatch.setattr(local_ranks, "GRACE_S", 0.1)
    ranks = processes((light_ranks.ends, 0, 600.0), (light_ranks.ends, status))
    assert local_ranks._run(ranks, []) == {1: status}
    assert [rank.exitcode for rank in ranks] == [-signal.SIGKILL, status]


class EndsBehindALook:
    """A process that ends just after somebody has read that it has no exit code yet."""

    def __init__(self, process):
        self._process = process

    def __getattr__(self, name):
        return getattr(self._process, name)

    @property
    def exitcode(self):
        code = self._process.exitcode
        self._process.join()
        return code


def test_a_rank_that_fails_between_two_looks_has_failed(monkeypatch):
    monkeypatch.setattr(local_ranks.multiprocessing.connection, "wait", lambda sentinels, timeout: None)
    (rank,) = processes((light_ranks.ends, 3))
    assert local_ranks._run([EndsBehindALook(rank)], []) == {0: 3}


def send_once(folder, names, *numbers):
    """Sends signals to this process once others are up."""

    def wait_and_send() -> None:
        while not all((folder / f"{name}-up").exists() for name in names):
            time.sleep(0.01)
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.2)

    threading.Thread(target=wait_and_send, daemon=True).start()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_go_on_to_the_ranks(tmp_path, number):
    ranks = processes((light_ranks.stops, tmp_path, "a"), (light_ranks.stops, tmp_path, "b"))
    send_once(tmp_path, "ab", number)
    with local_ranks.forwarded_signals(ranks) as signals:
        assert local_ranks._run(ranks, signals) == {}
    assert signals == [number]
    assert all((tmp_path / f"{name}-{number.name}").exists() for name in "ab")


def test_a_second_interrupt_ends_ranks_that_hear_nothing(tmp_path):
    ranks = processes((light_ranks.hangs, tmp_path, "a"))
    send_once(tmp_path, "a", signal.SIGINT, signal.SIGINT)
    with local_ranks.forwarded_signals(ranks) as signals:
        assert local_ranks._run(ranks, signals) == {}
    assert ranks[0].exitcode == -signal.SIGKILL


def test_the_reason_that_was_written_first_is_raised(tmp_path):
    for index, (rank, error) in enumerate(
        [(2, ("DataError", "no such file")), (0, ("RankLostError", "rank 2 is gone"))]
    ):
        path = tmp_path / f"error-{rank}"
        path.write_bytes(pickle.dumps(error))
        os.utime(path, (index, index))
    with pytest.raises(DataError, match="no such file"):
        local_ranks.raise_reason({0: 2}, tmp_path)


def test_a_rank_that_died_without_a_word_is_named_with_its_status(tmp_path):
    with pytest.raises(RankDiedError, match="rank 1 was killed by SIGKILL, mostly for memory") as caught:
        local_ranks.raise_reason({1: -signal.SIGKILL}, tmp_path)
    assert caught.value.exit_status == 137
    (tmp_path / "error-3").write_bytes(pickle.dumps(("", "Traceback ...")))
    with pytest.raises(RankDiedError, match="rank 3 died with exit status 1") as caught:
        local_ranks.raise_reason({3: 1}, tmp_path)
    assert (caught.value.exit_status, caught.value.text) == (1, "Traceback ...")


def some_rows(rank):
    return torch.arange(3.0) + rank


def test_what_ranks_of_tests_return_is_no_memory_of_theirs():
    """A process that gives memory away has to live until it was taken."""
    for rank, found in enumerate(run_ranks(some_rows, 2)):
        assert found.tolist() == [rank, rank + 1, rank + 2]
        assert not found.is_shared()


def test_a_rank_that_wrote_no_error_is_the_reason_of_the_errors_of_others(tmp_path):
    (tmp_path / "error-0").write_bytes(pickle.dumps(("RankLostError", "rank 1 is gone")))
    with pytest.raises(RankDiedError, match="rank 1 died with exit status 7"):
        local_ranks.raise_reason({0: 2, 1: 7}, tmp_path)
