import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from mmtrain.modality.bitfield import allowed, language_bits, segment_bits
from mmtrain.models.attention.context import attention_context, packed_attention
from mmtrain.models.attention.flex import BLOCK_SIZE, make_block_mask, visible_blocks
from tests.data.masks import KINDS, WITHOUT_HOLES, example, microbatches, words
from tests.examples import examples
from tests.models.attention.masks import SCALE, with_gradients

CPU = torch.device("cpu")
SCALE_OF_LENGTHS = 37
"""Makes random sequences of some blocks whose borders are not those of their parts."""


def dense(bits, rows):
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
    for ours, theirs in zip(visible_blocks(bits, rows), blocks_of(dense(bits, rows)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@settings(max_examples=examples(25), deadline=None)
@given(data=st.data())
def test_visible_blocks_of_any_words_are_exact(data):
    bits = data.draw(words(scale=SCALE_OF_LENGTHS))
    rows = rows_of(data.draw, len(bits))
    some, every = blocks_of(dense(bits, rows))
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
    mask = make_block_mask(bits, rows, CPU)
    seen = create_mask(mask.mask_mod, None, None, len(rows), len(bits), CPU)[0, 0]
    np.testing.assert_array_equal(seen.numpy(), dense(bits, rows))


@pytest.mark.parametrize("scale", [3, 32, 45])
@pytest.mark.parametrize("kind", WITHOUT_HOLES)
def test_the_lists_of_blocks_are_those_that_torch_makes_from_all_pairs(kind, scale):
    bits, total = language_bits(example(scale), kind), 20 * scale
    ours = make_block_mask(bits, np.arange(total), CPU)
    theirs = create_block_mask(ours.mask_mod, None, None, total, total, CPU, BLOCK_SIZE=BLOCK_SIZE)
    assert ours.seq_lengths == theirs.seq_lengths == (total, total)
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    for name in ("kv", "full_kv", "q", "full_q"):
        counts = getattr(ours, f"{name}_num_blocks")
        assert torch.equal(counts, getattr(theirs, f"{name}_num_blocks")), name
        a, b = getattr(ours, f"{name}_indices"), getattr(theirs, f"{name}_indices")
        used = torch.arange(a.shape[-1]) < counts[..., None]  # the rest of a list is never read
        assert torch.equal(a.where(used, 0), b.where(used, 0)), name


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile.*")
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
        context = attention_context(bits, rows=rows, gather=lambda k, v: (k, v), backend=backend)
        with torch.no_grad():
            outputs.append(packed_attention(None, query, key, value, context, scaling=SCALE)[0])
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)


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
        gather = (lambda k, v: (k, v)) if cp else None
        context = attention_context(bits, rows=rows, gather=gather, backend=backend)
        results.append(with_gradients(lambda *x, c=context: packed_attention(None, *x, c, scaling=SCALE)[0], inputs))
    for ours, theirs in zip(*results, strict=True):
        assert ((ours - theirs).abs().max() / theirs.abs().max()) < tolerance
