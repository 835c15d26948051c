"""The layers of low-rank adapters that `peft` makes in a way of its own here: lengths of rows (DoRA), and dropout whose
masks follow from keys.

They stand where `peft` has its modules, and are called as these are. A mask is a function of the key of the work, the
layer's name and the element, so that a forward that is repeated, and the backward, which keeps no mask, have the same.

Shape legend: R rows; D inputs; E outputs of an adapted layer; r rank.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

# ------------------------------------------------------------------------------------------------ DoRA


class Magnitude(nn.Module):
    """The lengths of the rows of an adapted weight, which train apart from their directions.

    Source: DoRA, arXiv:2402.09353; without the gradient of the norms, as in its section 4.3.
    """

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs))

    @torch.no_grad()
    def start(self, layer: nn.Module) -> None:
        """Sets the lengths to those of the weight of a layer whose second matrix is zero."""
        self.weight.copy_(torch.linalg.vector_norm(layer.base_layer.weight, dim=1))  # type: ignore[union-attr,arg-type]

    def forward(
        self,
        x: Tensor,
        *,
        lora_A: nn.Linear,
        lora_B: nn.Linear,
        scaling: float,
        base_layer: nn.Linear,
        base_result: Tensor | None = None,
        adapter_name: str = "",
    ) -> Tensor:
        """What is added to the output [R, E] of the base layer.

        Args: x: [R, D], behind the dropout. base_result: the base layer's output for the same x; None: it is computed.
        """
        growth = row_growth(self.weight, squared_lengths(base_layer.weight, lora_A.weight, lora_B.weight, scaling))
        low_rank = lora_B(lora_A(x)) * scaling
        product = product_of(base_result, base_layer.bias, lambda: nn.functional.linear(x, base_layer.weight))
        return lengthened(product, low_rank, growth)


def squared_lengths(weight_ED: Tensor, down_rD: Tensor, up_Er: Tensor, scaling: float) -> Tensor:
    """[E] float32: squared lengths of the rows of W + s B A, without a gradient."""
    adapted_ED = torch.addmm(weight_ED.detach(), up_Er.detach(), down_rD.detach(), alpha=scaling)
    return torch.linalg.vector_norm(adapted_ED, dim=1, dtype=torch.float32).square()


def row_growth(magnitude_E: Tensor, squares_E: Tensor) -> Tensor:
    """[E]: the length of each row over that of the adapted weight, minus 1; lengths have the dtype of the magnitude."""
    lengths_E = squares_E.sqrt().to(magnitude_E.dtype)
    return (magnitude_E.float() / lengths_E.float() - 1).to(magnitude_E.dtype)


def product_of(base_result: Tensor | None, bias: Tensor | None, compute: Callable[[], Tensor]) -> Tensor:
    """The product [R, E] of the base layer without its bias."""
    if base_result is None:
        return compute()
    return base_result if bias is None else base_result - bias


def lengthened(product_RE: Tensor, low_rank_RE: Tensor, growth_E: Tensor) -> Tensor:
    """What lengths add to the base layer's output: g (y + a) + a, where m (y + a) - y is meant, with g = m - 1.

    The backward keeps y + a alone.
    """
    return growth_E * (product_RE + low_rank_RE) + low_rank_RE


# --------------------------------------------------------------------------------------------- dropout


class DropoutKeys:
    """The key of the masks of one chunk's adapters, by the work that runs; without a work nothing is dropped."""

    def __init__(self, chunk: nn.Module) -> None:
        """Names the dropouts of a chunk, so that each has masks of its own."""
        self.now: int | None = None
        """The key of the work."""
        for name, module in chunk.named_modules():
            if isinstance(module, AdapterDropout):
                module.keys, module.name = self, name

    @contextmanager
    def of(self, key: int | None) -> Iterator[None]:
        """Inside, the adapters' inputs are dropped by a key: around the forward of a work, and around its backward,
        which may repeat the forward. Args: key: None: nothing is dropped."""
        outer, self.now = self.now, key
        try:
            yield
        finally:
            self.now = outer


class AdapterDropout(nn.Module):
    """Sets a part of an adapter's inputs to zero, as `nn.Dropout`, where its chunk has an open key."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.p = probability
        self.keys: DropoutKeys | None = None
        self.name = ""
        self.part = 0, 1
        """The index of the part of the columns that it gets, and the number of equal parts."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D], or with a key dropped."""
        if self.keys is None or self.keys.now is None:
            return x
        dropped: Tensor = _Dropped.apply(x, self.p, combined_key(self.keys.now, self.name), self.part)
        return dropped


def combined_key(*parts: object) -> int:
    """63 bits that depend only on the arguments, and on all of them."""
    text = " ".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def kept_inputs(key: int, shape: torch.Size, p: float, part: tuple[int, int], device: torch.device) -> Tensor:
    """[..., D] bool: which elements are kept, as in the mask of all columns of which D are a part."""
    index, parts = part
    generator = torch.Generator(device)
    generator.manual_seed(key)
    columns = shape[-1]
    draws = torch.rand((*shape[:-1], parts * columns), generator=generator, device=device)
    return draws.narrow(-1, index * columns, columns) >= p


class _Dropped(torch.autograd.Function):
    """Dropout whose backward draws the mask again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, key: int, part: tuple[int, int]) -> Tensor:
        ctx.settings = p, key, part
        return x * kept_inputs(key, x.shape, p, part, x.device) / (1 - p)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        p, key, part = ctx.settings
        return grad * kept_inputs(key, grad.shape, p, part, grad.device) / (1 - p), None, None, None
