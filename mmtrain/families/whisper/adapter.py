"""The class of Whisper's encoder in transformers.

Shape legend: N windows; R rows of all of them; F frames of a spectrogram; B its mel bins; D encoder width.
"""

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, WhisperConfig
from transformers.models.whisper import modeling_whisper

from mmtrain.families.shapes import ROW_FRAMES
from mmtrain.models.adapters import MaskedVision, RankRows
from mmtrain.models.transfer import to_device


class WhisperEncoder(MaskedVision):
    """The Whisper encoder: a log-mel spectrogram [mel bins, 2 x frames] is an image of one row of frames. Where rows
    are packed, a patch is all that one row reads of it, see `models.spectrogram`."""

    classes = WhisperConfig, modeling_whisper.WhisperEncoder

    def call_embed(self, tower: PreTrainedModel, pixels: Tensor, rows: RankRows) -> Tensor:
        if rows.shape.packed:
            return _embedded_rows(tower, pixels, rows)
        x_NDF = nn.functional.gelu(tower.conv1(pixels.to(tower.conv1.weight.dtype)))
        x_NDF = nn.functional.gelu(tower.conv2(x_NDF))
        frames = torch.arange(x_NDF.shape[-1], device=x_NDF.device)
        return (x_NDF.transpose(1, 2) + tower.embed_positions(frames)).flatten(0, 1)

    def init_weights(self, tower: PreTrainedModel, module: nn.Module) -> None:
        if module is not tower or tower.embed_positions is not None:  # the tower's own rule sets the positions
            super().init_weights(tower, module)


def _embedded_rows(tower: PreTrainedModel, patches: Tensor, rows: RankRows) -> Tensor:
    """[R, D]: the first activation of packed rows of sounds. Args: patches: [R, ROW_FRAMES * B]."""
    first, second = tower.conv1, tower.conv2
    own = np.maximum(rows.indices, 0)[: len(patches)]
    time_R = np.concatenate([np.arange(w) for _, _, w in rows.grids])[own]
    x_RBF = patches.to(first.weight.dtype).unflatten(1, (ROW_FRAMES, -1)).transpose(1, 2)
    x_RD3 = nn.functional.gelu(nn.functional.conv1d(x_RBF, first.weight, first.bias))
    # Before a sound's first frame the second convolution reads zeros, as its padding, and not what the first one
    # makes of zeros.
    begins_R = to_device(time_R == 0, x_RD3.device)
    x_RD3[:, :, 0].masked_fill_(begins_R[:, None], 0)
    x_RD = nn.functional.gelu(nn.functional.conv1d(x_RD3, second.weight, second.bias)).squeeze(2)
    return x_RD + tower.embed_positions(to_device(time_R, x_RD.device))


ADAPTERS = {"whisper_encoder": WhisperEncoder}
