"""The frames of a video, by index: of a video file, of an array, or of an image for each frame."""

import math
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, Protocol

import numpy as np
from PIL import Image

from mmtrain.config.data import DataConfig
from mmtrain.data.media import RawImage, RawVideo
from mmtrain.data.pixels import decode, header_size
from mmtrain.errors import DataError, one_line

_ARRAYS = ((b"\x93NUMPY", b"PK"), (".npy", ".npz"))
"""How files of arrays begin, and how their names end."""


class VideoFrames(Protocol):
    """The frames of one video, of which only headers are read before `read`."""

    num_frames: int
    size: tuple[int, int]
    """Height and width in pixels."""
    fps: float | None
    """Frames a second, as the file says; None: it does not."""

    def read(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        """The frames of some indices, ascending, in RGB. Raises: DataError: the content is corrupt."""


def open_frames(video: RawVideo, data: DataConfig) -> VideoFrames:
    """The frames of a video. Args: data: limits of what is read.

    Raises: DataError: it cannot be opened, has no frame, or exceeds a limit.
    """
    if video.file is None:
        return ImageFrames(video.frames, data)
    content, (starts, endings) = video.file.data, _ARRAYS
    if content.startswith(starts) if content is not None else video.file.path.lower().endswith(endings):
        return ArrayFrames(video.file, data)
    return FileFrames(_decoder(video.file), data.max_decoded_pixels)


def _check_pixels(size: tuple[int, int], max_pixels: int) -> None:
    height, width = size
    if not 0 < height * width <= max_pixels:
        raise DataError(
            f"its frames have {width} x {height} pixels; 1 to data.max_decoded_pixels = {max_pixels} are decoded: make "
            "them smaller, or raise that"
        )


# ---------------------------------------------------------------------------------------------- images


class ImageFrames:
    """Frames that are an image each, all of one size."""

    fps: float | None = None

    def __init__(self, frames: Sequence[RawImage], data: DataConfig) -> None:
        self._frames, self._max_bytes, self._max_pixels = frames, data.max_media_bytes, data.max_decoded_pixels
        self.num_frames = len(frames)
        try:
            self.size = header_size(frames[0].read(self._max_bytes), self._max_pixels)
        except DataError as error:
            raise DataError(f"frame 0: {error}") from None

    def read(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        """The frames of some indices; a repeated index is decoded once.

        Raises: DataError: an image is corrupt, or of another size than the first.
        """
        last, image = -1, None
        for index in indices:
            if index != last or image is None:
                try:
                    image, last = decode(self._frames[index].read(self._max_bytes), self._max_pixels), index
                except DataError as error:
                    raise DataError(f"frame {index}: {error}") from None
                if (image.height, image.width) != self.size:
                    first = self.size[::-1]
                    raise DataError(f"frame {index} has {image.size} pixels (width, height), but frame 0 has {first}")
            yield image


# ---------------------------------------------------------------------------------------------- arrays


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayHeader:
    """What the header of a .npy file says."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    columns_first: bool
    """Whether the first index varies fastest."""
    size: int
    """Bytes of the header: where the values begin."""


class ArrayFrames:
    """Frames in a .npy file, or the one array (or the one called `frames`) of a .npz file."""

    fps: float | None = None

    def __init__(self, raw: RawImage, data: DataConfig) -> None:
        self._raw, self._max_bytes = raw, data.max_media_bytes
        with array_file(raw, "frames", self._max_bytes) as (_, header):
            shape, is_bytes = header.shape, header.dtype == np.uint8
        if len(shape) != 4 or not is_bytes or shape[-1] != 3 or min(shape) < 1 or header.columns_first:
            order = ", Fortran order" if header.columns_first else ""
            raise DataError(
                f"its frames are {header.dtype} of shape {shape}{order}; they must be uint8 of shape [frames, height, "
                "width, 3] in C order, at least one"
            )
        self.num_frames, self.size = shape[0], (shape[1], shape[2])
        _check_pixels(self.size, data.max_decoded_pixels)

    def read(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        """The frames of some ascending indices, of which alone the bytes are read.

        Raises: DataError: the file ends before.
        """
        num_bytes = 3 * math.prod(self.size)
        with array_file(self._raw, "frames", self._max_bytes) as (file, header):
            for index in indices:
                try:
                    file.seek(header.size + index * num_bytes)
                    content = file.read(num_bytes)
                except Exception as error:  # of the decompression
                    raise DataError(f"the array of its frames is corrupt: {one_line(error)}") from None
                if len(content) != num_bytes:
                    raise DataError(f"the array of its frames ends within frame {index} of {self.num_frames}")
                yield Image.frombytes("RGB", self.size[::-1], content)


@contextmanager
def array_file(raw: RawImage, what: str, max_bytes: int) -> Iterator[tuple[IO[bytes], ArrayHeader]]:
    """A .npy file at its start, or the one array (or the one called as `what`) of a .npz file; and its header.

    Args: what: "latents" or "frames", the content.
    Raises: DataError: it is neither, or declares more than max_bytes.
    """
    with raw.open(max_bytes) as file, _npy_file(file, what) as npy:
        header = _header(npy, what)
        num_bytes = math.prod(header.shape) * header.dtype.itemsize
        if num_bytes > max_bytes:
            raise DataError(
                f"its {what} say that they are {header.dtype} of shape {header.shape}: {num_bytes} bytes, more than "
                f"data.max_media_bytes = {max_bytes}; raise that limit if they are right"
            )
        npy.seek(0)
        yield npy, header


@contextmanager
def _npy_file(file: IO[bytes], what: str) -> Iterator[IO[bytes]]:
    """The .npy file itself, or that of a .npz archive."""
    start = file.read(2)
    file.seek(0)
    if start != b"PK":
        yield file
        return
    try:
        archive = zipfile.ZipFile(file)
    except Exception as error:  # a damaged archive raises many kinds of errors
        raise DataError(f"its {what} are a damaged .npz file: {one_line(error)}") from None
    with archive:
        names = [name for name in archive.namelist() if name.endswith(".npy")]
        wanted = f"{what}.npy"
        chosen = wanted if wanted in names else names[0] if len(names) == 1 else None
        if chosen is None:
            has = ", ".join(name.removesuffix(".npy") for name in names) or "none"
            raise DataError(f"its .npz file has the arrays {has}; name one of them `{what}`")
        try:
            member = archive.open(chosen)
        except Exception as error:  # a password, or an unknown compression
            raise DataError(f"its .npz file cannot be read: {one_line(error)}") from None
        with member:
            yield member


def _header(file: IO[bytes], what: str) -> ArrayHeader:
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, columns_first, dtype = read(file)
        return ArrayHeader(shape=shape, dtype=dtype, columns_first=columns_first, size=file.tell())
    except Exception as error:  # of numpy, and of the decompression
        raise DataError(f"its {what} are no .npy or .npz file: {one_line(error, 150)}") from None


# ---------------------------------------------------------------------------------------------- video files


class FileFrames:
    """The frames of a video file, decoded by torchcodec."""

    def __init__(self, decoder: Any, max_pixels: int) -> None:
        self._decoder, self._max_pixels = decoder, max_pixels
        found = decoder.metadata
        if not all((found.num_frames, found.average_fps, found.height, found.width)):
            raise DataError("its header lacks the number of frames, the frame rate or the size")
        self.num_frames: int = found.num_frames
        self.fps: float | None = found.average_fps
        self.size: tuple[int, int] = (found.height, found.width)
        _check_pixels(self.size, max_pixels)

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


def _decoder(raw: RawImage) -> Any:
    """The decoder of torchcodec for a video.

    Raises: DataError: torchcodec is not installed, or it cannot read the file.
    """
    try:
        from torchcodec.decoders import VideoDecoder
    except Exception as error:  # not installed, or installed without the libraries of FFmpeg
        reason = "" if isinstance(error, ModuleNotFoundError) else f" ({one_line(error, 200)})"
        raise DataError(
            f"it has a `video`, which needs the package torchcodec and FFmpeg{reason}; install them, or give its "
            "frames as images or an array (of a clip `frames`, or `latents`)"
        ) from None
    source = raw.data if raw.data is not None else raw.local_path()
    try:
        return VideoDecoder(source)
    except Exception as error:  # any error of the codec
        raise DataError(f"its video cannot be opened: {one_line(error)}") from None
