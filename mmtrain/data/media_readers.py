"""What the encoders of a model read: for each kind of content its token, its size from the header, and encoder input.

A kind of content is a class here, and a row in the table that `make_readers` makes of a job.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from torch import Tensor

from mmtrain.config.config import Config
from mmtrain.config.data import DataConfig, TokenizerConfig
from mmtrain.config.model import placeholder, section_of
from mmtrain.data.frames import open_frames
from mmtrain.data.media import RawImage, RawSound, RawVideo
from mmtrain.data.pixels import PixelRules, blank, decode, header_size, pixel_rules, pixel_values, video_values
from mmtrain.data.sounds import heard, open_sound, spectrograms
from mmtrain.errors import ConfigError, DataError, shown
from mmtrain.families.catalogue import COMPOSITES
from mmtrain.modality.encoder_choice import readers_of_kinds
from mmtrain.modality.geometry import ImageGeometry, model_geometry
from mmtrain.modality.metadata import ImageMeta
from mmtrain.modality.sounds import SoundRules, sound_rules
from mmtrain.modality.videos import VIDEO_ENCODERS, VideoRules, video_rules
from mmtrain.spec.hub_files import processor_config
from mmtrain.spec.model_configs import encoder_config
from mmtrain.spec.module_sizes import whole_kind
from mmtrain.spec.vision_shapes import vision_shape

VISION_MARKERS = ("<|vision_start|>", "<|vision_end|>")
"""Tokens around those of an image or video, as Qwen-VL was trained."""


class PlaceholderItems(NamedTuple):
    """What one placeholder stands for."""

    images: tuple[ImageMeta, ...]
    """An image, a video, each patch in time of a video with captions, or each window of a sound."""
    captions: tuple[str, ...] = ()
    """The text before each of them; empty: their tokens are one run."""


class MediaReader(ABC):
    """One kind of content, as an encoder reads it."""

    markers: tuple[str, str]
    """Tokens around the tokens of an item, where the tokenizer has both and the chat template does not show items."""
    token: str
    """The token that each of its features replaces."""
    module: str
    """The encoder."""
    data: DataConfig
    """Limits of what is read, and whether its content is blanked."""

    @property
    def limits(self) -> Sequence[str]:
        """Keys of the config that limit the number of tokens of an item."""
        return ()

    @abstractmethod
    def items(self, raw: Any, meta: ImageMeta) -> PlaceholderItems:
        """The sizes, from the header. Args: meta: of an item without size.

        Raises: DataError: the header is corrupt, or there is nothing to read.
        """

    @abstractmethod
    def values(self, raw: Any, num_items: int) -> Sequence[Tensor]:
        """The input of the encoder for each item of `items`. Raises: DataError: the content is corrupt."""

    def image(self, raw: Any) -> Image.Image | None:
        """What shows it to a person, in RGB; None: it is nothing to see. Raises: DataError: the content is corrupt."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageReader(MediaReader):
    """Images of one encoder."""

    markers: tuple[str, str] = VISION_MARKERS
    token: str
    module: str = "vision"
    geometry: ImageGeometry
    rules: PixelRules
    data: DataConfig

    @property
    def limits(self) -> Sequence[str]:
        return ("data.max_pixels",) if self.geometry.layout == "packed" else ()

    def items(self, raw: RawImage, meta: ImageMeta) -> PlaceholderItems:
        """The grid of patches."""
        size = header_size(raw.read(self.data.max_media_bytes), self.data.max_decoded_pixels)
        grid = self.geometry.grid(*self._size(raw, size))
        return PlaceholderItems((replace(meta, grid=grid, num_tokens=self.geometry.num_tokens(grid)),))

    def values(self, raw: RawImage, num_items: int) -> Sequence[Tensor]:
        """The pixels."""
        image = self.image(raw)
        return [pixel_values(image, self.geometry, self.rules, self._size(raw, (image.height, image.width)))]

    def image(self, raw: RawImage) -> Image.Image:
        """The image, which may be blanked."""
        image = decode(raw.read(self.data.max_media_bytes), self.data.max_decoded_pixels)
        return blank(image) if self.data.blank_images else image

    def _size(self, raw: RawImage, size: tuple[int, int]) -> tuple[int, int]:
        """The height and width that the geometry resizes: of the image, or as its record says."""
        return raw.size.resized(*size, self.geometry) if raw.size else size


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoReader(MediaReader):
    """Videos of one encoder."""

    markers: tuple[str, str] = VISION_MARKERS
    token: str
    module: str = "vision"
    geometry: ImageGeometry
    """The geometry of the encoder's images, which gives the number of tokens."""
    rules: VideoRules
    pixels: PixelRules
    data: DataConfig

    @property
    def limits(self) -> Sequence[str]:
        return "data.video_max_frames", "data.video_max_pixels"

    def items(self, raw: RawVideo, meta: ImageMeta) -> PlaceholderItems:
        """The video, or each of its patches in time, and times of these."""
        frames, rules = open_frames(raw, self.data), self.rules
        fps = self._fps(raw, frames.fps)
        count = rules.num_sampled(frames.num_frames, fps)
        seconds, grid = rules.seconds(frames.num_frames, fps, count), rules.grid(count, *frames.size)
        captions = rules.captions(frames.num_frames, fps, count)
        grid = (1, *grid[1:]) if captions else grid
        step = rules.time_step(seconds)
        num_tokens = self.geometry.num_tokens(grid)
        meta = replace(meta, grid=grid, num_tokens=num_tokens, seconds=seconds, time_step=step)
        patches = tuple(replace(meta, frame=frame) for frame in range(len(captions)))
        return PlaceholderItems(patches or (meta,), captions)

    def values(self, raw: RawVideo, num_items: int) -> Sequence[Tensor]:
        """The pixels of sampled frames."""
        frames = list(self._frames(raw))
        size = self.rules.resized(len(frames), frames[0].height, frames[0].width)
        parts: Sequence[Tensor] = video_values(frames, size, self.rules.patches, self.pixels).chunk(num_items)
        return parts

    def image(self, raw: RawVideo) -> Image.Image:
        """The first frame."""
        return next(self._frames(raw))

    def _frames(self, raw: RawVideo) -> Iterator[Image.Image]:
        frames = open_frames(raw, self.data)
        count = self.rules.num_sampled(frames.num_frames, self._fps(raw, frames.fps))
        sampled = frames.read(self.rules.indices(frames.num_frames, count))
        return map(blank, sampled) if self.data.blank_images else sampled

    def _fps(self, raw: RawVideo, of_file: float | None) -> float:
        """Frames a second of a video. Raises: DataError: times of frames would have no meaning."""
        fps = raw.fps or of_file or self.data.source_fps or self.data.video_fps
        if not 0.001 <= fps <= 1000:
            raise DataError(f"it has {fps:g} frames a second; give its `fps`, from 0.001 to 1000")
        return fps


