"""The arguments of each chunk's forward in one step of a text-to-video job, from the batch and its metadata."""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmtrain.data.batch import Batch, ClipMicrobatch
from mmtrain.data.bitfield import prompt_bits
from mmtrain.data.metadata import IterationMeta
from mmtrain.models.attention.context import AttentionContext, Backend, attention_context
from mmtrain.models.diffusion import ClipNoise
from mmtrain.parallel.mesh import Mesh
from mmtrain.planner.batching import LANGUAGE, VAE
from mmtrain.planner.layout import IterationLayout, pad_places
from mmtrain.planner.partition import Partition

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class ClipFeed:
    """(stage, work) -> (args, kwargs) for `PipelineScheduleRuntime.step`.

    Token ids are needed where the text encoder begins, latents where the DiT begins and where it ends; all other stages
    go by the metadata. With a VAE its stage needs pixels, and the DiT nothing but what to do with the latents.
    """

    def __init__(
        self,
        partition: Partition,
        layout: IterationLayout,
        meta: IterationMeta,
        mesh: Mesh,
        *,
        batch: Batch | None,
        noise: ClipNoise,
        patch: tuple[int, int, int],
        attention_backend: Backend = "auto",
    ) -> None:
        """Args: noise: the random choices of the step. patch: frames, rows and columns of one of the DiT's patches."""
        self._partition = partition
        self._batching = layout.batching
        self._has_vae = VAE in layout.batching.modules
        self._tp = layout.plane.tp
        self._meta = meta
        self._device = mesh.device
        self._batch = batch
        self._noise = noise
        self._patch = patch
        self._backend: Backend = attention_backend
        self._first_clip: dict[int, int] = {}
        """work -> place of its first clip in its microbatch."""
        taken: dict[tuple[int, int], int] = {}
        for number, (work, clips) in enumerate(zip(self._batching.works, self._batching.clips_of, strict=True)):
            key = work.microbatch, work.module
            self._first_clip[number] = taken.get(key, 0)
            taken[key] = self._first_clip[number] + len(clips)
        self._prompts_cache: dict[int, tuple[AttentionContext, Tensor]] = {}

    def __call__(self, stage: int, work: int) -> Arguments:
        place = self._partition.stages[stage]
        if place.module == LANGUAGE:
            return self._prompts(place.first, work)
        if place.module == VAE:
            clips = self._batching.clips_of[work]
            pixels = [self._to_device(values) for values in self._content(work)]
            return (pixels,), {"latents": tuple(clip.bucket for clip in clips)}
        return self._clips(place.first, place.last, work)

    def _prompts(self, first: bool, work: int) -> Arguments:
        clips = self._batching.clips_of[work]
        lengths = [clip.num_text_tokens for clip in clips]
        places = pad_places(np.arange(sum(lengths)), self._tp)
        if work not in self._prompts_cache:
            attention = attention_context(prompt_bits(lengths), rows=places, backend=self._backend)
            positions = torch.cat([torch.arange(length) for length in lengths])
            self._prompts_cache[work] = attention, self._padded(positions, len(places))
        attention, position_ids = self._prompts_cache[work]
        kwargs: dict[str, Any] = {"attention": attention, "position_ids": position_ids}
        if not first:
            return (), kwargs
        index = self._batching.works[work].microbatch
        captions = self._microbatch(work).text_ids.split(list(self._meta.microbatches[index].text_lengths))
        start = self._first_clip[work]
        mine = torch.cat(captions[start : start + len(clips)])
        return (self._padded(self._noise.prompts(clips, mine), len(places)),), kwargs

    def _clips(self, first: bool, last: bool, work: int) -> Arguments:
        clips = self._batching.clips_of[work]
        kwargs: dict[str, Any] = {
            "grids": tuple(clip.grid(self._patch) for clip in clips),
            "text_lengths": tuple(clip.num_text_tokens for clip in clips),
        }
        args: tuple[Any, ...] = ()
        if first:
            kwargs["timesteps"] = [self._noise.timestep(clip) for clip in clips]
        if self._has_vae:
            if first:
                args = ([partial(self._noise.noisy, clip) for clip in clips],)
            if last:
                kwargs["targets"] = [None if clip.blank else partial(self._noise.target, clip) for clip in clips]
        elif first or last:
            pairs = [(clip, self._to_device(values)) for clip, values in zip(clips, self._content(work), strict=True)]
            if first:
                args = ([self._noise.noisy(*pair) for pair in pairs],)
            if last:
                kwargs["targets"] = [self._noise.target(*pair) for pair in pairs]
        return args, kwargs

    def _content(self, work: int) -> list[Tensor]:
        """Latents or pixels of the clips of a work."""
        start = self._first_clip[work]
        return self._microbatch(work).latents[start : start + len(self._batching.clips_of[work])]

    def _microbatch(self, work: int) -> ClipMicrobatch:
        assert self._batch is not None, "a rank where clips or captions enter has the batch"
        return self._batch.clips[self._batching.works[work].microbatch]

    def _padded(self, values: Tensor, count: int) -> Tensor:
        """Values with zeros behind them, on the device."""
        return self._to_device(torch.nn.functional.pad(values, (0, count - len(values))))

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)
