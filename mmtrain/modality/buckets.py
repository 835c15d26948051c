"""Which frames of a clip are read, and to which size: its bucket. Pure arithmetic; no pixel.

Clips of one bucket have equal shapes, so they can be one dense batch. As for images, the loader (which
must know a clip's size before it decodes a frame) and the pixel code use this one place.

The model reads latents [channels, frames, height, width]. Without a VAE these are the pixels, or what the record holds,
so all frames and sizes here are both. With a VAE (`models.vae`, which runs inside of the pipeline) buckets of pixels
are those that become whole patches of latents.
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
from mmtrain.spec.families import dit_config
from mmtrain.spec.shapes import check_prediction
from mmtrain.spec.vae_shapes import LatentScale, latent_scale

_ALMOST = 1e-6
"""Frames by which a rounding error of a frame rate may miss a whole number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoGeometry:
    """The rule that turns a clip's frames, rate and size into a bucket and a number of tokens."""

    channels: int
    """Of the latents that the model reads."""
    patch: tuple[int, int, int]
    """Frames, rows and columns of latents that become one token."""
    max_positions: int
    """Tokens along each axis, at most."""
    fps: float
    """Frames a second that clips are sampled to."""
    frames: tuple[int, ...]
    """Numbers of frames of the buckets, longest first."""
    sizes: tuple[tuple[int, int], ...]
    """(height, width) of the buckets."""
    vae: LatentScale | None = None
    """How much becomes one latent place; None: there is no VAE."""

    def latents(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Frames, rows and columns of the latents of a bucket."""
        scale = self.vae or LatentScale()
        return scale.latent_frames(frames), height // scale.side, width // scale.side

    def pixels(self, latents: tuple[int, int, int]) -> tuple[int, int, int]:
        """Frames, rows and columns of the bucket that has these latents."""
        return (self.vae or LatentScale()).pixels(latents)

    def sampled(self, num_frames: int, source_fps: float) -> int:
        """Frames that a clip has at `fps`: at least one."""
        return max(1, math.floor(num_frames * self.fps / source_fps + _ALMOST))

    def places(self, num_frames: int, source_fps: float, count: int) -> list[int]:
        """The first `count` sampled frames as places among the source's frames: what it shows at each moment.

        A source with fewer frames a second than `fps` shows some of them more than once.
        """
        step = source_fps / self.fps
        return [min(num_frames - 1, math.floor(j * step + _ALMOST)) for j in range(count)]

    def longest(self, num_frames: int) -> int:
        """Frames of the longest bucket that a clip of so many frames, at `fps`, fills.

        Raises: DataError: it fills none.
        """
        for count in self.frames:
            if count <= num_frames:
                return count
        raise DataError(
            f"it has {num_frames} frames at {self.fps:g} a second, but the shortest bucket has {self.frames[-1]}; "
            "leave it out or add a shorter one to data.video_frames"
        )

    def size(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) of the bucket whose aspect is nearest to that of a frame; of equals the first."""
        aspect = width / height
        return min(self.sizes, key=lambda size: round(abs(math.log(size[1] / size[0] / aspect)), 9))

    def num_tokens(self, bucket: tuple[int, int, int]) -> int:
        """Tokens of latents of that many frames, rows and columns.

        Raises: DataError: one of these is no multiple of the patch, or longer than the DiT's positions go.
        """
        for axis, length, side in zip(("frames", "rows", "columns"), bucket, self.patch, strict=True):
            if length > side * self.max_positions:
                raise DataError(
                    f"its latents have {length // side} patches along their {axis}, but model.dit.config has "
                    f"rope_max_seq_len = {self.max_positions}; raise it, or leave the clip out"
                )
            if length < 1 or length % side:
                raise DataError(
                    f"its latents have {length} {axis}, which is no multiple of the {side} of one patch (patch_size = "
                    f"{list(self.patch)} of model.dit.config)"
                )
        return math.prod(length // side for length, side in zip(bucket, self.patch, strict=True))


def crop(height: int, width: int, size: tuple[int, int]) -> tuple[float, float, float, float]:
    """The largest part of a frame, around its middle, that has the aspect of `size` (height, width).

    Returns: left, top, right, bottom in pixels of the frame.
    """
    scale = min(height / size[0], width / size[1])
    rows, columns = scale * size[0], scale * size[1]
    left, top = (width - columns) / 2, (height - rows) / 2
    return left, top, left + columns, top + rows


def video_geometry(dit: DitConfig, data: DataConfig, vae: VaeConfig | None = None) -> VideoGeometry:
    """The geometry of a job's clips.

    Raises: ConfigError: the DiT's patch is not of the form [time, height, width], or does not fit the buckets.
    """
    values = dit.config or dit_config(dit)
    patch, scale = _patch(values), latent_scale(vae) if vae else LatentScale()
    found = VideoGeometry(
        channels=latent_channels(dit),
        patch=patch,
        max_positions=_max_positions(values),
        fps=data.fps,
        frames=_frames(data, patch[0], scale),
        sizes=_sizes(data, (patch[1] * scale.side, patch[2] * scale.side)),
        vae=scale if vae else None,
    )
    sizes = found.sizes if found.channels == 3 or vae else ((1, 1),)  # of latents nobody knows the size yet
    for size in sizes:
        sides = zip(("frames", "height", "width"), found.latents(found.frames[0], *size), patch, strict=True)
        for name, length, side in sides:
            if length > side * found.max_positions:
                key = "data.max_seconds (or data.video_frames)" if name == "frames" else "data.video_area"
                raise ConfigError(
                    f"{key} makes clips with {length // side} patches along their {name}, but model.dit.config has "
                    f"rope_max_seq_len = {found.max_positions}; lower the one or raise the other"
                )
    return found


def check_video(config: Config) -> None:
    """Refuses a text-to-video job that could not train, before anything starts. Any other job passes.

    Raises: ConfigError: as `video_geometry` and `check_prediction`.
    """
    if config.model.dit is not None:
        check_prediction(config.model)
        video_geometry(config.model.dit, config.data, config.model.vae)


def latent_channels(dit: DitConfig) -> int:
    """Channels of the latents that a DiT reads.

    Raises: ConfigError: its in_channels is no number of channels.
    """
    channels = (dit.config or dit_config(dit)).get("in_channels", 16)
    if type(channels) is not int or channels < 1:
        raise ConfigError(f"model.dit.config: in_channels = {channels!r}; it is a whole number of at least 1")
    return channels


def most_frames(data: DataConfig) -> int:
    """Frames of all clips of one microbatch."""
    return math.floor(data.max_total_seconds * data.fps + _ALMOST)


def clip_seed(job_seed: int, step: int, sample: int, index: int = 0) -> int:
    """The seed of all random choices of one clip in one step: the same on every rank and for every layout.

    A rank that needs one of a clip's choices draws it by itself, see `models.diffusion.ClipNoise`, so all agree and
    nothing is sent.

    Args:
        job_seed: `debug.seed`.
        step: of training, from 1. Batch b of a validation counts as step -1 - b, so that all validations of a job
            meet equal noise.
        sample, index: of its `ClipMeta`.
    Returns: 0 .. 2**63 - 1.
    """
    key = f"{job_seed}/{step}/{sample}/{index}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


def _max_positions(dit: Mapping[str, Any]) -> int:
    most = dit.get("rope_max_seq_len", 1024)
    if type(most) is not int or most < 1:
        raise ConfigError(f"model.dit.config: rope_max_seq_len = {most!r}; it is a whole number of at least 1")
    return most


def _patch(dit: Mapping[str, Any]) -> tuple[int, int, int]:
    patch = dit.get("patch_size", [1, 2, 2])
    if not isinstance(patch, list | tuple) or len(patch) != 3 or not all(type(p) is int and p > 0 for p in patch):
        raise ConfigError(f"model.dit.config: patch_size = {patch!r}; write [time, height, width], as [1, 2, 2]")
    time, height, width = patch
    return time, height, width


def _frames(data: DataConfig, patch: int, scale: LatentScale) -> tuple[int, ...]:
    """The buckets' numbers of frames, longest first."""
    longest, least = math.floor(data.max_seconds * data.fps + _ALMOST), scale.frames_of(patch)
    if longest < least:
        raise ConfigError(
            f"data.max_seconds = {data.max_seconds} at data.fps = {data.fps} are {longest} frames, less than the "
            f"{least} of one patch of the DiT; raise one of them"
        )
    for count in data.video_frames:
        latents = scale.latent_frames(count)
        if scale.frames_of(latents) != count or latents % patch or count > longest:
            rule = f"a multiple of the {patch} frames of one patch of the DiT"
            if scale.frames > 1:
                rule = f"1 + {scale.frames} k frames, which become 1 + k latent ones, {rule}"
            raise ConfigError(
                f"data.video_frames names {count}; it must be {rule}, and at most data.max_seconds * data.fps = "
                f"{longest}"
            )
    if data.video_frames:
        return tuple(sorted(set(data.video_frames), reverse=True))
    whole = scale.latent_frames(longest) // patch  # in patches
    halved = [whole >> k for k in range(whole.bit_length())]
    numbers = {n for half in halved for n in (half, half * 3 // 4) if n}
    return tuple(sorted((scale.frames_of(patch * n) for n in numbers), reverse=True))


def _sizes(data: DataConfig, patch: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    """The buckets' (height, width), in the order of data.video_aspects, each once."""
    found: dict[tuple[int, int], None] = {}
    for text in data.video_aspects:
        columns, rows = (int(side) for side in text.split(":"))
        height, width = math.sqrt(data.video_area * rows / columns), math.sqrt(data.video_area * columns / rows)
        height, width = (max(1, round(side / p)) * p for side, p in zip((height, width), patch, strict=True))
        found[height, width] = None
    return tuple(found)
