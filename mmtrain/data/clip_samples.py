"""The samples of a text-to-video job: clips of any bucket, with their captions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from mmtrain.config.config import Config
from mmtrain.data.clip_processor import Clip, ClipProcessor
from mmtrain.data.packing import BinLimit, LoaderState
from mmtrain.data.sources import Sources
from mmtrain.data.tokenizer import job_tokenizer
from mmtrain.data.video_records import CLIPS
from mmtrain.modality.buckets import most_frames, video_geometry
from mmtrain.modality.metadata import ClipMeta, MicrobatchMeta
from mmtrain.models.batch import Batch, ClipMicrobatch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReadClip:
    """A clip with its content."""

    meta: ClipMeta
    text_ids: np.ndarray
    """The token ids of the caption, [T] int64."""
    latents: Tensor
    """[C, F, H, W] float32; pixels if the job has a VAE."""


class VideoSamples:
    """`Samples` of clips; a microbatch holds up to `data.max_clips` clips of `data.max_total_seconds` in total.

    Raises: ConfigError: source, split or tokenizer do not exist, or the buckets do not fit the model.
    """

    text = "tokens of its caption"

    def __init__(self, config: Config, split: str) -> None:
        data, dit = config.data, config.model.dit
        assert dit is not None
        self._geometry = video_geometry(dit, data, config.model.vae)
        self._processor = ClipProcessor(job_tokenizer(config), self._geometry, data)
        self.sources = Sources(data, split, CLIPS)
        frames = most_frames(data)
        self.limits: tuple[BinLimit, ...] = (
            BinLimit(
                most=frames,
                unit="frames",
                key=f"data.max_total_seconds = {data.max_total_seconds} s ({frames} frames)",
            ),
            BinLimit(most=data.max_clips, unit="clips", key=f"data.max_clips = {data.max_clips} clips"),
        )

    def notes(self) -> list[str]:
        return self._processor.unread.take()

    def measured(self, sample: int, state: LoaderState) -> Clip | None:
        record = self.sources[sample]
        return None if record is None else self._processor.clip(record)

    def num_text_tokens(self, measured: Clip) -> int:
        """Tokens of its caption."""
        return measured.meta.num_text_tokens

    def shorter(self, measured: Clip) -> str:
        return 'set data.too_long = "skip" or "truncate", or a larger seq_len'

    def truncated(self, measured: Clip, num_tokens: int) -> Clip:
        return self._processor.truncated(measured, num_tokens)

    def size(self, measured: Clip) -> tuple[int, ...]:
        """The clip's number of frames, and 1 clip."""
        return self._geometry.pixels(measured.meta.bucket)[0], 1

    def read(self, measured: Clip, occurrence: int) -> ReadClip:
        meta = replace(measured.meta, index=occurrence)
        return ReadClip(meta=meta, text_ids=measured.text_ids, latents=self._processor.latents(measured))

    def emptied(self, measured: Clip, occurrence: int) -> ReadClip:
        """Zeros in the clip's bucket, without a loss."""
        meta = replace(measured.meta, index=occurrence, blank=True)
        return ReadClip(meta=meta, text_ids=measured.text_ids, latents=self._processor.zeros(measured))

    def batch(self, microbatches: Sequence[Sequence[ReadClip]]) -> tuple[Batch, tuple[MicrobatchMeta, ...]]:
        metas = tuple(MicrobatchMeta(clips=tuple(clip.meta for clip in m)) for m in microbatches)
        return Batch(clips=[_microbatch(m) for m in microbatches]), metas


def _microbatch(clips: Sequence[ReadClip]) -> ClipMicrobatch:
    return ClipMicrobatch(
        text_ids=torch.from_numpy(np.concatenate([clip.text_ids for clip in clips])),
        latents=[clip.latents for clip in clips],
        clip_names=[(clip.meta.sample, clip.meta.index) for clip in clips],
    )
