"""Attention with FlexAttention, whose kernel skips blocks that the mask empties: for masks on a GPU.

Shape legend: T rows of the whole packed sequence; Q rows of this rank; H query heads; K key heads; E columns.
"""

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

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
from mmtrain.modality.token_split import longest_part, parts_of_rows
from mmtrain.models.transfer import to_device

BLOCK_SIZE = 128
"""Rows and keys of a block of the mask: the size for which the kernels of FlexAttention are tuned."""
LEAST_COLUMNS = 16
"""Fewest columns of a head for which FlexAttention has a GPU kernel."""


class RowBlocks(NamedTuple):
    """The blocks of rows of one rank as FlexAttention computes them: whole, or in parts that are merged.

    Shape legend: R blocks of rows; V of these or of their parts; N parts of the block with most.
    """

    mask: BlockMask
    """The mask of V blocks."""
    block_of: Tensor | None = None
    """[V] the block of each part; None: there are no parts."""
    parts: Tensor | None = None
    """[R, N] the parts of each block; V: it has fewer."""
    with_part: tuple[Tensor, ...] = ()
    """[part, from the second on] -> the blocks that have it."""


def block_attention(query: Tensor, key: Tensor, value: Tensor, blocks: RowBlocks, scale: float) -> Tensor:
    """Attention of this rank's rows to the rows of the sequence that the mask names, [1, Q, H, E].

    Shapes: query [1, H, Q, E]; key and value [1, K, T, E]. Rows that see nothing get 0.
    On a CPU it is slow, needs memory for all scores, and has no backward: it is for tests only.
    """
    attend = _compiled() if query.is_cuda else flex_attention
    grouped = query.shape[1] != key.shape[1]
    if blocks.block_of is None:
        out: Tensor = attend(query, key, value, block_mask=blocks.mask, scale=scale, enable_gqa=grouped)
        return out.transpose(1, 2)
    num_rows = query.shape[2]
    rows = nn.functional.pad(query, (0, 0, 0, -num_rows % BLOCK_SIZE)).unflatten(2, (-1, BLOCK_SIZE))
    out, aux = attend(
        rows.index_select(2, blocks.block_of).flatten(2, 3),
        key,
        value,
        block_mask=blocks.mask,
        scale=scale,
        enable_gqa=grouped,
        return_aux=AuxRequest(lse=True),
    )
    outputs, weights = (x.unflatten(2, (-1, BLOCK_SIZE)) for x in (out, aux.lse))
    merged = merge_parts(outputs, weights, blocks).flatten(2, 3)[:, :, :num_rows]
    return merged.to(query.dtype).transpose(1, 2)


def merge_parts(outputs: Tensor, log_sums: Tensor, blocks: RowBlocks) -> Tensor:
    """Attention of whole blocks of rows from that of their parts, [1, H, R, BLOCK_SIZE, E], at least in float32.

    Args: outputs: [1, H, V, BLOCK_SIZE, E]. log_sums: [1, H, V, BLOCK_SIZE] log of the sum of exponentials of scores.
    Source: Liu and Abbeel, Blockwise parallel transformer, arXiv:2305.19370; Cornstarch, arXiv:2503.11367, section 3.3.
    """
    assert blocks.parts is not None
    nothing = log_sums.new_full((*log_sums.shape[:2], 1, BLOCK_SIZE), -torch.inf)
    logs = torch.cat((log_sums, nothing), dim=2)[:, :, blocks.parts]  # [1, H, R, N, BLOCK_SIZE]
    most = logs.detach().amax(dim=3, keepdim=True)
    weights = (logs - most.where(most.isfinite(), 0)).exp()
    total = weights.sum(dim=3, keepdim=True)
    weights = (weights / total.where(total > 0, 1))[..., None]
    merged = outputs.index_select(2, blocks.parts[:, 0]) * weights[:, :, :, 0]
    for n, of in enumerate(blocks.with_part, 1):  # one part of each block at a time: sums have one order
        part = outputs.index_select(2, blocks.parts[of, n])
        merged = merged.index_add(2, of, part * weights[:, :, of, n])
    return merged


@functools.cache
def _compiled() -> Any:
    # Sizes differ in every microbatch.
    return torch.compile(flex_attention, dynamic=True)


