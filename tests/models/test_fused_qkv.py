"""Joint query-key-value layers with head-major rows: equal to Hugging Face's, whole and cut between heads."""

import pytest
import torch
from torch import nn

from mmtrain.models.fused_qkv import from_head_major, is_fused, reorder_output, to_head_major

HEADS, COLUMNS = 4, 6
WIDTH = HEADS * COLUMNS


class Attention(nn.Module):
    """Query, key and value as Qwen-VL's encoder makes them."""

    def __init__(self):
        super().__init__()
        self.head_dim, self.num_heads = COLUMNS, HEADS
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        return self.qkv(x).reshape(len(x), 3, self.num_heads, -1).permute(1, 0, 2, 3)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = Attention()


def blocks():
    """(head-major block, plain block with the same weights)."""
    torch.manual_seed(0)
    plain, block = Block(), Block()
    with torch.no_grad():
        block.attn.qkv.weight.copy_(to_head_major(plain.attn.qkv.weight, HEADS))
        block.attn.qkv.bias.copy_(to_head_major(plain.attn.qkv.bias, HEADS))
    reorder_output(block, "attn.qkv")
    return block, plain


def test_rows_name_their_head():
    rows = torch.tensor(
        [[100 * part + 10 * head + column for column in range(2)] for part in (1, 2, 3) for head in (0, 1)]
    )
    expected = [[100, 101, 200, 201, 300, 301], [110, 111, 210, 211, 310, 311]]
    assert to_head_major(rows.flatten(), 2).unflatten(0, (2, 6)).tolist() == expected
    assert to_head_major(rows.reshape(12, 1), 2).shape == (12, 1)


@pytest.mark.parametrize("shape", [(3 * WIDTH,), (3 * WIDTH, 5)], ids=["bias", "weight"])
def test_the_two_orders_are_inverse(shape):
    x = torch.randn(shape)
    assert torch.equal(from_head_major(to_head_major(x, HEADS), HEADS), x)
    assert torch.equal(to_head_major(from_head_major(x, HEADS), HEADS), x)
    assert not torch.equal(to_head_major(x, HEADS), x)


def test_output_and_gradients_equal_the_plain_layer():
    """But for rounding, since a product may be cut otherwise when its rows come in another order."""
    block, plain = blocks()
    x = torch.randn(5, WIDTH)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, expected = block.attn(ours), plain.attn(theirs)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    weight = torch.randn_like(expected)
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-5)
    for name in ("weight", "bias"):
        found, wanted = (getattr(b.attn.qkv, name).grad for b in (block, plain))
        torch.testing.assert_close(from_head_major(found, HEADS), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "fused"),
    [
        ("vision.blocks.3.attn.qkv.weight", True),
        ("blocks.3.attn.qkv.bias", True),
        ("attn.qkv.base_layer.weight", True),
        ("blocks.0.attn.qkv.lora_B.default.weight", True),
        ("blocks.0.attn.qkv.lora_A.default.weight", False),
        ("blocks.3.attn.proj.weight", False),
        ("blocks.3.cross_attn.qkv.weight", False),
    ],
)
def test_names_of_fused_parameters(name, fused):
    assert is_fused(name, ("attn.qkv",)) is fused
