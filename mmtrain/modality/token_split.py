"""The division of the tokens of a packed sequence over context-parallel ranks. Pure.

The keys and values of all tokens are gathered before attention (arXiv:2407.21783, section 3.3.2), so any division of
the queries is correct; it only affects the balance of work.

Shape legend: T packed tokens of one microbatch; cp context-parallel ranks.
"""

import heapq
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from mmtrain.errors import DataError
from mmtrain.modality.bitfield import Bits, block_ranges, visible_keys

SplitPolicy = Literal["causal", "balanced"]
Indices = npt.NDArray[np.int64]


def split_tokens(bits: Bits, cp: int, policy: SplitPolicy, block_size: int) -> tuple[Indices, ...]:
    """[cp rank] -> int64 positions of its tokens, ascending, at least one; each position belongs to one rank.

    causal: the sequence is cut into 2 cp pieces; rank r gets pieces r and 2 cp - 1 - r, which is balanced if the whole
    sequence is one causal document.

    balanced: blocks of consecutive tokens are assigned in the order of descending work, each to the least loaded rank.
    The work of a block is the number of blocks of keys that its tokens see; ties are broken by the number of keys. The
    time of a kernel that skips empty blocks is proportional to the former. At 64k tokens in blocks of 128 and cp = 16
    no rank has more than 1.03 times the mean of blocks and 1.06 times that of pairs; a split by pairs alone reaches
    1.00 in pairs but 1.11 in blocks. With cp = 64, where a rank has 8 blocks, it is 1.12 and 1.12 against 1.07 and 1.35
    (benchmarks/context_split.py).

    Args:
        bits: [T] int64: mask words of the whole sequence.
        cp: number of context-parallel ranks.
        block_size: tokens of a block of `balanced`; smaller for short sequences, so that each rank gets two blocks.
    Raises: DataError: there are fewer tokens than ranks.
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
    num_blocks, num_keys = block_work(bits, block_size)
    return tuple(np.concatenate([blocks[b] for b in of_rank]) for of_rank in longest_first(num_blocks, cp, num_keys))


def block_work(bits: Bits, block_size: int) -> tuple[Indices, Indices]:
    """[blocks], [blocks]: for each block of consecutive tokens, the numbers of visible blocks of keys and of keys.

    Args: bits: [T] int64: mask words of the whole sequence. block_size: tokens of a block.
    """
    starts = np.arange(0, len(bits), block_size)
    block, low, high = block_ranges(bits, np.arange(len(bits)), block_size)
    # The union of each block's ranges: in the order of their starts, each adds the part after all earlier ones.
    line = block * (len(starts) + 1)  # offsets that separate the ranges of different blocks
    start, end = line + low // block_size, line + (high - 1) // block_size + 1
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    reached = np.maximum.accumulate(np.concatenate([[0], end[:-1]]))
    added = np.maximum(end - np.maximum(start, reached), 0)
    visible = np.bincount(block[order], weights=added, minlength=len(starts)).astype(np.int64)
    return visible, np.add.reduceat(visible_keys(bits).number, starts)


LEAST_PART = 8
"""Fewest blocks of keys of a part for `longest_part`: what a part reads of its queries and writes is a small part of
its products."""
_PART_SHARE = 0.1


def longest_part(num_blocks: Indices, heads: int, units: int) -> int:
    """Most blocks of keys in one part of a block of rows, so that no unit of a device works long after the others.

    A unit (a multiprocessor of a GPU) computes one block of rows of one head at a time. Where units take them as they
    become free, the last one ends at most one block's work after the mean, so parts are at most a tenth of the mean. 0:
    no block is longer.
    Args: num_blocks: [blocks of rows] that each one sees. heads: of one call. units: that compute at a time.
    Source: balance inside of a GPU, Cornstarch, arXiv:2503.11367, section 3.3.2; it finds 16 to 32 parts good at 64k.
    """
    most = max(LEAST_PART, int(num_blocks.sum() * heads / units * _PART_SHARE))
    return most if num_blocks.max(initial=0) > most else 0


def parts_of_rows(visible: npt.NDArray[np.bool_], most: int) -> tuple[Indices, Indices, Indices]:
    """The visible blocks of keys of each block of rows in parts: block of rows, low and high, [parts] each.

    A part has those in [low, high): at most `most`, and as many as the other parts of its block, give or take one. A
    block that sees nothing has one part.
    Args: visible: [blocks of rows, blocks of keys].
    """
    number = visible.sum(axis=1)
    parts = np.maximum(1, -(-number // most))
    block = np.repeat(np.arange(len(visible)), parts)
    nth = np.arange(len(block)) - np.repeat(np.cumsum(parts) - parts, parts)
    # The visible columns of all blocks, one after the other; a part is a run of them.
    columns = np.append(np.nonzero(visible)[1], 0)
    before = np.repeat(np.cumsum(number) - number, parts)
    low = before + nth * number[block] // parts[block]
    high = before + (nth + 1) * number[block] // parts[block]
    return block, columns[low], np.where(high > low, columns[high - 1] + 1, columns[low])


def longest_first(weights: Sequence[int] | Indices, parts: int, ties: Indices | None = None) -> list[tuple[int, ...]]:
    """[part] -> its items, ascending, possibly none: in the order of descending weight, each to the least loaded part.

    Args: weights: [items]. ties: [items] second weights, which break ties between items and between parts.
    Source: Graham, Bounds on multiprocessing timing anomalies, 1969.
    """
    work = np.asarray(weights, dtype=np.int64)
    second = np.zeros_like(work) if ties is None else ties
    heap = [(0, 0, part) for part in range(parts)]
    items: list[list[int]] = [[] for _ in range(parts)]
    for item in np.lexsort((-second, -work)).tolist():
        load, tie, part = heap[0]
        items[part].append(item)
        heapq.heapreplace(heap, (load + int(work[item]), tie + int(second[item]), part))
    return [tuple(sorted(of_part)) for of_part in items]
