"""The loss behind two towers.

Shape legend: N pairs of a group of microbatches; D width of an embedding.
"""

import torch
from torch import Tensor, nn

from mmtrain.config.model import ModelConfig
from mmtrain.models.chunk import Chunk
from mmtrain.models.loss import LOSSES, LossOutput
from mmtrain.spec.contrast import BIAS, CONTRAST, SCALARS, SCALE
from mmtrain.spec.spec import ModelSpec


class ContrastChunk(Chunk):
    """The similarities of all images and captions of a group, and their loss.

    Parameters: `contrast.logit_scale`, the logarithm of what similarities are multiplied by, and of SigLIP
    `contrast.logit_bias`, [1] each.
    """

    def __init__(self, model: ModelConfig, spec: ModelSpec) -> None:
        super().__init__(spec.module(CONTRAST), (0, 1))
        assert model.contrast is not None
        self.loss = LOSSES[model.contrast.loss](model)
        self._start = SCALARS[model.contrast.loss]
        self.contrast = nn.Module()
        for name in self._start:
            scalar = nn.Parameter(torch.empty(1, device="meta"), requires_grad=bool(model.contrast.trainable))
            self.contrast.register_parameter(name, scalar)

    def blocks(self) -> list[nn.Module]:
        return []

    def init_weights(self) -> None:
        """Sets the parameters to the values with which training starts, in place."""
        for name, value in self._start.items():
            self.contrast.get_parameter(name).fill_(value)

    def forward(self, *embeddings: Tensor, want_predictions: bool = False, want_losses: bool = False) -> LossOutput:
        """The loss of N pairs.

        Args:
            embeddings: [n, D] each; those of N images, then those of their N captions.
            want_predictions: also return all of them normalised, [2, N, D] float32, images first.
            want_losses: also return the loss of each pair.
        """
        if not sum(map(len, embeddings)):  # of blank microbatches alone
            return LossOutput(loss_sum=torch.cat(embeddings).float().sum())
        x_2ND = nn.functional.normalize(torch.cat(embeddings).float(), dim=-1).unflatten(0, (2, -1))
        logits_NN = x_2ND[0] @ x_2ND[1].T * self.contrast.get_parameter(SCALE).float().exp()
        if BIAS in self._start:
            logits_NN = logits_NN + self.contrast.get_parameter(BIAS).float()
        losses = self.loss(logits_NN, torch.arange(len(logits_NN), device=logits_NN.device), reduction="none")
        return LossOutput(
            loss_sum=losses.sum(),
            predictions=x_2ND.detach() if want_predictions else None,
            losses=losses.detach() if want_losses else None,
        )
