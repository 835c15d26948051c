"""A chunk whose parameters are on the meta device gets the memory of its sharded tensors, and no initial values.

What this rank holds already is taken over without a copy; all else is new memory with undefined values.
"""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mmtrain.parallel.torch_private import as_dtensor, raw_part

LocalPart = Callable[[str, Tensor, torch.dtype, int], Tensor | None]
"""A function (stored name, a tensor of the same shape and sharding, dtype, row of the stored one with which it begins)
-> just that part, if this rank has it, to be taken over; else None. A part is given once: two copies of a tensor must
not share memory."""


def fill_chunk(
    chunk: nn.Module, local: LocalPart, aliases: Mapping[str, str], *, device: torch.device, buffers: torch.device
) -> None:
    """Gives memory to the parameters of a chunk, and moves its buffers; a shared parameter stays shared.

    Between `fully_shard` and its first use, when FSDP2 still takes over new parameters.

    Args:
        aliases: parameter -> name that it is stored under (tied head -> embedding).
        device: of parameters. buffers: that of buffers, which are real already.
    """
    done: dict[nn.Parameter, nn.Parameter] = {}
    rows = first_rows([chunk])
    for path, module in chunk.named_modules():
        for name, parameter in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
            full = f"{path}.{name}" if path else name
            if parameter not in done:
                part = local(f"model.{aliases.get(full, full)}", parameter, parameter.dtype, rows.get(full, 0))
                part = new_part(parameter, parameter.dtype, device) if part is None else part
                done[parameter] = nn.Parameter(stored_as(part, parameter), requires_grad=parameter.requires_grad)
            module.register_parameter(name, done[parameter])
        for name, buffer in [*module.named_buffers(recurse=False, remove_duplicate=False)]:
            full = f"{path}.{name}" if path else name
            own = (
                None if name in module._non_persistent_buffers_set else local(f"model.{full}", buffer, buffer.dtype, 0)
            )
            setattr(module, name, buffer.to(buffers) if own is None else own)


def first_rows(chunks: Iterable[nn.Module]) -> dict[str, int]:
    """Parameter of which ranks hold rows of their own under one name -> the first row of this rank."""
    held = (getattr(chunk, "stored_rows", {}) for chunk in chunks)
    return {name: rows.first for of_chunk in held for name, rows in of_chunk.items()}


def new_part(like: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for this rank's part of a tensor, with undefined values."""
    return torch.empty(raw_part(like).shape, dtype=dtype, device=device)


def stored_as(part: Tensor, like: Tensor) -> Tensor:
    """A part of a tensor that is sharded as another one. Args: part: of this rank."""
    return as_dtensor(part, like) if isinstance(like, DTensor) else part
