"""The size of an image in patches and in tokens. Pure arithmetic on sizes; no pixels.

Both the loader (which needs a sample's length before it decodes an image) and the pixel code use this module, so the
number of image tokens and the number of encoder rows always agree.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mmtrain.config.model import ModelConfig, section_of
from mmtrain.errors import ConfigError, DataError
from mmtrain.families.catalogue import ENCODERS
from mmtrain.families.family import ImageDefaults, named
from mmtrain.families.shapes import single_size
from mmtrain.spec.model_configs import encoder_config
from mmtrain.spec.vision_shapes import vision_shape

MAX_ASPECT_RATIO = 200
"""Largest ratio of the longer to the shorter side of an image for a native-resolution encoder.
Source: arXiv:2409.12191."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageGeometry:
    """The rule that turns an image's size into a grid of patches and a number of tokens.

    `packed`: native resolution; sides become multiples of patch x merge, patches lie in merge blocks. With
    `max_patches` an image is made as large as they allow.
    `fixed`: every image becomes image_size x image_size; `cropped`: its middle does.
    """

    layout: Literal["packed", "fixed", "cropped"]
    patch_size: int
    """Pixels along one side of a patch."""
    merge: int
    """Patches along one side of the block that becomes one token."""
    temporal_patch_size: int = 1
    """Frames in one patch; a still image is repeated to fill it (packed)."""
    image_size: int = 0
    """Side in pixels (fixed, cropped)."""
    min_pixels: int = 0
    """Smallest area after resizing, pixels (packed)."""
    max_pixels: int = 0
    """Largest area after resizing, pixels (packed)."""
    max_patches: int = 0
    """Number of patches that each image fills; 0: images keep their size within the limits above (packed)."""
    pixel_major: bool = False
    """Whether a packed patch is its pixels one by one, and not its channels."""
    extra_tokens: int = 0
    """Tokens of an image in addition to those of its patches: 1 for a class token."""

    @property
    def patch_dim(self) -> int:
        """Elements of one packed patch: 3 colours x frames x patch x patch."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """The height and width in pixels after resizing and cutting. Args: in pixels.

        Raises: DataError: a side is 0, or one side is more than 200 times the other.
        """
        if self.layout == "cropped":
            check_aspect_ratio(height, width)
        if self.layout != "packed":
            return self.image_size, self.image_size
        if self.max_patches:
            factor, blocks = self.patch_size * self.merge, self.max_patches // self.merge**2
            return filled_size(height, width, factor=factor, max_blocks=blocks)
        return smart_resize(
            height,
            width,
            factor=self.patch_size * self.merge,
            min_pixels=self.min_pixels,
            max_pixels=self.max_pixels,
        )

    def grid(self, height: int, width: int) -> tuple[int, int, int]:
        """Patches (time, height, width) of an image of height x width pixels; time is 1."""
        new_height, new_width = self.resized(height, width)
        return 1, new_height // self.patch_size, new_width // self.patch_size

    def num_tokens(self, grid: tuple[int, int, int]) -> int:
        """Number of tokens of an image: one for each merge x merge block, and the extra ones.

        Args: grid: patches (time, height, width).
        """
        frames, height, width = grid
        return frames * (height // self.merge) * (width // self.merge) + self.extra_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSize:
    """What a record says about the size of one image, pixels; 0: nothing."""

    min_pixels: int = 0
    max_pixels: int = 0
    resized_height: int = 0
    resized_width: int = 0

    def resized(self, height: int, width: int, geometry: ImageGeometry) -> tuple[int, int]:
        """The height and width that the geometry then resizes by its own limits. Args: of the image, pixels.

        Raises: DataError: the encoder's images have no size of their own, or as `smart_resize`.
        Source: `fetch_image` of the package qwen-vl-utils, with its limits of 4 and 16384 tokens.
        """
        if geometry.layout != "packed" or geometry.max_patches:
            keys = ", ".join(f"`{name}`" for name in self.__slots__ if getattr(self, name))
            raise DataError(f"it has {keys}, but all images of this encoder get one size or area; remove them")
        factor = geometry.patch_size * geometry.merge
        least, most = self.min_pixels or 4 * factor**2, self.max_pixels or 16384 * factor**2
        if self.resized_height:
            height, width, least, most = self.resized_height, self.resized_width, 4 * factor**2, 16384 * factor**2
        return smart_resize(height, width, factor=factor, min_pixels=least, max_pixels=most)


def smart_resize(height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Height and width in pixels: multiples of `factor`, with an area inside of the limits and nearly the same ratio.

    For an image that is too thin for all three, the sides are multiples, but the area exceeds the upper limit, as in
    the reference. Rounding is to the nearest multiple, ties to even.

    Args: height, width, factor: pixels. min_pixels, max_pixels: limits of the area.

    Raises: DataError: a side is 0, or the aspect ratio is above `MAX_ASPECT_RATIO`.
    Source: arXiv:2409.12191, sec. 2.1.
    """
    check_aspect_ratio(height, width)
    new_height = round(height / factor) * factor
    new_width = round(width / factor) * factor
    if new_height * new_width > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif new_height * new_width < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    return new_height, new_width


