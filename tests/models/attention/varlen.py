"""CPU kernels of torch's operator of variable-length attention, which check what the kernels of CUDA need.

They compute each segment by torch's kernel of a CPU for scaled-dot-product attention, so that segments whose rows are
their keys give what `diagonal_attention` gives, to the bit.

Shape legend: Q rows; T keys; H query heads; K key heads; E columns; S segments.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import varlen as operator
from torch.utils._python_dispatch import TorchDispatchMode

from mmtrain.models.attention import varlen
from mmtrain.models.attention.varlen import KernelLimits

ATEN = torch.ops.aten
ANY = KernelLimits((torch.float32, torch.float64, torch.bfloat16))
"""Of a kernel that takes all that tests have."""


class Call(NamedTuple):
    """What reached the operator."""

    backward: bool
    row_lengths: list[int]
    key_lengths: list[int]
    longest: tuple[int, int]
    causal: bool
    heads: tuple[int, int]
    scale: float | None


@contextmanager
def on_cpu(limits: KernelLimits) -> Iterator[list[Call]]:
    """Inside, a CPU has kernels with some limits. Yields: the calls that reach them."""
    _register()
    before = dict(varlen.LIMITS)
    varlen.LIMITS["cpu"] = limits
    _CALLS.clear()
    try:
        yield _CALLS
    finally:
        varlen.LIMITS.clear()
        varlen.LIMITS.update(before)


class Operators(TorchDispatchMode):
    """Counts the operators that are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


_CALLS: list[Call] = []


@cache
def _register() -> None:
    operator._varlen_attn.register_kernel("cpu")(_forward)
    operator._varlen_attn_backward.register_kernel("cpu")(_backward)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    *others: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    segments = _check(False, query, key, value, cu_seq_q, cu_seq_k, (max_q, max_k), is_causal, scale, window_size)
    assert all(x in (None, True) for x in others)
    out = torch.full_like(query, torch.nan)
    log_sums = query.new_full((query.shape[1], len(query)), torch.nan, dtype=torch.float32)
    log_sums = log_sums.to(torch.promote_types(query.dtype, torch.float32))
    for rows, keys in segments:
        if rows.start == rows.stop or keys.start == keys.stop:
            out[rows] = 0
            continue
        q, k, v = (x[s].transpose(0, 1)[None] for x, s in ((query, rows), (key, keys), (value, keys)))
        mask, plain = _mask(rows, keys, is_causal, query)
        o, log_sum = ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, plain, attn_mask=mask, scale=scale)
        out[rows] = o[0].transpose(0, 1)
        log_sums[:, rows] = log_sum[0]
    return out, log_sums, torch.zeros(2, dtype=torch.uint64)


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None = None,
    window_size: list[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    segments = _check(True, query, key, value, cu_seq_q, cu_seq_k, (max_q, max_k), is_causal, scale, window_size)
    assert grad_out.stride(-1) == 1
    grads = [torch.full_like(x, torch.nan) for x in (query, key, value)]
    for rows, keys in segments:
        if rows.start == rows.stop or keys.start == keys.stop:
            for grad, s in zip(grads, (rows, keys, keys), strict=True):
                grad[s] = 0
            continue
        tensors = ((grad_out, rows), (query, rows), (key, keys), (value, keys), (out, rows))
        g, q, k, v, o = (x[s].transpose(0, 1)[None] for x, s in tensors)
        mask, plain = _mask(rows, keys, is_causal, query)
        made = ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
            g, q, k, v, o, lse[:, rows][None], 0.0, plain, attn_mask=mask, scale=scale
        )
        for grad, of_segment, s in zip(grads, made, (rows, keys, keys), strict=True):
            grad[s] = of_segment[0].transpose(0, 1)
    return grads[0], grads[1], grads[2]


def _mask(rows: slice, keys: slice, is_causal: bool, query: Tensor) -> tuple[Tensor | None, bool]:
    """(mask, whether the one of torch serves): torch's is top left, that of CUDA's kernels bottom right."""
    num_rows, num_keys = rows.stop - rows.start, keys.stop - keys.start
    if not is_causal or num_rows == num_keys:
        return None, is_causal
    seen = torch.ones(num_rows, num_keys, dtype=torch.bool).tril(num_keys - num_rows)
    return torch.zeros(num_rows, num_keys, dtype=query.dtype).masked_fill(~seen, -torch.inf), False


def _check(
    backward: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    longest: tuple[int, int],
    is_causal: bool,
    scale: float | None,
    window_size: list[int] | None,
) -> list[tuple[slice, slice]]:
    """(rows, keys) of each segment, where the kernels of CUDA take all arguments."""
    limits = varlen.LIMITS["cpu"]
    assert query.dtype == key.dtype == value.dtype and query.dtype in limits.dtypes
    assert query.dim() == key.dim() == value.dim() == 3 and key.shape == value.shape
    assert query.shape[2] == key.shape[2] <= limits.most and query.shape[2] % limits.multiple == 0
    assert query.shape[1] % key.shape[1] == 0
    assert all(x.stride(-1) == 1 for x in (query, key, value))
    assert list(window_size or ()) == ([-1, 0] if is_causal else [-1, -1])
    lengths = []
    for edges, tensor, most in ((cu_seq_q, query, longest[0]), (cu_seq_k, key, longest[1])):
        assert edges.dtype == torch.int32 and edges.is_contiguous() and edges.device == query.device
        values = edges.tolist()
        assert len(values) >= 2 and values[0] == 0 and values[-1] == len(tensor)
        lengths.append([b - a for a, b in pairwise(values)])
        assert min(lengths[-1]) >= 0 and max(lengths[-1]) == most
    row_lengths, key_lengths = lengths
    if is_causal:
        assert all(rows <= keys for rows, keys in zip(row_lengths, key_lengths, strict=True))
    heads = query.shape[1], key.shape[1]
    _CALLS.append(Call(backward, row_lengths, key_lengths, longest, is_causal, heads, scale))
    slices = [[slice(a, b) for a, b in pairwise(edges.tolist())] for edges in (cu_seq_q, cu_seq_k)]
    return list(zip(*slices, strict=True))
