"""Cross-entropy over the vocabulary, and the most likely tokens.

Shape legend: L labelled positions; V vocabulary.
"""

from collections.abc import Callable

from torch import Tensor, nn

LossFunction = Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor | None]]
"""(logits [L, V or this rank's part of it], targets [L], want_predictions) -> (loss_sum, predictions)."""


def cross_entropy_sum(logits_LV: Tensor, targets_L: Tensor, want_predictions: bool) -> tuple[Tensor, Tensor | None]:
    """(float32 scalar: cross-entropy summed over the positions, [L] int64 most likely tokens or None)."""
    logits_LV = logits_LV.float()
    loss = nn.functional.cross_entropy(logits_LV, targets_L, reduction="sum")
    return loss, logits_LV.detach().argmax(dim=-1) if want_predictions else None
