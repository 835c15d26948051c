"""The chunks of a model whose embedding and head are divided over the pipeline ranks (`spec/vocabulary.py`).

Parameter names are those of the whole model; each rank holds its rows of them.

Shape legend: T tokens, t those that a rank has between layers; L labelled positions; D width; P parts.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from mmtrain.config.model import ModelConfig
from mmtrain.families.shapes import LanguageShape
from mmtrain.models.adapters import LanguageDecoder
from mmtrain.models.chunk import Chunk, train_language
from mmtrain.models.loss import LOSSES, LossOutput
from mmtrain.models.scores import JOINED, TokenShards, head_columns
from mmtrain.spec.model_configs import language_config
from mmtrain.spec.spec import ModelSpec, VocabularyRows

EMBEDDING, HEAD = "language.model.embed_tokens.weight", "language.lm_head.weight"
"""The matrices of the vocabulary."""


class PartialEmbedding(nn.Embedding):
    """A part of an embedding, whose tokens are counted from its first one; others have rows of zeros."""

    def forward(self, ids_T: Tensor) -> Tensor:
        """The embeddings of token ids, [T, D]; zeros where the token is another part's."""
        other_T = (ids_T < 0) | (ids_T >= self.num_embeddings)
        return super().forward(ids_T.masked_fill(other_T, 0)).masked_fill(other_T[:, None], 0)


class VocabularyPart(Chunk):
    """Rows of the embedding, of the head, or of both if they are one matrix: two stages then call one chunk."""

    def __init__(
        self,
        model: ModelConfig,
        shape: LanguageShape,
        adapter: LanguageDecoder,
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
        heads = (m.layers[0] for m in spec.modules if m.vocabulary == rows and m.layers[0].name == "head")
        self.loss_chunk_tokens = next(heads).loss_chunk_tokens
        self.shards = TokenShards()
        """The ranks that divide these rows further; set by tensor parallelism."""

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
        """The embeddings of token ids, or the scores of this part's tokens in labelled rows.

        Args:
            x: token ids [T] int64; for the head the normed rows [L, D].
            targets: [L] int64, for the head.
            want_predictions: also the most likely token of the part.
        Returns: [t, D], zeros where the token is another part's; of the head [L, 4] float32, see `head_columns`.
        """
        if targets is None:
            embedded: Tensor = self.language.model.embed_tokens(x - self.rows.first)
            return embedded
        return head_columns(
            self.language.lm_head,
            x,
            targets,
            (self.rows.first, self.rows.last),
            self.shards,
            chunk_tokens=self.loss_chunk_tokens,
            want_predictions=want_predictions,
        )


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
        """The loss. Args: parts: of P parts, [L, 4] each, see `head_columns`. targets: [L] int64. Others as of
        `LanguageChunk`."""
        parts_PL = torch.stack(parts)
        losses = self.loss(parts_PL, targets, reduction="none" if want_losses else "sum", vocabulary=JOINED)
        return LossOutput(
            loss_sum=losses.sum() if want_losses else losses,
            predictions=JOINED.most_likely(parts_PL) if want_predictions else None,
            losses=losses.detach() if want_losses else None,
        )
