"""Exchanges of rows between tensor-parallel ranks: what each name says, for single tensors and batches."""

import pytest
import torch

from mmtrain.config.topology import JobLayout
from mmtrain.parallel.mesh import build_mesh
from mmtrain.parallel.row_shards import RowShards
from tests.ranks import run_ranks

SHAPES = ((7, 2), (1, 7, 2), (3, 7, 2), (2, 3, 7, 2))
"""Rows and columns, with and without a batch before them; no number of ranks divides the rows."""


def exchanged(rank, degree):
    """Whether values and gradients of one rank are right, by shape and name."""
    mesh = build_mesh(JobLayout.grid(tp=degree), torch.device("cpu"))
    rows, found = RowShards(mesh.stage["tp"]), {}
    for shape in SHAPES:
        numbers = torch.arange(2.0 * torch.Size(shape).numel()).reshape(2, *shape)
        x, upstream = numbers[0].requires_grad_(), numbers[1]
        mine = rows.shard(x)
        missing = -shape[-2] % degree
        filled = torch.nn.functional.pad(x.detach(), (0, 0, 0, missing))
        found[shape, "shard"] = torch.equal(mine, filled.chunk(degree, -2)[rank])
        whole = rows.gather(mine)[..., : shape[-2], :]
        found[shape, "gather"] = torch.equal(whole, x)
        (back,) = torch.autograd.grad((whole * upstream).sum(), x)
        found[shape, "gradient"] = torch.equal(back, upstream)
        summed = rows.sum_shard((1 + rank) * x)
        factor = degree * (degree + 1) / 2
        found[shape, "sum"] = torch.equal(summed, factor * filled.chunk(degree, -2)[rank])
        used = rows.gather_for_parts(rows.shard(x))[..., : shape[-2], :]
        (back,) = torch.autograd.grad(((1 + rank) * used * upstream).sum(), x)
        found[shape, "gradient of parts"] = torch.equal(back, factor * upstream)
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("degree", [2, 3])
def test_rows_come_back_in_their_order(degree):
    for rank, found in enumerate(run_ranks(exchanged, degree, degree)):
        assert found == dict.fromkeys(found, True), rank
