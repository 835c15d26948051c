"""Video clips and captions for the chunks of a text-to-video model."""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmtrain.modality.base import first_of
from mmtrain.modality.bitfield import prompt_bits
from mmtrain.modality.clips import ClipsLayout
from mmtrain.modality.submesh import pad_indices
from mmtrain.models.attention.context import AttentionContext, attention_context
from mmtrain.models.batch import ClipMicrobatch, document_positions
from mmtrain.models.diffusion import ClipNoise
from mmtrain.parallel.feeds.inputs import Arguments, StepInputs
from mmtrain.spec.spec import ModuleSpec


class ClipsFeed:
    """What the feeds of all modules have in common."""

    def __init__(self, inputs: StepInputs, module: ModuleSpec) -> None:
        layout = inputs.layout.of_module[module.name]
        assert isinstance(layout, ClipsLayout)
        self._inputs, self._module, self._works = inputs, module, layout.works
        self._first = first_of(layout.works)

    @property
    def _noise(self) -> ClipNoise:
        assert self._inputs.noise is not None
        return self._inputs.noise

    def _microbatch(self, work: int) -> ClipMicrobatch:
        assert self._inputs.batch is not None, "a rank where clips or captions enter has the batch"
        return self._inputs.batch.clips[self._works[work].work.microbatch]

    def _content(self, work: int) -> list[Tensor]:
        """Latents or pixels of the clips of a work, on the device."""
        start = self._first[work]
        tensors = self._microbatch(work).latents[start : start + len(self._works[work].units)]
        return [self._inputs.to_device(values) for values in tensors]


class FramesFeed(ClipsFeed):
    """Pixels for a VAE."""

    def __call__(self, first: bool, last: bool, work: int) -> Arguments:
        return (self._content(work),), {"latents": tuple(clip.bucket for clip in self._works[work].units)}


class CaptionsFeed(ClipsFeed):
    """Token ids for the first stage of a text encoder, attention and positions for all."""

    def __init__(self, inputs: StepInputs, module: ModuleSpec) -> None:
        super().__init__(inputs, module)
        self._cache: dict[int, tuple[AttentionContext, Tensor]] = {}

    def __call__(self, first: bool, last: bool, work: int) -> Arguments:
        clips = self._works[work].units
        lengths = [clip.num_text_tokens for clip in clips]
        rows = pad_indices(np.arange(sum(lengths)), self._inputs.layout.submesh.row_parts)
        if work not in self._cache:
            attention = attention_context(prompt_bits(lengths), rows=rows, choices=self._inputs.attention)
            positions = document_positions(lengths)
            self._cache[work] = attention, self._padded(positions, len(rows))
        attention, position_ids = self._cache[work]
        kwargs: dict[str, Any] = {"attention": attention, "position_ids": position_ids}
        if not first:
            return (), kwargs
        index = self._works[work].work.microbatch
        captions = self._microbatch(work).text_ids.split(list(self._inputs.meta.microbatches[index].text_lengths))
        token_ids = torch.cat(captions[self._first[work] : self._first[work] + len(clips)])
        return (self._padded(self._noise.prompts(clips, token_ids), len(rows)),), kwargs

    def _padded(self, values: Tensor, count: int) -> Tensor:
        """Values with zeros behind them, on the device."""
        return self._inputs.to_device(torch.nn.functional.pad(values, (0, count - len(values))))


class LatentsFeed(ClipsFeed):
    """Functions that make noisy latents for the first stage of a DiT, and targets for the last one."""

    def __call__(self, first: bool, last: bool, work: int) -> Arguments:
        clips, noise = self._works[work].units, self._noise
        kwargs: dict[str, Any] = {
            "grids": tuple(clip.grid(self._module.patch) for clip in clips),
            "text_lengths": tuple(clip.num_text_tokens for clip in clips),
        }
        if first:
            kwargs["timesteps"] = [noise.timestep(clip) for clip in clips]
        if last and noise.wants_predictions:
            kwargs["want_predictions"] = True
        args: tuple[Any, ...] = ()
        if first or last:
            arrive = self._module.latents_arrive
            known = [(clip,) for clip in clips] if arrive else list(zip(clips, self._content(work), strict=True))
            if first:
                args = ([partial(noise.noisy, *of_clip) for of_clip in known],)
            if last:
                kwargs["targets"] = [None if of_clip[0].blank else partial(noise.target, *of_clip) for of_clip in known]
        return args, kwargs
