"""Attention piece by piece as one operator, for compiled blocks on a CPU: one call in a graph for any number of pieces.

It computes what `blockwise` computes, by the kernel that scaled-dot-product attention has on a CPU, and keeps the
logarithms of the sums of exponentials as that does. Which pieces is in a tensor, so that blocks which were compiled for
one batch run with any other.

Shape legend: T rows of the whole packed sequence, all on this rank; Q = T and rows of padding behind them; H query
heads; K key heads; E columns; P pieces.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmtrain.models.attention.blockwise import in_parts, piece_mask, piece_slices
from mmtrain.models.attention.pieces import KINDS, Piece

_ATEN = torch.ops.aten


class PieceTensors(NamedTuple):
    """What attention needs to know of a mask, as tensors."""

    pieces: Tensor
    """[8 P] int64 on the CPU, of at least one piece: the numbers of each."""
    bits: Tensor
    """[T] int64 on the device."""


def operands_of(pieces: tuple[Piece, ...], bits: Tensor) -> PieceTensors:
    """The pieces of a mask as tensors. Args: bits: [T] of the sequence, on the device."""
    numbers = [
        number
        for piece in pieces
        for number in (*piece.rows, *piece.keys, KINDS.index(piece.kind), piece.parts, piece.position, piece.bits)
    ]
    return PieceTensors(torch.tensor(numbers, dtype=torch.int64), bits)


def _pieces_of(numbers: Tensor) -> list[Piece]:
    return [
        Piece(rows=(a, b), keys=(c, d), kind=KINDS[kind], parts=parts, position=position, bits=bits)
        for a, b, c, d, kind, parts, position, bits in numbers.view(-1, 8).tolist()
    ]


def attention_in_pieces(query: Tensor, key: Tensor, value: Tensor, operands: PieceTensors, scale: float) -> Tensor:
    """Attention of this rank's rows to slices of the sequence, [1, Q, H, E].

    Shapes: query [1, H, Q, E]; key and value [1, K, Q, E]. Rows in no piece get 0.
    """
    out: Tensor = _attend(query, key, value, *operands, scale)[0]
    return out


@torch.library.custom_op("mmtrain::attention", mutates_args=())
def _attend(
    query: Tensor, key: Tensor, value: Tensor, pieces: Tensor, bits: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """The output [1, Q, H, E], and log sums [Q, H] at least in float32."""
    _, heads, rows, columns = query.shape
    out = query.new_zeros(1, rows, heads, columns)
    log_sums = query.new_zeros(rows, heads, dtype=torch.promote_types(query.dtype, torch.float32))
    for piece in _pieces_of(pieces):
        q, k, v = in_parts(piece, *piece_slices(piece, query, key, value))
        o, log_sum = _ATEN._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, piece.is_plain_causal, attn_mask=_additive(piece, bits, q), scale=scale
        )
        out[0, slice(*piece.rows)] = o.transpose(1, 2).flatten(0, 1)
        log_sums[slice(*piece.rows)] = log_sum.transpose(1, 2).flatten(0, 1)
    return out, log_sums


@_attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, pieces: Tensor, bits: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    _, heads, rows, columns = query.shape
    dtype = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty(1, rows, heads, columns), query.new_empty(rows, heads, dtype=dtype)


@torch.library.custom_op("mmtrain::attention_backward", mutates_args=())
def _attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sums: Tensor,
    pieces: Tensor,
    bits: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value."""
    grad_query = torch.zeros_like(query, memory_format=torch.contiguous_format)
    # Many pieces may add to one key: in half precision their sum would lose digits.
    dtype = torch.promote_types(key.dtype, torch.float32)
    grad_key, grad_value = (x.new_zeros(x.shape, dtype=dtype) for x in (key, value))
    for piece in _pieces_of(pieces):
        q, k, v = in_parts(piece, *piece_slices(piece, query, key, value))
        rows = slice(*piece.rows)
        g, o = (x[0, rows].unflatten(0, (piece.parts, -1)).transpose(1, 2) for x in (grad, out))
        log_sum = log_sums[rows].unflatten(0, (piece.parts, -1)).transpose(1, 2)
        grads = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
            g, q, k, v, o, log_sum, 0.0, piece.is_plain_causal, attn_mask=_additive(piece, bits, q), scale=scale
        )
        sums = in_parts(piece, *piece_slices(piece, grad_query, grad_key, grad_value))
        for total, of_piece in zip(sums, grads, strict=True):
            total += of_piece
    return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype)


@_attend_backward.register_fake
def _(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sums: Tensor,
    pieces: Tensor,
    bits: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, pieces, bits, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output, pieces, bits)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_attend_backward(grad, *ctx.saved_tensors, ctx.scale), None, None, None


_attend.register_autograd(_backward, setup_context=_keep)


def _additive(piece: Piece, bits: Tensor, query: Tensor) -> Tensor | None:
    """What is added to the scores of a piece, [rows, keys]; None: the kernel needs nothing."""
    visible = piece_mask(piece, bits)
    return None if visible is None else query.new_zeros(visible.shape).masked_fill(~visible, -torch.inf)
