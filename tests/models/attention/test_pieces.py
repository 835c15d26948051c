import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.modality.bitfield import GROUP_SHIFT, OWN_GROUP_MASK, allowed, language_bits, segment_bits, word
from mmtrain.modality.metadata import DocumentMeta, ImageMeta, MicrobatchMeta
from mmtrain.models.attention import pieces as module
from mmtrain.models.attention.pieces import find_runs, is_block_diagonal, make_pieces
from tests.data.masks import KINDS, microbatches, words


def pieces_of(bits, rows=None):
    rows = np.arange(len(bits)) if rows is None else np.asarray(rows)
    return [(p.kind, p.rows, p.keys, p.parts) for p in make_pieces(find_runs(bits, rows))]


def causal(*lengths):
    documents = [DocumentMeta(sample=i, num_tokens=n, num_targets=0, images=()) for i, n in enumerate(lengths)]
    return language_bits(MicrobatchMeta(documents=tuple(documents)))


def test_documents_are_one_causal_call_each_and_equal_neighbours_share_one():
    assert pieces_of(causal(5)) == [("causal", (0, 5), (0, 5), 1)]
    assert pieces_of(causal(5, 3, 3, 3, 2)) == [
        ("causal", (0, 5), (0, 5), 1),
        ("causal", (5, 14), (5, 14), 3),
        ("causal", (14, 16), (14, 16), 1),
    ]


def test_images_in_a_causal_document_change_nothing():
    image = ImageMeta(sample=0, index=0, grid=(1, 4, 4), num_tokens=4, start=2)
    document = DocumentMeta(sample=0, num_tokens=9, num_targets=0, images=(image,))
    bits = language_bits(MicrobatchMeta(documents=(document,)))
    assert len(np.unique(bits)) == 2
    assert pieces_of(bits) == [("causal", (0, 9), (0, 9), 1)]


def test_equal_segments_are_one_call_and_unequal_ones_one_each():
    assert pieces_of(segment_bits([4, 4, 4])) == [("all", (0, 12), (0, 12), 3)]
    assert pieces_of(segment_bits([4, 6, 6])) == [("all", (0, 4), (0, 4), 1), ("all", (4, 16), (4, 16), 2)]
    assert is_block_diagonal(find_runs(segment_bits([4, 6, 6]), np.arange(16)))


def test_two_ways_inside_of_images():
    image = ImageMeta(sample=0, index=0, grid=(1, 4, 4), num_tokens=4, start=2)
    document = DocumentMeta(sample=0, num_tokens=9, num_targets=0, images=(image,))
    bits = language_bits(MicrobatchMeta(documents=(document,)), "image_bidirectional")
    assert pieces_of(bits) == [
        ("causal", (0, 2), (0, 2), 1),
        ("all", (2, 6), (0, 6), 1),
        ("causal", (6, 9), (0, 9), 1),
    ]
    assert not is_block_diagonal(find_runs(bits, np.arange(9)))
    # A rank with the end of the image and the text after it; padding is in no piece.
    assert pieces_of(bits, [-1, 4, 5, 6, 8, -1]) == [
        ("all", (1, 3), (0, 6), 1),
        ("all", (3, 4), (0, 7), 1),
        ("all", (4, 5), (0, 9), 1),
    ]


def test_masks_are_cut_to_their_limit(monkeypatch):
    monkeypatch.setattr(module, "MASK_SIZE", 24)
    # Rows 4..9 of one causal document of 10: each mask ends with its last row.
    assert pieces_of(causal(10), np.arange(4, 10)) == [
        ("causal", (0, 2), (0, 6), 1),
        ("causal", (2, 4), (0, 8), 1),
        ("causal", (4, 6), (0, 10), 1),
    ]
    assert [p[1] for p in pieces_of(causal(40), np.arange(38, 40))] == [(0, 1), (1, 2)]


def test_keys_with_holes_take_a_mask():
    bits = np.array([word(0, group=0, earlier=1), word(0, group=1, earlier=2), word(0, group=0, earlier=1)])
    assert pieces_of(bits) == [("all", (0, 1), (0, 1), 1), ("mask", (1, 2), (0, 2), 1), ("mask", (2, 3), (0, 3), 1)]


@pytest.mark.parametrize("kind", [*KINDS, "any"])
@given(data=st.data())
def test_pieces_cover_each_real_row_once_and_no_key_outside_of_them_is_seen(kind, data):
    bits = data.draw(words()) if kind == "any" else language_bits(data.draw(microbatches()), kind)
    chosen = data.draw(st.lists(st.booleans(), min_size=len(bits), max_size=len(bits)))
    rows = np.append(np.flatnonzero(chosen), [-1, -1])
    made = make_pieces(find_runs(bits, rows))
    covered = [row for piece in made for row in range(*piece.rows)]
    assert covered == list(range(len(rows) - 2))
    places = np.arange(len(bits))
    for piece in made:
        own = rows[slice(*piece.rows)]
        assert own[0] == piece.position
        assert (np.diff(own) == 1).all()
        seen = allowed(bits[own], own, bits, places)
        inside = seen[:, slice(*piece.keys)]
        assert inside.sum() == seen.sum()
        if piece.parts > 1:
            block = np.arange(len(own)) // (len(own) // piece.parts)
            same = block[:, None] == block
            expected = same if piece.kind == "all" else np.tril(same)
        elif piece.kind == "causal":
            expected = np.tril(np.ones_like(inside), piece.position - piece.keys[0])
        else:
            expected = np.ones_like(inside)
        if piece.kind == "mask":
            assert len(np.unique(bits[own] & ~(OWN_GROUP_MASK << GROUP_SHIFT))) == 1
        else:
            np.testing.assert_array_equal(inside, expected)
