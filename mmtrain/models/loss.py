"""The losses that models are trained with, by name, and what a head returns.

A step's loss is the sum over all targets of all microbatches and ranks, divided by the number of their values. So a
loss returns sums, and says how many values a target has; no microbatch or rank divides by a number of its own.

Shape legend: L labelled positions; V vocabulary, or this rank's part of it; n patches; P numbers of one patch.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor, nn

from mmtrain.config.model import ModelConfig
from mmtrain.modality.metadata import IterationMeta
from mmtrain.spec.shapes import dit_shape

Reduction = Literal["sum", "none"]
"""As of torch: a scalar, or the loss of each target."""


class LossOutput(NamedTuple):
    """What the last chunk of a trained model returns; a tuple, so that FSDP finds its tensors."""

    loss_sum: Tensor
    """Float32 scalar: the loss summed over the targets; 0 with a graph if there is none."""
    predictions: Any = None
    """If asked for: of a language model [L] int64, a token for each labelled position; of a DiT [C, F, H, W] float32 of
    each clip."""
    losses: Tensor | None = None
    """If asked for: [L] float32, the loss of each labelled position, detached."""


class VocabularySharding(Protocol):
    """The division of a vocabulary over ranks, which hold logits of their tokens alone; results are equal on all."""

    def cross_entropy(self, logits_LV: Tensor, targets_L: Tensor, reduction: Reduction) -> Tensor:
        """Float32: the cross-entropy of each position, [L], or its sum."""

    def most_likely(self, logits_LV: Tensor) -> Tensor:
        """[L] int64: the most likely token of each position, the first of several."""


class WholeVocabulary:
    """The division for one rank, which has all tokens."""

    def cross_entropy(self, logits_LV: Tensor, targets_L: Tensor, reduction: Reduction) -> Tensor:
        """Float32: the cross-entropy of each position, [L], or its sum."""
        return nn.functional.cross_entropy(logits_LV.float(), targets_L, reduction=reduction)

    def most_likely(self, logits_LV: Tensor) -> Tensor:
        """[L] int64: the most likely token of each position, the first of several."""
        return logits_LV.detach().argmax(dim=-1)


_ALL_TOKENS = WholeVocabulary()


class Loss(ABC):
    """One loss, of a model that is trained with it."""

    lack: str
    """What a batch without targets does not have, and where to look, for errors."""

    def __init__(self, model: ModelConfig) -> None:
        self.values_per_target = 1
        """Numbers that are predicted for one target of the metadata."""

    @abstractmethod
    def __call__(
        self,
        predicted: Tensor,
        targets: Tensor,
        *,
        reduction: Reduction = "sum",
        vocabulary: VocabularySharding = _ALL_TOKENS,
    ) -> Tensor:
        """Float32: the loss of each target, or its sum. Args: vocabulary: of predicted tokens."""

    def num_values(self, meta: IterationMeta) -> int:
        """The numbers by which the sum of the losses of these microbatches is divided."""
        return meta.num_targets * self.values_per_target


class CrossEntropy(Loss):
    """Of the next token, at the labelled positions."""

    lack = "no token to predict; check the records' answers"

    def __call__(
        self,
        logits_LV: Tensor,
        targets_L: Tensor,
        *,
        reduction: Reduction = "sum",
        vocabulary: VocabularySharding = _ALL_TOKENS,
    ) -> Tensor:
        """Float32: the loss of each position, [L], or its sum."""
        return vocabulary.cross_entropy(logits_LV, targets_L, reduction)


class SquaredError(Loss):
    """Of all numbers of a clip's target: its velocity, noise or both, as `diffusion.prediction` says."""

    lack = "no clip that can be read"

    def __init__(self, model: ModelConfig) -> None:
        super().__init__(model)
        self.values_per_target = dit_shape(model).output_dim

    def __call__(
        self,
        predicted_nP: Tensor,
        target_nP: Tensor,
        *,
        reduction: Reduction = "sum",
        vocabulary: VocabularySharding = _ALL_TOKENS,
    ) -> Tensor:
        """Float32: the loss of each number, [n, P], or its sum. Args: vocabulary: unread."""
        errors_nP = (predicted_nP.float() - target_nP.float()).square()
        return errors_nP if reduction == "none" else errors_nP.sum()


LOSSES: dict[str, Callable[[ModelConfig], Loss]] = {"cross_entropy": CrossEntropy, "squared_error": SquaredError}
"""By the key `loss` of the section of the module with the head."""


def loss_of(model: ModelConfig) -> Loss:
    """The loss that a model is trained with: that of its DiT, or else of its language model."""
    return LOSSES[(model.dit or model.language).loss](model)
