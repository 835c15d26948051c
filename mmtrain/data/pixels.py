"""The input of an encoder from the bytes of an image, with Pillow and numpy only.

The results equal those of the Hugging Face image processors of the same encoders (tested), which need torchvision in
some versions. The size is read from the header, without decoding.
"""

import io
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mmtrain.errors import ConfigError, DataError, one_line
from mmtrain.families.catalogue import ENCODERS
from mmtrain.families.family import named
from mmtrain.modality.geometry import ImageGeometry
from mmtrain.spec.hub_files import find_file, processor_config
from mmtrain.spec.processor_values import checked_values

_GREY = (128, 128, 128)
_ORIENTATION = 0x0112
"""EXIF tag: orientation of the camera."""
_WIDTH, _LENGTH, _BITS_PER_SAMPLE = 256, 257, 258
"""TIFF tags."""
_PNG_METADATA = (b"eXIf", b"tEXt", b"zTXt", b"iTXt")
"""Chunks of a PNG that can hold EXIF or XMP."""
_SCALED_TO_16_BITS = ("PNG", "PPM", "JPEG2000")
"""Formats whose grey values of 9 to 16 bits Pillow decodes to 0 .. 65535, in mode I;16 or I."""
_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelRules:
    """The conversion of 8-bit colours into an encoder's input: (value * rescale - mean) / std after resampling."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    resample: Image.Resampling
    rescale: float = 1 / 255
    min_pixels: int = 0
    """Smallest area after resizing, from the processor; 0: none."""
    max_pixels: int = 0
    """Largest area after resizing, from the processor; 0: none."""
    image_size: int = 0
    """Fixed side, from the processor; 0: none."""
    crops: bool = False
    """Whether the shorter side is resized, and a square cut out of the middle, instead of both sides."""
    shortest_edge: int = 0
    """Length of the shorter side before that, from the processor; 0: the side of the square."""

    def table(self) -> np.ndarray:
        """[256, 3] float32: the input value of each 8-bit value of each channel."""
        scaled = (np.arange(256, dtype=np.float64) * self.rescale).astype(np.float32)
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        return (scaled[:, None] - mean) / std


def pixel_rules(model_type: str, processor: str = "", key: str = "data.image_processor") -> PixelRules:
    """The rules of an encoder's default Hugging Face processor, or of a named one.

    Args:
        model_type: of the vision encoder.
        processor: id or folder with an image processor; empty: the encoder's default.
        key: of the config that names it, for errors.
    Raises: ConfigError: the processor does not exist, or asks for a step that is not supported.
    """
    images = ENCODERS[named(ENCODERS)[model_type]].images
    assert images is not None
    rules = PixelRules(
        mean=images.mean,
        std=images.std,
        resample=Image.Resampling[images.resample],
        crops=images.layout == "cropped",
    )
    if not processor:
        return rules
    config = processor_config(key, processor)
    if config is None:
        find_file(key, processor, "preprocessor_config.json")  # which says what is there
    return _read_rules(f"{key} = {processor!r}", config or {}, rules)


def _read_rules(where: str, config: Mapping[str, Any], default: PixelRules) -> PixelRules:
    config = checked_values(where, config)
    for key in ("do_resize", "do_rescale", "do_normalize"):
        if config.get(key, True) is False:
            raise ConfigError(f"{where}: {key} = false is not supported; remove it")
    crops = bool(config.get("do_center_crop", default.crops))
    for key, asked in (("do_center_crop", crops and not default.crops), ("do_pad", config.get("do_pad"))):
        if asked:
            raise ConfigError(f"{where}: {key} = true is not supported; set it to false")
    size = _sides(config.get("size"), ("shortest_edge",) if crops else ("height", "width"))
    square = _sides(config.get("crop_size"), ("height", "width")) if crops else size
    if square.get("height") != square.get("width"):
        raise ConfigError(f"{where}: {'crop_size' if crops else 'size'} = {square}; a fixed size must be square")
    if crops and size.get("height"):
        raise ConfigError(
            f"{where}: size = {size} with do_center_crop = true; only the shorter side can be resized before a square "
            "is cut out, give size.shortest_edge"
        )
    return PixelRules(
        mean=tuple(config.get("image_mean") or default.mean),
        std=tuple(config.get("image_std") or default.std),
        resample=Image.Resampling(config.get("resample", default.resample)),
        rescale=config.get("rescale_factor", default.rescale),
        min_pixels=config.get("min_pixels") or size.get("shortest_edge") or 0,
        max_pixels=config.get("max_pixels")
        or size.get("longest_edge")
        or (config.get("max_num_patches") or 0) * (config.get("patch_size") or 0) ** 2,
        image_size=square.get("height") or 0,
        crops=crops,
        shortest_edge=size.get("shortest_edge", 0) if crops else 0,
    )


def _sides(size: Any, names: tuple[str, ...]) -> Mapping[str, Any]:
    """A size of a processor by the names of its sides. Args: names: of the sides that a single number stands for."""
    return dict.fromkeys(names, size) if isinstance(size, int) else size or {}


def header_size(data: bytes, max_pixels: int) -> tuple[int, int]:
    """Height and width of an image after decoding, from its header only.

    Raises: DataError: not an image that Pillow reads, more than max_pixels, or of a kind that `decode` refuses.
    """
    image = _open(data, max_pixels)
    if image.format == "PNG" and _has_late_metadata(data):
        with suppress(Exception):  # which `decode` reports
            image.load()
    width, height = _stored_size(image)
    return (width, height) if _orientation(image) >= 5 else (height, width)


def decode(data: bytes, max_pixels: int) -> Image.Image:
    """The image in RGB on a white background, rotated as its EXIF or XMP tells, of the size that `header_size` returns.

    Grey values of more than 8 bits are rescaled by their number of bits: of 16 bits, 0 .. 65535 become 0 .. 255.
    Raises: DataError: its content is corrupt or truncated, or as `header_size`.
    """
    image, expected = _open(data, max_pixels), header_size(data, max_pixels)
    bits = _grey_bits(image)
    try:
        image.load()
        orientation = _orientation(image)  # of a TIFF none, since Pillow has turned it
        image = _rescaled(image, bits) if bits else _on_white(image)
    except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, ValueError, struct.error, ...
        raise DataError(f"its content is corrupt: {one_line(error)}") from None
    if orientation in _TRANSPOSE:
        image = image.transpose(_TRANSPOSE[orientation])
    if (image.height, image.width) != expected:
        raise DataError(f"it decodes to {(image.height, image.width)} pixels, but its header says {expected}")
    return image


def _open(data: bytes, max_pixels: int) -> Image.Image:
    """The image, not yet decoded, checked for size and kind."""
    try:
        image = Image.open(io.BytesIO(data))
    except Image.UnidentifiedImageError:
        raise DataError(f"its {len(data)} bytes are not an image in a known format") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):  # far above any allowed size
        raise DataError(f"it has more pixels than data.max_decoded_pixels = {max_pixels}; make it smaller") from None
    except Exception as error:  # as in `decode`: a damaged header raises many kinds of errors
        raise DataError(f"its header is corrupt: {one_line(error)}") from None
    if not 0 < image.width * image.height <= max_pixels:
        raise DataError(
            f"it has {image.width} x {image.height} pixels; 1 to data.max_decoded_pixels = {max_pixels} are decoded: "
            "make it smaller, or raise that"
        )
    if image.format == "EPS":  # Pillow would start another program for it
        raise DataError("it is a PostScript program; write it as PNG")
    if image.mode == "F" or (image.mode.startswith("I") and not _grey_bits(image)):
        kind = "floats" if image.mode == "F" else "integers of 32 bits, or signed ones"
        raise DataError(f"its grey values are {kind}, whose range is unknown; write it with 8 or 16 bits")
    return image


def _grey_bits(image: Image.Image) -> int | None:
    """Bits of the grey values of an image with more than 8 bits; None: it has 8, or they are unknown."""
    if not image.mode.startswith("I"):
        return None
    if image.format == "TIFF":
        is_unsigned = image.mode != "I"
        return int(image.tag_v2[_BITS_PER_SAMPLE][0]) if is_unsigned else None  # type: ignore[attr-defined]
    return 16 if image.format in _SCALED_TO_16_BITS else None


def _rescaled(image: Image.Image, bits: int) -> Image.Image:
    """Grey values of more bits as 8-bit ones, rounded; white stays white, and what is transparent becomes it."""
    table = np.rint(np.arange(2**bits) * (255 / (2**bits - 1))).astype(np.uint8)
    transparent = image.info.get("transparency")
    if isinstance(transparent, int) and 0 <= transparent < 2**bits:
        table[transparent] = 255
    return Image.fromarray(table[np.asarray(image)]).convert("RGB")


def _on_white(image: Image.Image) -> Image.Image:
    """The image in RGB, on a white background where it is transparent: by an alpha channel, or a colour of its palette
    or of its pixels.

    Source: `convert_to_rgb` of transformers 5.23, with which its image processors begin.
    """
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image)
    return image.convert("RGB")


def _has_late_metadata(data: bytes) -> bool:
    """Whether a PNG has metadata behind its pixels, which Pillow finds only when it decodes."""
    at, behind = 8, False
    while at + 8 <= len(data):
        length, name = struct.unpack(">I4s", data[at : at + 8])
        if behind and name in _PNG_METADATA:
            return True
        behind = behind or name == b"IDAT"
        at += length + 12
    return False


def _orientation(image: Image.Image) -> int:
    """The orientation of the camera, from 1 to 8, wherever `ImageOps.exif_transpose` finds it: in EXIF, in an EXIF
    profile in a text, or in XMP."""
    try:
        value = Image.Image.getexif(image).get(_ORIENTATION)  # that of a PNG would decode it
    except Exception:  # damaged metadata does not make an image unreadable
        return 1
    return value if isinstance(value, int) and value in _TRANSPOSE else 1


def _stored_size(image: Image.Image) -> tuple[int, int]:
    """Width and height before rotation. Some versions of Pillow turn those of a TIFF when they open it."""
    if image.format != "TIFF":
        return image.width, image.height
    tags = image.tag_v2  # type: ignore[attr-defined]
    return int(tags[_WIDTH]), int(tags[_LENGTH])


def blank(image: Image.Image) -> Image.Image:
    """A grey image of the same size."""
    return Image.new("RGB", image.size, _GREY)


def pixel_values(
    image: Image.Image, geometry: ImageGeometry, rules: PixelRules, size: tuple[int, int] | None = None
) -> Tensor:
    """An RGB image as float32 encoder input. Args: size: (height, width) that the geometry resizes; None: the image's.

    Shapes:
        packed: [patches, channels * frames * patch * patch], or with `pixel_major` [patches, patch * patch * channels];
            patches in merge blocks (block row, block column, row inside, column inside).
        fixed, cropped: [1, channels, image_size, image_size].
    Source: arXiv:2409.12191.
    """
    height, width = geometry.resized(*(size or (image.height, image.width)))
    if rules.crops:
        image = _middle(image, rules.shortest_edge or height, height, rules.resample)
    elif (image.height, image.width) != (height, width):
        image = image.resize((width, height), resample=rules.resample)
    colours_HWC = np.asarray(image)
    table = rules.table()
    values_HWC = np.stack([table[:, c][colours_HWC[..., c]] for c in range(3)], axis=-1)
    if geometry.layout != "packed":
        return torch.from_numpy(np.ascontiguousarray(values_HWC.transpose(2, 0, 1))[None])
    p, m, frames = geometry.patch_size, geometry.merge, geometry.temporal_patch_size
    rows, columns = height // (p * m), width // (p * m)
    blocks = values_HWC.reshape(rows, m, p, columns, m, p, 3).transpose(0, 3, 1, 4, 2, 5, 6)
    if geometry.pixel_major:
        return torch.from_numpy(blocks.reshape(-1, geometry.patch_dim))
    blocks = np.moveaxis(blocks, -1, -3)
    repeated = np.broadcast_to(blocks[:, :, :, :, :, None], (*blocks.shape[:5], frames, p, p))
    return torch.from_numpy(repeated.reshape(rows * columns * m * m, geometry.patch_dim))


def video_values(
    frames: Sequence[Image.Image], size: tuple[int, int], geometry: ImageGeometry, rules: PixelRules
) -> Tensor:
    """RGB frames of one size as float32 encoder input [patches, channels * frames * patch * patch].

    Args: size: (height, width) in pixels after resizing. geometry: the patches.

    Patches of a time are in merge blocks, as those of an image; the last frame is repeated to fill a patch. Frames are
    resized by torch, not Pillow, as the reference does it: colours of the two differ by up to 2 of 255.
    Source: the video processor of the same family in transformers 5.23.
    """
    frames_FCHW = torch.from_numpy(np.stack([np.asarray(frame) for frame in frames])).permute(0, 3, 1, 2).contiguous()
    if frames_FCHW.shape[2:] != size:
        mode = "bilinear" if rules.resample == Image.Resampling.BILINEAR else "bicubic"
        frames_FCHW = torch.nn.functional.interpolate(frames_FCHW, size, mode=mode, antialias=True)
    tables = torch.from_numpy(np.ascontiguousarray(rules.table().T))
    values_FCHW = torch.stack([tables[c][frames_FCHW[:, c].int()] for c in range(3)], dim=1)
    p, m, unit = geometry.patch_size, geometry.merge, geometry.temporal_patch_size
    if missing := -len(frames) % unit:
        values_FCHW = torch.cat([values_FCHW, values_FCHW[-1:].expand(missing, -1, -1, -1)])
    blocks = values_FCHW.reshape(-1, unit, 3, size[0] // (p * m), m, p, size[1] // (p * m), m, p)
    return blocks.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, geometry.patch_dim)


def _middle(image: Image.Image, shortest_edge: int, side: int, resample: Image.Resampling) -> Image.Image:
    """The square in the middle of an image whose shorter side is resized; black where the image is smaller."""
    shorter = min(image.size)
    width, height = (shortest_edge * length // shorter for length in image.size)
    if image.size != (width, height):
        image = image.resize((width, height), resample=resample)
    left, top = (width - side) // 2, (height - side) // 2
    return image.crop((left, top, left + side, top + side))
