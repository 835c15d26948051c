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
from mmtrain.spec.model_shapes import dit_shape

Reduction = Literal["sum", "none"]
"""The reduction, named as by torch: "sum" gives a scalar, "none" the loss of each target."""


class LossOutput(NamedTuple):
    """What the last chunk of a trained model returns; a tuple, so that FSDP finds its tensors."""

    loss_sum: Tensor
    """Float32 scalar: the loss summed over the targets; 0 with a graph if there is none."""
    predictions: Any = None
    """The predictions, if asked for. Language model: [L] int64, a token for each labelled position. DiT: [C, F, H, W]
    float32 of each clip. Two towers: [2, N, D] float32, the normalised embeddings of images and captions."""
    losses: Tensor | None = None
    """The loss of each labelled position or pair, if asked for: [L] float32, detached."""


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
    """The cross-entropy of the next token at the labelled positions."""

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
    """The squared error of all numbers of a clip's target: its velocity, noise or both, as `diffusion.prediction`
    says."""

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


class PairLoss(Loss):
    """The loss of the pairs of N images and N captions, from their similarities."""

    lack = "no pair of an image and a caption"

    def __call__(
        self,
        logits_NN: Tensor,
        targets_N: Tensor,
        *,
        reduction: Reduction = "sum",
        vocabulary: VocabularySharding = _ALL_TOKENS,
    ) -> Tensor:
        """Float32: the loss of each image, [N], or its sum.

        Args: logits_NN: [image, caption]. targets_N: the caption of each image. vocabulary: unread.
        """
        losses_N = self.of_images(logits_NN, targets_N)
        return losses_N if reduction == "none" else losses_N.sum()

    @abstractmethod
    def of_images(self, logits_NN: Tensor, targets_N: Tensor) -> Tensor:
        """[N]: the loss of each image with its caption. Arguments: see `__call__`."""


class ClipLoss(PairLoss):
    """The mean of two cross-entropies of each pair: its caption among all captions, and its image among all images.

    Source: CLIP, arXiv:2103.00020, figure 3.
    """

    def of_images(self, logits_NN: Tensor, targets_N: Tensor) -> Tensor:
        of_captions_N = nn.functional.cross_entropy(logits_NN, targets_N, reduction="none")
        of_images_N = nn.functional.cross_entropy(logits_NN.T, targets_N.argsort(), reduction="none")
        return (of_captions_N + of_images_N[targets_N]) / 2


class SigmoidLoss(PairLoss):
    """The binary cross-entropies of each image with all captions, of which one is its own.

    Source: SigLIP, arXiv:2303.15343, equation 1.
    """

    def of_images(self, logits_NN: Tensor, targets_N: Tensor) -> Tensor:
        own_NN = nn.functional.one_hot(targets_N, logits_NN.shape[1]).to(logits_NN.dtype)
        return nn.functional.binary_cross_entropy_with_logits(logits_NN, own_NN, reduction="none").sum(dim=1)


LOSSES: dict[str, Callable[[ModelConfig], Loss]] = {
    "cross_entropy": CrossEntropy,
    "squared_error": SquaredError,
    "clip": ClipLoss,
    "siglip": SigmoidLoss,
}
"""The losses by the key `loss` of the section of the module with the head."""


def loss_of(model: ModelConfig) -> Loss:
    """The loss that a model is trained with: that of its DiT, of its two towers, or else of its language model."""
    return LOSSES[(model.dit or model.contrast or model.language).loss](model)
