"""The scores of tokens: what the logits of some tokens say of each labelled position, with all logits or in pieces.

In pieces no more logits exist at one time than a number of positions have (`LayerSpec.loss_chunk_tokens`): they are
made for some of the tokens after the others, and made again in the backward, which makes both gradients from them. They
cannot wait for it, as those of a whole vocabulary do (`loss_pieces.py`): the loss needs those of other parts. Each row
of the weight is read once for a product and gets its gradient at once, whatever the number of pieces. Source: the sum
of exponentials of one piece after the other is that of FlashAttention, arXiv:2205.14135, section 3.1.

Several ranks, or modules, may have parts of the tokens, each of which is a head of its own; their results are joined.

Shape legend: L labelled positions; D width; V tokens of the vocabulary, v those of a part; P parts.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from mmtrain.models.loss import Reduction
from mmtrain.spec.vocabulary import HEAD_COLUMNS

Combine = Callable[[Tensor, Literal["max", "sum", "min"]], None]
"""Combines a tensor in place with those of the ranks that hold the other tokens."""

_ALIGNED = 64
"""Tokens of a piece are a multiple of this where they are as many: of tiles of matrix products."""
_NONE = torch.iinfo(torch.int64).max


def alone(x: Tensor, how: Literal["max", "sum", "min"]) -> None:
    """Combines nothing: there is one rank."""


def _own(head: nn.Module, x_LD: Tensor) -> tuple[Tensor, Tensor]:
    weight: Any = head.weight
    return x_LD, weight


@dataclass(frozen=True, kw_only=True)
class TokenShards:
    """The division of a head's tokens over the ranks that compute it together; the default is that of one rank."""

    rank: int = 0
    """The index of this rank among these, which have equal parts in their order."""
    combine: Combine = alone
    """The function that combines tensors over these ranks."""
    operands: Callable[[nn.Module, Tensor], tuple[Tensor, Tensor]] = _own
    """A function of the head and its input [L, D]: the input as all ranks use it, and this rank's rows [v, D] of the
    weight; gradients of both lead back."""


class Scores(NamedTuple):
    """What logits of a part of the tokens say of each position, [L] float32, equal on all ranks that combine theirs."""

    log_sum: Tensor
    """Logarithm of the sum of exponentials, less `largest`."""
    target: Tensor
    """Logit of the target less `largest`; 0 if no rank has it."""
    largest: Tensor
    """The largest logit, without a gradient: what `log_sum` and `target` lack is the same for both."""


def scores(logits_Lv: Tensor, targets_L: Tensor, first: int, combine: Combine) -> Scores:
    """The scores of the tokens first .. first + v - 1 of this rank and those of the others. Keeps the logits as they
    are for the backward, which needs no other rank.

    Args: targets_L: int64.
    """
    return Scores(*_Scores.apply(logits_Lv, targets_L, first, combine))


def most_likely(logits_Lv: Tensor, largest_L: Tensor, first: int, combine: Combine) -> Tensor:
    """[L] int64: the most likely token of each position, the first of several; token 0 for scores that are not
    numbers. Args: largest_L: over all ranks. first: token of this rank."""
    scores_Lv = logits_Lv.detach().float()
    index_L = scores_Lv.argmax(dim=-1)
    has_L = scores_Lv.gather(1, index_L[:, None]).squeeze(1) == largest_L
    return _first_of_all(index_L + first, has_L, combine)


def scores_in_pieces(
    x_LD: Tensor,
    weight_vD: Tensor,
    targets_L: Tensor,
    first: int,
    combine: Combine,
    *,
    chunk_tokens: int,
    want_predictions: bool = False,
) -> tuple[Scores, Tensor | None]:
    """`scores` of the logits x_LD weight_vD^T, and if wanted their `most_likely`, without ever making all logits.

    The backward makes the gradients of both operands, that of the weight in its dtype.

    Args: targets_L: int64. chunk_tokens: at least 1; no more logits exist at one time than so many positions have.
    """
    *found, token_L = _ScoresInPieces.apply(x_LD, weight_vD, targets_L, first, combine, chunk_tokens, want_predictions)
    return Scores(*found), token_L if want_predictions else None


