"""Attention by one dense mask in double precision: what every path must equal."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from mmtrain.modality.bitfield import Bits, allowed

SCALE = 0.3


def dense(query: Tensor, key: Tensor, value: Tensor, bits: Bits, rows: Bits) -> Tensor:
    """Softmax attention of the rows to all places, [1, Q, H, E]; padding rows are zero."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (x[:, :, : len(bits)].repeat_interleave(repeats, 1) for x in (key, value))
    real = rows >= 0
    places = np.where(real, rows, 0)
    seen = torch.from_numpy(allowed(bits[places], places, bits, np.arange(len(bits)))).to(query.device)
    scores = (query @ key.transpose(2, 3) * SCALE).masked_fill(~seen, -torch.inf)
    out = (scores.softmax(-1) @ value).transpose(1, 2)
    return out * torch.from_numpy(real).to(out)[None, :, None, None]


def with_gradients(attend: Callable[..., Tensor], inputs: list[Tensor], seed: int = 0) -> list[Tensor]:
    """Output and gradients of a function of query, key and value, for a fixed gradient of its output."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = attend(*leaves)
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]


class Given:
    """A `Gather` of keys and values that are at hand: those of all rows, by default those that it gets."""

    def __init__(self, *gathered: Tensor, head_groups: int = 1) -> None:
        self.gathered, self.head_groups = gathered, head_groups

    def start(self, *local: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        return lambda: self.gathered or local
