"""A spectrogram cut into what each row of an encoder of sound reads of it.

Row r comes from two convolutions over three frames, the second with stride two: of the first one's outputs 2 r - 1 to
2 r + 1, and so of the frames 2 r - 2 to 2 r + 2. The last row of a sound thus reads up to two frames behind its end.
Those are frames of the silence with which the sound was padded before its spectrogram was made and normalised; behind
the last frame of a full window, and before the first one, the convolutions read zeros.

Shape legend: B mel bins; F frames; l rows.
"""

import torch
from torch import Tensor, nn

from mmtrain.families.shapes import ROW_FRAMES

_BEFORE = 2
"""Frames before its own two that a row reads."""


def row_patches(mel_BF: Tensor, num_rows: int) -> Tensor:
    """[l, ROW_FRAMES * B]: the frames that each of the first rows reads, frame by frame.

    Args: mel_BF: log-mel frames from the first one on, of the padded window; frames that it lacks are zero.
    """
    missing = max(0, 2 * num_rows + 1 - mel_BF.shape[1])
    frames_BF = nn.functional.pad(mel_BF, (_BEFORE, missing))
    return frames_BF.unfold(1, ROW_FRAMES, 2)[:, :num_rows].permute(1, 2, 0).flatten(1).contiguous()


def spectrogram_of(patches: Tensor, num_frames: int) -> Tensor:
    """[B, F]: the frames of which `row_patches` made patches [l, ROW_FRAMES * B], then zeros, which no row reads."""
    frames = patches.unflatten(1, (ROW_FRAMES, -1))
    own = frames[:, _BEFORE : _BEFORE + 2].flatten(0, 1)
    read = torch.cat([own, frames[-1, _BEFORE + 2 :]])[:num_frames]
    return nn.functional.pad(read, (0, 0, 0, num_frames - len(read))).T.contiguous()