def head_columns(
    head: nn.Module,
    x_LD: Tensor,
    targets_L: Tensor,
    tokens: tuple[int, int],
    shards: TokenShards,
    *,
    chunk_tokens: int,
    want_predictions: bool,
) -> Tensor:
    """What a head of some tokens says of each position, to be joined with those of other tokens.

    Args:
        targets_L: int64, tokens of the whole vocabulary.
        tokens: [first, last) of the head, which the ranks of `shards` divide.
        chunk_tokens: as of `scores_in_pieces`; 0: all logits at one time, which are kept.
        want_predictions: also the most likely of its tokens.
    Returns: [L, `HEAD_COLUMNS`] float32.
    """
    token_L: Tensor | None = None
    if chunk_tokens:
        operands = shards.operands(head, x_LD)
        first = tokens[0] + shards.rank * len(operands[1])
        (log_sum, target, largest), token_L = scores_in_pieces(
            *operands, targets_L, first, shards.combine, chunk_tokens=chunk_tokens, want_predictions=want_predictions
        )
    else:
        logits_Lv = head(x_LD)
        first = tokens[0] + shards.rank * logits_Lv.shape[-1]
        log_sum, target, largest = scores(logits_Lv, targets_L, first, shards.combine)
        if want_predictions:
            token_L = most_likely(logits_Lv, largest, first, shards.combine)
    here = (targets_L >= tokens[0]) & (targets_L < tokens[1])
    columns = [log_sum + largest, (target + largest).masked_fill(~here, 0)]
    if token_L is not None:
        columns += [largest, token_L.float()]  # exact up to 2^24
    else:
        columns += [torch.zeros_like(largest)] * (HEAD_COLUMNS - len(columns))
    return torch.stack(columns, dim=1)


class JoinedVocabulary:
    """The division over heads of parts: for logits stand the results of all of them, [P, L, `HEAD_COLUMNS`]."""

    def cross_entropy(self, parts_PL: Tensor, targets_L: Tensor, reduction: Reduction) -> Tensor:
        """Float32: the cross-entropy of each position, [L], or its sum. Args: targets_L: unread; parts know theirs."""
        log_sums_PL, of_target_PL = parts_PL[..., 0], parts_PL[..., 1]
        losses_L = log_sums_PL.logsumexp(dim=0) - of_target_PL.sum(dim=0)
        return losses_L if reduction == "none" else losses_L.sum()

    def most_likely(self, parts_PL: Tensor) -> Tensor:
        """[L] int64: the most likely token of each position, the first of several; token 0 for scores that are not
        numbers."""
        largest_PL, token_PL = parts_PL.detach()[..., 2:].unbind(dim=-1)
        return token_PL.gather(0, largest_PL.argmax(dim=0, keepdim=True)).squeeze(0).long()


JOINED = JoinedVocabulary()


def _first_of_all(token_L: Tensor, has_L: Tensor, combine: Combine) -> Tensor:
    """[L] int64: the first token of all ranks that have one; 0 if none has. Args: has_L: whether this rank's counts."""
    token_L = token_L.masked_fill(~has_L, _NONE)
    combine(token_L, "min")
    return token_L.masked_fill(token_L == _NONE, 0)


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_Lv: Tensor, targets_L: Tensor, first: int, combine: Combine
    ) -> tuple[Tensor, Tensor, Tensor]:
        scores_Lv = logits_Lv.float()
        largest_L = scores_Lv.amax(dim=-1)
        combine(largest_L, "max")
        local_L, mine_L = local_targets(targets_L, first, logits_Lv.shape[-1])
        target_L = scores_Lv.gather(1, local_L[:, None]).squeeze(1) - largest_L
        # [2, L] partial -> [2, L]: the sum of the exponentials, and the score of the target from the rank that has it.
        sums = torch.stack([(scores_Lv - largest_L[:, None]).exp_().sum(dim=-1), target_L.masked_fill(~mine_L, 0)])
        combine(sums, "sum")
        ctx.save_for_backward(logits_Lv, largest_L, sums[0], local_L, mine_L)
        ctx.mark_non_differentiable(largest_L)
        return sums[0].log(), sums[1], largest_L

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_sum_L: Tensor, grad_target_L: Tensor, _: Tensor
    ) -> tuple[Tensor, None, None, None]:
        logits_Lv, largest_L, sum_L, local_L, mine_L = ctx.saved_tensors
        grad_Lv = (logits_Lv.float() - largest_L[:, None]).exp_().mul_((grad_sum_L / sum_L)[:, None])
        grad_Lv.scatter_add_(1, local_L[:, None], grad_target_L.masked_fill(~mine_L, 0)[:, None])
        return grad_Lv.to(logits_Lv.dtype), None, None, None


