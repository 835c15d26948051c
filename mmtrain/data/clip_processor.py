"""Reading a video clip: its caption's tokens, its bucket, and the latents or pixels that the model reads."""

import io
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mmtrain.config.data import DataConfig
from mmtrain.data.frames import VideoFrames, array_file, open_frames
from mmtrain.data.media import RawVideo, check_length
from mmtrain.data.record_keys import UnreadKeys
from mmtrain.data.video_records import VideoRecord
from mmtrain.errors import DataError, one_line, shown
from mmtrain.modality.buckets import VideoGeometry, crop
from mmtrain.modality.metadata import ClipMeta, sample_name
from mmtrain.spec.vae_shapes import PIXEL_CHANNELS


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Clip:
    """One sample: its caption as tokens, its content still encoded."""

    meta: ClipMeta
    text_ids: np.ndarray
    """The token ids of the caption, [T] int64."""
    frame_indices: tuple[int, ...]
    """Indices of the frames that are read; empty for latents, whose first frames are read."""
    record: VideoRecord


class ClipProcessor:
    """Converts records into clips, and their content into latents.

    Args:
        tokenizer: a fast Hugging Face tokenizer; its own special tokens are added to captions.
        geometry: the buckets.
        data: limits of what is read, and the frame rate of records without one.
    """

    def __init__(self, tokenizer: Any, geometry: VideoGeometry, data: DataConfig) -> None:
        self.tokenizer = tokenizer
        self.unread = UnreadKeys()
        self.geometry = geometry
        self._source_fps = data.source_fps or geometry.fps
        self._data, self._max_bytes = data, data.max_media_bytes

    def clip(self, record: VideoRecord) -> Clip:
        """The tokens and the bucket of a record; content is read only up to its header.

        Raises: DataError: naming the sample: a header is corrupt, or the content fits no bucket.
        """
        where = sample_name(record.sample, record.source)
        self.unread.add(where, record.source, record.unread)
        check_length(record.caption, self._data.max_text_bytes, f"{where}: its caption")
        ids = np.array(self.tokenizer(record.caption, verbose=False)["input_ids"], np.int64)
        if not len(ids):
            raise DataError(f"{where}: its caption {shown(record.caption)} has no token in this tokenizer")
        try:
            bucket, indices = self._latent_bucket(record) if record.latents else self._pixel_bucket(record)
            bucket = self.geometry.latents(*bucket)
            num_tokens = self.geometry.num_tokens(bucket)
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
        frames, height, width = bucket
        meta = ClipMeta(
            sample=record.sample,
            source=record.source,
            frames=frames,
            height=height,
            width=width,
            num_tokens=num_tokens,
            num_text_tokens=len(ids),
        )
        return Clip(meta=meta, text_ids=ids, frame_indices=indices, record=record)

    def truncated(self, clip: Clip, num_tokens: int) -> Clip:
        """The clip with the first num_tokens tokens of its caption."""
        return replace(
            clip, meta=replace(clip.meta, num_text_tokens=num_tokens), text_ids=clip.text_ids[:num_tokens].copy()
        )

    def latents(self, clip: Clip) -> Tensor:
        """[C, F, H, W] float32 of a clip, in its bucket: its own latents, or pixels between -1 and 1.

        Pixels are encoded by the VAE on the rank that holds it, not by the loader; without a VAE they are the latents.
        Raises: DataError: naming the sample whose content is corrupt.
        """
        try:
            return self._read_latents(clip) if clip.record.latents else self._pixels(clip)
        except DataError as error:
            raise DataError(f"{sample_name(clip.meta.sample, clip.meta.source)}: {error}") from None

    def zeros(self, clip: Clip) -> Tensor:
        """[C, F, H, W] float32 zeros in a clip's bucket."""
        channels = PIXEL_CHANNELS if self.geometry.vae else self.geometry.channels
        return torch.zeros(channels, *self.geometry.pixels(clip.meta.bucket))

    # ------------------------------------------------------------------------------------ buckets

    def _pixel_bucket(self, record: VideoRecord) -> tuple[tuple[int, int, int], tuple[int, ...]]:
        """The bucket of a record with frames or a video, and the indices of the frames to read."""
        if self.geometry.channels != PIXEL_CHANNELS and self.geometry.vae is None:
            raise DataError(
                f"it has pixels, but the model reads latents of {self.geometry.channels} channels; give `latents`, add "
                "[model.vae], or set in_channels = 3 in model.dit.config, with which pixels are the latents"
            )
        frames = self._frames(record)
        fps = record.fps or frames.fps or self._source_fps
        count = self.geometry.longest(self.geometry.sampled(frames.num_frames, fps))
        indices = tuple(self.geometry.places(frames.num_frames, fps, count))
        return (count, *self.geometry.size(*frames.size)), indices

    def _latent_bucket(self, record: VideoRecord) -> tuple[tuple[int, int, int], tuple[int, ...]]:
        """The bucket of a record with latents, which are truncated, but neither sampled nor resized."""
        assert record.latents
        if self.geometry.vae is not None:
            raise DataError(
                "it has `latents`, but [model.vae] encodes the frames of all clips; give `frames` or a `video`, or "
                "remove [model.vae] if all clips have latents"
            )
        fps = record.fps or self._source_fps
        if not math.isclose(fps, self.geometry.fps):
            raise DataError(
                f"its latents have {fps:g} frames a second, but data.fps = {self.geometry.fps:g}, and latents cannot "
                "be sampled anew; make the two agree"
            )
        with array_file(record.latents, "latents", self._max_bytes) as (_, header):
            shape, dtype = header.shape, header.dtype
        if len(shape) != 4 or dtype.kind != "f" or min(shape) < 1:
            raise DataError(
                f"its latents are {dtype} of shape {shape}; they must be floats of shape [channels, frames, height, "
                "width]"
            )
        channels, frames, height, width = shape
        if channels != self.geometry.channels:
            raise DataError(
                f"its latents have {channels} channels, but in_channels of model.dit.config is "
                f"{self.geometry.channels}; make the two agree"
            )
        return (self.geometry.longest(frames), height, width), ()

    # ------------------------------------------------------------------------------------ content

    def _read_latents(self, clip: Clip) -> Tensor:
        assert clip.record.latents
        with array_file(clip.record.latents, "latents", self._max_bytes) as (file, _):
            try:
                array = np.lib.format.read_array(file, allow_pickle=False)
            except Exception as error:  # of numpy, and of the decompression
                raise DataError(f"the content of its latents is corrupt: {one_line(error)}") from None
        with np.errstate(over="ignore"):  # values that float32 cannot hold become infinite
            values = np.ascontiguousarray(array[:, : clip.meta.frames], np.float32)
        if not np.isfinite(values).all():
            raise DataError("its latents hold values that are not finite")
        if (values.shape[0], *clip.meta.bucket) != values.shape:
            raise DataError(f"the shape of its latents changed to {values.shape} since they were first read")
        return torch.from_numpy(values)

    def _pixels(self, clip: Clip) -> Tensor:
        """[3, F, H, W] float32 between -1 and 1."""
        size = self.geometry.pixels(clip.meta.bucket)[1:]
        images = self._frames(clip.record).read(clip.frame_indices)
        frames_FHWC = np.stack([_resized(image, size) for image in images])
        values = frames_FHWC.astype(np.float32) / np.float32(127.5) - np.float32(1)
        return torch.from_numpy(np.ascontiguousarray(values.transpose(3, 0, 1, 2)))

    def _frames(self, record: VideoRecord) -> VideoFrames:
        return open_frames(RawVideo(file=record.video, frames=record.frames), self._data)


def _resized(image: Image.Image, size: tuple[int, int]) -> np.ndarray:
    """[H, W, 3] uint8: the centre of the image, in the size (height, width)."""
    if (image.height, image.width) != size:
        height, width = size
        box = crop(image.height, image.width, size)
        image = image.resize((width, height), resample=Image.Resampling.BICUBIC, box=box)
    return np.asarray(image)


def npy_bytes(values: np.ndarray) -> bytes:
    """An array as the bytes of a .npy file, for a column `latents`."""
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.ascontiguousarray(values), allow_pickle=False)
    return buffer.getvalue()
