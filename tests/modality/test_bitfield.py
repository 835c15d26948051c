import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.errors import DataError
from mmtrain.modality.bitfield import (
    GROUP_BITS,
    allowed,
    language_bits,
    segment_bits,
    two_way_spans,
    visible_keys,
    word,
)
from mmtrain.modality.metadata import DocumentMeta, ImageMeta, MicrobatchMeta
from tests.data.masks import KINDS, WITHOUT_HOLES, microbatches, words


def dense(bits):
    places = np.arange(len(bits))
    return allowed(bits, places, bits, places)


def naive(microbatch, kind):
    """The mask by its definition, a pair at a time."""
    tokens = []  # (document, place in it, image)
    for number, document in enumerate(microbatch.documents):
        for place in range(document.num_tokens):
            inside = [i for i, image in enumerate(document.images) if 0 <= place - image.start < image.num_tokens]
            tokens.append((number, place, inside[0] if inside else None))
    seen = np.zeros((len(tokens), len(tokens)), bool)
    for q, (document, place, image) in enumerate(tokens):
        prefix = microbatch.documents[document].prefix
        for k, (other, key_place, key_image) in enumerate(tokens):
            visible = key_place <= place
            if kind == "image_bidirectional":
                visible |= image is not None and image == key_image
            elif kind == "prefix":
                visible |= place < prefix and key_place < prefix
            elif kind == "modality" and image is not None:
                visible = key_image is not None
            seen[q, k] = document == other and visible
    return seen


@pytest.mark.parametrize("kind", KINDS)
@given(microbatch=microbatches())
def test_language_masks_equal_their_definition(kind, microbatch):
    bits = language_bits(microbatch, kind)
    assert bits.dtype == np.int64
    np.testing.assert_array_equal(dense(bits), naive(microbatch, kind))


@given(lengths=st.lists(st.integers(1, 5), max_size=5))
def test_segments_see_themselves_alone(lengths):
    segment = np.repeat(np.arange(len(lengths)), lengths)
    np.testing.assert_array_equal(dense(segment_bits(lengths)), segment[:, None] == segment)


@given(bits=words())
def test_visible_keys_hold_what_is_allowed(bits):
    seen = dense(bits)
    assert seen.diagonal().all()
    low, high, number = visible_keys(bits)
    np.testing.assert_array_equal(number, seen.sum(axis=1))
    for q, (start, end) in enumerate(zip(low, high, strict=True)):
        assert not seen[q, :start].any()
        assert not seen[q, end:].any()
    assert number.sum() == seen.sum()


def test_tokens_of_an_encoder_see_all_its_tokens_of_their_document_and_no_text():
    images = [ImageMeta(sample=0, index=i, grid=(1, 1, 1), num_tokens=1, start=start) for i, start in enumerate((1, 3))]
    one = DocumentMeta(sample=0, num_tokens=5, num_targets=0, images=tuple(images))
    bits = language_bits(MicrobatchMeta(documents=(one,)), "modality")
    seen = ["".join(".x"[int(cell)] for cell in row) for row in dense(bits)]
    assert seen == ["x....", ".x.x.", "xxx..", ".x.x.", "xxxxx"]


@pytest.mark.parametrize("kind", WITHOUT_HOLES)
@given(microbatch=microbatches())
def test_language_masks_have_no_holes(kind, microbatch):
    """Ranges without holes are what fast kernels and the split over ranks work on."""
    low, high, number = visible_keys(language_bits(microbatch, kind))
    np.testing.assert_array_equal(number, high - low)


def test_nothing_at_all():
    assert len(language_bits(MicrobatchMeta(documents=()))) == len(segment_bits([])) == 0


def test_a_long_sequence_is_counted_without_a_square():
    assert visible_keys(segment_bits([1 << 20])).number.sum() == 1 << 40


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"document": 1 << 19}, "room for 524288 documents .* number 524288 does not fit"),
        ({"span": 1 << 16}, "room for 65536 spans"),
        ({"group": GROUP_BITS, "full": 0xFFF}, "room for 12 groups"),
        ({"earlier": 1 << 12}, "earlier = 0x1000"),
        ({"group": 1, "earlier": 1}, "a token of group 1 sees .* earlier = 0x1 .* does not see itself"),
    ],
)
def test_words_that_cannot_be(fields, message):
    with pytest.raises(DataError, match=message):
        word(**{"document": 0, **fields})


def test_the_last_numbers_have_room():
    bits = np.array([word((1 << 19) - 1, span=(1 << 16) - 1), word(0)])
    assert (bits >= 0).all()
    np.testing.assert_array_equal(dense(bits), np.eye(2, dtype=bool))


def test_too_many_segments():
    with pytest.raises(DataError, match="room for 524288 documents"):
        segment_bits([1] * ((1 << 19) + 1))


def document(*starts, prefix=0):
    images = [ImageMeta(sample=7, index=i, grid=(1, 2, 4), num_tokens=4, start=s) for i, s in enumerate(starts)]
    return DocumentMeta(sample=7, num_tokens=10, num_targets=0, images=tuple(images), prefix=prefix)


def test_spans_by_kind():
    assert two_way_spans(document(1, 5, prefix=6), "causal") == []
    assert two_way_spans(document(1, 5, prefix=6), "image_bidirectional") == [(1, 5), (5, 9)]
    assert two_way_spans(document(1, 5, prefix=6), "prefix") == [(0, 6)]
    assert two_way_spans(document(1, 5), "prefix") == []


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [
        (document(2, 5), "image_bidirectional", "image 1 of sample 7 would be at tokens 5..8 .* between 6 and 9"),
        (document(7), "image_bidirectional", "image 0 of sample 7 would be at tokens 7..10"),
        (document(prefix=11), "prefix", "sample 7: the tokens before its first answer would be at tokens 0..10"),
    ],
)
def test_spans_outside_of_their_document(wrong, kind, message):
    with pytest.raises(DataError, match=message):
        two_way_spans(wrong, kind)
