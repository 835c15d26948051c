"""Attention masks as one 64-bit word a token: which keys it sees, without any T x T tensor. Pure.

Extends the bitfield of Cornstarch (arXiv:2503.11367, section 3.4.2), whose bits say which modalities a token
attends to and whose top bit makes it causal, by what packed sequences need: a document, and spans inside of
which attention goes both ways. A token q sees a token k of the same document if one of these holds:

- k is not later than q, and q's `earlier` bits name the group of k;
- q's `full` bits name the group of k;
- both are in the same span.

Fields of a word, from the lowest bit: 12 bits `earlier` groups, 12 bits `full` groups, 4 bits own group,
16 bits span (0: none), 19 bits document. "Later" is by place in the packed sequence, which the words do not
hold: whoever reorders them keeps the places beside them. Every word made here lets its token see itself.

Shape legend: T packed tokens of one microbatch.
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from mmtrain.errors import DataError
from mmtrain.modality.metadata import DocumentMeta, MicrobatchMeta

Bits = npt.NDArray[np.int64]

GROUP_BITS, SPAN_BITS, DOCUMENT_BITS = 12, 16, 19
FULL_SHIFT = GROUP_BITS
GROUP_SHIFT = 2 * GROUP_BITS
SPAN_SHIFT = GROUP_SHIFT + 4
DOCUMENT_SHIFT = SPAN_SHIFT + SPAN_BITS
GROUP_MASK = (1 << GROUP_BITS) - 1
SPAN_MASK = (1 << SPAN_BITS) - 1
OWN_GROUP_MASK = 15

TEXT, IMAGE = 0, 1
"""Groups of a language model's tokens."""

LanguageMask = Literal["causal", "image_bidirectional", "prefix"]


def word(document: int, *, group: int = 0, span: int = 0, earlier: int = GROUP_MASK, full: int = 0) -> int:
    """The bits of one token.

    Args: earlier, full: sets of groups, bit g for group g.
    Raises: DataError: a number that has no room in its field, or a token that would not see itself.
    """
    for name, value, limit in (
        ("documents", document, 1 << DOCUMENT_BITS),
        ("spans", span, 1 << SPAN_BITS),
        ("groups", group, GROUP_BITS),
    ):
        if not 0 <= value < limit:
            raise DataError(
                f"an attention mask has room for {limit} {name} in one microbatch, numbered from 0; number {value} "
                "has none; use a shorter microbatch"
            )
    if not (0 <= earlier <= GROUP_MASK and 0 <= full <= GROUP_MASK):
        raise DataError(f"sets of groups: earlier = {earlier:#x}, full = {full:#x}; the largest set is {GROUP_MASK:#x}")
    if not (span or (earlier | full) >> group & 1):
        raise DataError(
            f"a token of group {group} sees the groups earlier = {earlier:#x} and full = {full:#x} and is in no span, "
            "so it does not see itself; name its own group"
        )
    return document << DOCUMENT_SHIFT | span << SPAN_SHIFT | group << GROUP_SHIFT | full << FULL_SHIFT | earlier


def two_way_spans(document: DocumentMeta, kind: LanguageMask) -> list[tuple[int, int]]:
    """[lo, hi) of the tokens of a document among which attention goes both ways, in order.

    Raises: DataError: an image or a prefix that does not lie inside of its document, or images that overlap.
    """
    if kind == "prefix":
        where = f"sample {document.sample}: the tokens before its first answer"
        spans = [(where, 0, document.prefix)] if document.prefix else []
    elif kind == "image_bidirectional":
        spans = [(image.name, image.start, image.start + image.num_tokens) for image in document.images]
    else:
        spans = []
    end = 0
    for where, low, high in spans:
        if low < end or high > document.num_tokens:
            raise DataError(
                f"{where} would be at tokens {low}..{high - 1} of its document; it must lie between {end} and "
                f"{document.num_tokens - 1}, after the image before it"
            )
        end = high
    return [(low, high) for _, low, high in spans]


def language_bits(microbatch: MicrobatchMeta, kind: LanguageMask = "causal") -> Bits:
    """The mask of one packed microbatch of the language model, [T].

    Args: kind: `causal` inside of each document; `image_bidirectional`: also both ways inside of each image;
        `prefix`: also both ways among the tokens before a document's first answer.
    Raises: DataError: as `two_way_spans`; more documents or spans than a word has room for.
    """
    parts: list[Bits] = []
    span = 0
    for number, document in enumerate(microbatch.documents):
        bits = np.full(document.num_tokens, word(number), dtype=np.int64)
        for image in document.images:
            bits[image.start : image.start + image.num_tokens] = word(number, group=IMAGE)
        for low, high in two_way_spans(document, kind):
            span += 1
            bits[low:high] |= word(0, span=span, earlier=0)
        parts.append(bits)
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def prompt_bits(lengths: Iterable[int]) -> Bits:
    """The mask of packed prompts, [sum of lengths]: causal inside of each.

    Raises: DataError: more prompts than a word has room for.
    """
    parts = [np.full(length, word(number), dtype=np.int64) for number, length in enumerate(lengths)]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def segment_bits(lengths: Iterable[int]) -> Bits:
    """The mask of an encoder's packed rows, [sum of lengths]: attention both ways inside of each segment.

    Raises: DataError: more segments than a word has room for.
    """
    counts = np.fromiter(lengths, dtype=np.int64)
    if len(counts):
        word(len(counts) - 1)
    numbers = np.arange(len(counts), dtype=np.int64) << DOCUMENT_SHIFT
    return np.repeat(numbers | word(0, earlier=0, full=GROUP_MASK), counts)


