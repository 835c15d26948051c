"""Attention of many segments in one call of torch's variable-length attention, whose kernels run on CUDA.

A segment is a run of neighbouring rows that see one slice of keys: all of it, or each row up to itself, the last row
seeing the last key. Torch's operator checks neither dtype nor sizes before its kernel does, and not at all on the meta
device; `LIMITS` has what the kernels take. Torch 2.11 has no argument for fewer key heads than query heads, but takes
them.

Shape legend: T rows of the whole packed sequence; Q rows of this rank; H query heads; K key heads; E columns; S
segments.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from mmtrain.models.attention.pieces import Piece
from mmtrain.models.transfer import to_device

MOST_CALLS = 2
"""Most calls for rows whose keys are not their own: one for each of the two runs of rows that a rank has where
`context_parallel_split = "causal"`. FlexAttention is one call, whatever the mask."""


class KernelLimits(NamedTuple):
    """What the kernels of a device take."""

    dtypes: tuple[torch.dtype, ...]
    capability: tuple[int, int] = (0, 0)
    """Least compute capability."""
    multiple: int = 1
    """A head has a multiple of this many columns."""
    most: int = 2**31
    """Columns of a head."""


LIMITS = {"cuda": KernelLimits((torch.bfloat16, torch.float16), capability=(8, 0), multiple=8, most=192)}
"""Device type -> what its kernels take. Those of CUDA run forward with heads of up to 256 columns, but backward above
192 on some devices alone. Source: aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp of torch."""

CAUSAL, FULL = (-1, 0), (-1, -1)
"""Keys that a row sees before and after itself; -1: all."""


def key_head_options(function: Callable[..., Any]) -> dict[str, bool]:
    """The options of torch's function with which it takes fewer key heads than query heads."""
    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(function).parameters else {}


_KEY_HEADS = key_head_options(varlen_attn)


class VarlenCall(NamedTuple):
    """One call of variable-length attention."""

    rows: tuple[int, int]
    """[lo, hi) among this rank's rows: those of all segments."""
    keys: tuple[int, int] | Tensor
    """[lo, hi) among the rows of the sequence, or their int64 indices: the keys of all segments, one after another."""
    row_edges: Tensor
    """[S + 1] int32: the first row of each segment, counted from the first of the call; then the number of rows."""
    key_edges: Tensor
    """[S + 1] int32: so for keys."""
    longest: tuple[int, int]
    """Rows, and keys, of the longest segment."""
    window: tuple[int, int]
    """`CAUSAL` or `FULL`."""


def group_runs(runs: tuple[Piece, ...]) -> list[list[Piece]]:
    """The runs that one call computes, call by call; empty: one of the runs needs a mask.

    A call has neighbouring rows, in the order of their keys, of which none is in two segments.
    """
    if any(run.kind == "mask" for run in runs):
        return []
    groups: list[list[Piece]] = []
    kind = ""  # of the longer runs of the last call; single rows see all their keys either way
    for run in runs:
        own = run.kind if run.rows[1] - run.rows[0] > 1 else ""
        last = groups[-1][-1] if groups else None
        follows = last is not None and last.rows[1] == run.rows[0] and last.keys[1] <= run.keys[0]
        if follows and (not own or not kind or own == kind):
            groups[-1].append(run)
            kind = kind or own
        else:
            groups.append([run])
            kind = own
    return groups


def make_call(runs: list[Piece], device: torch.device) -> VarlenCall:
    """The call that computes some runs, with its tensors on a device."""
    rows, keys = (np.array([getattr(run, name) for run in runs]) for name in ("rows", "keys"))
    sizes = np.stack([rows[:, 1] - rows[:, 0], keys[:, 1] - keys[:, 0]])
    edges = np.concatenate([np.zeros((2, 1), np.int64), sizes.cumsum(axis=1)], axis=1).astype(np.int32)
    row_edges, key_edges = to_device(edges, device).unbind()
    of_call: tuple[int, int] | Tensor = int(keys[0, 0]), int(keys[-1, 1])
    if (keys[1:, 0] != keys[:-1, 1]).any():
        indices = np.concatenate([np.arange(*run.keys) for run in runs])
        of_call = to_device(indices, device)
    causal = any(run.kind == "causal" for run in runs)
    return VarlenCall(
        rows=(int(rows[0, 0]), int(rows[-1, 1])),
        keys=of_call,
        row_edges=row_edges,
        key_edges=key_edges,
        longest=(int(sizes[0].max()), int(sizes[1].max())),
        window=CAUSAL if causal else FULL,
    )


def varlen_attention(query: Tensor, key: Tensor, value: Tensor, calls: tuple[VarlenCall, ...], scale: float) -> Tensor:
    """Attention of this rank's rows to the keys of their segments, [1, Q, H, E].

    Shapes: query [1, H, Q, E]; key and value [1, K, T, E]. Rows in no call are padding, whose output is 0.
    """
    q_QHE, k_TKE, v_TKE = (x[0].transpose(0, 1) for x in (query, key, value))
    outputs: list[Tensor] = []
    end = 0
    for call in calls:
        outputs += _padding(q_QHE, end, call.rows[0])
        k, v = (_keys(x, call.keys) for x in (k_TKE, v_TKE))
        outputs.append(_attend(q_QHE[slice(*call.rows)], k, v, call, scale))
        end = call.rows[1]
    outputs += _padding(q_QHE, end, len(q_QHE))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None]


def _padding(q_QHE: Tensor, start: int, end: int) -> list[Tensor]:
    return [torch.zeros_like(q_QHE[start:end])] if start < end else []


def _keys(x_TKE: Tensor, keys: tuple[int, int] | Tensor) -> Tensor:
    return x_TKE.index_select(0, keys) if isinstance(keys, Tensor) else x_TKE[slice(*keys)]


def _attend(q: Tensor, k: Tensor, v: Tensor, call: VarlenCall, scale: float) -> Tensor:
    options: dict[str, Any] = {"scale": scale, "window_size": call.window, **_KEY_HEADS}
    # A tuple: the causal kernel is chosen by comparing with one.
    out: Tensor = varlen_attn(q, k, v, call.row_edges, call.key_edges, *call.longest, **options)
    return out
