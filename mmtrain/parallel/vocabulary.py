"""A vocabulary that tensor-parallel ranks divide among themselves: token embedding and cross-entropy.

Legend: T tokens; t those that a rank has between layers, T / tp or all; D width; V tokens of the vocabulary; v = V / tp
of them, those of this rank; L labelled positions. Every collective of the embedding is over tp.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mmtrain.models.loss import Reduction
from mmtrain.parallel.row_shards import RowShards


class VocabularyEmbedding:
    """Looks up tokens in this rank's part of the vocabulary.

    torch's DTensor embedding makes the gradient of all V rows on every rank before it adds them up, and takes
    `padding_idx` for a local number.
    """

    def __init__(self, padding: int | None, mesh: DeviceMesh, rows: RowShards) -> None:
        """Args:
        padding: token whose row gets no gradient, counted in the whole vocabulary.
        rows: of this rank between layers.
        """
        self._padding = padding
        self._rows = rows
        self._tp_rank: int = mesh.get_local_rank()

    def __call__(self, ids_T: Tensor, weight_vD: Tensor) -> Tensor:
        """This rank's rows of the embedded tokens, [t, D]."""
        num_tokens = len(weight_vD)
        first = self._tp_rank * num_tokens
        local_T = ids_T - first
        other_T = (local_T < 0) | (local_T >= num_tokens)
        padding = None  # a negative number would count from the end
        if self._padding is not None and first <= self._padding < first + num_tokens:
            padding = self._padding - first
        x_TD = nn.functional.embedding(local_T.masked_fill(other_T, 0), weight_vD, padding)
        return self._rows.sum_shard(x_TD.masked_fill(other_T[:, None], 0))


class VocabularyShards:
    """The `VocabularySharding` of one rank, whose logits are those of its tokens. No rank ever holds [L, V].

    Equal on all ranks; the backward needs no collective.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Args: group: the ranks that divide the vocabulary, in the order of their tokens."""
        self._group, self._rank = group, dist.get_rank(group)

    def cross_entropy(self, logits_Lv: Tensor, targets_L: Tensor, reduction: Reduction) -> Tensor:
        """Float32: the cross-entropy of each position, [L], or its sum."""
        losses_L: Tensor = _CrossEntropy.apply(logits_Lv, targets_L, self._first(logits_Lv), self._group)
        return losses_L if reduction == "none" else losses_L.sum()

    def most_likely(self, logits_Lv: Tensor) -> Tensor:
        """[L] int64: the most likely token of each position, the first of several; token 0 for scores that are not
        numbers."""
        scores_Lv = logits_Lv.detach().float()
        largest_L = _largest(scores_Lv, self._group)
        index_L = scores_Lv.argmax(dim=-1)
        has_L = scores_Lv.gather(1, index_L[:, None]).squeeze(1) == largest_L
        none = torch.iinfo(torch.int64).max
        index_L = (index_L + self._first(logits_Lv)).masked_fill(~has_L, none)
        _all_reduce(index_L, dist.ReduceOp.MIN, self._group)
        return index_L.masked_fill(index_L == none, 0)

    def _first(self, logits_Lv: Tensor) -> int:
        """The first token of this rank."""
        first: int = self._rank * logits_Lv.shape[-1]
        return first


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_Lv: Tensor, targets_L: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
        scores_Lv = logits_Lv.float()
        largest_L = _largest(scores_Lv, group)
        local_L = targets_L - first
        mine_L = (local_L >= 0) & (local_L < logits_Lv.shape[-1])
        local_L = local_L.masked_fill(~mine_L, 0)
        target_L = scores_Lv.gather(1, local_L[:, None]).squeeze(1) - largest_L
        # [2, L] partial -> [2, L]: the sum of the exponentials, and the score of the target from the rank that has it.
        sums = torch.stack([(scores_Lv - largest_L[:, None]).exp_().sum(dim=-1), target_L.masked_fill(~mine_L, 0)])
        _all_reduce(sums, dist.ReduceOp.SUM, group)
        ctx.save_for_backward(logits_Lv, largest_L, sums[0], local_L, mine_L)
        return sums[0].log() - sums[1]

    @staticmethod
    def backward(ctx: Any, grad_L: Tensor) -> tuple[Tensor, None, None, None]:
        logits_Lv, largest_L, sum_L, local_L, mine_L = ctx.saved_tensors
        grad_Lv = (logits_Lv.float() - largest_L[:, None]).exp_().div_(sum_L[:, None])
        grad_Lv.scatter_add_(1, local_L[:, None], -mine_L[:, None].to(grad_Lv.dtype))
        return grad_Lv.mul_(grad_L[:, None]).to(logits_Lv.dtype), None, None, None


def _largest(scores_Lv: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[L]: the largest score of each position over all tokens."""
    largest_L = scores_Lv.amax(dim=-1)
    _all_reduce(largest_L, dist.ReduceOp.MAX, group)
    return largest_L


def _all_reduce(x: Tensor, op: Any, group: dist.ProcessGroup) -> None:
    if x.numel():  # the number of positions is equal on all ranks
        dist.all_reduce(x, op, group=group)
