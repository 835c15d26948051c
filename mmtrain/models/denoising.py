"""From prompts to latents with the whole modules of a text-to-video model: sampling without files.

Shape legend: N clips; T text tokens of one clip; D columns; C, F, H, W channels, frames, rows and columns of latents.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mmtrain.modality.bitfield import prompt_bits
from mmtrain.models.attention.context import attention_context
from mmtrain.models.batch import document_positions
from mmtrain.models.chunk import LanguageChunk
from mmtrain.models.dit import DitChunk


@torch.no_grad()
def encode_prompts(text_encoder: LanguageChunk, prompts: Sequence[Tensor]) -> list[Tensor]:
    """The states [T, D] of prompts, token ids [T] each on the encoder's device."""
    lengths = [len(ids) for ids in prompts]
    positions = document_positions(lengths).to(prompts[0].device)
    states: Tensor = text_encoder(
        torch.cat(list(prompts)), attention=attention_context(prompt_bits(lengths)), position_ids=positions
    )
    return list(states.split(lengths))


@torch.no_grad()
def denoise(
    dit: DitChunk,
    scheduler: Any,
    noise_NCFHW: Tensor,
    texts: Sequence[Tensor],
    avoided_texts: Sequence[Tensor] | None,
    *,
    guidance: float,
    num_steps: int,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """[N, C, F, H, W]: latents without noise, all clips in one call a step.

    Args:
        dit: the whole module.
        scheduler: as `make_scheduler` gives it.
        texts: states [T, D] of each clip's prompt.
        avoided_texts: states of the text of each clip that guidance avoids; None: no guidance.
        guidance: weight w of classifier-free guidance: the prediction is u + w (p - u) of the predictions p with
            the prompt and u with the other text. Source: Ho and Salimans, arXiv:2207.12598.
        progress: told (steps done, steps in all).
    """
    sides = zip(noise_NCFHW.shape[2:], dit.shape.patch, strict=True)
    frames, rows, columns = (side // patch for side, patch in sides)
    all_texts = [*texts, *(avoided_texts or ())]
    common: dict[str, Any] = {
        "grids": ((frames, rows, columns),) * len(all_texts),
        "text_lengths": tuple(len(text) for text in all_texts),
        "features": torch.cat(all_texts),
        "want_predictions": True,
    }
    scheduler.set_timesteps(num_steps, device=noise_NCFHW.device)
    x = noise_NCFHW
    for done, time in enumerate(scheduler.timesteps):
        clips = list(x) if avoided_texts is None else [*x, *x]
        predicted = torch.stack(dit(clips, timesteps=[float(time)] * len(all_texts), **common).predictions)
        if avoided_texts is not None:
            prompted, avoided = predicted.chunk(2)
            predicted = avoided + guidance * (prompted - avoided)
        x = scheduler.step(predicted, time, x).prev_sample
        if progress:
            progress(done + 1, num_steps)
    return x
