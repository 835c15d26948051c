"""Deferred weight gradients of linear layers: the weight-gradient pass (W) of a split backward.

A linear layer is y = x A^T + b. In the input-gradient pass (I) its backward makes only the gradient of x, and keeps x
and the gradient of y. The weight-gradient pass (W) makes the gradients of A and b from them, by the products of the
whole backward; it needs no other rank. All other parameters (norms, embeddings, convolutions, a bias that is added
behind an exchange) get their gradients in I.

The forward decides: the linear layers keep x and the gradient of y only in works whose plan has I and W, or whose
whole backward makes weight gradients while it waits for an exchange. A block that
is recomputed calls its linear layers again during I, and W recomputes nothing.

Source: Qi et al., Zero bubble pipeline parallelism, arXiv:2401.10241, section 2. Cutting torch's graph in two
instead would keep nearly all activations until W, recompute a block for each of its layers, and lose or double
gradients of parameters that are shared or have no input with a gradient before them.

Shape legend: R rows; D inputs; E outputs.
"""

from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_SWITCH = "weight_grads"
"""Attribute of a linear layer: the `WeightGrads` of its chunk."""


class _Call(NamedTuple):
    """One call of a linear layer, and the queue to which its backward appends."""

    weight: Tensor
    """[E, D]: the parameter, or this rank's part of it, which leads back to it."""
    bias: Tensor | None
    """The bias, [E], likewise."""
    waiting: "deque[_Waiting]"


class _Waiting(NamedTuple):
    """The tensors that the weight gradient of one call needs."""

    weight: Tensor
    bias: Tensor | None
    x: Tensor
    """The input, [R, D]."""
    version: int
    """The number of changes of x in place."""
    grad: Tensor
    """[R, E]: of the output."""


class WeightGrads:
    """The weight gradients of one chunk that wait for W, by work."""

    def __init__(self, chunk: nn.Module, without: Collection[nn.Module] = ()) -> None:
        """Lets the linear layers of a chunk keep the tensors that W needs.

        Layers with a forward of their own (tensor parallelism) call `linear`. A subclass of `nn.Linear` with another
        forward is left alone: its gradients are made in I.

        Args: without: parts of the chunk that are left alone, too.
        """
        left_alone = {module for part in without for module in part.modules()}
        self._works: dict[int, deque[_Waiting]] = {}
        self._open: deque[_Waiting] | None = None
        for module in chunk.modules():
            if isinstance(module, nn.Linear) and module not in left_alone:
                setattr(module, _SWITCH, self)
                if "forward" not in vars(module) and type(module).forward is nn.Linear.forward:
                    module.forward = partial(_forward, module)  # type: ignore[method-assign]

    @property
    def open(self) -> "deque[_Waiting] | None":
        """The queue of the linear layers that are called now; None: their backward is not split."""
        return self._open

    @open.setter
    def open(self, queue: "deque[_Waiting] | None") -> None:
        self._open = queue

    @contextmanager
    def deferred(self, work: int) -> Iterator[None]:
        """Inside, linear layers leave the weight gradients of a work to `run`: around its forward, and around its
        backward, which may call them again."""
        outer, self._open = self._open, self._works.setdefault(work, deque())
        try:
            yield
        finally:
            self._open = outer

    def run(self, work: int) -> None:
        """Adds all gradients that wait to those of the parameters; the work is then over."""
        self.run_some(work, self.num_waiting(work))
        del self._works[work]

    def num_waiting(self, work: int) -> int:
        """The number of calls of linear layers whose weight gradients wait now."""
        return len(self._works[work])

    def run_some(self, work: int, count: int) -> None:
        """Adds the gradients of at most `count` calls to those of the parameters, in the order of the backward; frees
        as it goes."""
        waiting = self._works[work]
        for _ in range(min(count, len(waiting))):
            weight, bias, x_RD, version, grad_RE = waiting.popleft()
            assert x_RD._version == version, "the input of a linear layer was changed in place between I and W"
            # By autograd, not by hand: the gradient of a part then becomes one of the parameter.
            if bias is not None and bias.requires_grad:
                torch.autograd.backward(bias, grad_RE.sum(0))
            torch.autograd.backward(weight, grad_RE.t().mm(x_RD))

    def works(self) -> tuple[int, ...]:
        """The works that had a forward and still need their W."""
        return tuple(self._works)

    def held_bytes(self) -> int:
        """Bytes of the tensors that wait, each storage once."""
        tensors = (tensor for waiting in self._works.values() for call in waiting for tensor in (call.x, call.grad))
        storages = {storage.data_ptr(): storage.nbytes() for storage in map(Tensor.untyped_storage, tensors)}
        return sum(storages.values())

    def clear(self) -> None:
        """Drops everything that waits."""
        self._works.clear()


def linear(module: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`nn.functional.linear`, as the product of a layer whose chunk may leave weight gradients for W.

    Shapes: x [..., D], weight [E, D], bias [E]; returns [..., E]. All of one dtype: not under torch.autocast.
    Args: module: the layer. weight, bias: its parameters, or this rank's parts of them.
    """
    switch: WeightGrads | None = vars(module).get(_SWITCH)
    waiting = None if switch is None else switch.open
    if waiting is None or not weight.requires_grad or not torch.is_grad_enabled():
        return nn.functional.linear(x, weight, bias)
    x_RD = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    # Without a gradient to give to x, something else must bring the backward here.
    anchor = None if x_RD.requires_grad else x.new_empty(0).requires_grad_()
    y_RE: Tensor = _Linear.apply(x_RD, anchor, _Call(weight, bias, waiting))
    return y_RE if x.dim() == 2 else y_RE.reshape(*x.shape[:-1], y_RE.shape[-1])


def _forward(module: nn.Linear, x: Tensor) -> Tensor:
    return linear(module, x, module.weight, module.bias)


class _Linear(torch.autograd.Function):
    """The product of a linear layer, without its weights' part of the backward."""

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, anchor: Tensor | None, call: _Call) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x_RD)
        # Weights are not saved by autograd, whose hooks (recomputation) may give back other tensors.
        ctx.call = call
        return nn.functional.linear(x_RD, call.weight, call.bias)

    @staticmethod
    def backward(ctx: Any, grad_RE: Tensor | None) -> tuple[Tensor | None, None, None]:
        if grad_RE is None:
            return None, None, None
        call: _Call = ctx.call
        (x_RD,) = ctx.saved_tensors
        call.waiting.append(_Waiting(call.weight, call.bias, x_RD.detach(), x_RD._version, grad_RE))
        return grad_RE.mm(call.weight) if ctx.needs_input_grad[0] else None, None, None
