import os

import pytest
import torch
import torch.distributed as dist

from mmtrain.config import CommConfig
from mmtrain.errors import DataError
from mmtrain.local_ranks import run_on_ranks
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks


def place(device: torch.device, base: int) -> tuple[int, int, int, str]:
    total = torch.tensor(base + dist.get_rank())
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), int(total), os.environ["LOCAL_RANK"]


def fails(device: torch.device) -> None:
    if dist.get_rank() == 1:
        raise DataError("rank 1 cannot read")
    dist.barrier()  # the others wait in vain


def test_each_copy_is_a_group_of_its_own():
    found = run_on_ranks(place, 2, 10, comm=CommConfig(), copies=2)
    assert found == [(0, 2, 21, "0"), (1, 2, 21, "1")] * 2


def test_an_error_of_a_rank_is_raised_here_and_the_others_stop():
    with pytest.raises(DataError, match="rank 1 cannot read"):
        run_on_ranks(fails, 2, comm=CommConfig())


def some_rows(rank):
    return torch.arange(3.0) + rank


def test_what_ranks_of_tests_return_is_no_memory_of_theirs():
    """A process that gives memory away has to live until it was taken."""
    for rank, found in enumerate(run_ranks(some_rows, 2)):
        assert found.tolist() == [rank, rank + 1, rank + 2]
        assert not found.is_shared()
