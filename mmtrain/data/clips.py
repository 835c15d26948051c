"""From a record of a video clip to its caption's tokens, its bucket, and the latents or pixels that the model reads."""

import io
import math
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import IO, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mmtrain.config.data import DataConfig
from mmtrain.data.media import RawImage
from mmtrain.data.pixels import decode, header_size
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
    """[T] int64."""
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
        self.geometry = geometry
        self._source_fps = data.source_fps or geometry.fps
        self._max_bytes, self._max_pixels = data.max_media_bytes, data.max_decoded_pixels

    def clip(self, record: VideoRecord) -> Clip:
        """The tokens and the bucket of a record; content is read only up to its header.

        Raises: DataError: naming the sample: a header is corrupt, or the content fits no bucket.
        """
        where = sample_name(record.sample, record.source)
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
        fps = record.fps or self._source_fps
        if record.video:
            video = self._video(record.video)
            num_frames, (height, width) = video.num_frames, video.size
            fps = record.fps or video.fps
        else:
            num_frames = len(record.frames)
            try:
                height, width = header_size(record.frames[0].read(self._max_bytes), self._max_pixels)
            except DataError as error:
                raise DataError(f"frame 0: {error}") from None
        count = self.geometry.longest(self.geometry.sampled(num_frames, fps))
        indices = tuple(self.geometry.places(num_frames, fps, count))
        return (count, *self.geometry.size(height, width)), indices

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
        with self._array_file(record.latents) as (_, shape, dtype):
            pass
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
        with self._array_file(clip.record.latents) as (file, _, _):
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
        if clip.record.video:
            images: Iterator[Image.Image] = self._video(clip.record.video).read(clip.frame_indices)
        else:
            images = self._frames(clip.record.frames, clip.frame_indices)
        frames_FHWC = np.stack([_resized(image, size) for image in images])
        values = frames_FHWC.astype(np.float32) / np.float32(127.5) - np.float32(1)
        return torch.from_numpy(np.ascontiguousarray(values.transpose(3, 0, 1, 2)))

    def _frames(self, frames: Sequence[RawImage], indices: Sequence[int]) -> Iterator[Image.Image]:
        """The frames of some indices; a repeated index is decoded once."""
        first: tuple[int, int] | None = None
        last, image = -1, None
        for index in indices:
            if index != last or image is None:
                try:
                    image, last = decode(frames[index].read(self._max_bytes), self._max_pixels), index
                except DataError as error:
                    raise DataError(f"frame {index}: {error}") from None
                first = first or image.size
                if image.size != first:
                    raise DataError(f"frame {index} has {image.size} pixels (width, height), but frame 0 has {first}")
            yield image

    def _video(self, raw: RawImage) -> "_Video":
        return _Video(_video_decoder(raw), self._max_pixels)

    @contextmanager
    def _array_file(self, raw: RawImage) -> Iterator[tuple[IO[bytes], tuple[int, ...], np.dtype[Any]]]:
        """A .npy file, or the one array (or the one called `latents`) of a .npz file; its shape and dtype.

        Raises: DataError: it is neither, or declares a size above the limit.
        """
        with raw.open(self._max_bytes) as file, _npy_file(file) as npy:
            shape, dtype = _header(npy)
            num_bytes = math.prod(shape) * dtype.itemsize
            if num_bytes > self._max_bytes:
                raise DataError(
                    f"its latents say that they are {dtype} of shape {shape}: {num_bytes} bytes, more than "
                    f"data.max_media_bytes = {self._max_bytes}; raise that limit if they are right"
                )
            npy.seek(0)
            yield npy, shape, dtype


def _resized(image: Image.Image, size: tuple[int, int]) -> np.ndarray:
    """[H, W, 3] uint8: the centre of the image, in the size (height, width)."""
    if (image.height, image.width) != size:
        height, width = size
        box = crop(image.height, image.width, size)
        image = image.resize((width, height), resample=Image.Resampling.BICUBIC, box=box)
    return np.asarray(image)


# ---------------------------------------------------------------------------------------------- arrays


@contextmanager
def _npy_file(file: IO[bytes]) -> Iterator[IO[bytes]]:
    """The .npy file itself, or that of a .npz archive."""
    start = file.read(2)
    file.seek(0)
    if start != b"PK":
        yield file
        return
    try:
        archive = zipfile.ZipFile(file)
    except Exception as error:  # a damaged archive raises many kinds of errors
        raise DataError(f"its latents are a damaged .npz file: {one_line(error)}") from None
    with archive:
        names = [name for name in archive.namelist() if name.endswith(".npy")]
        chosen = "latents.npy" if "latents.npy" in names else names[0] if len(names) == 1 else None
        if chosen is None:
            has = ", ".join(name.removesuffix(".npy") for name in names) or "none"
            raise DataError(f"its .npz file has the arrays {has}; name one of them `latents`")
        try:
            member = archive.open(chosen)
        except Exception as error:  # a password, or an unknown compression
            raise DataError(f"its .npz file cannot be read: {one_line(error)}") from None
        with member:
            yield member


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of a .npy file, without its content."""
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
    except Exception as error:  # of numpy, and of the decompression
        raise DataError(f"its latents are no .npy or .npz file: {one_line(error, 150)}") from None
    return shape, dtype


# ---------------------------------------------------------------------------------------------- videos


class _Video:
    """A video file, decoded by torchcodec."""

    def __init__(self, decoder: Any, max_pixels: int) -> None:
        self._decoder, self._max_pixels = decoder, max_pixels
        found = decoder.metadata
        if not all((found.num_frames, found.average_fps, found.height, found.width)):
            raise DataError("its header lacks the number of frames, the frame rate or the size")
        self.num_frames: int = found.num_frames
        self.fps: float = found.average_fps
        self.size: tuple[int, int] = (found.height, found.width)
        if found.height * found.width > max_pixels:
            raise DataError(
                f"its frames have {found.width} x {found.height} pixels, more than data.max_decoded_pixels = "
                f"{max_pixels}; make them smaller, or raise that"
            )

    def read(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        """The frames of some indices; at most `max_pixels` in total are decoded at once.

        Raises: DataError: the content is corrupt.
        """
        at_once = self._max_pixels // math.prod(self.size)
        for start in range(0, len(indices), at_once):
            try:
                frames_FCHW = self._decoder.get_frames_at(indices=list(indices[start : start + at_once])).data
            except Exception as error:  # any error of the codec
                raise DataError(f"the content of its video is corrupt: {one_line(error)}") from None
            for frame in frames_FCHW:
                yield Image.fromarray(frame.permute(1, 2, 0).contiguous().numpy())


def _video_decoder(raw: RawImage) -> Any:
    """The decoder of torchcodec for a video.

    Raises: DataError: torchcodec is not installed, or it cannot read the file.
    """
    try:
        from torchcodec.decoders import VideoDecoder
    except Exception as error:  # not installed, or installed without the libraries of FFmpeg
        reason = "" if isinstance(error, ModuleNotFoundError) else f" ({one_line(error, 200)})"
        raise DataError(
            f"it has a `video`, which needs the package torchcodec and FFmpeg{reason}; install them, or give the clip "
            "as `frames` (a list of images) or `latents` (an array)"
        ) from None
    source = raw.data if raw.data is not None else raw.local_path()
    try:
        return VideoDecoder(source)
    except Exception as error:  # any error of the codec
        raise DataError(f"its video cannot be opened: {one_line(error)}") from None


def npy_bytes(values: np.ndarray) -> bytes:
    """An array as the bytes of a .npy file, for a column `latents`."""
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.ascontiguousarray(values), allow_pickle=False)
    return buffer.getvalue()
