"""What ranks say of each other once a collective has failed; the ranks are threads with one store."""

import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from mmtrain import errors
from mmtrain.errors import DataError, MMTrainError, RankLostError
from mmtrain.parallel import roll_call
from mmtrain.parallel.meeting import Patience
from mmtrain.parallel.roll_call import RollCall, common_reason

PATIENCE = Patience(seconds=30, rule="comm.timeout_seconds")
TIMEOUT = RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 30000ms for recv operation")
RESET = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:35515.")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(roll_call, "_LEAST_PATIENCE_S", 3.0)


def ends(ranks: list[Exception | None]) -> list[Exception | None]:
    """How ranks end whose step raises these; None: the rank hangs."""
    store = dist.HashStore()
    found: list[Exception | None] = [None] * len(ranks)

    def end(rank: int, error: Exception) -> None:
        try:
            with common_reason(calls[rank], lambda: PATIENCE, lambda function: "at step 5, in 3F2.0"):
                raise error
        except Exception as raised:
            found[rank] = raised

    calls = [RollCall(store, rank, len(ranks)) for rank in range(len(ranks))]
    _together([lambda r=rank, e=error: end(r, e) for rank, error in enumerate(ranks) if error is not None])
    return found


def _together(calls: list[Callable[[], Any]]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_the_rank_that_hangs_is_named_by_all_others():
    first, silent, last = ends([TIMEOUT, None, RuntimeError("Application timeout caused pair closure")])
    assert silent is None
    assert isinstance(first, RankLostError)
    assert str(first) == str(last)
    assert "waited 30 s (comm.timeout_seconds) at step 5, in 3F2.0; rank 1 (process " in str(first)
    assert "does not answer: it is stopped, dead or busy" in str(first)


def test_all_ranks_end_with_the_error_of_one():
    own = DataError("sample 7: its content is corrupt")
    found = ends([RESET, own, RESET])
    assert found[1] is own
    assert all(isinstance(error, DataError) and str(error) == str(own) for error in found)


def test_a_bug_on_one_rank_is_a_lost_rank_on_the_others():
    first, bug = ends([RESET, TypeError("'int' object is not iterable")])
    assert isinstance(bug, TypeError)
    assert isinstance(first, RankLostError)
    assert str(first) == "rank 1 failed: TypeError: 'int' object is not iterable; see its traceback"


def test_an_error_of_the_system_is_said_in_one_line_with_its_place():
    (found,) = ends([FileNotFoundError(2, "No such file or directory", "data/train.parquet")])
    assert type(found) is MMTrainError
    assert str(found).startswith(
        "rank 0 at step 5, in 3F2.0: [Errno 2] No such file or directory: 'data/train.parquet'"
    )


def test_where_all_answer_nobody_is_blamed():
    for found in ends([TIMEOUT, TIMEOUT]):
        assert "all ranks answer" in str(found)


def test_a_second_trainer_of_a_process_starts_anew():
    store = dist.HashStore()
    RollCall(store, 0, 1).tell(DataError("old"))
    with pytest.raises(RankLostError, match="all ranks answer"):
        raise RollCall(store, 0, 1).reason("rank 0 waited")


class Hangs:
    """A store whose server is stopped."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def __getattr__(self, name: str) -> Any:
        def hang(*args: object) -> None:
            self.ended.wait()
            raise RuntimeError("the store is gone")

        return hang


def test_a_store_that_hangs_is_given_up(monkeypatch):
    call = RollCall(dist.HashStore(), 0, 2)
    call._store = store = Hangs()
    monkeypatch.setattr(roll_call, "_LEAST_PATIENCE_S", 0.1)
    assert "store does not answer" in str(call.reason("rank 0 waited"))
    store.ended.set()


def test_each_error_is_made_of_its_text_alone_as_another_process_does():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, MMTrainError)]
    assert len(kinds) > 5
    for kind in kinds:
        again = pickle.loads(pickle.dumps(kind("why")))
        assert type(again) is kind and str(again) == str(kind("why")) == "why"
