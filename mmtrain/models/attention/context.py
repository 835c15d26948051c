"""The attention function that all adapted models call, and its context: which rows see which keys.

Hugging Face models hand their `attention_mask` argument (or, in Qwen-VL encoders, a keyword) unchanged to the
attention function; here that is an `AttentionContext`.

Shape legend: T rows of the whole packed sequence; Q rows of this rank; H query heads; K key heads; E columns.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from mmtrain.errors import ConfigError, DataError
from mmtrain.modality.bitfield import Bits
from mmtrain.models.attention.blockwise import diagonal_attention, piecewise_attention
from mmtrain.models.attention.flex import LEAST_COLUMNS, block_attention, make_block_mask
from mmtrain.models.attention.pieces import Piece, is_block_diagonal, make_pieces

PACKED = "mmtrain_packed"
"""Name of `packed_attention` in a Hugging Face config."""

Gather = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""This rank's keys and values [1, K, Q, E] -> those of all T rows in their order, [1, K, T, E]."""

Backend = Literal["auto", "sdpa", "flex"]


class AttentionContext:
    """Which rows of one packed sequence see which keys, and how to get the keys of other ranks.

    Masks and pieces are computed once, at the first call, for all blocks and their recomputation. Not
    a dataclass: FSDP2 would copy one with every call of a module.
    """

    def __init__(self, bits: Bits, rows: Bits, gather: Gather | None = None, backend: Backend = "auto") -> None:
        """Args:
        bits: [T] masks of `modality.bitfield`, in the order of the sequence.
        rows: [Q] int64: position of each row of this rank in the sequence; -1 for padding, whose output is zero.
        gather: None: this rank's rows without the padding at their end are the whole sequence, in order.
        backend: flex: FlexAttention, only on CUDA. sdpa: scaled-dot-product attention piece by piece. auto: flex
            on CUDA where the mask is not one of plain blocks on the diagonal, else sdpa.
        """
        self.bits, self.rows, self.gather, self.backend = bits, rows, gather, backend
        self._on_device: dict[Any, Any] = {}

    @cached_property
    def has_rows(self) -> bool:
        """Whether there is a row that is no padding."""
        return bool((self.rows >= 0).any())

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The calls of scaled-dot-product attention that this rank's rows need."""
        return make_pieces(self.bits, self.rows)

    @cached_property
    def is_diagonal(self) -> bool:
        """Whether this rank has the whole sequence, in blocks that attend only within themselves, without a mask."""
        return self.gather is None and is_block_diagonal(self.pieces)

    def device_bits(self, device: torch.device) -> Tensor:
        """`bits` [T] on a device."""
        return self._once(("bits", device), lambda: torch.from_numpy(self.bits).to(device, non_blocking=True))

    def block_mask(self, device: torch.device) -> Any:
        """The mask of FlexAttention, on a device."""
        return self._once(("mask", device), lambda: make_block_mask(self.bits, self.rows, device))

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._on_device:
            self._on_device[key] = make()
        return self._on_device[key]


def attention_context(
    bits: Bits, *, rows: Bits | None = None, gather: Gather | None = None, backend: Backend = "auto"
) -> AttentionContext:
    """The context of one packed sequence on one rank.

    Args: as the fields of `AttentionContext`; rows: default: all, in order.
    Raises: DataError: rows outside of the sequence, or not all of it, in order, though nothing is gathered.
    """
    whole = np.arange(len(bits))
    rows = whole if rows is None else rows
    if len(rows) and not -1 <= rows.min() <= rows.max() < len(bits):
        raise DataError(
            f"rows of attention have positions {rows.min()}..{rows.max()} in a sequence of {len(bits)}; a position is "
            "below its length, or -1 for padding"
        )
    if gather is None and not (np.array_equal(rows[: len(bits)], whole) and (rows[len(bits) :] == -1).all()):
        raise DataError(
            f"{len(rows)} rows of attention are not the {len(bits)} positions of the sequence, in order, with padding "
            "after them; ranks with other rows need `gather`"
        )
    return AttentionContext(bits=bits, rows=rows, gather=gather, backend=backend)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: AttentionContext | None,
    *,
    context: AttentionContext | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of this rank's rows to all rows that they may see, [1, Q, H, E].

    No T x T tensor exists at any time. Gradients reach query, key and value on every rank, even without a row.

    Shapes: query [1, H, Q, E]; key and value [1, K, Q, E], where K divides H.
    Args: attention_mask or context: the context; scaling: of the scores, default 1 / sqrt(E).
    Returns: the output and, as Hugging Face expects, None for the weights.
    Raises: ConfigError: gradients are wanted of FlexAttention on another device than CUDA.
    """
    context = context or attention_mask
    assert context is not None
    assert dropout == 0.0
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if context.gather is not None:
        key, value = context.gather(key, value)
    if not context.has_rows:
        # The backward of `gather` is a collective, so that this rank needs its graph, too.
        nothing = query[:, :, :0].sum() + key[:, :, :0].sum() + value[:, :, :0].sum()
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]) + nothing, None
    if _use_flex(context, query, key, value):
        if context.gather is None:
            key, value = key[:, :, : len(context.bits)], value[:, :, : len(context.bits)]
        return block_attention(query, key, value, context.block_mask(query.device), scale), None
    if context.is_diagonal:
        return diagonal_attention(query, key, value, context.pieces, scale), None
    bits = context.device_bits(query.device)
    return piecewise_attention(query, key, value, context.pieces, bits, scale), None


def _use_flex(context: AttentionContext, query: Tensor, key: Tensor, value: Tensor) -> bool:
    if context.backend == "auto":
        return query.is_cuda and query.shape[-1] >= LEAST_COLUMNS and not context.is_diagonal
    if context.backend == "flex" and not query.is_cuda:
        needs_grad = query.requires_grad or key.requires_grad or value.requires_grad
        if torch.is_grad_enabled() and needs_grad:
            raise ConfigError(
                f"training.attention_backend = 'flex', but the model is on {query.device.type}, where FlexAttention "
                "has no backward; set it to 'auto'"
            )
    return context.backend == "flex"


AttentionInterface.register(PACKED, packed_attention)
