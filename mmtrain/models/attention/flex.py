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
    block_ranges,
    visible_keys,
)

BLOCK_SIZE = 128
"""Rows and keys of a block of the mask: the size for which the kernels of FlexAttention are tuned."""
LEAST_COLUMNS = 16
"""Fewest columns of a head for which FlexAttention has a GPU kernel."""


def block_attention(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float) -> Tensor:
    """Attention of this rank's rows to the rows of the sequence that the mask names, [1, Q, H, E].

    Shapes: query [1, H, Q, E]; key and value [1, K, T, E]. Rows that see nothing get 0.
    On a CPU it is slow, needs memory for all scores, and has no backward: it is for tests only.
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

    Args: bits: [T] masks. rows: [Q] positions of the rows, -1 for padding.
    """
    any_visible, full = visible_blocks(bits, rows)
    partial = any_visible & ~full
    num_rows, num_keys = (length * BLOCK_SIZE for length in partial.shape)
    positions = _on(device, np.concatenate([rows, np.full(num_rows - len(rows), -1)]))
    # No key has the mask -1, nor the document -1 that it stands for.
    padded_bits = np.append(bits, np.full(num_keys - len(bits) + 1, -1))
    key_bits = _on(device, padded_bits[:-1])
    row_bits = _on(device, np.append(padded_bits[rows], np.full(num_rows - len(rows), -1)))

    def mask_mod(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        # Captures only tensors: a captured number would compile a kernel for each of its values.
        q, k, position = row_bits[row], key_bits[column], positions[row]
        group = (k >> GROUP_SHIFT) & OWN_GROUP_MASK
        span = (q >> SPAN_SHIFT) & SPAN_MASK
        visible = (((q >> group) & 1) != 0) & (column <= position)
        visible = visible | (((q >> (group + FULL_SHIFT)) & 1) != 0)
        visible = visible | ((span != 0) & (span == ((k >> SPAN_SHIFT) & SPAN_MASK)))
        return visible & ((q >> DOCUMENT_SHIFT) == (k >> DOCUMENT_SHIFT)) & (position >= 0)

    counts_and_indices = [_on(device, x) for blocks in (partial, full) for x in _listed(blocks)]
    return BlockMask.from_kv_blocks(
        *counts_and_indices, BLOCK_SIZE=BLOCK_SIZE, mask_mod=mask_mod, seq_lengths=(len(rows), len(bits))
    )


def visible_blocks(bits: Bits, rows: Bits) -> tuple[np.ndarray, np.ndarray]:
    """Of which blocks of pairs some are visible, and of which every one, [blocks of rows, blocks of keys] bool each.

    The former is exact; of the latter, some count as partly visible where rows with holes in their mask see all keys.
    In time linear in rows and in blocks of pairs.
    """
    num_row_blocks, num_key_blocks = -(-len(rows) // BLOCK_SIZE), -(-len(bits) // BLOCK_SIZE)
    real = rows >= 0
    low, high, number = (x[rows] for x in visible_keys(bits))
    whole = real & (number == high - low)

    # Any: each range opens its blocks at one end and closes them at the other; what is open is visible.
    block, first, last = block_ranges(bits, rows, BLOCK_SIZE)
    line = block * (num_key_blocks + 1)
    size = num_row_blocks * (num_key_blocks + 1)
    opened = np.bincount(line + first // BLOCK_SIZE, minlength=size)
    closed = np.bincount(line + (last - 1) // BLOCK_SIZE + 1, minlength=size)
    any_visible = (opened - closed).reshape(num_row_blocks, num_key_blocks + 1).cumsum(axis=1)[:, :-1] > 0

    # Full: all rows of the block are there, and the least of their ranges holds the block of keys.
    missing = num_row_blocks * BLOCK_SIZE - len(rows)
    starts = np.append(np.where(whole, low, len(bits)), np.full(missing, len(bits))).reshape(-1, BLOCK_SIZE).max(axis=1)
    ends = np.append(np.where(whole, high, 0), np.zeros(missing, np.int64)).reshape(-1, BLOCK_SIZE).min(axis=1)
    edges = np.arange(num_key_blocks + 1) * BLOCK_SIZE
    full = (starts[:, None] <= edges[:-1]) & (edges[1:] <= ends[:, None])
    return any_visible, full


def _listed(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Number and indices of the true columns of each row, the true ones first, [1, 1, R] and [1, 1, R, C] int32."""
    indices = np.argsort(~blocks, axis=1, kind="stable")
    return blocks.sum(axis=1).astype(np.int32)[None, None], indices.astype(np.int32)[None, None]


def _on(device: torch.device, x: np.ndarray) -> Tensor:
    return torch.from_numpy(x).to(device, non_blocking=True)
