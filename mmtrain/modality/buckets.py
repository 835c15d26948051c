"""The frames that are read of a clip, and their size: its bucket. Pure arithmetic; no pixels.

Clips of one bucket have equal shapes, so they can be one dense batch. As for images, both the loader (which needs a
clip's size before it decodes a frame) and the pixel code use this module.

The model reads latents [channels, frames, height, width]. Without a VAE these are the pixels or the contents of the
record, so frames and sizes here apply to both. With a VAE (`models.vae`, which runs inside of the pipeline) buckets of
pixels are those that become whole patches of latents.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmtrain.config.config import Config
from mmtrain.config.data import DataConfig
from mmtrain.config.model import DitConfig, VaeConfig
from mmtrain.errors import ConfigError, DataError
from mmtrain.spec.model_configs import dit_config
from mmtrain.spec.model_shapes import check_prediction
from mmtrain.spec.vae_shapes import LatentScale, latent_scale

_ALMOST = 1e-6
"""Tolerance in frames for rounding errors of frame rates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoGeometry:
    """The rule that turns a clip's frames, rate and size into a bucket and a number of tokens."""

    channels: int
    """Channels of the latents that the model reads."""
    patch: tuple[int, int, int]
    """Frames, rows and columns of latents that become one token."""
    max_positions: int
    """Largest number of tokens along each axis."""
    fps: float
    """Frames per second to which clips are sampled."""
    frames: tuple[int, ...]
    """Numbers of frames of the buckets, longest first."""
    sizes: tuple[tuple[int, int], ...]
    """The height and width of each bucket."""
    vae: LatentScale | None = None
    """Compression of the VAE; None: there is no VAE."""

    def latents(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Frames, rows and columns of the latents of a bucket. Args: in frames and pixels."""
        scale = self.vae or LatentScale()
        return scale.latent_frames(frames), height // scale.side, width // scale.side

    def pixels(self, latents: tuple[int, int, int]) -> tuple[int, int, int]:
        """Frames, rows and columns of the bucket that has these latents."""
        return (self.vae or LatentScale()).pixels(latents)

    def sampled(self, num_frames: int, source_fps: float) -> int:
        """Number of frames of a clip at `fps`, at least one. Args: source_fps: frames per second of the source."""
        return max(1, math.floor(num_frames * self.fps / source_fps + _ALMOST))

    def places(self, num_frames: int, source_fps: float, count: int) -> list[int]:
        """Indices among the source's frames of the first `count` sampled frames.

        Frames of a source with fewer frames per second than `fps` are repeated.
        """
        step = source_fps / self.fps
        return [min(num_frames - 1, math.floor(j * step + _ALMOST)) for j in range(count)]

    def longest(self, num_frames: int) -> int:
        """Number of frames of the longest bucket that fits into a clip of `num_frames` frames at `fps`.

        Raises: DataError: the clip is shorter than all buckets.
        """
        for count in self.frames:
            if count <= num_frames:
                return count
        raise DataError(
            f"it has {num_frames} frames at {self.fps:g} a second, but the shortest bucket has {self.frames[-1]}; "
            "leave it out or add a shorter one to data.video_frames"
        )

    def size(self, height: int, width: int) -> tuple[int, int]:
        """The height and width of the bucket with the aspect ratio nearest to that of a frame; the first one of
        equals."""
        aspect = width / height
        return min(self.sizes, key=lambda size: round(abs(math.log(size[1] / size[0] / aspect)), 9))

    def num_tokens(self, bucket: tuple[int, int, int]) -> int:
        """Number of tokens of latents. Args: bucket: frames, rows and columns of the latents.

        Raises: DataError: one of them is no multiple of the patch, or exceeds the positions of the DiT.
        """
        for axis, length, patch_length in zip(("frames", "rows", "columns"), bucket, self.patch, strict=True):
            if length > patch_length * self.max_positions:
                raise DataError(
                    f"its latents have {length // patch_length} patches along their {axis}, but model.dit.config has "
                    f"rope_max_seq_len = {self.max_positions}; raise it, or leave the clip out"
                )
            if length < 1 or length % patch_length:
                raise DataError(
                    f"its latents have {length} {axis}, which is no multiple of the {patch_length} of one patch "
                    f"(patch_size = {list(self.patch)} of model.dit.config)"
                )
        return math.prod(length // patch_length for length, patch_length in zip(bucket, self.patch, strict=True))


def crop(height: int, width: int, size: tuple[int, int]) -> tuple[float, float, float, float]:
    """The left, top, right and bottom in pixels of the largest centred crop of a frame with the aspect ratio of `size`.

    Args: height, width: of the frame in pixels. size: (height, width).
    """
    scale = min(height / size[0], width / size[1])
    rows, columns = scale * size[0], scale * size[1]
    x, y = (width - columns) / 2, (height - rows) / 2
    return x, y, x + columns, y + rows


def video_geometry(dit: DitConfig, data: DataConfig, vae: VaeConfig | None = None) -> VideoGeometry:
    """The geometry of a job's clips.

    Raises: ConfigError: the DiT's patch is not of the form [time, height, width], or does not fit the buckets.
    """
    values = dit.config or dit_config(dit)
    patch, scale = _patch(values), latent_scale(vae) if vae else LatentScale()
    geometry = VideoGeometry(
        channels=latent_channels(dit),
        patch=patch,
        max_positions=_positive(values, "rope_max_seq_len", 1024),
        fps=data.fps,
        frames=_frames(data, patch[0], scale),
        sizes=_sizes(data, (patch[1] * scale.side, patch[2] * scale.side)),
        vae=scale if vae else None,
    )
    sizes = geometry.sizes if geometry.channels == 3 or vae else ((1, 1),)  # sizes of given latents are unknown
    for size in sizes:
        lengths = geometry.latents(geometry.frames[0], *size)
        for name, length, patch_length in zip(("frames", "height", "width"), lengths, patch, strict=True):
            if length > patch_length * geometry.max_positions:
                key = "data.max_seconds (or data.video_frames)" if name == "frames" else "data.video_area"
                raise ConfigError(
                    f"{key} makes clips with {length // patch_length} patches along their {name}, but model.dit.config "
                    f"has rope_max_seq_len = {geometry.max_positions}; lower the one or raise the other"
                )
    return geometry


def default_bucket(geometry: VideoGeometry) -> tuple[int, int, int]:
    """Frames, height and width of the bucket nearest to half of the longest one, with the first aspect."""
    return min(geometry.frames, key=lambda count: abs(2 * count - geometry.frames[0])), *geometry.sizes[0]


def check_video(config: Config) -> None:
    """Checks the clips and the DiT of a text-to-video job before anything starts; other jobs pass.

    Raises: ConfigError: see `video_geometry` and `check_prediction`.
    """
    if config.model.dit is not None:
        check_prediction(config.model)
        geometry = video_geometry(config.model.dit, config.data, config.model.vae)
        if config.validation.samples and geometry.channels != 3:
            raise ConfigError(
                f"validation.samples = {config.validation.samples}, but the model's latents have {geometry.channels} "
                "channels, so they are no pixels that could be shown; set it to 0"
            )


def latent_channels(dit: DitConfig) -> int:
    """Number of channels of the latents that a DiT reads.

    Raises: ConfigError: its in_channels is no integer of at least 1.
    """
    return _positive(dit.config or dit_config(dit), "in_channels", 16)


def most_frames(data: DataConfig) -> int:
    """Largest number of frames of all clips of one microbatch."""
    return math.floor(data.max_total_seconds * data.fps + _ALMOST)


def clip_seed(job_seed: int, step: int, sample: int, index: int = 0) -> int:
    """The seed, 0 .. 2**63 - 1, of all random choices of one clip in one step; equal on every rank and layout.

    A rank that needs one of a clip's choices draws it locally (`models.diffusion.ClipNoise`), so all ranks agree
    without communication.

    Args:
        job_seed: `debug.seed`.
        step: training step, from 1. Batch b of a validation counts as step -1 - b, so that all validations of a job
            have equal noise.
        sample, index: those of its `ClipMeta`.
    """
    key = f"{job_seed}/{step}/{sample}/{index}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


def _positive(dit: Mapping[str, Any], key: str, default: int) -> int:
    value = dit.get(key, default)
    if type(value) is not int or value < 1:
        raise ConfigError(f"model.dit.config: {key} = {value!r}; it is a whole number of at least 1")
    return value


def _patch(dit: Mapping[str, Any]) -> tuple[int, int, int]:
    patch = dit.get("patch_size", [1, 2, 2])
    if not isinstance(patch, list | tuple) or len(patch) != 3 or not all(type(p) is int and p > 0 for p in patch):
        raise ConfigError(f"model.dit.config: patch_size = {patch!r}; write [time, height, width], as [1, 2, 2]")
    time, height, width = patch
    return time, height, width


def _frames(data: DataConfig, patch: int, scale: LatentScale) -> tuple[int, ...]:
    """Numbers of frames of the buckets, longest first. Args: patch: latent frames of one patch."""
    longest, shortest = math.floor(data.max_seconds * data.fps + _ALMOST), scale.frames_of(patch)
    if longest < shortest:
        raise ConfigError(
            f"data.max_seconds = {data.max_seconds} at data.fps = {data.fps} are {longest} frames, less than the "
            f"{shortest} of one patch of the DiT; raise one of them"
        )
    for frames in data.video_frames:
        latents = scale.latent_frames(frames)
        if scale.frames_of(latents) != frames or latents % patch or frames > longest:
            rule = f"a multiple of the {patch} frames of one patch of the DiT"
            if scale.frames > 1:
                rule = f"1 + {scale.frames} k frames, which become 1 + k latent ones, {rule}"
            raise ConfigError(
                f"data.video_frames names {frames}; it must be {rule}, and at most data.max_seconds * data.fps = "
                f"{longest}"
            )
    if data.video_frames:
        return tuple(sorted(set(data.video_frames), reverse=True))
    num_patches = scale.latent_frames(longest) // patch
    halved = [num_patches >> k for k in range(num_patches.bit_length())]
    numbers = {count for n in halved for count in (n, n * 3 // 4) if count}
    return tuple(sorted((scale.frames_of(patch * count) for count in numbers), reverse=True))


def _sizes(data: DataConfig, patch: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    """The height and width of each bucket in pixels, in the order of data.video_aspects, each once."""
    buckets: dict[tuple[int, int], None] = {}
    for text in data.video_aspects:
        columns, rows = (int(length) for length in text.split(":"))
        height, width = math.sqrt(data.video_area * rows / columns), math.sqrt(data.video_area * columns / rows)
        height, width = (max(1, round(length / p)) * p for length, p in zip((height, width), patch, strict=True))
        buckets[height, width] = None
    return tuple(buckets)
