"""Which tokens of a packed sequence each context-parallel rank takes. Pure.

The keys and values of all tokens are gathered before attention (arXiv:2407.21783, section 3.3.2), so any division
of the queries is correct; it decides only how even the work is.

Shape legend: T packed tokens of one microbatch; cp context-parallel ranks.
"""

import heapq
from typing import Literal

import numpy as np
import numpy.typing as npt

from mmtrain.errors import DataError
from mmtrain.modality.bitfield import Bits, visible_keys

SplitPolicy = Literal["causal", "balanced"]
Indices = npt.NDArray[np.int64]


def split_tokens(bits: Bits, cp: int, policy: SplitPolicy, block_size: int) -> tuple[Indices, ...]:
    """The places that each rank takes, ascending; each place has one rank and each rank at least one place.

    causal: the sequence is cut into 2 cp pieces; rank r takes pieces r and 2 cp - 1 - r, which is even where the
    whole sequence is one causal document.

    balanced: blocks of consecutive tokens, the most work first, each to the rank with the least so far. The work
    of a block is the number of blocks of keys that its tokens see, and where that is equal, of keys. A kernel that
    skips empty blocks spends its time on the former. At 64k tokens in blocks of 128 and cp = 16 no rank has more
    than 1.03 times the mean of blocks and 1.06 times that of pairs; a split by pairs alone reaches 1.00 in pairs but
    1.11 in blocks. With cp = 64, where a rank has 8 blocks, it is 1.12 and 1.12 against 1.07 and 1.35
    (benchmarks/context_split.py).

    Args:
        bits: [T] mask words of the whole sequence.
        block_size: tokens of a block of `balanced`; smaller for short sequences, so that each rank gets two blocks.
    Raises: DataError: fewer tokens than ranks.
    Source: balanced: Cornstarch, arXiv:2503.11367, section 3.3.2, algorithm 1; the order of longest-first: Graham,
        Bounds on multiprocessing timing anomalies, 1969.
    """
    if len(bits) < cp:
        raise DataError(
            f"a microbatch of {len(bits)} tokens cannot be divided over {cp} context-parallel ranks, which take at "
            "least one token each; pack longer microbatches or lower parallelism.context_parallel_degree"
        )
    if policy == "causal":
        size, extra = divmod(len(bits), 2 * cp)
        # Longer pieces last: with fewer tokens than pieces, each rank still gets one of the last cp pieces.
        sizes = np.where(np.arange(2 * cp) < 2 * cp - extra, size, size + 1)
        pieces = np.split(np.arange(len(bits)), np.cumsum(sizes)[:-1])
        return tuple(np.concatenate([pieces[rank], pieces[2 * cp - 1 - rank]]) for rank in range(cp))
    block_size = max(1, min(block_size, len(bits) // (2 * cp)))
    blocks = np.split(np.arange(len(bits)), range(block_size, len(bits), block_size))
    taken = _longest_first(*block_work(bits, block_size), cp)
    return tuple(np.concatenate([blocks[b] for b in sorted(own)]) for own in taken)


def block_work(bits: Bits, block_size: int) -> tuple[Indices, Indices]:
    """For each block of consecutive tokens the blocks of keys and the keys that its tokens see, [blocks] each.

    A block of keys counts if it meets the range of keys of one of the tokens; that is exact for masks that let each
    token see a range without holes, as all masks of `language_bits` and `segment_bits` do.
    """
    low, high, number = visible_keys(bits)
    starts = np.arange(0, len(bits), block_size)
    # Tokens of one block whose ranges start at the same key: the longest of these ranges holds the others.
    cuts = np.union1d(starts, np.flatnonzero(np.diff(low)) + 1)
    low, high = low[cuts], np.maximum.reduceat(high, cuts)
    block = cuts // block_size
    # The union of each block's ranges: in the order of their starts, each adds what lies beyond all before it.
    line = block * (len(starts) + 1)  # puts the ranges of different blocks on different parts of one line
    first, end = line + low // block_size, line + (high - 1) // block_size + 1
    order = np.argsort(first, kind="stable")
    first, end = first[order], end[order]
    reached = np.maximum.accumulate(np.concatenate([[0], end[:-1]]))
    added = np.maximum(end - np.maximum(first, reached), 0)
    return np.add.reduceat(added, np.searchsorted(block, np.arange(len(starts)))), np.add.reduceat(number, starts)


def attended_pairs(bits: Bits, parts: tuple[Indices, ...]) -> Indices:
    """(query, key) pairs of each rank's tokens, [cp]; their imbalance is the largest over the mean."""
    number = visible_keys(bits).number
    return np.array([number[part].sum() for part in parts], dtype=np.int64)


def _longest_first(work: Indices, ties: Indices, parts: int) -> list[list[int]]:
    """Items of each part: the most work first, each to the part with the least. Args: ties: work between equals."""
    heap = [(0, 0, part) for part in range(parts)]
    taken: list[list[int]] = [[] for _ in range(parts)]
    for item in np.lexsort((-ties, -work)).tolist():
        load, tie, part = heap[0]
        taken[part].append(item)
        heapq.heapreplace(heap, (load + int(work[item]), tie + int(ties[item]), part))
    return taken
