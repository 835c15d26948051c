import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from mmtrain.modality.bitfield import FULL_SHIFT, GROUP_MASK, allowed, language_bits, segment_bits
from mmtrain.modality.token_split import longest_part, parts_of_rows
from mmtrain.models.attention.context import AttentionChoices, attention_context, packed_attention
from mmtrain.models.attention.flex import BLOCK_SIZE, block_attention, make_row_blocks, visible_blocks
from tests.data.masks import KINDS, WITHOUT_HOLES, example, microbatches, words
from tests.examples import examples
from tests.models.attention.masks import SCALE, Given, dense, with_gradients

CPU = torch.device("cpu")
SCALE_OF_LENGTHS = 37
"""Makes random sequences of some blocks whose borders are not those of their parts."""


def pairs(bits, rows):
    seen = allowed(bits[rows], rows, bits, np.arange(len(bits)))
    seen[rows < 0] = False
    return seen


def blocks_of(seen):
    """[blocks of rows, blocks of keys]: some pair is visible; every pair of a whole block is."""
    rows, keys = (-(-n // BLOCK_SIZE) for n in seen.shape)
    padded = np.zeros((rows * BLOCK_SIZE, keys * BLOCK_SIZE), bool)
    padded[: len(seen), : seen.shape[1]] = seen
    tiles = padded.reshape(rows, BLOCK_SIZE, keys, BLOCK_SIZE)
    return tiles.any(axis=(1, 3)), tiles.all(axis=(1, 3))


def rows_of(draw, total):
    """All rows in order; or some runs of them with padding at the end."""
    if draw(st.booleans()):
        return np.arange(total)
    runs = np.split(np.arange(total), range(29, total, 29))
    chosen = draw(st.lists(st.booleans(), min_size=len(runs), max_size=len(runs)))
    kept = [run for run, wanted in zip(runs, chosen, strict=True) if wanted]
    return np.concatenate([*kept, np.full(draw(st.integers(1, 3)), -1)]).astype(np.int64)


@pytest.mark.parametrize("kind", WITHOUT_HOLES)
@settings(max_examples=examples(25), deadline=None)
@given(data=st.data())
def test_blocks_of_language_masks_are_exact(kind, data):
    bits = language_bits(data.draw(microbatches(scale=SCALE_OF_LENGTHS)), kind)
    rows = rows_of(data.draw, len(bits))
    for ours, theirs in zip(visible_blocks(bits, rows), blocks_of(pairs(bits, rows)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@settings(max_examples=examples(25), deadline=None)
@given(data=st.data())
def test_visible_blocks_of_any_words_are_exact(data):
    bits = data.draw(words(scale=SCALE_OF_LENGTHS))
    rows = rows_of(data.draw, len(bits))
    some, every = blocks_of(pairs(bits, rows))
    our_some, our_every = visible_blocks(bits, rows)
    np.testing.assert_array_equal(our_some, some)
    assert (~our_every | every).all()


@pytest.mark.parametrize("kind", [*KINDS, "any", "segments"])
@settings(max_examples=examples(10), deadline=None)
@given(data=st.data())
def test_the_mask_of_single_pairs_is_exact(kind, data):
    if kind == "segments":
        bits = segment_bits(data.draw(st.lists(st.integers(1, 200), min_size=1, max_size=5)))
    elif kind == "any":
        bits = data.draw(words(scale=SCALE_OF_LENGTHS))
    else:
        bits = language_bits(data.draw(microbatches(scale=SCALE_OF_LENGTHS)), kind)
    rows = rows_of(data.draw, len(bits))
    mask = make_row_blocks(bits, rows, CPU).mask
    seen = create_mask(mask.mask_mod, None, None, len(rows), len(bits), CPU)[0, 0]
    np.testing.assert_array_equal(seen.numpy(), pairs(bits, rows))


@pytest.mark.parametrize("scale", [3, 32, 45])
@pytest.mark.parametrize("kind", WITHOUT_HOLES)
def test_the_lists_of_blocks_are_those_that_torch_makes_from_all_pairs(kind, scale):
    bits, total = language_bits(example(scale), kind), 20 * scale
    ours = make_row_blocks(bits, np.arange(total), CPU).mask
    theirs = create_block_mask(ours.mask_mod, None, None, total, total, CPU, BLOCK_SIZE=BLOCK_SIZE)
    assert ours.seq_lengths == theirs.seq_lengths == (total, total)
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    for name in ("kv", "full_kv", "q", "full_q"):
        counts = getattr(ours, f"{name}_num_blocks")
        assert torch.equal(counts, getattr(theirs, f"{name}_num_blocks")), name
        a, b = getattr(ours, f"{name}_indices"), getattr(theirs, f"{name}_indices")
        used = torch.arange(a.shape[-1]) < counts[..., None]  # the rest of a list is never read
        assert torch.equal(a.where(used, 0), b.where(used, 0)), name


@pytest.mark.filterwarnings("ignore:.*flex_attention called without", "ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("kind", [*KINDS, "any"])
@settings(max_examples=examples(10), deadline=None)
@given(data=st.data())
def test_both_backends_give_the_same(kind, data):
    """Measured in double precision: 1e-15."""
    bits = data.draw(words()) if kind == "any" else language_bits(data.draw(microbatches()), kind)
    rows = rows_of(data.draw, len(bits))
    key, value = torch.randn(2, 1, 2, len(bits), 16, dtype=torch.float64)
    query = torch.randn(1, 4, len(rows), 16, dtype=torch.float64)
    outputs = []
    for backend in ("sdpa", "flex"):
        context = attention_context(bits, rows=rows, gather=Given(), choices=AttentionChoices(backend))
        with torch.no_grad():
            outputs.append(packed_attention(None, query, key, value, context, scaling=SCALE)[0])
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)


@pytest.fixture
def gradients_on_a_cpu(monkeypatch):
    """torch refuses gradients of FlexAttention on a CPU, where its reference implementation has them."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)


@pytest.mark.filterwarnings("ignore:.*flex_attention called without", "ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("key_heads", "most", "cp"), [(2, 2, False), (1, 1, True)], ids=["whole", "rows of a rank"])
def test_parts_equal_unsplit_attention(kind, key_heads, most, cp, gradients_on_a_cpu):
    """Output and gradients, with rows of padding; measured in double precision: 2e-15."""
    bits = language_bits(example(scale=45), kind)
    rows = np.append(np.arange(1, len(bits), 3), [-1, -1]) if cp else np.arange(len(bits))
    torch.manual_seed(0)
    shapes = (2, len(rows)), (key_heads, len(bits)), (key_heads, len(bits))
    inputs = [torch.randn(1, heads, n, 16, dtype=torch.float64) for heads, n in shapes]
    blocks = make_row_blocks(bits, rows, CPU, most=most)
    assert len(blocks.block_of) > len(blocks.parts), "nothing is cut"
    ours = with_gradients(lambda q, k, v: block_attention(q, k, v, blocks, SCALE), inputs)
    for a, b in zip(ours, with_gradients(lambda q, k, v: dense(q, k, v, bits, rows), inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*flex_attention called without", "ignore:The .grad attribute of a Tensor")
def test_rows_that_see_nothing_get_zeros_from_their_parts(gradients_on_a_cpu):
    """The first 200 of 600 rows have words that name no group."""
    bits = segment_bits([200, 400])
    bits[:200] &= ~(GROUP_MASK << FULL_SHIFT)
    torch.manual_seed(0)
    inputs = [torch.randn(1, 2, 600, 16, dtype=torch.float64) for _ in range(3)]
    blocks = make_row_blocks(bits, np.arange(600), CPU, most=1)
    out, *grads = with_gradients(lambda q, k, v: block_attention(q, k, v, blocks, SCALE), inputs)
    rest = [x[:, :, 200:] for x in inputs]
    theirs = with_gradients(lambda q, k, v: dense(q, k, v, bits[200:], np.arange(400)), rest)
    assert not out[:, :200].any()
    assert not any(grad[:, :, :200].any() for grad in grads)
    torch.testing.assert_close(out[:, 200:].sum(), out.sum(), rtol=1e-12, atol=1e-12)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)[:, 200:]
    leaves = [x.clone().requires_grad_() for x in rest]
    whole = dense(*leaves, bits[200:], np.arange(400))
    for a, b in zip(grads, torch.autograd.grad((whole * weight).sum(), leaves), strict=True):
        torch.testing.assert_close(a[:, :, 200:], b, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(out[:, 200:], theirs[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("most", [1, 2, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_parts_cover_what_is_visible_once_and_evenly(kind, most):
    bits = language_bits(example(scale=150), kind)
    visible, _ = visible_blocks(bits, np.arange(len(bits)))
    block, low, high = parts_of_rows(visible, most)
    columns = np.arange(visible.shape[1])
    parts = visible[block] & (columns >= low[:, None]) & (columns < high[:, None])
    covered = np.zeros_like(visible, dtype=int)
    np.add.at(covered, block, parts)
    np.testing.assert_array_equal(covered, visible)
    assert parts.sum(axis=1).max() == min(most, visible.sum(axis=1).max())
    for of_block in np.unique(block):
        assert np.ptp(parts[block == of_block].sum(axis=1)) <= 1


def test_the_rule_of_parts():
    assert longest_part(np.array([100] * 10), heads=8, units=100) == 8  # the mean is 80
    assert longest_part(np.array([100] * 100), heads=8, units=100) == 80
    assert longest_part(np.array([80] * 100), heads=8, units=80) == 0  # no block is longer than a tenth of the mean
    assert longest_part(np.array([], dtype=int), heads=8, units=80) == 0
    blocks = make_row_blocks(segment_bits([128 * 12]), np.arange(128 * 12), CPU, most=-1)
    assert blocks.block_of is None  # rows see 12 blocks, and 14.4 are a tenth of the one unit's


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-3), (torch.bfloat16, 3e-2)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cp", [False, True], ids=["whole", "rows of a rank"])
def test_both_backends_give_the_same_on_a_gpu(kind, cp, dtype, tolerance):
    """Forward and backward; float32 products may round to TF32."""
    bits = language_bits(example(scale=150), kind)
    rows = np.append(np.arange(1, len(bits), 3), [-1, -1]) if cp else np.arange(len(bits))
    torch.manual_seed(0)
    shapes = (8, len(rows)), (2, len(bits)), (2, len(bits))
    inputs = [torch.randn(1, heads, n, 64, device="cuda", dtype=dtype) for heads, n in shapes]
    results = []
    for backend in ("sdpa", "flex"):
        gather = Given() if cp else None
        context = attention_context(bits, rows=rows, gather=gather, choices=AttentionChoices(backend))
        results.append(with_gradients(lambda *x, c=context: packed_attention(None, *x, c, scaling=SCALE)[0], inputs))
    for ours, theirs in zip(*results, strict=True):
        assert ((ours - theirs).abs().max() / theirs.abs().max()) < tolerance
