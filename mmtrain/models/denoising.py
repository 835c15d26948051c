"""Sampling without files: latents from prompts with the whole modules of a text-to-video model.

Shape legend: N clips; T text tokens of one clip; D columns; C, F, H, W channels, frames, rows and columns of latents.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mmtrain.modality.bitfield import prompt_bits
from mmtrain.modality.buckets import clip_seed
from mmtrain.models.attention.context import attention_context
from mmtrain.models.batch import document_positions
from mmtrain.models.chunk import LanguageChunk
from mmtrain.models.dit import DitChunk

GUIDANCE = 2.0
"""Default for a job that trained with hidden captions."""
NUM_STEPS = 30
"""Default number of calls of the model."""


@torch.no_grad()
def encode_prompts(text_encoder: LanguageChunk, prompts: Sequence[Tensor]) -> list[Tensor]:
    """The states [T, D] of prompts, token ids [T] each on the encoder's device."""
    lengths = [len(ids) for ids in prompts]
    positions = document_positions(lengths).to(prompts[0].device)
    states: Tensor = text_encoder(
        torch.cat(list(prompts)), attention=attention_context(prompt_bits(lengths)), position_ids=positions
    )
    return list(states.split(lengths))


Predict = Callable[[Sequence[Tensor], float], Tensor]
"""A function of the noisy latents [C, F, H, W] of each clip and the timestep: the prediction for each, [N, C, F, H,
W]."""


def predictor(dit: DitChunk, texts: Sequence[Tensor]) -> Predict:
    """The predictions of a whole DiT, all clips in one call. Args: texts: states [T, D] of each clip's prompt."""

    def predict(clips: Sequence[Tensor], timestep: float) -> Tensor:
        sides = zip(clips[0].shape[1:], dit.shape.patch, strict=True)
        frames, rows, columns = (side // patch for side, patch in sides)
        with torch.no_grad():
            output = dit(
                list(clips),
                grids=((frames, rows, columns),) * len(clips),
                text_lengths=tuple(len(text) for text in texts),
                features=torch.cat(list(texts)),
                timesteps=[timestep] * len(clips),
                want_predictions=True,
            )
        return torch.stack(output.predictions)

    return predict


def denoise(
    predict: Predict,
    scheduler: Any,
    noise_NCFHW: Tensor,
    *,
    guidance: float | None,
    num_steps: int,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """[N, C, F, H, W]: latents without noise.

    Args:
        predict: for each clip with its prompt, then, with guidance, for each with the text that guidance avoids.
        scheduler: as `make_scheduler` gives it.
        guidance: weight w of classifier-free guidance: the prediction is u + w (p - u) of the predictions p with
            the prompt and u with the other text; None: p alone. Source: Ho and Salimans, arXiv:2207.12598.
        progress: told (steps done, steps in all).
    """
    scheduler.set_timesteps(num_steps, device=noise_NCFHW.device)
    x = noise_NCFHW
    for done, time in enumerate(scheduler.timesteps):
        predicted = predict(list(x) if guidance is None else [*x, *x], float(time))
        if guidance is not None:
            prompted, avoided = predicted.chunk(2)
            predicted = avoided + guidance * (prompted - avoided)
        x = scheduler.step(predicted, time, x).prev_sample
        if progress:
            progress(done + 1, num_steps)
    return x


def start_noise(shape: tuple[int, int, int, int], seed: int, index: int) -> Tensor:
    """[C, F, H, W]: where sample `index` of every prompt begins; drawn on the CPU, so equal on all devices."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(clip_seed(seed, 0, 0, index)))


def to_pixels(latents_CFHW: Tensor) -> npt.NDArray[np.uint8] | None:
    """[F, H, W, 3] of latents that are pixels from -1 to 1; None: they are no pixels."""
    if len(latents_CFHW) != 3:
        return None
    levels = ((latents_CFHW.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return np.ascontiguousarray(levels.permute(1, 2, 3, 0).numpy())
