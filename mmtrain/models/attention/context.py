"""The attention function that all adapted models call, and its context: which rows see which keys.

Hugging Face models hand their `attention_mask` argument (or, in Qwen-VL encoders, a keyword) unchanged to the
attention function; here that is an `AttentionContext`.

Shape legend: T rows of the whole packed sequence; Q rows of this rank; H query heads; K key heads; E columns.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from mmtrain.errors import ConfigError, DataError
from mmtrain.modality.bitfield import Bits
from mmtrain.models.attention.backend import Backend, Kernels, Operands, choose_kernels
from mmtrain.models.attention.blockwise import diagonal_attention, piecewise_attention
from mmtrain.models.attention.flex import RowBlocks, block_attention, make_row_blocks
from mmtrain.models.attention.operator import PieceTensors, attention_in_pieces, operands_of
from mmtrain.models.attention.pieces import Piece, find_runs, is_block_diagonal, make_pieces
from mmtrain.models.attention.varlen import MOST_CALLS, VarlenCall, group_runs, make_call, varlen_attention
from mmtrain.models.transfer import to_device

PACKED = "mmtrain_packed"
"""Name of `packed_attention` in a Hugging Face config."""


class Gather(Protocol):
    """Brings the keys and values of other ranks."""

    head_groups: int
    """Groups of key heads to ask for; those of the next group travel under the attention of the current one."""

    def start(self, key: Tensor, value: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
        """Starts an exchange of [1, K, Q, E] twice. Returns: what waits for it: keys and values of all T rows in their
        order, [1, K, T, E] twice."""
        ...


class AttentionChoices(NamedTuple):
    """How attention is computed; what it computes is the same."""

    backend: Backend = "auto"
    """sdpa: scaled-dot-product attention piece by piece. flex: FlexAttention. varlen: variable-length attention of
    plain segments, in one call. auto: as `choose_kernels` says."""
    part_blocks: int = 0
    """Most blocks of keys in one part of a block of rows of FlexAttention; 0: no parts; -1: by `longest_part`."""


class AttentionContext:
    """Which rows of one packed sequence see which keys, and how to get the keys of other ranks.

    Masks and pieces are computed once, at the first call, for all blocks and their recomputation. Not
    a dataclass: FSDP2 would copy one with every call of a module.
    """

    def __init__(self, bits: Bits, rows: Bits, gather: Gather | None, choices: AttentionChoices) -> None:
        """Args:
        bits: [T] masks of `modality.bitfield`, in the order of the sequence.
        rows: [Q] int64: position of each row of this rank in the sequence; -1 for padding, whose output is zero.
        gather: None: this rank's rows without the padding at their end are the whole sequence, in order.
        choices: how it is computed.
        """
        self.bits, self.rows, self.gather, self.choices = bits, rows, gather, choices
        self.prepared: tuple[VarlenCall, ...] | PieceTensors | None = None
        """What compiled blocks need, see `prepare`."""
        self._on_device: dict[Any, Any] = {}

    @cached_property
    def has_rows(self) -> bool:
        """Whether there is a row that is no padding."""
        return bool((self.rows >= 0).any())

    @cached_property
    def runs(self) -> tuple[Piece, ...]:
        """The runs of this rank's rows."""
        return find_runs(self.bits, self.rows)

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The calls of scaled-dot-product attention that this rank's rows need."""
        return make_pieces(self.runs)

    @cached_property
    def is_diagonal(self) -> bool:
        """Whether this rank has the whole sequence, in blocks that attend only within themselves, without a mask."""
        return self.gather is None and is_block_diagonal(self.runs)

    def kernels(self, query: Tensor) -> Kernels:
        """The kernels for queries of a device, dtype and number of columns."""
        of = query.device, query.dtype, query.shape[-1]
        kernels: Kernels = self._once(("kernels", *of), lambda: choose_kernels(self.choices.backend, Operands.on(*of)))
        return kernels

    def varlen_calls(self, device: torch.device) -> tuple[VarlenCall, ...]:
        """The calls of variable-length attention, with their tensors on a device; empty: they would be too many, or the
        mask is not a plain one."""
        calls: tuple[VarlenCall, ...] = self._once(("varlen", device), lambda: self._make_varlen_calls(device))
        return calls

    def _make_varlen_calls(self, device: torch.device) -> tuple[VarlenCall, ...]:
        groups = group_runs(self.runs)
        if not self.is_diagonal and len(groups) > MOST_CALLS:
            return ()
        return tuple(make_call(group, device) for group in groups)

    def device_bits(self, device: torch.device) -> Tensor:
        """`bits` [T] on a device."""
        return self._once(("bits", device), lambda: to_device(self.bits, device))

    def blocks(self, device: torch.device, heads: int) -> RowBlocks:
        """The blocks of rows of FlexAttention, on a device. Args: heads: of one call."""
        most = self.choices.part_blocks
        blocks: RowBlocks = self._once(
            ("blocks", device, heads if most < 0 else 0),
            lambda: make_row_blocks(self.bits, self.rows, device, most=most, heads=heads),
        )
        return blocks

    def prepare(self, operands: Operands) -> None:
        """Makes the tensors that blocks need which are compiled, with such operands, before one of them is called.

        Where one operator computes the mask they have that in their graph; anything else runs between two graphs.
        """
        device = torch.device(operands.device)
        kernels = choose_kernels(self.choices.backend, operands)
        self.prepared = None
        if self.gather is not None or not self.has_rows:
            return
        if kernels.plain == "varlen":
            self.prepared = self.varlen_calls(device) or None
        if self.prepared is None and device.type == "cpu":
            self.prepared = self._once("pieces", lambda: operands_of(self.pieces, self.device_bits(device)))

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._on_device:
            self._on_device[key] = make()
        return self._on_device[key]