def make_row_blocks(bits: Bits, rows: Bits, device: torch.device, *, most: int = 0, heads: int = 1) -> RowBlocks:
    """The blocks of one rank's rows, and the mask that tells FlexAttention which blocks of pairs to compute.

    Args:
        bits: [T] masks.
        rows: [Q] positions of the rows, -1 for padding.
        most: blocks of keys in one part; blocks of rows that see more are computed in parts. 0: there are no parts; -1:
            by `longest_part`.
        heads: of one call, for `longest_part`.
    """
    any_visible, full = visible_blocks(bits, rows)
    if most < 0:
        units = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        most = longest_part(any_visible.sum(axis=1), heads, units)
    if not most:
        return RowBlocks(_block_mask(bits, rows, any_visible, full, device))
    block_of, low, high = parts_of_rows(any_visible, most)
    columns = np.arange(any_visible.shape[1])
    chosen = (columns >= low[:, None]) & (columns < high[:, None])
    padded = np.append(rows, np.full(-len(rows) % BLOCK_SIZE, -1)).reshape(-1, BLOCK_SIZE)
    limits = np.stack([low, high]).repeat(BLOCK_SIZE, axis=1) * BLOCK_SIZE
    visible = any_visible[block_of] & chosen, full[block_of] & chosen
    mask = _block_mask(bits, padded[block_of].ravel(), *visible, device, limits)
    first = np.searchsorted(block_of, np.arange(len(any_visible) + 1))
    nth = np.arange(np.diff(first).max())
    parts = np.where(nth < np.diff(first)[:, None], first[:-1, None] + nth, len(block_of))
    with_part = tuple(to_device(np.flatnonzero(parts[:, n] < len(block_of)), device) for n in nth[1:])
    return RowBlocks(mask, to_device(block_of, device), to_device(parts, device), with_part)


def _block_mask(
    bits: Bits, rows: Bits, any_visible: np.ndarray, full: np.ndarray, device: torch.device, limits: Bits | None = None
) -> BlockMask:
    """The mask of FlexAttention.

    Args:
        any_visible, full: [blocks of rows, blocks of keys]: those to visit, and those without a mask.
        limits: [2, rows] first key that a row may see here, and the one after the last.
    """
    num_rows, num_keys = (length * BLOCK_SIZE for length in any_visible.shape)
    positions = to_device(np.concatenate([rows, np.full(num_rows - len(rows), -1)]), device)
    # No key has the mask -1, nor the document -1 that it stands for.
    padded_bits = np.append(bits, np.full(num_keys - len(bits) + 1, -1))
    key_bits = to_device(padded_bits[:-1], device)
    row_bits = to_device(np.append(padded_bits[rows], np.full(num_rows - len(rows), -1)), device)

    def mask_mod(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        # Captures only tensors: a captured number would compile a kernel for each of its values.
        q, k, position = row_bits[row], key_bits[column], positions[row]
        group = (k >> GROUP_SHIFT) & OWN_GROUP_MASK
        span = (q >> SPAN_SHIFT) & SPAN_MASK
        visible = (((q >> group) & 1) != 0) & (column <= position)
        visible = visible | (((q >> (group + FULL_SHIFT)) & 1) != 0)
        visible = visible | ((span != 0) & (span == ((k >> SPAN_SHIFT) & SPAN_MASK)))
        return visible & ((q >> DOCUMENT_SHIFT) == (k >> DOCUMENT_SHIFT)) & (position >= 0)

    def within(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return mask_mod(batch, head, row, column) & (column >= low[row]) & (column < high[row])

    if limits is not None:
        low, high = (to_device(limit, device) for limit in limits)

    counts_and_indices = [to_device(x, device) for blocks in (any_visible & ~full, full) for x in _listed(blocks)]
    return BlockMask.from_kv_blocks(
        *counts_and_indices,
        BLOCK_SIZE=BLOCK_SIZE,
        mask_mod=mask_mod if limits is None else within,
        seq_lengths=(len(rows), len(bits)),
    )


def visible_blocks(bits: Bits, rows: Bits) -> tuple[np.ndarray, np.ndarray]:
    """The blocks with some visible pairs, and those with all, [blocks of rows, blocks of keys] bool each.

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
