import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from benchmarks import context_split
from mmtrain.errors import DataError
from mmtrain.modality.bitfield import allowed, language_bits, segment_bits, visible_keys
from mmtrain.modality.metadata import DocumentMeta, MicrobatchMeta
from mmtrain.modality.token_split import block_work, longest_first, split_tokens
from tests.data.masks import KINDS, example, microbatches, words
from tests.examples import examples


def causal(*lengths):
    documents = [DocumentMeta(sample=i, num_tokens=n, num_targets=0, images=()) for i, n in enumerate(lengths)]
    return language_bits(MicrobatchMeta(documents=tuple(documents)))


def dense(bits):
    places = np.arange(len(bits))
    return allowed(bits, places, bits, places)


@pytest.mark.parametrize("policy", ["causal", "balanced"])
@given(bits=words(scale=3), data=st.data())
def test_each_place_has_one_rank_and_each_rank_a_place(policy, bits, data):
    cp, block_size = data.draw(st.integers(1, min(len(bits), 9))), data.draw(st.integers(1, 16))
    parts = split_tokens(bits, cp, policy, block_size)
    assert len(parts) == cp
    for part in parts:
        assert part.dtype == np.int64
        assert len(part) > 0
        assert (np.diff(part) > 0).all()
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(bits)))
    for first, second in zip(parts, split_tokens(bits, cp, policy, block_size), strict=True):
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("policy", ["causal", "balanced"])
def test_each_rank_has_a_place_of_the_shortest_sequences(policy):
    for cp in range(1, 12):
        for total in range(cp, 3 * cp):
            parts = split_tokens(causal(total), cp, policy, 128)
            assert min(len(part) for part in parts) > 0
            assert sum(len(part) for part in parts) == total


