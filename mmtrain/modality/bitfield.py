"""Attention masks with one 64-bit word for each token, which encodes its visible keys without a T x T tensor. Pure.

Extends the bitfield of Cornstarch (arXiv:2503.11367, section 3.4.2), in which bits select the modalities that a token
attends to and the top bit makes it causal. Packed sequences also need a document, and spans with bidirectional
attention. A token q attends to a token k of the same document if one of these holds:

- k is not later than q, and q's `earlier` bits include the group of k;
- q's `full` bits include the group of k;
- both are in the same span.

Fields of a word, from the lowest bit: 12 bits `earlier` groups, 12 bits `full` groups, 4 bits own group, 16 bits span
(0: none), 19 bits document. "Later" refers to positions in the packed sequence, which the words do not contain: code
that reorders words also has to keep their positions. Every word made here lets its token attend to itself.

Shape legend: T packed tokens of one microbatch.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from mmtrain.errors import DataError
from mmtrain.modality.metadata import DocumentMeta, MicrobatchMeta, sample_name

Bits = npt.NDArray[np.int64]

GROUP_BITS, SPAN_BITS, DOCUMENT_BITS = 12, 16, 19
FULL_SHIFT = GROUP_BITS
GROUP_SHIFT = 2 * GROUP_BITS
SPAN_SHIFT = GROUP_SHIFT + 4
DOCUMENT_SHIFT = SPAN_SHIFT + SPAN_BITS
GROUP_MASK = (1 << GROUP_BITS) - 1
SPAN_MASK = (1 << SPAN_BITS) - 1
OWN_GROUP_MASK = 15

TEXT = 0
"""Group of a language model's tokens of text; those of each encoder are a further one."""

LanguageMask = Literal["causal", "bidirectional", "image_bidirectional", "prefix", "modality"]