def allowed(q: Bits, q_place: Bits, k: Bits, k_place: Bits) -> npt.NDArray[np.bool_]:
    """Which keys each query sees, [queries, keys]: the definition, for small blocks and tests.

    Args: q, k: words. q_place, k_place: their places in the packed sequence.
    """
    q, q_place = q[:, None], q_place[:, None]
    member = np.int64(1) << ((k >> GROUP_SHIFT) & OWN_GROUP_MASK)
    span = (q >> SPAN_SHIFT) & SPAN_MASK
    seen: npt.NDArray[np.bool_] = ((q & member) != 0) & (k_place <= q_place)
    seen |= ((q >> FULL_SHIFT) & GROUP_MASK & member) != 0
    seen |= (span != 0) & (span == (k >> SPAN_SHIFT) & SPAN_MASK)
    seen &= q >> DOCUMENT_SHIFT == k >> DOCUMENT_SHIFT
    return seen


class VisibleKeys(NamedTuple):
    """For each token of a sequence the keys that it sees; no token sees a key outside of [low, high)."""

    low: Bits
    """[T] int64: place of the first key that it may see."""
    high: Bits
    """[T] int64: after the last key that it may see."""
    number: Bits
    """[T] int64: keys that it sees, exactly; it sees all of [low, high) where this is high - low."""


def visible_keys(bits: Bits) -> VisibleKeys:
    """Range and number of the keys that each token of a whole sequence sees.

    Counts by runs of equal words, so that only the last steps look at single tokens.
    """
    start = np.flatnonzero(np.diff(bits, prepend=~bits[:1]))
    runs, lengths = bits[start], np.diff(start, append=len(bits))
    group = (runs >> GROUP_SHIFT) & OWN_GROUP_MASK
    in_span = ((runs >> SPAN_SHIFT) & SPAN_MASK) != 0
    documents = _Buckets(runs >> DOCUMENT_SHIFT, start, lengths)
    spans = _Buckets(runs >> SPAN_SHIFT, start, lengths)
    # The tokens of a run see `base` keys, and `slope` more for each token from the run's first to themselves.
    base, slope = np.zeros((2, len(runs)), dtype=np.int64)
    sees_document, sees_later = np.zeros((2, len(runs)), dtype=bool)
    for g in np.unique(group):
        own = group == g
        full = (runs >> (FULL_SHIFT + g) & 1) != 0
        earlier = ((runs >> g & 1) != 0) & ~full
        total, before = documents.count(own)
        base += np.where(full, total, np.where(earlier, before, 0))
        slope += earlier & own
        sees_document |= (full | earlier) & (total > 0)
        sees_later |= full & (total > 0)
        if in_span.any():  # what its span shows a token beyond that
            total, before = spans.count(own)
            base += np.where(in_span & ~full, total - np.where(earlier, before, 0), 0)
            slope -= in_span & earlier & own
    low = np.where(sees_document, documents.first, np.where(in_span, spans.first, start))
    high = np.where(sees_later, documents.end, np.where(in_span, spans.end, 0))
    number = np.arange(1, len(bits) + 1)
    until = number.copy()
    number -= np.repeat(start, lengths)
    number *= np.repeat(slope, lengths)
    number += np.repeat(base, lengths)
    return VisibleKeys(
        low=np.repeat(low, lengths), high=np.maximum(np.repeat(high, lengths), until, out=until), number=number
    )


class _Buckets:
    """Runs of tokens with equal keys; each is described from the point of view of each of its runs.

    Attributes: first, end: [runs] place of the bucket's first token, and the one after its last.
    """

    def __init__(self, keys: Bits, start: Bits, lengths: Bits) -> None:
        self._order = np.argsort(keys, kind="stable")
        edges = np.append(np.flatnonzero(np.diff(keys[self._order], prepend=~keys[:1])), len(keys))
        sizes = np.diff(edges)
        self._from, self._to, self._rank = np.empty((3, len(keys)), dtype=np.int64)
        self._from[self._order] = np.repeat(edges[:-1], sizes)
        self._to[self._order] = np.repeat(edges[1:], sizes)
        self._rank[self._order] = np.arange(len(keys))
        self._lengths = lengths
        last = self._order[self._to - 1]
        self.first, self.end = start[self._order[self._from]], start[last] + lengths[last]

    def count(self, members: npt.NDArray[np.bool_]) -> tuple[Bits, Bits]:
        """[runs] tokens of member runs in the run's bucket: all, and those of earlier runs."""
        sums = np.concatenate([[0], np.cumsum(np.where(members, self._lengths, 0)[self._order])])
        before = sums[self._from]
        return sums[self._to] - before, sums[self._rank] - before
