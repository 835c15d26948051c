"""The sampling and the size of videos in conversations. Pure arithmetic on numbers of frames and sizes; no pixels."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mmtrain.config.config import CONVERSATION_VIDEO_KEYS
from mmtrain.config.data import DataConfig
from mmtrain.config.model import ModelConfig
from mmtrain.errors import ConfigError
from mmtrain.modality.geometry import ImageGeometry, model_geometry
from mmtrain.spec.model_configs import encoder_config

VIDEO_ENCODERS: Mapping[str, str] = {"qwen2_vl_vision": "", "qwen2_5_vl_vision": "tokens_per_second"}
"""Family of encoders that read videos -> key of its config with the positions of one second; empty: each patch in time
is one position, however long it lasts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoRules:
    """How many frames of a video are read, which ones, and how many patches they become."""

    frame: ImageGeometry
    """Of a frame."""
    fps: float
    """Frames a second that are sampled."""
    min_frames: int
    max_frames: int
    tokens_per_second: float = 0.0
    """Positions of one second; 0: each patch in time is one position."""

    def num_sampled(self, num_frames: int, fps: float) -> int:
        """Number of frames that are read of a video: a multiple of those of a patch, unless the video has fewer.

        Args: num_frames, fps: of the video; frames, and frames a second.
        Source: `Qwen2VLVideoProcessor.sample_frames` of transformers 5.23.
        """
        unit = self.frame.temporal_patch_size
        wanted = max(num_frames / fps * self.fps, self.min_frames)
        count = math.floor(min(wanted, self.max_frames, num_frames) / unit) * unit
        return min(num_frames, max(unit, count))

    def indices(self, num_frames: int, count: int) -> list[int]:
        """Indices of `count` frames, evenly over a video of num_frames, rounded down after float32 as in the source."""
        times = (np.arange(count) * (num_frames / count)).astype(np.float32).astype(np.int64)
        return [min(int(time), num_frames - 1) for time in times]

    def grid(self, count: int, height: int, width: int) -> tuple[int, int, int]:
        """Patches (time, height, width) of `count` frames of height x width pixels; the last frame fills a patch.

        Raises: DataError: as `ImageGeometry.resized`.
        """
        _, rows, columns = self.frame.grid(height, width)
        return -(-count // self.frame.temporal_patch_size), rows, columns

    def seconds(self, num_frames: int, fps: float, count: int) -> float:
        """Seconds from one patch to the next in time, if `count` frames of a video are read."""
        return self.frame.temporal_patch_size / (count / num_frames * fps)

    def time_step(self, seconds: float) -> float:
        """Positions from one patch to the next in time."""
        return self.tokens_per_second * seconds if self.tokens_per_second else 1.0


def video_rules(model: ModelConfig, data: DataConfig) -> VideoRules | None:
    """The rules of the videos of conversations; None for a model that reads none.

    Raises: ConfigError: limits that the encoder cannot keep, or that concern videos which the model cannot read.
    """
    encoder: dict[str, Any] = encoder_config(model.encoder) if model.encoder is not None else {"model_type": ""}
    kind, default = encoder["model_type"], DataConfig(source="any")
    if kind not in VIDEO_ENCODERS:
        for name in CONVERSATION_VIDEO_KEYS:
            if getattr(data, name) != getattr(default, name):
                raise ConfigError(
                    f"data.{name} = {getattr(data, name)} has no effect: only the encoders {', '.join(VIDEO_ENCODERS)} "
                    "read videos; remove it"
                )
        return None
    frame = replace(model_geometry(model), min_pixels=data.video_min_pixels, max_pixels=data.video_max_pixels)
    area = (frame.patch_size * frame.merge) ** 2
    for name, least, what in (
        ("video_max_frames", frame.temporal_patch_size, "one patch holds as many"),
        ("video_max_pixels", area, "one token covers as many"),
    ):
        if getattr(data, name) < least:
            raise ConfigError(f"data.{name} = {getattr(data, name)}; it must be at least {least}: {what}")
    key = VIDEO_ENCODERS[kind]
    return VideoRules(
        frame=frame,
        fps=data.video_fps,
        min_frames=data.video_min_frames,
        max_frames=data.video_max_frames,
        tokens_per_second=float(encoder[key]) if key else 0.0,
    )
