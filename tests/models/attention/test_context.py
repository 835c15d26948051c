import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from mmtrain.errors import ConfigError, DataError
from mmtrain.modality.bitfield import language_bits, segment_bits
from mmtrain.modality.metadata import DocumentMeta, MicrobatchMeta
from mmtrain.models.attention import pieces
from mmtrain.models.attention.context import PACKED, AttentionChoices, attention_context, packed_attention
from tests.data.masks import KINDS, microbatches, words
from tests.examples import examples
from tests.models.attention.masks import SCALE, Given, dense, with_gradients


def causal(*lengths):
    documents = [DocumentMeta(sample=i, num_tokens=n, num_targets=0, images=()) for i, n in enumerate(lengths)]
    return language_bits(MicrobatchMeta(documents=tuple(documents)))


def tensors(rows, keys, *, heads=4, key_heads=2, columns=8, dtype=torch.float64):
    torch.manual_seed(0)
    return [
        torch.randn(1, h, n, columns, dtype=dtype) for h, n in ((heads, rows), (key_heads, keys), (key_heads, keys))
    ]


def attend(context):
    return lambda q, k, v: packed_attention(None, q, k, v, context, scaling=SCALE)[0]


def assert_equal(ours, theirs, tolerance=1e-12):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def check_whole_sequence(kind, padding, key_heads, data):
    """The context of a drawn sequence, whose outputs and gradients are those of a dense mask. Measured in double
    precision: 5e-15."""
    bits = data.draw(words()) if kind == "any" else language_bits(data.draw(microbatches()), kind)
    rows = np.append(np.arange(len(bits)), np.full(padding, -1))
    inputs = tensors(len(rows), len(rows), key_heads=key_heads)
    context = attention_context(bits, rows=rows)
    ours = with_gradients(attend(context), inputs)
    assert_equal(ours, with_gradients(lambda q, k, v: dense(q, k, v, bits, rows), inputs))
    return context


@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("kind", [*KINDS, "any"])
@settings(max_examples=examples(25))
@given(data=st.data())
def test_a_whole_sequence_equals_a_dense_mask(kind, padding, key_heads, data):
    check_whole_sequence(kind, padding, key_heads, data)


@pytest.mark.parametrize("lengths", [[5, 5, 5], [3, 3, 7, 7, 1], [9]])
@pytest.mark.parametrize("padding", [0, 1])
def test_segments_equal_a_dense_mask(lengths, padding):
    bits = segment_bits(lengths)
    rows = np.append(np.arange(len(bits)), np.full(padding, -1))
    inputs = tensors(len(rows), len(rows), key_heads=4)
    ours = with_gradients(attend(attention_context(bits, rows=rows)), inputs)
    assert_equal(ours, with_gradients(lambda q, k, v: dense(q, k, v, bits, rows), inputs))


@pytest.mark.parametrize("kind", [*KINDS, "any"])
@settings(max_examples=examples(25))
@given(data=st.data())
def test_ranks_with_parts_of_the_rows_add_up_to_the_whole(kind, data):
    """Each rank gets all keys from `gather`; outputs are its rows, and gradients of the keys add up."""
    bits = data.draw(words()) if kind == "any" else language_bits(data.draw(microbatches()), kind)
    owner = np.array(data.draw(st.lists(st.integers(0, 2), min_size=len(bits), max_size=len(bits))))
    inputs = tensors(len(bits), len(bits))
    whole = [x.clone().requires_grad_() for x in inputs]
    out = dense(*whole, bits, np.arange(len(bits)))
    weight = torch.randn_like(out)
    (out * weight).sum().backward()
    grads = [torch.zeros_like(x) for x in inputs]
    for rank in range(3):
        places = np.flatnonzero(owner == rank)
        rows = np.append(places, [-1])
        query, key, value = (x.clone().requires_grad_() for x in inputs)
        local = query[:, :, torch.from_numpy(np.append(places, [0]))]
        context = attention_context(bits, rows=rows, gather=Given(key, value))
        nothing = torch.zeros_like(local[:, :2])
        mine = packed_attention(None, local, nothing, nothing, context, scaling=SCALE)[0]
        assert not mine[:, -1].any()  # padding
        torch.testing.assert_close(mine[:, :-1], out[:, places], rtol=1e-12, atol=1e-12)
        (mine[:, :-1] * weight[:, places]).sum().backward()
        for grad, leaf in zip(grads, (query, key, value), strict=True):
            grad += leaf.grad
    assert_equal(grads, [x.grad for x in whole])


