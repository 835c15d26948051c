"""How ranks meet in a store, also in one that an earlier start of the job has used; the ranks are threads."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from mmtrain.config.sections import CommConfig
from mmtrain.errors import RankLostError
from mmtrain.parallel.meeting import Patience, own_store


def met(store: dist.Store, ranks: list[int], world_size: int, wait_s: float = 60.0) -> list[dist.Store]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(lambda rank: own_store(store, rank, world_size, wait_s), ranks))


def test_all_ranks_get_one_part_of_the_store():
    first, *others = met(dist.HashStore(), [0, 1, 2], 3)
    first.set("key", "value")
    assert all(other.get("key") == b"value" for other in others)


def test_a_restart_in_the_same_store_sees_nothing_of_the_start_before():
    store = dist.HashStore()
    for _ in range(3):
        for part in met(store, [0, 1], 2):
            assert not part.check(["key"])
        part.set("key", "value")


def test_a_rank_that_restarts_first_waits_for_the_new_rank_0():
    """It finds the name of the start before, under which all had answered."""
    store = dist.HashStore()
    old, _ = met(store, [0, 1], 2)
    old.set("key", "value")
    with ThreadPoolExecutor(2) as pool:
        early = pool.submit(own_store, store, 1, 2, 60.0)
        with pytest.raises(TimeoutError):
            early.result(0.3)
        late = pool.submit(own_store, store, 0, 2, 60.0)
        late.result().set("other", "value")
        assert early.result().get("other") == b"value"
        assert not early.result().check(["key"])


def test_ranks_that_do_not_come_are_named():
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        errors = [pool.submit(own_store, store, rank, 4, 1.5).exception() for rank in (0, 1)]
    for rank, error in enumerate(errors):
        assert isinstance(error, RankLostError)
        message = f"rank {rank} waited 1.5 s for the job to start, but of its 4 ranks these did not come: "
        assert str(error).startswith(message)


def test_a_rank_0_that_does_not_come_is_named_alone():
    with pytest.raises(RankLostError, match="these did not come: 0;"):
        own_store(dist.HashStore(), 2, 4, 0.2)


def test_ranks_are_patient_before_the_first_step():
    short, long = CommConfig(timeout_seconds=5), CommConfig(timeout_seconds=500)
    assert Patience.at_start(short).seconds == 120
    assert "at least 120 before the first step" in Patience.at_start(short).rule
    assert Patience.later(short) == Patience(seconds=5, rule="comm.timeout_seconds")
    assert Patience.at_start(long) == Patience.later(long)