class _ScoresInPieces(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_LD: Tensor,
        weight_vD: Tensor,
        targets_L: Tensor,
        first: int,
        combine: Combine,
        chunk_tokens: int,
        want_predictions: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        largest_L = x_LD.new_full((len(x_LD),), -torch.inf, dtype=torch.float32)
        sum_L, target_L = (torch.zeros_like(largest_L) for _ in range(2))
        token_L = torch.zeros_like(targets_L)
        for start, end in _pieces(len(x_LD), len(weight_vD), chunk_tokens):
            logits_Lw = (x_LD @ weight_vD[start:end].t()).float()
            top_L = logits_Lw.amax(dim=-1)
            if want_predictions:
                token_L = torch.where(top_L > largest_L, logits_Lw.argmax(dim=-1) + start, token_L)
            local_L, mine_L = local_targets(targets_L, first + start, end - start)
            target_L += logits_Lw.gather(1, local_L[:, None]).squeeze(1).masked_fill_(~mine_L, 0)
            top_L = torch.maximum(top_L, largest_L)
            sum_L *= (largest_L - top_L).exp_()
            sum_L += logits_Lw.sub_(top_L[:, None]).exp_().sum(dim=-1)
            largest_L = top_L
            del logits_Lw  # before there are those of the next piece
        _, mine_L = local_targets(targets_L, first, len(weight_vD))
        own_L = largest_L.clone()
        combine(largest_L, "max")
        sum_L *= (own_L - largest_L).exp_()
        # [2, L] partial -> [2, L], as of whole logits.
        sums = torch.stack([sum_L, (target_L - largest_L).masked_fill_(~mine_L, 0)])
        combine(sums, "sum")
        if want_predictions:
            token_L = _first_of_all(token_L + first, own_L == largest_L, combine)
        sum_L, target_L = (one.clone() for one in sums)  # not views, of which one would keep both
        ctx.save_for_backward(x_LD, weight_vD, targets_L, largest_L, sum_L)
        ctx.mark_non_differentiable(largest_L, token_L)
        ctx.first, ctx.chunk_tokens = first, chunk_tokens
        return sum_L.log(), target_L, largest_L, token_L

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_sum_L: Tensor, grad_target_L: Tensor, *_: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None, None]:
        x_LD, weight_vD, targets_L, largest_L, sum_L = ctx.saved_tensors
        of_x, of_weight = ctx.needs_input_grad[:2]
        grad_x_LD = torch.zeros_like(x_LD, dtype=torch.float32) if of_x else None
        grad_weight_vD = torch.empty_like(weight_vD) if of_weight else None
        scale_L = grad_sum_L / sum_L
        for start, end in _pieces(len(x_LD), len(weight_vD), ctx.chunk_tokens):
            logits_Lw = (x_LD @ weight_vD[start:end].t()).float()
            grad_Lw = logits_Lw.sub_(largest_L[:, None]).exp_().mul_(scale_L[:, None])
            local_L, mine_L = local_targets(targets_L, ctx.first + start, end - start)
            grad_Lw.scatter_add_(1, local_L[:, None], grad_target_L.masked_fill(~mine_L, 0)[:, None])
            del logits_Lw  # of which there is a smaller copy next
            grad_Lw = grad_Lw.to(x_LD.dtype)
            if grad_x_LD is not None:
                grad_x_LD += grad_Lw @ weight_vD[start:end]
            if grad_weight_vD is not None:
                torch.mm(grad_Lw.t(), x_LD, out=grad_weight_vD[start:end])
            del grad_Lw
        grad_x = None if grad_x_LD is None else grad_x_LD.to(x_LD.dtype)
        return grad_x, grad_weight_vD, None, None, None, None, None


def local_targets(targets_L: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """[L] int64: the index of each target among the tokens first .. first + count - 1, 0 of others; [L] bool: whether
    it is one of them."""
    local_L = targets_L - first
    mine_L = (local_L >= 0) & (local_L < count)
    return local_L.masked_fill(~mine_L, 0), mine_L


def _pieces(count: int, num_tokens: int, chunk_tokens: int) -> Iterator[tuple[int, int]]:
    """[start, end) of the tokens of each piece, whose logits of `count` positions are no more than all logits of
    `chunk_tokens` positions."""
    width = min(num_tokens, max(1, num_tokens * chunk_tokens // max(1, count)))
    width -= width % _ALIGNED if width > _ALIGNED else 0
    for start in range(0, num_tokens, width):
        yield start, min(start + width, num_tokens)