def word(document: int, *, group: int = 0, span: int = 0, earlier: int = GROUP_MASK, full: int = 0) -> int:
    """The 64-bit word of one token.

    Args:
        document, group, span: indices; span 0: none.
        earlier, full: sets of groups, bit g for group g.
    Raises: DataError: an index does not fit into its field, or the token would not attend to itself.
    """
    for name, value, limit in (
        ("documents", document, 1 << DOCUMENT_BITS),
        ("spans", span, 1 << SPAN_BITS),
        ("groups", group, GROUP_BITS),
    ):
        if not 0 <= value < limit:
            raise DataError(
                f"an attention mask has room for {limit} {name} in one microbatch, numbered from 0; number {value} "
                "does not fit; use a shorter microbatch"
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
    """[lo, hi) of each span of a document's tokens with bidirectional attention, in order.

    Tokens of one modality, which see each other in `modality`, are no span: text may lie between them.
    Raises: DataError: an image or a prefix does not lie inside of its document, or images overlap.
    """
    if kind == "prefix":
        where = f"{sample_name(document.sample, document.source)}: the tokens before its first answer"
        spans = [(where, 0, document.prefix)] if document.prefix else []
    elif kind == "bidirectional":
        spans = [(document.name, 0, document.num_tokens)]
    elif kind == "image_bidirectional":
        return image_spans(document)
    else:
        spans = []
    return _inside(document, spans)


def image_spans(document: DocumentMeta) -> list[tuple[int, int]]:
    """[lo, hi) of each image's tokens in its document, in order. Raises: DataError: as `two_way_spans`."""
    return _inside(document, [(image.name, image.start, image.start + image.num_tokens) for image in document.images])


def _inside(document: DocumentMeta, spans: list[tuple[str, int, int]]) -> list[tuple[int, int]]:
    """[lo, hi) of spans with names, if they follow each other inside of the document."""
    end = 0
    for where, low, high in spans:
        if low < end or high > document.num_tokens:
            raise DataError(
                f"{where} would be at tokens {low}..{high - 1} of its document; it must lie between {end} and "
                f"{document.num_tokens - 1}, after the image before it"
            )
        end = high
    return [(low, high) for _, low, high in spans]


def extra_pairs(document: DocumentMeta, kind: LanguageMask) -> int:
    """Attended pairs of a document beyond those of causal attention; negative if there are fewer.

    Raises: DataError: as `two_way_spans`.
    """
    if kind == "modality":
        causal = sum((high - low) * (low + high + 1) // 2 for low, high in image_spans(document))
        tokens = Counter[str]()
        for image in document.images:
            tokens[image.module] += image.num_tokens
        return sum(count**2 for count in tokens.values()) - causal
    return sum((high - low) * (high - low - 1) // 2 for low, high in two_way_spans(document, kind))


def language_bits(microbatch: MicrobatchMeta, kind: LanguageMask = "causal") -> Bits:
    """[T] int64: the mask words of one packed microbatch of the language model.

    Args: kind: `causal` inside of each document; `bidirectional` inside of each; `image_bidirectional`: causal, and
        bidirectional inside of each image;
        `prefix`: also bidirectional among the tokens before a document's first answer; `modality`: text is causal, and
        a token of an encoder sees all those of its encoder in its document, and no others.
    Raises: DataError: see `two_way_spans`; or more documents or spans than fit into a word.
    """
    of_documents: list[Bits] = []
    span = 0
    modules = sorted({image.module for document in microbatch.documents for image in document.images})
    groups = {module: number for number, module in enumerate(modules, start=TEXT + 1)}
    for number, document in enumerate(microbatch.documents):
        bits = np.full(document.num_tokens, word(number), dtype=np.int64)
        for image, (low, high) in zip(document.images, image_spans(document), strict=True):
            group = groups[image.module]
            sees = {"earlier": 0, "full": 1 << group} if kind == "modality" else {}
            bits[low:high] = word(number, group=group, **sees)
        for low, high in two_way_spans(document, kind):
            span += 1
            bits[low:high] |= word(0, span=span, earlier=0)
        of_documents.append(bits)
    return np.concatenate(of_documents) if of_documents else np.empty(0, dtype=np.int64)


def prompt_bits(lengths: Iterable[int]) -> Bits:
    """[sum of lengths] int64: the mask words of packed prompts, causal inside of each prompt.

    Args: lengths: tokens of each prompt.
    Raises: DataError: more prompts than fit into a word.
    """
    of_prompts = [np.full(length, word(number), dtype=np.int64) for number, length in enumerate(lengths)]
    return np.concatenate(of_prompts) if of_prompts else np.empty(0, dtype=np.int64)


def segment_bits(lengths: Iterable[int]) -> Bits:
    """[sum of lengths] int64: the mask words of an encoder's packed rows, bidirectional inside of each segment.

    Args: lengths: rows of each segment.
    Raises: DataError: more segments than fit into a word.
    """
    counts = np.fromiter(lengths, dtype=np.int64)
    if len(counts):
        word(len(counts) - 1)
    numbers = np.arange(len(counts), dtype=np.int64) << DOCUMENT_SHIFT
    return np.repeat(numbers | word(0, earlier=0, full=GROUP_MASK), counts)


def allowed(q: Bits, q_position: Bits, k: Bits, k_position: Bits) -> npt.NDArray[np.bool_]:
    """[queries, keys] bool: whether each query attends to each key; the definition, for small blocks and tests.

    Args:
        q, k: [queries], [keys] int64: mask words.
        q_position, k_position: [queries], [keys] int64: their positions in the packed sequence.
    """
    q, q_position = q[:, None], q_position[:, None]
    member = np.int64(1) << ((k >> GROUP_SHIFT) & OWN_GROUP_MASK)
    span = (q >> SPAN_SHIFT) & SPAN_MASK
    visible: npt.NDArray[np.bool_] = ((q & member) != 0) & (k_position <= q_position)
    visible |= ((q >> FULL_SHIFT) & GROUP_MASK & member) != 0
    visible |= (span != 0) & (span == (k >> SPAN_SHIFT) & SPAN_MASK)
    visible &= q >> DOCUMENT_SHIFT == k >> DOCUMENT_SHIFT
    return visible


class VisibleKeys(NamedTuple):
    """The visible keys of each token of a sequence; no token attends to a key outside of [low, high)."""

    low: Bits
    """[T] int64: position of the first visible key, or an earlier one."""
    high: Bits
    """[T] int64: position after the last visible key, or a later one."""
    number: Bits
    """[T] int64: exact number of visible keys; if it is high - low, all of [low, high) are visible."""


def visible_keys(bits: Bits) -> VisibleKeys:
    """Range and number of the visible keys of each token of a whole sequence.

    It counts by runs of equal words; only the last steps process single tokens. Args: bits: [T] int64: mask words.
    """
    start = np.flatnonzero(np.diff(bits, prepend=~bits[:1]))
    runs, lengths = bits[start], np.diff(start, append=len(bits))
    group = (runs >> GROUP_SHIFT) & OWN_GROUP_MASK
    in_span = ((runs >> SPAN_SHIFT) & SPAN_MASK) != 0
    documents = _Buckets(runs >> DOCUMENT_SHIFT, start, lengths)
    spans = _Buckets(runs >> SPAN_SHIFT, start, lengths)
    # A token of a run sees `base` keys, and `slope` more for each token from the run's first token to itself.
    base, slope = np.zeros((2, len(runs)), dtype=np.int64)
    sees_document, sees_later = np.zeros((2, len(runs)), dtype=bool)
    for g in np.unique(group):
        in_group = group == g
        full = (runs >> (FULL_SHIFT + g) & 1) != 0
        earlier = ((runs >> g & 1) != 0) & ~full
        total, num_before = documents.count(in_group)
        base += np.where(full, total, np.where(earlier, num_before, 0))
        slope += earlier & in_group
        sees_document |= (full | earlier) & (total > 0)
        sees_later |= full & (total > 0)
        if in_span.any():  # further keys that a token sees in its span
            total, num_before = spans.count(in_group)
            base += np.where(in_span & ~full, total - np.where(earlier, num_before, 0), 0)
            slope -= in_span & earlier & in_group
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


def block_ranges(bits: Bits, rows: Bits, block_size: int) -> tuple[Bits, Bits, Bits]:
    """Ranges [low, high) of keys whose union, over those of one block, is what its rows see: (block, low, high).

    Exact for every mask, with holes or without. Ranges of one block may overlap.

    Args:
        bits: [T] int64: mask words.
        rows: [Q] int64: positions of the rows, -1 for padding; `block_size` of them are a block.
    """
    low, high, number = visible_keys(bits)
    real = np.flatnonzero(rows >= 0)
    at, block = rows[real], real // block_size
    plain = number[at] == (high - low)[at]
    # Of neighbours of one block whose ranges start at the same key, the longest range contains the others.
    first, of_row = low[at[plain]], block[plain]
    cuts = np.flatnonzero((np.diff(first, prepend=-1) != 0) | (np.diff(of_row, prepend=-1) != 0))
    last = np.maximum.reduceat(high[at[plain]], cuts) if len(cuts) else cuts
    ranges = [(of_row[cuts], first[cuts], last), *_ranges_with_holes(bits, at[~plain], block[~plain])]
    blocks, lows, highs = (np.concatenate(values) for values in zip(*ranges, strict=True))
    some = highs > lows
    return blocks[some], lows[some], highs[some]


def _ranges_with_holes(bits: Bits, at: Bits, block: Bits) -> Iterator[tuple[Bits, Bits, Bits]]:
    """The ranges of `block_ranges` where masks have holes. Args: at, block: [rows]: position and block of each row."""
    start = np.flatnonzero(np.diff(bits, prepend=~bits[:1]))
    runs, end = bits[start], np.append(start[1:], len(bits))
    group = (runs >> GROUP_SHIFT) & OWN_GROUP_MASK
    rules = bits[at] & ~(OWN_GROUP_MASK << GROUP_SHIFT)
    order = np.lexsort((at, block, rules))
    at, block, rules = at[order], block[order], rules[order]
    # Of the rows of one block and rule, the last one sees what the others see.
    is_last = np.append((np.diff(block) != 0) | (np.diff(rules) != 0), True)[: len(at)]
    at, block, rules = at[is_last], block[is_last], rules[is_last]
    for rule in np.unique(rules):
        of_rule = rules == rule
        span = (rule >> SPAN_SHIFT) & SPAN_MASK
        always = (rule >> (FULL_SHIFT + group) & 1 != 0) | ((span != 0) & ((runs >> SPAN_SHIFT) & SPAN_MASK == span))
        earlier = (rule >> group & 1 != 0) & ~always
        seen = np.flatnonzero((always | earlier) & (runs >> DOCUMENT_SHIFT == rule >> DOCUMENT_SHIFT))
        # [blocks, runs]
        until = np.where(earlier[seen], np.minimum(end[seen], at[of_rule, None] + 1), end[seen])
        blocks, lows = np.broadcast_arrays(block[of_rule, None], start[seen])
        yield blocks.ravel(), lows.ravel(), until.ravel()


class _Buckets:
    """Buckets of runs of tokens with equal keys; attributes and results are given for each run.

    Attributes: first, end: [runs]: position of the first token of the run's bucket, and after its last token.
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
        last_run = self._order[self._to - 1]
        self.first, self.end = start[self._order[self._from]], start[last_run] + lengths[last_run]

    def count(self, members: npt.NDArray[np.bool_]) -> tuple[Bits, Bits]:
        """[runs], [runs]: number of tokens of member runs in the run's bucket, and of those in earlier runs."""
        sums = np.concatenate([[0], np.cumsum(np.where(members, self._lengths, 0)[self._order])])
        num_before = sums[self._from]
        return sums[self._to] - num_before, sums[self._rank] - num_before
