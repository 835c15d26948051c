"""Joint query-key-value layers whose rows can be cut between heads.

Qwen-VL encoders compute query, key and value by one Linear, whose outputs Hugging Face orders
(query | key | value, head, column). A cut of that order in two would part query from value, not one head from
another, and nothing would notice. Here the same parameter, with the same name and shape, holds its rows in
head-major order, (head, query | key | value, column), in memory and in checkpoints of mmtrain; files of
Hugging Face keep theirs. A hook gives the output the order that the Hugging Face class expects.

Shape legend: H heads (of this rank); E columns of a head.
"""

from functools import partial
from typing import Any

from torch import Tensor, nn


def to_head_major(tensor: Tensor, num_heads: int) -> Tensor:
    """A weight, bias or adapter of Hugging Face's row order in head-major order: [3 * H * E, ...] both.

    Args: num_heads: of the whole layer.
    """
    return tensor.unflatten(0, (3, num_heads, -1)).transpose(0, 1).flatten(0, 2)


def from_head_major(tensor: Tensor, num_heads: int) -> Tensor:
    """A weight, bias or adapter of head-major order in Hugging Face's row order: [3 * H * E, ...] both."""
    return tensor.unflatten(0, (num_heads, 3, -1)).transpose(0, 1).flatten(0, 2)


def is_fused(name: str, fused: tuple[str, ...]) -> bool:
    """Whether a parameter has head-major rows.

    Args:
        name: of the parameter, in a module or in a file; a wrapped layer's `base_layer` counts as the layer, and so do
            the second matrix and the lengths of its adapter.
        fused: names of the layers inside of a block, as an adapter's `fused_qkv`.
    """
    if ".lora_A." in name:  # [rank, inputs]: its rows are no heads
        return False
    return any(f".{layer}." in f".{name}" for layer in fused)


def reorder_output(block: nn.Module, layer: str) -> None:
    """Makes a block's fused layer, whose rows are head-major, give its output in Hugging Face's order.

    To be called on the final layer (after adapters were wrapped around it) and before tensor parallelism, which
    may leave a rank with some of the heads.
    """
    parent, _, _ = layer.rpartition(".")
    head_dim = block.get_submodule(parent).head_dim
    block.get_submodule(layer).register_forward_hook(partial(_reorder, head_dim))


def _reorder(head_dim: int, layer: nn.Module, args: Any, output: Tensor) -> Tensor:
    """[..., H * 3 * E] -> [..., 3 * H * E]."""
    return output.unflatten(-1, (-1, 3, head_dim)).transpose(-3, -2).flatten(-3)