@pytest.mark.parametrize("rows", [[], [-1, -1]])
def test_a_rank_without_rows_still_takes_part_in_the_backward_of_gather(rows):
    calls = []

    class Gathered(torch.autograd.Function):
        @staticmethod
        def forward(ctx, key, value):
            return key.new_ones(1, 2, 4, 8), value.new_ones(1, 2, 4, 8)

        @staticmethod
        def backward(ctx, grad_key, grad_value):
            calls.append((grad_key, grad_value))
            return grad_key[:, :, : len(rows)], grad_value[:, :, : len(rows)]

    given = Given()
    given.start = lambda *local: lambda: Gathered.apply(*local)
    context = attention_context(causal(4), rows=np.array(rows, dtype=np.int64), gather=given)
    out, *grads = with_gradients(attend(context), tensors(len(rows), len(rows)))
    assert out.shape == (1, len(rows), 4, 8)
    assert not out.any()
    assert len(calls) == 1
    assert not any(grad.any() for grad in (*calls[0], *grads))


@pytest.fixture
def sdpa_calls(monkeypatch):
    """(shape of the query, is_causal, has a mask, query is a view of the input's memory) of each call."""
    calls = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def record(query, key, value, attn_mask=None, is_causal=False, **options):
        calls.append((tuple(query.shape), is_causal, attn_mask is not None, query.untyped_storage().data_ptr()))
        return attention(query, key, value, attn_mask=attn_mask, is_causal=is_causal, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    return calls


@pytest.mark.parametrize(
    ("bits", "shapes", "is_causal"),
    [
        (causal(9), [(1, 4, 9, 8)], True),
        (causal(4, 3, 2), [(1, 4, 4, 8), (1, 4, 3, 8), (1, 4, 2, 8)], True),
        (segment_bits([3, 3, 3]), [(3, 4, 3, 8)], False),
        (segment_bits([4, 5]), [(1, 4, 4, 8), (1, 4, 5, 8)], False),
    ],
)
def test_plain_blocks_take_few_calls_without_masks_or_copies(sdpa_calls, bits, shapes, is_causal):
    query, key, value = tensors(9, 9)
    packed_attention(None, query, key, value, attention_context(bits))
    memory = query.untyped_storage().data_ptr()
    assert sdpa_calls == [(shape, is_causal, False, memory) for shape in shapes]


def test_no_tensor_grows_with_the_square_of_the_sequence(monkeypatch):
    """The largest tensor of forward and backward is the limit of a mask, or a gradient of all keys."""
    monkeypatch.setattr(pieces, "MASK_SIZE", 2048)
    sizes = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor))
            return out

    total = 256
    rows = np.arange(1, total, 2)
    inputs = tensors(len(rows), total, heads=1, key_heads=1)
    keys = inputs[1:]
    context = attention_context(causal(total), rows=rows, gather=Given())
    with Record():
        with_gradients(attend(context), [inputs[0], *keys])
    assert max(sizes) == 2048 == total * 8 < total * len(rows)


def test_derived_values_are_worked_out_once(monkeypatch):
    calls = []
    make = pieces.make_pieces
    monkeypatch.setattr("mmtrain.models.attention.context.make_pieces", lambda *a: calls.append(1) or make(*a))
    context = attention_context(causal(6), rows=np.array([1, 3]), gather=Given())
    for _ in range(3):
        with_gradients(attend(context), [torch.randn(1, 2, n, 8) for n in (2, 6, 6)])
    assert calls == [1]
    assert context.device_bits(torch.device("cpu")) is context.device_bits(torch.device("cpu"))


def test_half_precision_adds_up_key_gradients_in_single():
    bits, rows = causal(64), np.arange(1, 64, 2)
    context = attention_context(bits, rows=rows, gather=Given())
    exact = tensors(len(rows), 64)
    inputs = [x.bfloat16() for x in exact]
    ours = with_gradients(attend(context), inputs)
    theirs = with_gradients(lambda q, k, v: dense(q, k, v, bits, rows), [x.double() for x in inputs])
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == torch.bfloat16
        assert ((a - b).abs().max() / b.abs().max()) < 0.01  # measured: 0.0041


@pytest.mark.parametrize("total", [3, 4])
def test_default_scale_is_that_of_the_columns(total):
    inputs = tensors(total, total)
    context = attention_context(causal(total))
    default = packed_attention(None, *inputs, None, context=context)[0]
    named = packed_attention(None, *inputs, context, scaling=8**-0.5)[0]
    assert torch.equal(default, named)


def test_rows_that_cannot_be():
    bits = causal(4)
    with pytest.raises(DataError, match=r"positions 0\.\.4 in a sequence of 4"):
        attention_context(bits, rows=np.array([0, 4]), gather=Given())
    with pytest.raises(DataError, match="2 rows of attention are not the 4 positions of the sequence"):
        attention_context(bits, rows=np.array([0, 1]))
    with pytest.raises(DataError, match="need `gather`"):
        attention_context(bits, rows=np.array([-1, 0, 1, 2, 3]))


def test_flex_does_not_train_on_a_cpu():
    context = attention_context(causal(4), choices=AttentionChoices("flex"))
    with pytest.raises(ConfigError, match=r"training\.attention_backend = 'flex', but the model is on cpu"):
        with_gradients(attend(context), tensors(4, 4))


def test_registered_under_its_name():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    assert ALL_ATTENTION_FUNCTIONS[PACKED] is packed_attention
