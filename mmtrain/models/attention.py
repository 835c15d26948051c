"""Causal attention inside of each packed document, as an attention function that Hugging Face models call.

Shape legend: T packed tokens of one microbatch; H query heads; K key heads; E columns of a head.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

DOCUMENTS = "mmtrain_documents"
"""Name of `document_attention` in a Hugging Face config."""


def document_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    document_lengths: tuple[int, ...],
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of each token to itself and the earlier tokens of its own document, [1, T, H, E].

    One call of scaled-dot-product attention for each document, so no T x T mask exists.
    Shapes: query [1, H, T, E]; key and value [1, K, T, E], where K divides H.
    Args:
        attention_mask: must be None; the documents say it all.
        document_lengths: tokens of each document, T in total.
    Returns: the output and, as Hugging Face expects, None for the weights.
    """
    assert attention_mask is None
    assert dropout == 0.0
    grouped = query.shape[1] != key.shape[1]
    # Only the fused kernels of a CPU and of half precision share key heads without expanding them.
    native = grouped and (query.device.type == "cpu" or query.dtype in (torch.float16, torch.bfloat16))
    if grouped and not native:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    outputs = []
    for q, k, v in zip(*(x.split(document_lengths, dim=2) for x in (query, key, value)), strict=True):
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=native)
        outputs.append(out.transpose(1, 2))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1), None


AttentionInterface.register(DOCUMENTS, document_attention)
