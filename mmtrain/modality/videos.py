"""The sampling and the size of videos in conversations. Pure arithmetic on numbers of frames and sizes; no pixels.

What a family says of its videos is `Videos`; where text says the time of each patch, a subclass of `VideoRules` does
what is otherwise.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mmtrain.config.content import CONVERSATION_VIDEO_KEYS
from mmtrain.config.data import DataConfig
from mmtrain.config.model import ModelConfig
from mmtrain.errors import ConfigError
from mmtrain.families.catalogue import ENCODERS
from mmtrain.modality.geometry import ImageGeometry, check_aspect_ratio, model_geometry, smart_resize
from mmtrain.spec.hub_files import processor_config
from mmtrain.spec.model_configs import encoder_config
from mmtrain.spec.processor_values import checked_values

_LIMITS = (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge"))
"""The keys of a video processor, and of its `size`, for the smallest and the largest area, in pixels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoRules:
    """How many frames of a video are read, which ones, and how many patches they become."""

    processor: ClassVar[str] = "Qwen2VLVideoProcessor"
    """The class of transformers that does the same."""

    patches: ImageGeometry
    """Patches of a frame; its limits are those of images."""
    fps: float
    """Frames a second that are sampled."""
    min_frames: int
    max_frames: int
    min_pixels: int
    """Smallest area after resizing, of `num_limited` frames together."""
    max_pixels: int
    """Largest one."""
    tokens_per_second: float = 0.0
    """Positions of one second; 0: each patch in time is one position."""

    @property
    def unit(self) -> int:
        """Frames of one patch in time."""
        return self.patches.temporal_patch_size

    @property
    def factor(self) -> int:
        """Pixels along one side of a token: sides of frames are multiples."""
        return self.patches.patch_size * self.patches.merge

    def num_limited(self, count: int) -> int:
        """Number of frames, of `count` that are read, whose area together is within the limits."""
        return 1

    def num_sampled(self, num_frames: int, fps: float) -> int:
        """Number of frames that are read of a video: a multiple of those of a patch, unless the video has fewer.

        Args: num_frames, fps: of the video; frames, and frames a second.
        Source: `Qwen2VLVideoProcessor.sample_frames` of transformers 5.23.
        """
        wanted = max(num_frames / fps * self.fps, self.min_frames)
        count = math.floor(min(wanted, self.max_frames, num_frames) / self.unit) * self.unit
        return min(num_frames, max(self.unit, count))

    def indices(self, num_frames: int, count: int) -> list[int]:
        """Indices of `count` frames, evenly over a video of num_frames, rounded down after float32 as in the source."""
        times = (np.arange(count) * (num_frames / count)).astype(np.float32).astype(np.int64)
        return [min(int(time), num_frames - 1) for time in times]

    def resized(self, count: int, height: int, width: int) -> tuple[int, int]:
        """The height and width in pixels of each of `count` frames after resizing. Args: height, width: in pixels.

        Raises: DataError: as `smart_resize`.
        """
        limits = {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
        return smart_resize(height, width, factor=self.factor, **limits)

    def grid(self, count: int, height: int, width: int) -> tuple[int, int, int]:
        """Patches (time, height, width) of `count` frames of height x width pixels; the last frame fills a patch.

        Raises: DataError: as `resized`.
        """
        new_height, new_width = self.resized(count, height, width)
        side = self.patches.patch_size
        return -(-count // self.unit), new_height // side, new_width // side

    def seconds(self, num_frames: int, fps: float, count: int) -> float:
        """Seconds from one patch to the next in time, if `count` frames of a video are read."""
        return self.unit / (count / num_frames * fps)

    def time_step(self, seconds: float) -> float:
        """Positions from one patch to the next in time, in float32 as its factors.

        Source: `second_per_grid_ts` in `get_rope_index` of the whole model in transformers 5.23.
        """
        return float(np.float32(self.tokens_per_second) * np.float32(seconds)) if self.tokens_per_second else 1.0

    def captions(self, num_frames: int, fps: float, count: int) -> tuple[str, ...]:
        """The text before each patch in time; empty: there is none, and a video is one item of the encoder."""
        return ()


class TimedVideoRules(VideoRules):
    """The rules of videos in which text says the time of each patch in time, so each is an item of its own.

    Source: `Qwen3VLVideoProcessor` and `Qwen3VLProcessor` of transformers 5.23.
    """

    __slots__ = ()
    processor = "Qwen3VLVideoProcessor"

    def num_limited(self, count: int) -> int:
        """All of them."""
        return max(count, self.unit)

    def num_sampled(self, num_frames: int, fps: float) -> int:
        """Number of frames that are read of a video, odd ones too. Args: as of the base class."""
        wanted = int(num_frames / fps * self.fps)
        return min(max(wanted, self.min_frames), self.max_frames, num_frames)

    def indices(self, num_frames: int, count: int) -> list[int]:
        """Indices of `count` frames, evenly from the first to the last of a video."""
        return [int(index) for index in np.linspace(0, num_frames - 1, count).round()]

    def resized(self, count: int, height: int, width: int) -> tuple[int, int]:
        """The height and width in pixels of each frame, such that the area of all of them is within the limits.

        A side below a token's is enlarged first. One frame counts as those of a patch, which the source refuses.
        Raises: DataError: a side is 0, or the aspect ratio is too large.
        """
        check_aspect_ratio(height, width)
        count, factor = self.num_limited(count), self.factor
        if min(height, width) < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        rows, columns = round(height / factor), round(width / factor)
        area = round(count / self.unit) * self.unit * rows * columns * factor**2
        if area > self.max_pixels:
            shrink = math.sqrt(count * height * width / self.max_pixels)
            rows, columns = (max(1, math.floor(side / shrink / factor)) for side in (height, width))
        elif area < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (count * height * width))
            rows, columns = (math.ceil(side * grow / factor) for side in (height, width))
        return rows * factor, columns * factor

    def captions(self, num_frames: int, fps: float, count: int) -> tuple[str, ...]:
        """The time of each patch: the mean of those of its first and its last frame."""
        times = [index / fps for index in self.indices(num_frames, count)]
        times += times[-1:] * (-count % self.unit)
        pairs = zip(times[:: self.unit], times[self.unit - 1 :: self.unit], strict=True)
        return tuple(f"<{(first + last) / 2:.1f} seconds>" for first, last in pairs)


VIDEO_ENCODERS = {name: encoder.videos for name, encoder in ENCODERS.items() if encoder.videos is not None}
"""Encoders that read videos -> how."""


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
    family, (least, most) = VIDEO_ENCODERS[kind], _stored_limits(model)
    rules = (TimedVideoRules if family.timed else VideoRules)(
        patches=model_geometry(model),
        fps=data.video_fps,
        min_frames=data.video_min_frames,
        max_frames=data.video_max_frames,
        min_pixels=data.video_min_pixels or least or family.min_pixels,
        max_pixels=data.video_max_pixels or most or family.max_pixels,
        tokens_per_second=float(encoder[family.time_key]) if family.time_key else 0.0,
    )
    _check_limits(rules)
    return rules


def _stored_limits(model: ModelConfig) -> tuple[int, int]:
    """The smallest and the largest area of the video processor of the whole model that the encoder is a part of; 0:
    none."""
    key, whole = "model.pretrained", model.pretrained
    if model.encoder is None or not whole or model.encoder.pretrained != whole:
        return 0, 0
    config = processor_config(key, whole, "video") or {}
    config = checked_values(f"{key} = {whole!r}: its video processor", config)
    sizes = config.get("size") or {}
    sizes = {} if isinstance(sizes, int) else sizes
    found = [config.get(old) or sizes.get(new, 0) for old, new in _LIMITS]
    if not all(isinstance(area, int) and area >= 0 for area in found):
        raise ConfigError(f"{key} = {whole!r}: its video processor has the limits {found}; they are areas in pixels")
    return found[0], found[1]


def _check_limits(rules: VideoRules) -> None:
    area = rules.num_limited(rules.unit) * rules.factor**2
    for name, least, why in (
        ("max_frames", rules.unit, "one patch holds as many"),
        ("max_pixels", area, "one token covers as many"),
    ):
        if getattr(rules, name) < least:
            raise ConfigError(f"data.video_{name} = {getattr(rules, name)}; it must be at least {least}: {why}")
    if rules.max_pixels < rules.min_pixels:
        raise ConfigError(
            f"data.video_max_pixels = {rules.max_pixels} is below data.video_min_pixels = {rules.min_pixels}; raise it"
        )
