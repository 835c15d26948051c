"""The data section of a small job with the same data but smaller samples. Pure."""

from dataclasses import replace

from mmtrain.config.data import DataConfig
from mmtrain.config.model import ModelConfig
from mmtrain.modality.videos import VideoRules, video_rules
from mmtrain.spec.model_shapes import DitShape, dit_shape
from mmtrain.spec.vae_shapes import LatentScale, latent_scale
from mmtrain.spec.vision_shapes import vision_shape

_IMAGE_TOKENS = 16
_VIDEO_FRAMES = 4
_CLIP_SECONDS = 4.0
_CLIP_PATCHES = 64
"""Patches in time of a clip whose frames are resized."""
_LATENT_PATCHES = 4
"""Patches in time of a clip of given latents, which are not resized."""
_CLIPS = 4
"""Clips of a microbatch: two works of two."""


def most_image_tokens(model: ModelConfig) -> int:
    """Largest number of tokens of one of the small job's images, and an item of each further encoder."""
    shapes = [vision_shape(model, name) for name in model.encoders]
    return sum(_IMAGE_TOKENS if shape.any_size else shape.full_tokens for shape in shapes)


def small_data(section: DataConfig, model: ModelConfig) -> DataConfig:
    """The data section with smaller images and fewer, shorter and smaller clips. Args: model: the small model."""
    section = replace(section, num_workers=0, too_long="skip" if model.encoders else "truncate")
    if model.dit is not None:
        return _clips(section, dit_shape(model), latent_scale(model.vae) if model.vae else None)
    shapes = [vision_shape(model, name) for name in model.encoders]
    packed = [shape for shape in shapes if shape.any_size]
    if not packed:
        return section
    token = max((shape.patch_size * shape.merge) ** 2 for shape in packed)
    if videos := video_rules(model, section):
        section = _videos(section, videos)
    max_pixels = min(section.max_pixels or _IMAGE_TOKENS * token, _IMAGE_TOKENS * token)
    min_pixels = 0 if any(shape.fills for shape in packed) else min(token, max_pixels)
    return replace(section, max_pixels=max_pixels, min_pixels=min_pixels)


def _videos(section: DataConfig, rules: VideoRules) -> DataConfig:
    """The section with shorter videos of smaller frames."""
    frames = min(rules.max_frames, _VIDEO_FRAMES)
    frame = _IMAGE_TOKENS // (_VIDEO_FRAMES // 2) * rules.factor**2
    area = min(rules.max_pixels, rules.num_limited(frames) * frame)
    return replace(
        section,
        video_max_frames=frames,
        video_min_frames=min(rules.min_frames, frames),
        video_max_pixels=area,
        video_min_pixels=min(rules.min_pixels, rules.factor**2, area),
    )


def _clips(section: DataConfig, shape: DitShape, vae: LatentScale | None) -> DataConfig:
    """The section with fewer, shorter and smaller clips and the same frame rate; clips still differ in length."""
    frames, rows, columns = shape.patch
    patches = _CLIP_PATCHES if shape.in_channels == 3 or vae else _LATENT_PATCHES
    if vae is not None:
        frames, rows, columns = vae.pixels(shape.patch)
    longest = max(frames / section.fps, min(_CLIP_SECONDS, patches * frames / section.fps))
    seconds = min(section.max_seconds, longest)
    return replace(
        section,
        max_seconds=seconds,
        max_total_seconds=min(section.max_total_seconds, 2 * seconds),
        max_clips=min(section.max_clips, _CLIPS),
        video_area=min(section.video_area, _IMAGE_TOKENS * rows * columns),
        video_frames=[],
    )
