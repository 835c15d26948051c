"""Attention piece by piece with scaled-dot-product attention: used on a CPU, and on a GPU if no mask is needed.

Shape legend: T rows of the whole packed sequence; Q rows of this rank; H query heads; K key heads; E columns.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mmtrain.modality.bitfield import (
    DOCUMENT_SHIFT,
    FULL_SHIFT,
    GROUP_MASK,
    GROUP_SHIFT,
    OWN_GROUP_MASK,
    SPAN_MASK,
    SPAN_SHIFT,
)
from mmtrain.models.attention.pieces import Piece


def diagonal_attention(query: Tensor, key: Tensor, value: Tensor, pieces: tuple[Piece, ...], scale: float) -> Tensor:
    """Attention of rows that are the whole sequence, cut into blocks that attend only within themselves, [1, Q, H, E].

    Shapes: query [1, H, Q, E]; key and value [1, K, Q, E]; rows after the last piece are padding, whose output is 0.
    """
    sizes = [piece.rows[1] - piece.rows[0] for piece in pieces]
    padding = query.shape[2] - sum(sizes)
    blocks = zip(*(x.split([*sizes, padding], dim=2) for x in (query, key, value)), strict=True)
    outputs = [_attend(piece, q, k, v, None, scale) for piece, (q, k, v) in zip(pieces, blocks, strict=False)]
    if padding:
        outputs.append(query.new_zeros(1, padding, query.shape[1], value.shape[3]))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def piecewise_attention(
    query: Tensor, key: Tensor, value: Tensor, pieces: tuple[Piece, ...], bits: Tensor, scale: float
) -> Tensor:
    """Attention of this rank's rows to slices of the sequence, [1, Q, H, E].

    Shapes: query [1, H, Q, E]; key and value [1, K, T, E]; bits [T] int64 on their device. Rows in no piece get 0.
    The backward recomputes each piece, so that no mask is kept longer than its piece.
    """
    out: Tensor = _Piecewise.apply(query, key, value, pieces, bits, scale)
    return out


class _Piecewise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pieces: tuple[Piece, ...],
        bits: Tensor,
        scale: float,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, bits)
        ctx.pieces, ctx.scale = pieces, scale
        out = query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
        for piece in pieces:
            q, k, v = piece_slices(piece, query, key, value)
            out[:, slice(*piece.rows)] = _attend(piece, q, k, v, bits, scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, bits = ctx.saved_tensors
        grad_query = torch.zeros_like(query)
        # Many pieces add to one key: in half precision their sum would lose digits.
        dtype = torch.promote_types(key.dtype, torch.float32)
        grad_key, grad_value = torch.zeros_like(key, dtype=dtype), torch.zeros_like(value, dtype=dtype)
        for piece in ctx.pieces:
            rows, keys = slice(*piece.rows), slice(*piece.keys)
            leaves = [x.detach().requires_grad_() for x in piece_slices(piece, query, key, value)]
            with torch.enable_grad():
                out = _attend(piece, leaves[0], leaves[1], leaves[2], bits, ctx.scale)
            grads = torch.autograd.grad(out, leaves, grad[:, rows])
            grad_query[:, :, rows] = grads[0]
            grad_key[:, :, keys] += grads[1]
            grad_value[:, :, keys] += grads[2]
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), None, None, None


def piece_slices(piece: Piece, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The rows and keys of a piece, as views. Shapes: query [1, H, Q, E]; key and value [1, K, T, E]."""
    keys = slice(*piece.keys)
    return query[:, :, slice(*piece.rows)], key[:, :, keys], value[:, :, keys]


def in_parts(piece: Piece, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Rows or keys of a piece, [1, heads, parts x rows, E] each, as views [parts, heads, rows, E]."""
    if piece.parts == 1:
        return tensors
    return tuple(x[0].unflatten(1, (piece.parts, -1)).transpose(0, 1) for x in tensors)


def _attend(piece: Piece, query: Tensor, key: Tensor, value: Tensor, bits: Tensor | None, scale: float) -> Tensor:
    """The output of one piece, [1, rows, H, E], from its own rows and keys."""
    grouped = query.shape[1] != key.shape[1]
    # Only the fused kernels of a CPU and of half precision share key heads without expanding them.
    native = grouped and (query.device.type == "cpu" or query.dtype in (torch.float16, torch.bfloat16))
    if grouped and not native:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    query, key, value = in_parts(piece, query, key, value)
    mask = piece_mask(piece, bits)
    out = nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=piece.is_plain_causal,
        scale=scale,
        enable_gqa=native,
    )
    return out.transpose(1, 2).flatten(0, 1)[None]


def piece_mask(piece: Piece, bits: Tensor | None) -> Tensor | None:
    """Which of its keys each row of a piece sees, [rows, keys]; None: all, or as `is_plain_causal`."""
    if piece.kind == "all" or piece.is_plain_causal:
        return None
    assert bits is not None
    low, high = piece.keys
    positions = torch.arange(low, high, device=bits.device)
    rows = torch.arange(piece.position, piece.position + piece.rows[1] - piece.rows[0], device=bits.device)
    until_itself = positions <= rows[:, None]
    if piece.kind == "causal":
        return until_itself
    k, rule = bits[low:high], piece.bits
    # All rows follow one rule, so that it is enough to look at each key once, and then at the order.
    group = (k >> GROUP_SHIFT) & OWN_GROUP_MASK
    document = k >> DOCUMENT_SHIFT == rule >> DOCUMENT_SHIFT
    member = torch.ones_like(k) << group
    earlier = document & (member & (rule & GROUP_MASK) != 0)
    always = member & (rule >> FULL_SHIFT & GROUP_MASK) != 0
    span = rule >> SPAN_SHIFT & SPAN_MASK
    if span:
        always |= (k >> SPAN_SHIFT) & SPAN_MASK == span
    return (always & document) | (earlier & until_itself)
