"""The loss of each labelled position of a language model, of jobs that report losses by source."""

from collections.abc import Callable, Iterable

from torch import Tensor, nn

from mmtrain.models.chunk import Chunk, LanguageChunk
from mmtrain.parallel.vocabulary import VocabularyLoss

PositionFunction = Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor | None]]
"""As a `LossFunction`, but the losses of the positions, [L] float32, instead of their sum."""


class PositionLosses:
    """A `LossFunction` that also keeps the loss of each position, until it is taken.

    Args: function: the losses that are summed.
    """

    def __init__(self, function: PositionFunction) -> None:
        self._function = function
        self._kept: Tensor | None = None

    @classmethod
    def of(cls, chunks: Iterable[Chunk]) -> "PositionLosses | None":
        """The loss of a language model's head, put in the place of its own; None: no chunk has the head."""
        for chunk in chunks:
            if isinstance(chunk, LanguageChunk) and chunk.has_head:
                loss = chunk.loss
                chunk.loss = made = cls(loss.positions if isinstance(loss, VocabularyLoss) else _cross_entropy)
                return made
        return None

    def __call__(self, logits: Tensor, targets_L: Tensor, want_predictions: bool) -> tuple[Tensor, Tensor | None]:
        """(float32 scalar: the loss summed over the positions, [L] int64 most likely tokens or None)."""
        losses_L, predictions = self._function(logits, targets_L, want_predictions)
        self._kept = losses_L.detach()
        return losses_L.sum(), predictions

    def take(self) -> Tensor:
        """[L]: the losses of the last call, which are given out once."""
        kept, self._kept = self._kept, None
        assert kept is not None, "no loss was computed since they were last taken"
        return kept


def _cross_entropy(logits_LV: Tensor, targets_L: Tensor, want_predictions: bool) -> tuple[Tensor, Tensor | None]:
    losses_L = nn.functional.cross_entropy(logits_LV.float(), targets_L, reduction="none")
    return losses_L, logits_LV.detach().argmax(dim=-1) if want_predictions else None
