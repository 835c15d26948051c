"""A device without values, on which everything fails that makes a host wait for a device or copies pageable memory."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmtrain.models import transfer
from mmtrain.parallel import feed_ahead
from mmtrain.parallel.offload import TensorCopy

META = torch.device("meta")
_ATEN = torch.ops.aten
_COPIES = (_ATEN._to_copy.default, _ATEN.copy_.default)
_OF_NUMBERS = (torch.tensor, torch.as_tensor, Tensor.new_tensor)
"""They copy from pageable memory, and no dispatch mode sees it."""


class Watched(TorchDispatchMode):
    """Refuses operators that wait, and counts those of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = self.copied = 0
        self._pinned: dict[int, Tensor] = {}

    def pin(self, x: Tensor, device: torch.device) -> Tensor:
        """Stands for pinned memory, of which a CPU has none."""
        if device != META or not x.numel():
            return x
        copy = x.clone()
        self._pinned[copy.data_ptr()] = copy
        return copy

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        there = any(x.device == META for x in tensors) or torch.device(kwargs.get("device") or "cpu") == META
        if there:
            self._check(function, tensors)
            self.operators += 1
        return function(*args, **kwargs)

    def _check(self, function: Any, tensors: list[Tensor]) -> None:
        indexes = "index" in function.name() or "repeat_interleave" in function.name()  # by numbers is no wait
        assert torch.Tag.data_dependent_output not in function.tags, f"{function} needs values of the device"
        assert indexes or torch.Tag.dynamic_output_shape not in function.tags, f"{function} needs values of the device"
        for x in tensors:
            if x.device == META:
                assert not (indexes and x.dtype == torch.bool and "fill" not in function.name()), (
                    f"{function} by a mask"
                )
            elif x.dim() or function in _COPIES:  # operators take scalars of the host by value
                assert function in _COPIES, f"{function} reads {list(x.shape)} of host memory"
                assert not x.numel() or x.data_ptr() in self._pinned, f"{function} of pageable memory, {list(x.shape)}"
                self.copied += 1


class _NoNumbers(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (Tensor.__getitem__, Tensor.__setitem__) and args[0].device == META:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            assert not any(isinstance(i, list | np.ndarray) for i in index), "a list of indices is copied to the device"
        made = function(*args, **(kwargs or {}))
        assert function not in _OF_NUMBERS or made.device != META, f"{function} copies numbers to the device"
        return made


class MetaCopies:
    """Copies to the device, which take no time."""

    least_bytes = 1

    def buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def start(self, copies: Sequence[TensorCopy]) -> object:
        for to, source in copies:
            to.copy_(source, non_blocking=True)
        return object()

    def wait(self, started: Any) -> None: ...


@contextmanager
def no_waits() -> Iterator[Watched]:
    """Inside, operators on tensors of the device `meta` fail if the host would wait for them."""
    watched = Watched()
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(transfer, "pinned", watched.pin)
        patch.setattr(feed_ahead, "pinned", watched.pin)
        stack.enter_context(_NoNumbers())
        stack.enter_context(watched)
        yield watched
