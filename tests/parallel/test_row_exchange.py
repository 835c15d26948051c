import numpy as np
import pytest
import torch
import torch.distributed as dist

from mmtrain.modality.bitfield import segment_bits
from mmtrain.models.attention.context import attention_context, packed_attention
from mmtrain.parallel.row_exchange import KeyValueGather, RowExchange
from tests.ranks import run_ranks

HELD = [np.array([3, 0, -1]), np.array([], dtype=np.int64), np.array([1, 4, 2, -1, -1, 5])]


def exchange(rank, wanted):
    torch.manual_seed(0)
    values = torch.randn(6, 2, 3)
    names = torch.from_numpy(HELD[rank])
    mine = values[names.clamp(min=0)].masked_fill((names < 0)[:, None, None], torch.nan).requires_grad_()
    out = RowExchange(dist.group.WORLD, HELD, np.array(wanted[rank], dtype=np.int64))(mine)
    assert torch.equal(out, values[wanted[rank]])
    weight = torch.arange(1.0, 1 + out.numel()).view_as(out) * (rank + 1)
    (out * weight).sum().backward()
    return mine.grad, weight


@pytest.mark.ranks
def test_rows_come_in_the_order_asked_for_and_gradients_go_back_summed():
    wanted = [[0, 1, 2, 3, 4, 5], [5, 2], []]
    found = run_ranks(exchange, 3, wanted)
    expected = torch.zeros(6, 2, 3)
    for rank, (_, weight) in enumerate(found):
        expected.index_add_(0, torch.tensor(wanted[rank], dtype=torch.int64), weight)
    for rank, (grad, _) in enumerate(found):
        names = torch.from_numpy(HELD[rank])
        assert torch.equal(grad[names >= 0], expected[names[names >= 0]])
        assert not grad[names < 0].any(), "padding has no gradient"


def gather(rank):
    torch.manual_seed(0)
    key, value = torch.randn(1, 2, 7, 4), torch.randn(1, 2, 7, 4)
    held = [np.array([0, 6]), np.array([5, 1, 2, 3, 4])]
    both = KeyValueGather(RowExchange(dist.group.WORLD, held, np.arange(7)))
    mine = [x[:, :, held[rank]].requires_grad_() for x in (key, value)]
    k, v = both.start(*mine)()
    assert torch.equal(k, key)
    assert torch.equal(v, value)
    (k * 2 + v * (rank + 1)).sum().backward()
    return [x.grad for x in mine]


def gather_in_groups(rank):
    """Attention with groups of heads whose exchanges are all under way at once; one rank has no row."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 7, 4, dtype=torch.float64) for heads in (6, 3, 3))
    held = [np.array([0, 6, 5, 1, 2, 3, 4]), np.array([-1])]
    exchange = RowExchange(dist.group.WORLD, held, np.arange(7))
    results = []
    for groups in (1, 2, 3, 8):
        context = attention_context(segment_bits([7]), rows=held[rank], gather=KeyValueGather(exchange, groups))
        leaves = [x[:, :, held[rank]].requires_grad_() for x in (query, key, value)]
        out, _ = packed_attention(None, *leaves, context)
        (out * torch.arange(1.0, 1 + out.numel()).view_as(out)).sum().backward()
        results.append([out.detach(), *(x.grad for x in leaves)])
    return results


@pytest.mark.ranks
def test_groups_of_heads_are_gathered_one_under_the_other():
    for (whole, *grouped), has_rows in zip(run_ranks(gather_in_groups, 2), (True, False), strict=True):
        assert all(bool(x.any()) == has_rows for x in whole)
        for results in grouped:
            for ours, theirs in zip(results, whole, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)


@pytest.mark.ranks
def test_keys_and_values_come_in_the_order_of_the_sequence():
    for grads in run_ranks(gather, 2):
        assert (grads[0] == 4).all()
        assert (grads[1] == 3).all()