def attention_context(
    bits: Bits,
    *,
    rows: Bits | None = None,
    gather: Gather | None = None,
    choices: AttentionChoices = AttentionChoices(),  # noqa: B008  immutable
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
    return AttentionContext(bits, rows, gather, choices)


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
    if torch.compiler.is_compiling():
        return _attend_compiled(context, query, key, value, scale), None
    return _attend_gathered(context, query, key, value, scale), None


def _attend_compiled(context: AttentionContext, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """What a compiler traces."""
    if context.prepared is None:
        return _between_graphs(context, query, key, value, scale)
    if isinstance(context.prepared, PieceTensors):
        return attention_in_pieces(query, key, value, context.prepared, scale)
    return varlen_attention(query, key, value, context.prepared, scale)


def _attend_gathered(context: AttentionContext, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attention to the keys and values of all ranks."""
    if context.gather is None:
        return _attend(context, query, key, value, scale)
    groups = min(context.gather.head_groups, key.shape[1])
    split = [x.chunk(groups, dim=1) for x in (key, value)]
    arriving = [context.gather.start(k, v) for k, v in zip(*split, strict=True)]
    queries = query.split([k.shape[1] * (query.shape[1] // key.shape[1]) for k in split[0]], dim=1)
    # Each group waits for its own keys alone; in the backward its gradients travel under the group before it.
    outputs = [_attend(context, q, *wait(), scale) for q, wait in zip(queries, arriving, strict=True)]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


_between_graphs = torch.compiler.disable(_attend_gathered)


def _attend(context: AttentionContext, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attention to keys and values that this rank has, [1, Q, H, E]."""
    if not context.has_rows:
        # The backward of `gather` is a collective, so that this rank needs its graph, too.
        nothing = query[:, :, :0].sum() + key[:, :, :0].sum() + value[:, :, :0].sum()
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]) + nothing
    kernels = context.kernels(query)
    if kernels.plain == "varlen" and (calls := context.varlen_calls(query.device)):
        return varlen_attention(query, key, value, calls, scale)
    if (kernels.plain if context.is_diagonal else kernels.masked) == "flex":
        _check_backward(query, key, value)
        if context.gather is None:
            key, value = key[:, :, : len(context.bits)], value[:, :, : len(context.bits)]
        return block_attention(query, key, value, context.blocks(query.device, query.shape[1]), scale)
    if context.is_diagonal:
        return diagonal_attention(query, key, value, context.pieces, scale)
    bits = context.device_bits(query.device)
    return piecewise_attention(query, key, value, context.pieces, bits, scale)


def _check_backward(query: Tensor, key: Tensor, value: Tensor) -> None:
    needs_grad = query.requires_grad or key.requires_grad or value.requires_grad
    if not query.is_cuda and torch.is_grad_enabled() and needs_grad:
        raise ConfigError(
            f"training.attention_backend = 'flex', but the model is on {query.device.type}, where FlexAttention "
            "has no backward; set it to 'auto'"
        )


AttentionInterface.register(PACKED, packed_attention)