@dataclass(frozen=True, slots=True, kw_only=True)
class SoundReader(MediaReader):
    """Sounds of one encoder."""

    markers: tuple[str, str] = ("<|audio_bos|>", "<|audio_eos|>")
    token: str
    module: str
    rules: SoundRules
    data: DataConfig

    def items(self, raw: RawSound, meta: ImageMeta) -> PlaceholderItems:
        """The windows of the encoder, in time."""
        sound, rules, items = open_sound(raw, self.data.max_media_bytes), self.rules, list[ImageMeta]()
        for frame, samples in enumerate(rules.windows(rules.resampled(sound.num_samples, sound.rate))):
            rows = rules.num_rows(samples)
            tokens, seconds = rules.num_tokens(rows), rules.seconds(samples)
            items.append(replace(meta, frame=frame, grid=(1, 1, rows), num_tokens=tokens, sound_s=seconds))
        if not items:
            raise DataError(f"its {sound.num_samples} samples are too short for a token; leave it out")
        return PlaceholderItems(tuple(items))

    def values(self, raw: RawSound, num_items: int) -> Sequence[Tensor]:
        """The spectrogram of each window, which may be that of silence."""
        samples = heard(open_sound(raw, self.data.max_media_bytes), self.rules)
        return spectrograms(np.zeros_like(samples) if self.data.blank_audio else samples, self.rules)


@dataclass(frozen=True, slots=True, kw_only=True)
class Readers:
    """What a model reads of a record in addition to text."""

    of_kind: Mapping[str, MediaReader]
    """Kind of content -> its reader."""
    unread: Mapping[str, str]
    """Kind of content that the model does not read -> why, and what to change."""

    def blanked(self, *, images: bool, audio: bool) -> "Readers":
        """Readers that give grey images and videos, or silent sounds, or both."""
        of_kind: dict[str, Any] = {}
        for kind, reader in self.of_kind.items():
            data: DataConfig = reader.data
            data = replace(data, blank_images=data.blank_images or images, blank_audio=data.blank_audio or audio)
            of_kind[kind] = replace(reader, data=data)  # type: ignore[type-var]
        return replace(self, of_kind=of_kind)


UNREAD: dict[str, str] = {
    "image": "the model has no encoder of images; add [model.encoder]",
    "video": f"the model's encoder reads images alone; use one of {', '.join(VIDEO_ENCODERS)}",
    "audio": 'the model has no encoder of sound; add [model.modules.audio] with kind = "audio"',
}
"""Kind of content -> what the error says for a model that has no encoder of it."""


