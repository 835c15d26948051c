"""A vocabulary that tensor-parallel ranks divide among themselves: token embedding and cross-entropy.

Legend: T tokens; t those that a rank has between layers, T / tp or all; D width; V tokens of the vocabulary; v = V / tp
of them, those of this rank; L labelled positions. Every collective of the embedding is over tp.
"""

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mmtrain.models.loss import Reduction
from mmtrain.models.scores import Combine, TokenShards, most_likely, scores
from mmtrain.parallel.grads import local_part
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

    def __init__(self, shards: TokenShards) -> None:
        self._combine, self._rank = shards.combine, shards.rank

    def cross_entropy(self, logits_Lv: Tensor, targets_L: Tensor, reduction: Reduction) -> Tensor:
        """Float32: the cross-entropy of each position, [L], or its sum."""
        found = scores(logits_Lv, targets_L, self._first(logits_Lv), self._combine)
        losses_L = found.log_sum - found.target
        return losses_L if reduction == "none" else losses_L.sum()

    def most_likely(self, logits_Lv: Tensor) -> Tensor:
        """[L] int64: the most likely token of each position, the first of several; token 0 for scores that are not
        numbers."""
        largest_L = logits_Lv.detach().float().amax(dim=-1)
        self._combine(largest_L, "max")
        return most_likely(logits_Lv, largest_L, self._first(logits_Lv), self._combine)

    def _first(self, logits_Lv: Tensor) -> int:
        """The first token of this rank."""
        first: int = self._rank * logits_Lv.shape[-1]
        return first


def token_shards(group: dist.ProcessGroup, rows: RowShards) -> TokenShards:
    """The division of a head over a group of tensor parallelism. Args: group: in the order of their tokens. rows: of
    this rank between layers."""

    def operands(head: nn.Module, x_LD: Tensor) -> tuple[Tensor, Tensor]:
        return rows.use_for_parts(x_LD), local_part(head.weight)  # type: ignore[arg-type]

    return TokenShards(rank=dist.get_rank(group), combine=combining(group), operands=operands)


def combining(group: dist.ProcessGroup) -> Combine:
    """Combines tensors over the ranks of a group."""
    ops = {"max": dist.ReduceOp.MAX, "sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN}

    def combine(x: Tensor, how: str) -> None:
        if x.numel():  # the number of positions is equal on all ranks
            dist.all_reduce(x, ops[how], group=group)

    return combine
