"""The cross-entropy of a head that makes its logits piece by piece, when their gradient is asked for.

The forward keeps the rows, and makes nothing: no layer reads a loss. The backward makes for some positions after the
others logits, loss and both gradients, so that no logits are kept, none are made twice, and no more exist at one time
than the positions of a piece have. Source: Liger Kernel, arXiv:2410.10989, section 3.2, which makes the gradients in
the forward, and keeps that of the weight until the backward.

Shape legend: L labelled positions; D width; v tokens of this rank; C positions of a piece.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmtrain.models.loss import LossOutput
from mmtrain.models.scores import Combine, local_targets, most_likely


def loss_in_pieces(
    x_LD: Tensor,
    weight_vD: Tensor,
    targets_L: Tensor,
    *,
    first: int,
    combine: Combine,
    chunk_tokens: int,
    want_predictions: bool = False,
    want_losses: bool = False,
) -> LossOutput:
    """The cross-entropy of the logits x_LD weight_vD^T, of which ranks may have parts.

    If it has a gradient, the backward sets all of its values, in place; before, `loss_sum` is NaN.

    Args:
        targets_L: int64, tokens of the whole vocabulary.
        first: token of this rank.
        combine: over the ranks with other tokens, which call it in forward and backward alike.
        chunk_tokens: C, at least 1.
    """
    values = _Values(
        loss_sum=torch.full((), torch.nan, device=x_LD.device),
        losses=torch.empty(len(x_LD), device=x_LD.device) if want_losses else None,
        predictions=torch.empty_like(targets_L) if want_predictions else None,
    )
    pieces = _Pieces(first=first, combine=combine, chunk_tokens=chunk_tokens, values=values)
    if torch.is_grad_enabled() and (x_LD.requires_grad or weight_vD.requires_grad):
        loss_sum = _LossInPieces.apply(x_LD, weight_vD, targets_L, pieces)
    else:
        pieces.run(x_LD.detach(), weight_vD.detach(), targets_L)
        loss_sum = values.loss_sum
    return LossOutput(loss_sum=loss_sum, predictions=values.predictions, losses=values.losses)


@dataclass(frozen=True, kw_only=True)
class _Values:
    """The tensors that the pieces write their results to."""

    loss_sum: Tensor
    losses: Tensor | None
    predictions: Tensor | None


@dataclass(frozen=True, kw_only=True)
class _Pieces:
    """The computation of all pieces."""

    first: int
    combine: Combine
    chunk_tokens: int
    values: _Values

    def run(
        self,
        x_LD: Tensor,
        weight_vD: Tensor,
        targets_L: Tensor,
        grad: Tensor | None = None,
        grad_x_LD: Tensor | None = None,
        grad_weight_vD: Tensor | None = None,
    ) -> None:
        """Sets the values. Args: grad: scalar, of the loss. grad_x_LD, grad_weight_vD: set where they are given."""
        values = self.values
        values.loss_sum.zero_()
        for start in range(0, len(x_LD) or 1, self.chunk_tokens):
            piece = slice(start, start + self.chunk_tokens)
            x_CD = x_LD[piece]
            grad_Cv = self._logits(x_CD, weight_vD, targets_L[piece], piece, grad)
            if grad_x_LD is not None:
                grad_x_LD[piece] = grad_Cv @ weight_vD
            if grad_weight_vD is not None:
                grad_weight_vD.addmm_(grad_Cv.t(), x_CD, beta=float(start > 0))  # its values before are undefined
            del grad_Cv  # before there are logits of the next piece

    def _logits(self, x_CD: Tensor, weight_vD: Tensor, targets_C: Tensor, piece: slice, grad: Tensor | None) -> Tensor:
        """[C, v]: the gradient of the logits of a piece; without a gradient of the loss, undefined. Sets the values."""
        values, combine = self.values, self.combine
        logits_Cv = (x_CD @ weight_vD.t()).float()
        largest_C = logits_Cv.amax(dim=-1)
        combine(largest_C, "max")
        if values.predictions is not None:
            values.predictions[piece] = most_likely(logits_Cv, largest_C, self.first, combine)
        local_C, own_C = local_targets(targets_C, self.first, len(weight_vD))
        target_C = logits_Cv.gather(1, local_C[:, None]).squeeze(1) - largest_C
        exponentials_Cv = logits_Cv.sub_(largest_C[:, None]).exp_()
        # [2, C] partial -> [2, C]: the sum of the exponentials, and the score of the target from the rank that has it.
        sums = torch.stack([exponentials_Cv.sum(dim=-1), target_C.masked_fill_(~own_C, 0)])
        combine(sums, "sum")
        losses_C = sums[0].log() - sums[1]
        values.loss_sum.add_(losses_C.sum())
        if values.losses is not None:
            values.losses[piece] = losses_C
        if grad is None:
            return exponentials_Cv
        grad_Cv = exponentials_Cv.mul_((grad / sums[0])[:, None])
        grad_Cv.scatter_add_(1, local_C[:, None], (-grad * own_C)[:, None])
        return grad_Cv.to(x_CD.dtype)


class _LossInPieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_LD: Tensor, weight_vD: Tensor, targets_L: Tensor, pieces: _Pieces) -> Tensor:
        ctx.save_for_backward(x_LD, weight_vD, targets_L)
        ctx.pieces = pieces
        return pieces.values.loss_sum.detach()  # the same memory, which the backward writes

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:  # type: ignore[override]
        x_LD, weight_vD, targets_L = ctx.saved_tensors
        of_x, of_weight = ctx.needs_input_grad[:2]
        grad_x_LD = torch.empty_like(x_LD) if of_x else None
        grad_weight_vD = torch.empty_like(weight_vD) if of_weight else None
        ctx.pieces.run(x_LD, weight_vD, targets_L, grad.float(), grad_x_LD, grad_weight_vD)
        return grad_x_LD, grad_weight_vD, None, None