def filled_size(height: int, width: int, *, factor: int, max_blocks: int) -> tuple[int, int]:
    """Height and width in pixels: the multiples of `factor` that fill a number of blocks, with nearly the same ratio.

    The scale is the largest one up to 100 at which both sides, rounded up, have at most `max_blocks` blocks, found by
    bisection to 1e-5 as in the reference, so that sizes are equal to the pixel.

    Args: height, width, factor: pixels. max_blocks: factor x factor pixels each.
    Raises: DataError: a side is 0, or the aspect ratio is above `MAX_ASPECT_RATIO`.
    Source: arXiv:2502.14786, sec. 2.4.2.
    """
    check_aspect_ratio(height, width)

    def blocks(scale: float, side: int) -> int:
        return max(1, math.ceil(side * scale / factor))

    low, high = 1e-6, 100.0
    while high - low >= 1e-5:
        scale = (low + high) / 2
        fits = blocks(scale, height) * blocks(scale, width) <= max_blocks
        low, high = (scale, high) if fits else (low, scale)
    return blocks(low, height) * factor, blocks(low, width) * factor


def model_geometry(
    model: ModelConfig, module: str = "vision", *, min_pixels: int = 0, max_pixels: int = 0
) -> ImageGeometry:
    """The geometry of the images of an encoder of a model that has it. Arguments and errors: see `image_geometry`."""
    return image_geometry(
        encoder_config(model.encoders[module], section_of(module)),
        section=section_of(module),
        spatial_merge=model.merge_of(module),
        extra_tokens=int(vision_shape(model, module).keeps_class_token),
        min_pixels=min_pixels,
        max_pixels=max_pixels,
    )


def check_aspect_ratio(height: int, width: int) -> None:
    """Refuses an image that is so thin that resizing would make its longer side huge. Args: pixels.

    Raises: DataError: a side is 0, or the aspect ratio is above `MAX_ASPECT_RATIO`.
    """
    if min(height, width) < 1:
        raise DataError(f"image of {width} x {height} pixels: a side is empty")
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise DataError(
            f"image of {width} x {height} pixels: one side is more than {MAX_ASPECT_RATIO} times the "
            "other; crop it or leave it out"
        )


