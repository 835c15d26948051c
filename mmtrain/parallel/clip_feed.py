"""The arguments of each chunk's forward in one step of a text-to-video job, from the batch and its metadata."""

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
from mmtrain.planner.batching import LANGUAGE
from mmtrain.planner.layout import IterationLayout, pad_places
from mmtrain.planner.partition import Partition

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class ClipFeed:
    """(stage, work) -> (args, kwargs) for `PipelineScheduleRuntime.step`.

    Token ids are needed where the text encoder begins, latents where the DiT begins and where it ends; all other stages
    go by the metadata.
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
        if first or last:
            start = self._first_clip[work]
            latents = self._microbatch(work).latents[start : start + len(clips)]
            pairs = [(clip, self._to_device(values)) for clip, values in zip(clips, latents, strict=True)]
            if first:
                args = ([self._noise.noisy(*pair) for pair in pairs],)
                kwargs["timesteps"] = [self._noise.timestep(clip) for clip in clips]
            if last:
                kwargs["targets"] = [self._noise.target(*pair) for pair in pairs]
        return args, kwargs

    def _microbatch(self, work: int) -> ClipMicrobatch:
        assert self._batch is not None, "a rank where the text encoder begins or the DiT begins or ends has the batch"
        return self._batch.clips[self._batching.works[work].microbatch]

    def _padded(self, values: Tensor, count: int) -> Tensor:
        """Values with zeros behind them, on the device."""
        return self._to_device(torch.nn.functional.pad(values, (0, count - len(values))))

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)
