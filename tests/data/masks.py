"""Random packed microbatches and random mask words."""

from typing import Any

import numpy as np
from hypothesis import strategies as st

from mmtrain.modality.bitfield import Bits, word
from mmtrain.modality.metadata import DocumentMeta, ImageMeta, MicrobatchMeta

WITHOUT_HOLES = ("causal", "image_bidirectional", "prefix")
"""Masks in which the keys that a token sees follow each other."""
KINDS = (*WITHOUT_HOLES, "modality")


@st.composite
def microbatches(draw: Any, scale: int = 1) -> MicrobatchMeta:
    """One to four documents of text and images. Args: scale: multiplies the length of every part."""
    documents = []
    for sample in range(draw(st.integers(1, 4))):
        parts = draw(st.lists(st.tuples(st.booleans(), st.integers(1, 6)), min_size=1, max_size=5))
        images: list[ImageMeta] = []
        tokens = 0
        for is_image, length in parts:
            if is_image:
                images.append(
                    ImageMeta(sample=sample, index=len(images), grid=(1, 1, 1), num_tokens=length * scale, start=tokens)
                )
            tokens += length * scale
        documents.append(
            DocumentMeta(
                sample=sample,
                num_tokens=tokens,
                num_targets=0,
                images=tuple(images),
                prefix=draw(st.integers(0, tokens)),
            )
        )
    return MicrobatchMeta(documents=tuple(documents))


def example(scale: int = 1) -> MicrobatchMeta:
    """Three documents of 9, 4 and 7 x scale tokens: with an image inside, without, and with two at its start."""
    documents = []
    for sample, (length, images) in enumerate([(9, [(2, 6)]), (4, []), (7, [(0, 2), (2, 5)])]):
        images = [
            ImageMeta(sample=sample, index=i, grid=(1, 1, 1), num_tokens=(high - low) * scale, start=low * scale)
            for i, (low, high) in enumerate(images)
        ]
        documents.append(
            DocumentMeta(
                sample=sample, num_tokens=length * scale, num_targets=0, images=tuple(images), prefix=3 * scale
            )
        )
    return MicrobatchMeta(documents=tuple(documents))


@st.composite
def words(draw: Any, scale: int = 1) -> Bits:
    """Words of any rules for three groups, in runs, and now and then in no order at all."""
    runs, span = [], 0
    sets = st.integers(0, 7)
    for document in range(draw(st.integers(1, 3))):
        for _ in range(draw(st.integers(1, 4))):
            group, earlier, full = draw(st.integers(0, 2)), draw(sets), draw(sets)
            inside = draw(st.sampled_from([0, span, span + 1]))
            span = max(span, inside)
            if not inside and not (earlier | full) >> group & 1:
                earlier |= 1 << group
            run = word(document, group=group, span=inside, earlier=earlier, full=full)
            runs.append(np.full(draw(st.integers(1, 6)) * scale, run, dtype=np.int64))
    bits = np.concatenate(runs)
    if draw(st.integers(0, 3)) == 0:
        bits = np.random.default_rng(draw(st.integers(0, 99))).permutation(bits)
    return bits