def image_geometry(
    encoder: Mapping[str, Any],
    *,
    spatial_merge: int,
    extra_tokens: int = 0,
    min_pixels: int = 0,
    max_pixels: int = 0,
    section: str = "model.encoder",
) -> ImageGeometry:
    """The geometry of an encoder's images.

    Args:
        encoder: Hugging Face config of the vision encoder, with its `model_type`.
        spatial_merge: neighbours along each side that become one token.
        extra_tokens: of an image, in addition to those of its patches.
        min_pixels, max_pixels: area limits for native-resolution encoders; 0: those of the family's processor.
        section: of the config, for errors.
    Raises: ConfigError: the model_type is unknown or reads no images, or sizes do not divide each other.
    """
    kind = encoder.get("model_type")
    names = named(ENCODERS)
    if kind not in names:
        known_types = ", ".join(name for name, network in names.items() if ENCODERS[network].images)
        raise ConfigError(f"{section}: model_type = {kind!r} has no known image layout; known are {known_types}")
    family = ENCODERS[names[kind]]
    if family.images is None:
        raise ConfigError(
            f"{section}: model_type = {kind!r} reads sound, and this section images; write it as [model.modules.audio] "
            'with kind = "audio"'
        )
    channels = encoder.get("num_channels", encoder.get("in_channels", encoder.get("in_chans", 3)))
    if channels != 3:
        raise ConfigError(f"{section}: {channels} colour channels; images are read as RGB, so set it to 3")
    values = {**family.defaults, **encoder}
    if family.images.layout == "native":
        return _native(values, family.images, section, spatial_merge, min_pixels, max_pixels)
    if family.images.layout == "filled":
        return _filled(values, section, spatial_merge, min_pixels, max_pixels)
    if min_pixels or max_pixels:
        raise ConfigError(
            f"data.min_pixels = {min_pixels}, data.max_pixels = {max_pixels}: a {kind} encoder has "
            "one fixed image size (its image_size); remove both"
        )
    patch = single_size(section, "patch_size", values["patch_size"])
    size = single_size(section, "image_size", values["image_size"])
    if size % patch or (size // patch) % spatial_merge:
        raise ConfigError(
            f"{section}: image_size = {size} must be a multiple of patch_size * spatial_merge = "
            f"{patch} * {spatial_merge}; change model.projector.spatial_merge or the encoder's sizes"
        )
    layout = family.images.layout
    return ImageGeometry(
        layout=layout, patch_size=patch, merge=spatial_merge, extra_tokens=extra_tokens, image_size=size
    )


def _native(
    values: Mapping[str, Any], images: ImageDefaults, section: str, merge: int, min_pixels: int, max_pixels: int
) -> ImageGeometry:
    """Images that keep their size within limits of the area. Args: as of `image_geometry`."""
    patch = single_size(section, "patch_size", values["patch_size"])
    geometry = ImageGeometry(
        layout="packed",
        patch_size=patch,
        merge=merge,
        temporal_patch_size=single_size(section, "temporal_patch_size", values["temporal_patch_size"]),
        min_pixels=min_pixels or images.min_pixels,
        max_pixels=max_pixels or images.max_pixels,
    )
    if geometry.max_pixels < max(geometry.min_pixels, (patch * merge) ** 2):
        raise ConfigError(
            f"data.max_pixels = {geometry.max_pixels} is below the smallest image: data.min_pixels = "
            f"{geometry.min_pixels}, and one token covers {(patch * merge) ** 2} pixels; raise it, or "
            "lower data.min_pixels"
        )
    return geometry


def _filled(values: Mapping[str, Any], section: str, merge: int, min_pixels: int, max_pixels: int) -> ImageGeometry:
    """Images that are as large as a number of patches allows. Args: as of `image_geometry`."""
    if min_pixels:
        raise ConfigError(
            f"data.min_pixels = {min_pixels}: images of a {values['model_type']} encoder always have as many patches "
            "as data.max_pixels allows; remove it"
        )
    patch = single_size(section, "patch_size", values["patch_size"])
    max_patches = max_pixels // patch**2 if max_pixels else values["num_patches"]
    if max_patches < merge**2:
        raise ConfigError(
            f"data.max_pixels = {max_pixels}: an image has at most {max_patches} patches, but one token covers "
            f"{merge**2}; raise it"
        )
    return ImageGeometry(layout="packed", patch_size=patch, merge=merge, max_patches=max_patches, pixel_major=True)
