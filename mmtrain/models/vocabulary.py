"""A vocabulary that ranks divide: the scores of a part of the tokens, and the chunks of a model whose embedding and
head are divided over the pipeline ranks (`spec/vocabulary.py`).

Parameter names are those of the whole model; each rank holds its rows of them.

Shape legend: T tokens, t those that a rank has between layers; L labelled positions; D width; V tokens of the
vocabulary, v those of a part; P parts.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from mmtrain.config.model import ModelConfig
from mmtrain.families.shapes import LanguageShape
from mmtrain.models.adapters import Decoder
from mmtrain.models.chunk import Chunk, train_language
from mmtrain.models.loss import LOSSES, LossOutput, Reduction
from mmtrain.spec.model_configs import language_config
from mmtrain.spec.spec import ModelSpec, VocabularyRows
from mmtrain.spec.vocabulary import HEAD_COLUMNS

EMBEDDING, HEAD = "language.model.embed_tokens.weight", "language.lm_head.weight"
"""The matrices of the vocabulary."""

Combine = Callable[[Tensor, Literal["max", "sum", "min"]], None]
"""Combines a tensor in place with those of the ranks that hold the other tokens."""


def alone(x: Tensor, how: Literal["max", "sum", "min"]) -> None:
    """Of one rank."""


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
    none = torch.iinfo(torch.int64).max
    index_L = (index_L + first).masked_fill(~has_L, none)
    combine(index_L, "min")
    return index_L.masked_fill(index_L == none, 0)


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_Lv: Tensor, targets_L: Tensor, first: int, combine: Combine
    ) -> tuple[Tensor, Tensor, Tensor]:
        scores_Lv = logits_Lv.float()
        largest_L = scores_Lv.amax(dim=-1)
        combine(largest_L, "max")
        local_L = targets_L - first
        mine_L = (local_L >= 0) & (local_L < logits_Lv.shape[-1])
        local_L = local_L.masked_fill(~mine_L, 0)
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


class PartialEmbedding(nn.Embedding):
    """A part of an embedding, whose tokens are counted from its first one; others have rows of zeros."""

    def forward(self, ids_T: Tensor) -> Tensor:
        """[T, D]."""
        other_T = (ids_T < 0) | (ids_T >= self.num_embeddings)
        return super().forward(ids_T.masked_fill(other_T, 0)).masked_fill(other_T[:, None], 0)


class VocabularyPart(Chunk):
    """Rows of the embedding, of the head, or of both if they are one matrix: two stages then call one chunk."""

    def __init__(
        self,
        model: ModelConfig,
        shape: LanguageShape,
        adapter: Decoder,
        spec: ModelSpec,
        module: str,
    ) -> None:
        super().__init__(spec.module(module), (0, 1))
        rows = self.module_spec.vocabulary
        assert rows is not None
        self.shape, self.rows = shape, rows
        self.has_head = self.has_norm or shape.tied
        self.has_embed = self.has_embed or shape.tied
        self.language = adapter.build(language_config(model.language))
        adapter.keep(self.language, embed=self.has_embed, blocks=[], norm=self.has_head)
        self.language.model.norm = None
        self._keep_rows()
        train_language(self, self.language, model, adapter)
        self.combine: Combine = alone
        """Over the ranks that divide these rows further; set by tensor parallelism."""
        self.tp_rank = 0
        """Of these, which have equal parts in their order."""

    def _keep_rows(self) -> None:
        """Matrices of this part's rows, on the meta device."""
        first, last, _ = self.rows
        language, width = self.language, self.shape.width
        with torch.device("meta"):
            if self.has_embed:
                padding = language.model.embed_tokens.padding_idx
                own = padding - first if padding is not None and first <= padding < last else None
                language.model.embed_tokens = PartialEmbedding(last - first, width, padding_idx=own)
            if self.has_head:
                language.lm_head = nn.Linear(width, last - first, bias=False)
        if self.has_embed and self.has_head:
            language.lm_head.weight = language.model.embed_tokens.weight

    @property
    def stored_rows(self) -> Mapping[str, VocabularyRows]:
        return dict.fromkeys((EMBEDDING, HEAD), self.rows)

    def blocks(self) -> list[nn.Module]:
        return []

    def forward(self, x: Tensor, *, targets: Tensor | None = None, want_predictions: bool = False) -> Tensor:
        """Of token ids their embeddings, of labelled rows the scores of this part's tokens.

        Args:
            x: token ids [T] int64; for the head the normed rows [L, D].
            targets: [L] int64, for the head.
            want_predictions: also the most likely token of the part.
        Returns: [t, D], zeros where the token is another part's; of the head [L, `HEAD_COLUMNS`] float32.
        """
        if targets is None:
            embedded: Tensor = self.language.model.embed_tokens(x - self.rows.first)
            return embedded
        logits_Lv = self.language.lm_head(x)
        first = self.rows.first + self.tp_rank * logits_Lv.shape[-1]
        log_sum, target, largest = scores(logits_Lv, targets, first, self.combine)
        here = (targets >= self.rows.first) & (targets < self.rows.last)
        columns = [log_sum + largest, (target + largest).masked_fill(~here, 0)]
        if want_predictions:
            token = most_likely(logits_Lv, largest, first, self.combine)
            columns += [largest, token.float()]  # exact up to 2^24
        else:
            columns += [torch.zeros_like(largest)] * (HEAD_COLUMNS - len(columns))
        return torch.stack(columns, dim=1)


class JoinedVocabulary:
    """The division over modules of a model: for logits stand the results of all parts, [P, L, `HEAD_COLUMNS`]."""

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


_JOINED = JoinedVocabulary()


class LossChunk(Chunk):
    """The loss of a model whose head is divided: it joins the results of the parts."""

    def __init__(self, model: ModelConfig, spec: ModelSpec) -> None:
        super().__init__(spec.module("loss"), (0, 1))
        self.loss = LOSSES[model.language.loss](model)

    def blocks(self) -> list[nn.Module]:
        return []

    def forward(
        self, *parts: Tensor, targets: Tensor, want_predictions: bool = False, want_losses: bool = False
    ) -> LossOutput:
        """The loss. Args: parts: of P parts, [L, `HEAD_COLUMNS`] each. targets: [L] int64. Others as of
        `LanguageChunk`."""
        parts_PL = torch.stack(parts)
        losses = self.loss(parts_PL, targets, reduction="none" if want_losses else "sum", vocabulary=_JOINED)
        return LossOutput(
            loss_sum=losses.sum() if want_losses else losses,
            predictions=_JOINED.most_likely(parts_PL) if want_predictions else None,
            losses=losses.detach() if want_losses else None,
        )