def vision_readers(
    section: TokenizerConfig,
    geometry: ImageGeometry | None,
    rules: PixelRules | None,
    data: DataConfig,
    videos: VideoRules | None = None,
    *,
    vocabulary: Mapping[str, int],
) -> Readers:
    """The readers of [model.encoder].

    Args:
        section: the tokens of one feature of an image, and of a video.
        geometry, rules: of the encoder's images; None for a model without an encoder.
        videos: of its videos; None for a model that reads none.
        vocabulary: of the tokenizer; without the token of videos none is read.
    """
    if geometry is None or rules is None:
        return Readers(of_kind={}, unread=UNREAD | {"video": UNREAD["image"]})
    readers: dict[str, MediaReader] = {
        "image": ImageReader(token=section.image_token, geometry=geometry, rules=rules, data=data)
    }
    unread = {kind: why for kind, why in UNREAD.items() if kind != "image"}
    if videos is not None and section.video_token in vocabulary:
        del unread["video"]
        readers["video"] = VideoReader(
            token=section.video_token, geometry=geometry, rules=videos, pixels=rules, data=data
        )
    elif videos is not None:
        unread["video"] = (
            f"the tokenizer has no token {shown(section.video_token)} for them; name its own with "
            "tokenizer.video_token, or use a tokenizer that has one"
        )
    return Readers(of_kind=readers, unread=unread)


def make_readers(config: Config, vocabulary: Mapping[str, int]) -> Readers:
    """The readers of all encoders of a job. Args: vocabulary: token -> id of the tokenizer.

    Raises: ConfigError: an encoder, its projector and processor do not fit together, or its token is not in the
        vocabulary.
    """
    model, data = config.model, config.data
    geometry, rules = image_rules(config) if model.encoder is not None else (None, None)
    videos = video_rules(model, data)
    readers = vision_readers(config.tokenizer, geometry, rules, data, videos, vocabulary=vocabulary)
    of_kind, unread = dict(readers.of_kind), dict(readers.unread)
    for kind, module in readers_of_kinds(model).items():
        if module == "vision":
            continue
        unread.pop(kind, None)
        token = placeholder(module, model.modules[module])
        if token not in vocabulary:
            likely = ", ".join(sorted(t for t in vocabulary if t.startswith("<|"))[:8]) or "none"
            raise ConfigError(
                f"{section_of(module)}.token = {shown(token)} is not in the tokenizer's vocabulary; name one of its "
                f"special tokens that texts do not use (it has {likely}), or add the token to it"
            )
        if model.modules[module].kind == "audio":
            of_kind[kind] = SoundReader(token=token, module=module, rules=sound_rules(model, module), data=data)
        else:
            geometry, rules = image_rules(config, module)
            of_kind[kind] = ImageReader(token=token, module=module, geometry=geometry, rules=rules, data=data)
    projectors = {model.projector_of(name).kind for name in model.encoders}
    without_markers = {kind: whole.projector for kind, whole in COMPOSITES.items() if whole.processor}
    if projectors <= {*without_markers.values()} and whole_kind(model) in without_markers:
        of_kind = {kind: replace(reader, markers=("", "")) for kind, reader in of_kind.items()}  # type: ignore[type-var]
    return Readers(of_kind=of_kind, unread=unread)


def image_rules(config: Config, module: str = "vision") -> tuple[ImageGeometry, PixelRules]:
    """The geometry and pixel rules of an encoder's images.

    `data.image_processor` is that of [model.encoder]; the limits `data.min_pixels` and `data.max_pixels` are those of
    all encoders of native resolution.
    Raises: ConfigError: encoder, projector, image processor and area limits do not fit together.
    """
    section, data = config.model.encoders[module], config.data
    encoder = encoder_config(section, section_of(module))
    key, processor = image_processor(config) if module == "vision" else ("", "")
    rules = pixel_rules(encoder["model_type"], processor, key)
    fixed = bool(encoder.get("image_size"))
    native = any(vision_shape(config.model, name).any_size for name in config.model.encoders)
    limits = (0, 0) if fixed and native else (data.min_pixels, data.max_pixels)  # of the others
    least, most = (0, 0) if fixed else (rules.min_pixels, rules.max_pixels)
    geometry = model_geometry(config.model, module, min_pixels=limits[0] or least, max_pixels=limits[1] or most)
    if fixed and rules.image_size not in (0, geometry.image_size):
        raise ConfigError(
            f"{key} = {processor!r} makes images of side "
            f"{rules.image_size}, but the encoder's image_size is {geometry.image_size}; use its own one"
        )
    return geometry, rules


def image_processor(config: Config) -> tuple[str, str]:
    """The key of the config that names it, and the id or folder, of the image processor of a job: that of the whole
    model which the encoder is a part of, if it has one and data.image_processor names no other; empty: the encoder's
    default."""
    encoder, whole = config.model.encoder, config.model.pretrained
    if not config.data.image_processor and whole and encoder is not None and encoder.pretrained == whole:
        key = "model.pretrained"
        return key, whole if processor_config(key, whole) is not None else ""
    return "data.image_processor", config.data.image_processor
