"""The samples of validations: which held-out captions are their prompts, and what of the job says how they are made."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mmtrain.config.config import Config
from mmtrain.data.clip_samples import VideoSamples
from mmtrain.data.packing import LoaderState
from mmtrain.data.tokenizer import job_tokenizer
from mmtrain.data.toy.shape_clips import EASY_BUCKET
from mmtrain.data.toy.shapes import is_easy
from mmtrain.errors import DataError
from mmtrain.modality.buckets import default_bucket, most_frames, video_geometry
from mmtrain.modality.metadata import ClipMeta, IterationMeta, MicrobatchMeta
from mmtrain.models.batch import Batch, ClipMicrobatch
from mmtrain.models.denoising import GUIDANCE, start_noise
from mmtrain.models.diffusion import null_token

_READ = 8
"""Records that are read for each prompt, at most, to find captions that differ."""


@dataclass(frozen=True, kw_only=True)
class ClipPrompts:
    """The clips of a sheet: the prompts, and what the DiT reads of them in one call."""

    prompts: tuple[str, ...]
    """The prompt of each clip."""
    noise: Tensor
    """[N, C, F, H, W]: where each clip begins."""
    text_ids: tuple[Tensor, ...]
    """[T] of each clip; with guidance then those of the text that guidance avoids."""
    guidance: float | None
    judged: bool
    """Whether their pixels can be judged: the data are the easy level of moving shapes, and the clips as long and large
    as these."""
    metas: tuple[tuple[ClipMeta, ...], ...]
    """[microbatch] -> of its clips; clip i, also of the avoided ones, is sample i."""

    @property
    def meta(self) -> IterationMeta:
        """The metadata of an iteration that predicts all clips once."""
        return IterationMeta(microbatches=tuple(MicrobatchMeta(clips=clips) for clips in self.metas))

    def batch(self, clips: Sequence[Tensor]) -> Batch:
        """The iteration's tensors. Args: clips: noisy latents [C, F, H, W]."""
        return Batch(
            clips=[
                ClipMicrobatch(
                    text_ids=torch.cat([self.text_ids[meta.sample] for meta in metas]),
                    latents=[clips[meta.sample] for meta in metas],
                    clip_names=[(meta.sample, meta.index) for meta in metas],
                )
                for metas in self.metas
            ]
        )


def held_out_prompts(config: Config) -> ClipPrompts:
    """The clips of `validation.samples`: the first different captions of the validation split are the prompts, each of
    as many samples as there is room for. Shape, guidance and noise are the defaults of `mmtrain sample`.

    Raises: ConfigError, DataError: the captions cannot be read.
    """
    assert config.model.dit is not None
    geometry = video_geometry(config.model.dit, config.data)
    frames, height, width = default_bucket(geometry)
    most, guided = config.validation.samples, config.diffusion.caption_dropout > 0
    captions = _captions(config, most)
    each = max(1, most // len(captions))
    tokenizer = job_tokenizer(config)
    prompts = tuple(caption for caption in captions for _ in range(each))
    ids = [torch.tensor(tokenizer(prompt, verbose=False)["input_ids"], dtype=torch.int64) for prompt in prompts]
    if guided:
        ids += [torch.full_like(prompt, null_token(tokenizer)) for prompt in ids]
    noise = torch.stack([start_noise((geometry.channels, frames, height, width), 0, k) for k in range(each)])
    metas = [
        ClipMeta(
            sample=i,
            frames=frames,
            height=height,
            width=width,
            num_tokens=geometry.num_tokens((frames, height, width)),
            num_text_tokens=len(text),
        )
        for i, text in enumerate(ids)
    ]
    room = max(1, min(config.data.max_clips, most_frames(config.data) // frames))
    return ClipPrompts(
        prompts=prompts,
        noise=noise.repeat(len(captions), 1, 1, 1, 1),
        text_ids=tuple(ids),
        guidance=GUIDANCE if guided else None,
        judged=is_easy(Path(config.data.source)) and (frames, height, width) == EASY_BUCKET,
        metas=tuple(tuple(metas[start : start + room]) for start in range(0, len(metas), room)),
    )


def _captions(config: Config, most: int) -> list[str]:
    """The first captions that differ, and fit `training.seq_len`."""
    clips, found = VideoSamples(config, config.data.validation_split), dict[str, None]()
    known = [count for count in clips.sources.num_samples if count is not None]
    for number in range(min([_READ * most, *(len(clips.sources.num_samples) * count for count in known)])):
        try:
            measured = clips.measured(number, LoaderState(seed=0))
        except DataError:
            if config.data.on_error == "raise":
                raise
            continue
        if measured is not None and measured.meta.num_text_tokens <= config.training.seq_len:
            found[measured.record.caption] = None
        if len(found) == most:
            break
    if not found:
        raise DataError(
            f"validation.samples = {most}, but split {config.data.validation_split!r} of {config.data.description} has "
            f"no caption of at most training.seq_len = {config.training.seq_len} tokens; set it to 0, or change the "
            "split"
        )
    return list(found)
