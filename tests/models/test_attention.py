import pytest
import torch

from mmtrain.models.attention import DOCUMENTS, document_attention


def dense(query, key, value, lengths):
    """The same attention by a T x T mask."""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    allowed = (document[:, None] == document[None, :]).tril()
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = (query @ key.transpose(2, 3) * 0.3).masked_fill(~allowed, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("lengths", [(9,), (1, 5, 3)])
def test_equal_to_a_dense_mask(lengths, kv_heads):
    torch.manual_seed(0)
    sides = []
    inputs = [torch.randn(1, heads, 9, 8, dtype=torch.float64) for heads in (4, kv_heads, kv_heads)]
    weight = torch.randn(1, 9, 4, 8, dtype=torch.float64)
    for attend in (
        lambda q, k, v: document_attention(None, q, k, v, None, document_lengths=lengths, scaling=0.3)[0],
        lambda q, k, v: dense(q, k, v, lengths),
    ):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = attend(*leaves)
        (out * weight).sum().backward()
        sides.append([out, *(leaf.grad for leaf in leaves)])
    for ours, theirs in zip(*sides, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_registered_under_its_name():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    assert ALL_ATTENTION_FUNCTIONS[DOCUMENTS] is document_attention
