"""Attention with FlexAttention, whose kernel skips blocks that the mask empties: for masks on a GPU.

Shape legend: T rows of the whole packed sequence; Q rows of this rank; H query heads; K key heads; E columns.
"""

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from mmtrain.modality.bitfield import (
    DOCUMENT_SHIFT,
    FULL_SHIFT,
    GROUP_SHIFT,
    OWN_GROUP_MASK,
    SPAN_MASK,
    SPAN_SHIFT,
    Bits,
    visible_keys,
)

BLOCK_SIZE = 128
"""Rows and keys of a block of the mask: what the kernels of FlexAttention are tuned for."""
LEAST_COLUMNS = 16
"""Fewest columns of a head for which FlexAttention has a GPU kernel."""


def block_attention(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float) -> Tensor:
    """Attention of this rank's rows to the rows of the sequence that the mask names, [1, Q, H, E].

    Shapes: query [1, H, Q, E]; key and value [1, K, T, E]. Rows that see nothing get 0.
    On a CPU it is slow, needs memory for all scores, and has no backward: there it serves tests alone.
    """
    attend = _compiled() if query.is_cuda else flex_attention
    grouped = query.shape[1] != key.shape[1]
    out: Tensor = attend(query, key, value, block_mask=mask, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2)


@functools.cache
def _compiled() -> Any:
    # Sizes differ in every microbatch.
    return torch.compile(flex_attention, dynamic=True)


def make_block_mask(bits: Bits, rows: Bits, device: torch.device) -> BlockMask:
    """The mask of one rank's rows over the whole sequence, by blocks of BLOCK_SIZE.

    Blocks in which all pairs are visible skip the mask, those in which none is are skipped. A block is also
    visited in vain if it lies inside of the range of keys of one of its rows and the rows see none of it, which
    happens only where a row's keys have holes.

    Args: bits: [T] words. rows: [Q] places of the rows, -1 for padding.
    """
    some, every = visible_blocks(bits, rows)
    some &= ~every
    num_rows, num_keys = (length * BLOCK_SIZE for length in some.shape)
    places = _on(device, np.concatenate([rows, np.full(num_rows - len(rows), -1)]))
    # No key has the word -1, nor the document -1 that it stands for.
    words = np.append(bits, np.full(num_keys - len(bits) + 1, -1))
    key_words = _on(device, words[:-1])
    row_words = _on(device, np.append(words[rows], np.full(num_rows - len(rows), -1)))

    def mask_mod(batch: Tensor, head: Tensor, row: Tensor, place: Tensor) -> Tensor:
        # Captures tensors alone: a captured number would compile a kernel for each of its values.
        q, k, own_place = row_words[row], key_words[place], places[row]
        group = (k >> GROUP_SHIFT) & OWN_GROUP_MASK
        span = (q >> SPAN_SHIFT) & SPAN_MASK
        seen = (((q >> group) & 1) != 0) & (place <= own_place)
        seen = seen | (((q >> (group + FULL_SHIFT)) & 1) != 0)
        seen = seen | ((span != 0) & (span == ((k >> SPAN_SHIFT) & SPAN_MASK)))
        return seen & ((q >> DOCUMENT_SHIFT) == (k >> DOCUMENT_SHIFT)) & (own_place >= 0)

    counts_and_indices = [_on(device, x) for blocks in (some, every) for x in _listed(blocks)]
    return BlockMask.from_kv_blocks(
        *counts_and_indices, BLOCK_SIZE=BLOCK_SIZE, mask_mod=mask_mod, seq_lengths=(len(rows), len(bits))
    )


def visible_blocks(bits: Bits, rows: Bits) -> tuple[np.ndarray, np.ndarray]:
    """Of which blocks of pairs some are visible, and of which every one, [blocks of rows, blocks of keys] bool each.

    Found from the range of keys of each row, in time linear in rows and in blocks of pairs.
    """
    num_row_blocks, num_key_blocks = -(-len(rows) // BLOCK_SIZE), -(-len(bits) // BLOCK_SIZE)
    real = rows >= 0
    low, high, number = (x[rows] for x in visible_keys(bits))
    whole = real & (number == high - low)

    # Some: each row opens its range of blocks at one end and closes it at the other; what is open is visible.
    seeing = np.flatnonzero(real & (number > 0))
    line = seeing // BLOCK_SIZE * (num_key_blocks + 1)
    size = num_row_blocks * (num_key_blocks + 1)
    opened = np.bincount(line + low[seeing] // BLOCK_SIZE, minlength=size)
    closed = np.bincount(line + (high[seeing] - 1) // BLOCK_SIZE + 1, minlength=size)
    some = (opened - closed).reshape(num_row_blocks, num_key_blocks + 1).cumsum(axis=1)[:, :-1] > 0

    # Every: all rows of the block are there, and the least of their ranges holds the block of keys.
    missing = num_row_blocks * BLOCK_SIZE - len(rows)
    starts = np.append(np.where(whole, low, len(bits)), np.full(missing, len(bits))).reshape(-1, BLOCK_SIZE).max(axis=1)
    ends = np.append(np.where(whole, high, 0), np.zeros(missing, np.int64)).reshape(-1, BLOCK_SIZE).min(axis=1)
    edges = np.arange(num_key_blocks + 1) * BLOCK_SIZE
    every = (starts[:, None] <= edges[:-1]) & (edges[1:] <= ends[:, None])
    return some, every


def _listed(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Number and indices of the true columns of each row, the true ones first, [1, 1, R] and [1, 1, R, C] int32."""
    indices = np.argsort(~blocks, axis=1, kind="stable")
    return blocks.sum(axis=1).astype(np.int32)[None, None], indices.astype(np.int32)[None, None]


def _on(device: torch.device, x: np.ndarray) -> Tensor:
    return torch.from_numpy(x).to(device, non_blocking=True)
