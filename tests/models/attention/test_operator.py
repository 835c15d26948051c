"""Attention in pieces as one operator."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmtrain.modality.bitfield import language_bits, segment_bits
from mmtrain.models.attention import pieces
from mmtrain.models.attention.context import attention_context
from mmtrain.models.attention.operator import attention_in_pieces, operands_of
from tests.data.masks import KINDS, example, microbatches, words
from tests.examples import examples
from tests.models.attention.masks import SCALE, dense, with_gradients
from tests.models.attention.test_context import assert_equal, attend, causal, tensors


def operands(bits, rows=None):
    return operands_of(attention_context(bits, rows=rows).pieces, torch.from_numpy(bits))


def in_one(bits, rows=None):
    tensors = operands(bits, rows)
    return lambda q, k, v: attention_in_pieces(q, k, v, tensors, SCALE)


def check_against_dense(bits, rows, inputs):
    """Measured in double precision: at most 4e-15."""
    assert_equal(with_gradients(in_one(bits, rows), inputs), with_gradients(lambda *x: dense(*x, bits, rows), inputs))


@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("kind", [*KINDS, "any"])
@settings(max_examples=examples(15))
@given(data=st.data())
def test_it_equals_a_dense_mask(kind, padding, key_heads, data):
    bits = data.draw(words()) if kind == "any" else language_bits(data.draw(microbatches()), kind)
    rows = np.append(np.arange(len(bits)), np.full(padding, -1))
    check_against_dense(bits, rows, tensors(len(rows), len(rows), key_heads=key_heads))


@pytest.mark.parametrize("kind", KINDS)
def test_masks_in_tiles_add_up(kind, monkeypatch):
    monkeypatch.setattr(pieces, "MASK_SIZE", 12)
    bits = language_bits(example(), kind)
    check_against_dense(bits, np.arange(len(bits)), tensors(len(bits), len(bits)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [causal(5), causal(5, 5, 5), causal(3, 9, 1), segment_bits([4, 4, 7])])
def test_segments_equal_scaled_dot_product_attention_to_the_bit(bits, dtype):
    inputs = tensors(len(bits), len(bits), dtype=dtype)
    ours, theirs = with_gradients(in_one(bits), inputs), with_gradients(attend(attention_context(bits)), inputs)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_its_declarations_hold(kind):
    """Shapes, strides and aliases are those that a compiler is told, and the backward is one of its operators."""
    bits = language_bits(example(), kind)
    query, key, value = (x.requires_grad_() for x in tensors(len(bits), len(bits)))
    torch.library.opcheck(torch.ops.mmtrain.attention, (query, key, value, *operands(bits), SCALE))