def test_mirrored_pieces():
    assert [part.tolist() for part in split_tokens(causal(8), 2, "causal", 128)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [part.tolist() for part in split_tokens(causal(5), 2, "causal", 128)] == [[0, 3, 4], [1, 2]]
    assert context_split.attended_pairs(causal(64), split_tokens(causal(64), 4, "causal", 128)).tolist() == [520] * 4


def test_balanced_takes_the_longest_block_first():
    # Blocks of 2 tokens see 1, 2, 3, 4 blocks of keys.
    assert [part.tolist() for part in split_tokens(causal(8), 2, "balanced", 2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    # Equal blocks: in their order, to the ranks in their order.
    assert [p.tolist() for p in split_tokens(segment_bits([2, 2, 2, 2]), 2, "balanced", 2)] == [
        [0, 1, 4, 5],
        [2, 3, 6, 7],
    ]
    # The long document's end costs most, the short documents go to the other rank.
    parts = split_tokens(causal(8, 2, 2, 2, 2), 2, "balanced", 2)
    assert block_work(causal(8, 2, 2, 2, 2), 2)[0].tolist() == [1, 2, 3, 4, 1, 1, 1, 1]
    assert [block_work(causal(8, 2, 2, 2, 2), 2)[0][np.unique(part // 2)].sum() for part in parts] == [7, 7]


def test_short_sequences_get_two_blocks_a_rank():
    assert [part.tolist() for part in split_tokens(causal(12), 3, "balanced", 128)] == [
        [0, 1, 10, 11],
        [2, 3, 8, 9],
        [4, 5, 6, 7],
    ]


@pytest.mark.parametrize("kind", [*KINDS, "any"])
@given(data=st.data())
def test_work_of_blocks(kind, data):
    bits = data.draw(words(scale=2)) if kind == "any" else language_bits(data.draw(microbatches(scale=2)), kind)
    size = data.draw(st.integers(1, 9))
    seen, count = dense(bits), -(-len(bits) // size)
    padded = np.zeros((count * size, count * size), dtype=np.int64)
    padded[: len(bits), : len(bits)] = seen
    tiles = padded.reshape(count, size, count, size).sum(axis=(1, 3))
    blocks, keys = block_work(bits, size)
    np.testing.assert_array_equal(keys, tiles.sum(axis=1))
    np.testing.assert_array_equal(blocks, (tiles > 0).sum(axis=1))


@given(bits=words(), data=st.data())
def test_pairs_of_ranks_add_up(bits, data):
    parts = split_tokens(bits, data.draw(st.integers(1, len(bits))), "balanced", 4)
    pairs = context_split.attended_pairs(bits, parts)
    np.testing.assert_array_equal(pairs, [dense(bits)[part].sum() for part in parts])
    assert pairs.sum() == visible_keys(bits).number.sum()


@pytest.mark.parametrize("kind", KINDS)
@given(microbatch=microbatches(scale=8), cp=st.integers(2, 4))
def test_no_rank_has_more_than_its_share_and_one_block(kind, microbatch, cp):
    """Graham's bound for longest-first lists, on the work that is balanced."""
    bits, size = language_bits(microbatch, kind), 4
    size = max(1, min(size, len(bits) // (2 * cp)))
    blocks, _ = block_work(bits, size)
    loads = [blocks[np.unique(part // size)].sum() for part in split_tokens(bits, cp, "balanced", size)]
    assert max(loads) <= blocks.sum() / cp + blocks.max() * (1 - 1 / cp)


def test_balanced_is_more_even_than_mirrored_pieces_where_documents_are_packed():
    bits = language_bits(example(scale=64), "image_bidirectional")
    spread = {}
    for policy in ("causal", "balanced"):
        pairs = context_split.attended_pairs(bits, split_tokens(bits, 4, policy, 32))
        spread[policy] = pairs.max() / pairs.mean()
    assert spread["balanced"] < 1.05 < 1.2 < spread["causal"]


@pytest.mark.parametrize("policy", ["causal", "balanced"])
def test_fewer_tokens_than_ranks(policy):
    with pytest.raises(DataError, match="a microbatch of 3 tokens cannot be divided over 4 context-parallel ranks"):
        split_tokens(causal(3), 4, policy, 128)


@pytest.mark.parametrize("kind", context_split.FIGURE)
@pytest.mark.parametrize("total", [2**14, 2**15, 2**16])
def test_longest_first_is_close_to_its_lower_bound(total, kind):
    """Within 3 % of the mean and of the largest block, for the masks of Cornstarch's figure 3.5."""
    bits = language_bits(context_split.of_figure(total, kind, seed=0), "modality")
    blocks, _ = block_work(bits, 128)
    for cp in (2, 4, 8, 16):
        loads = [blocks[np.unique(part // 128)].sum() for part in split_tokens(bits, cp, "balanced", 128)]
        assert max(loads) <= 1.03 * max(blocks.sum() / cp, blocks.max())


@given(weights=st.lists(st.integers(1, 40), min_size=3, max_size=9), parts=st.integers(2, 3))
@settings(max_examples=examples(15), deadline=None)
def test_longest_first_against_the_optimum(weights, parts):
    """The integer program of Cornstarch's equation 3.4; Graham's bound of 1969 holds, and is reached at times."""
    least = integer_program(weights, parts)
    loads = [sum(weights[i] for i in items) for items in longest_first(weights, parts)]
    assert max(sum(weights) / parts, max(weights)) <= least <= max(loads) <= (4 / 3 - 1 / (3 * parts)) * least + 1e-9


def integer_program(weights, parts):
    """The least possible load of the most loaded part."""
    count = len(weights)
    cost = np.append(np.zeros(count * parts), 1.0)
    once = np.hstack([np.kron(np.eye(count), np.ones(parts)), np.zeros((count, 1))])
    load = np.hstack([np.kron(np.array(weights, dtype=float), np.eye(parts)), -np.ones((parts, 1))])
    solution = milp(
        cost,
        constraints=[LinearConstraint(once, 1, 1), LinearConstraint(load, -np.inf, 0)],
        integrality=np.append(np.ones(count * parts), 0),
        bounds=Bounds(0, np.append(np.ones(count * parts), np.inf)),
    )
    return round(solution.fun)
