"""Compiled blocks: each block of a chunk as one graph for works of any size, or with attention between two graphs.

A block calls attention as one operator, whose mask it has as tensors, so that neither the number of documents or images
nor that of rows is part of the graph. Blocks of one class share their graphs. What cannot be compiled is refused with
the config (`config.compile`).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mmtrain.errors import ConfigError
from mmtrain.models.attention.backend import Operands
from mmtrain.models.attention.context import AttentionContext
from mmtrain.models.chunk import Chunk, LanguageChunk, VisionChunk
from mmtrain.parallel.torch_private import compiled_for_any_size, why_no_compiler


def check_compiler() -> None:
    """Refuses compiled blocks on a machine that cannot compile them.

    Raises: ConfigError.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if why := why_no_compiler(device):
        raise ConfigError(
            f"compile.enable = true, but nothing can be compiled for {device} here: {why}; install it, or set "
            "compile.enable = false"
        )


def compile_blocks(chunk: Chunk) -> None:
    """Replaces the forward of each block by a compiled one, before the switch of their activations and FSDP2, whose
    hooks stay outside of the graph."""
    if isinstance(chunk, LanguageChunk | VisionChunk):
        for block in chunk.blocks():
            block.forward = _Compiled(block, chunk.shape.head_dim)


class _Compiled:
    """A block's forward, compiled at its first call."""

    def __init__(self, block: nn.Module, columns: int) -> None:
        """Args: columns: of a head."""
        self._forward: Callable[..., Any] = compiled_for_any_size(block.forward)
        self._columns = columns

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        for context in (*args, *kwargs.values()):
            if isinstance(context, AttentionContext):
                context.prepare(Operands.on(x.device, x.dtype, self._columns))
        return self._forward(_Plain.apply(x), *args, **kwargs)


class _Plain(torch.autograd.Function):
    """The same tensor, contiguous and not known as a view: a compiler would compile for its strides, and for those of
    what it is a view of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach().contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad
