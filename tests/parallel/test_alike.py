"""What ranks compare before anything is built; the ranks are threads with one store."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from mmtrain.errors import ConfigError
from mmtrain.launch.launched import Launched
from mmtrain.parallel import alike
from mmtrain.parallel.alike import Subject, check_alike, describe_ranks


def subject(name: str = "config", *, partial: bool = False, **values: str) -> Subject:
    return Subject(name=name, values=values, remedy="correct it", partial=partial)


def message_of(*ranks: list[Subject], store: dist.Store | None = None) -> str:
    """The message of ranks with these subjects, the same on all; empty: they may train."""
    store = store or dist.HashStore()
    store.set_timeout(timedelta(seconds=20))

    def compare(rank: int) -> str:
        place = Launched(rank=rank, world_size=len(ranks), local_rank=0, local_world_size=1)
        try:
            check_alike(store, place, ranks[rank])
        except ConfigError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(ranks)) as pool:
        (message,) = set(pool.map(compare, range(len(ranks))))
    return message


@pytest.fixture(autouse=True)
def host(monkeypatch):
    monkeypatch.setattr(alike.socket, "gethostname", lambda: "node")


def test_ranks_that_are_alike_train():
    assert message_of(*[[subject(lr="1", seed="3"), subject("versions", torch="2")]] * 4) == ""


def test_a_difference_names_key_values_and_ranks():
    assert message_of([subject(lr="0.1", seed="3")], [subject(lr="0.1", seed="3")], [subject(lr="0.2", seed="3")]) == (
        "the processes of this job differ in config: lr = 0.1 on ranks 0-1 (node), but 0.2 on rank 2 (node); correct it"
    )


def test_three_kinds_of_ranks_and_a_key_that_one_lacks():
    message = message_of([subject(a="1", b="1")], [subject(a="2", b="1")], [subject(a="3")])
    assert "a = 1 on rank 0 (node), but 2 on rank 1 (node), but 3 on rank 2 (node)" in message
    assert "b = 1 on rank 0 (node) and rank 1 (node), but nothing on rank 2 (node)" in message


def test_the_first_subject_is_told_and_the_others_named():
    message = message_of(
        [subject(lr="1"), subject("data", file="2 bytes")], [subject(lr="2"), subject("data", file="3 bytes")]
    )
    assert "lr = 1" in message
    assert message.endswith("(they also differ in data)")


def test_many_keys_are_shortened():
    keys = {f"key{index}": "x" * 500 for index in range(9)}
    message = message_of([subject(**keys)], [subject(**dict.fromkeys(keys, "y"))])
    assert "key2 = " in message
    assert "key3" not in message
    assert "; 6 more; " in message
    assert len(message) < 1000


def test_a_rank_may_lack_a_subject_and_parts_of_one_that_is_partial():
    assert message_of([subject("data", a="1")], [], [subject("data", a="1")]) == ""
    shards = [subject("model", partial=True, a="1", b="2")], [subject("model", partial=True, b="2", c="3")]
    assert message_of(*shards) == ""
    assert "b = 2 on rank 0 (node), but 4 on rank 1" in message_of(shards[0], [subject("model", partial=True, b="4")])


def test_only_digests_are_exchanged_where_ranks_agree():
    store = dist.HashStore()
    assert message_of(*[[subject(**{f"key{index}": "x" * 100 for index in range(1000)})]] * 3, store=store) == ""
    assert store.num_keys() == 4  # of three ranks, and that none differs
    assert all(len(store.get(f"alike/digests {rank}")) < 100 for rank in range(3))


def test_ranks_and_hosts_in_a_message_are_few():
    hosts = [f"node{rank // 2}" for rank in range(40)]
    assert describe_ranks([0, 1, 2, 5], hosts) == "ranks 0-2, 5 (node0, node1, node2)"
    assert describe_ranks(list(range(0, 40, 3)), hosts) == "ranks 0, 3, 6, 9, ... (node0, node1, node3, node4, ...)"
