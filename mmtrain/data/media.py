"""Images, videos, sounds and latents of a record, still encoded: in memory, or in files that are opened with care.

Records may be untrusted. So a file is opened only if it is a regular one (reading a device or a pipe might never end)
and not larger than `data.max_media_bytes`.
"""

import base64
import io
import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np

from mmtrain.errors import DataError, TooLongError, one_line, shown
from mmtrain.modality.geometry import OwnSize

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RawImage:
    """An encoded image (or another file of a record), in memory or in a file."""

    data: bytes | None
    path: str = ""
    """Local path or URL; read when `data` is None."""
    kind: str = "image"
    """Kind of content, which says whose placeholder stands for it."""
    size: OwnSize | None = None
    """What the record says about its size."""

    def read(self, max_bytes: int) -> bytes:
        """The encoded bytes.

        Raises: DataError: as `open`.
        """
        with self.open(max_bytes) as file:
            data = self._guarded(lambda: file.read(max_bytes + 1))
            _check_size(len(data), max_bytes)  # the size behind a URL may be unknown before
            return data

    @contextmanager
    def open(self, max_bytes: int) -> Iterator[IO[bytes]]:
        """The encoded bytes as a file, for readers that need only a part of them.

        Raises: DataError: no regular file, one of more than max_bytes, or it cannot be opened.
        """
        if self.data is not None:
            _check_size(len(self.data), max_bytes)
            yield io.BytesIO(self.data)
            return
        with self._guarded(lambda: self._open_path(max_bytes)) as file:
            yield file

    def local_path(self) -> str:
        """The path, for a library that opens the file itself and reads parts of it.

        Raises: DataError: it names no regular file.
        """
        if "://" not in self.path:
            self._guarded(lambda: _regular_size(self.path))
        return self.path

    def _open_path(self, max_bytes: int) -> IO[bytes]:
        if "://" in self.path:
            return _open_url(self.path, max_bytes)
        _check_size(_regular_size(self.path), max_bytes)
        return Path(self.path).open("rb")

    def _guarded(self, action: Callable[[], T]) -> T:
        try:
            return action()
        except DataError:
            raise
        except Exception as error:  # file systems behind URLs raise any kind of error
            reason = getattr(error, "strerror", None) or one_line(error)
            if "://" in self.path:
                cause = one_line(error.__cause__ or error, 200)  # fsspec says of any failure that there is no file
                reason = f"{cause}; download the file, and name its path"
            elif isinstance(error, FileNotFoundError):
                reason += "; correct the path, which starts at the folder of the file that names it if it is relative"
            raise DataError(f"its file {shown(self.path)} cannot be read: {reason}") from None


_IRREGULAR = "it is no regular file, but a folder, device or pipe"


def _regular_size(path: str) -> int:
    """Size of a regular file in bytes; other files are not opened, as that may wait for a pipe's writer or move a
    tape."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(_IRREGULAR)
    if not status.st_size:
        raise ValueError("it is empty")  # as those of /proc, reading which may never end
    return status.st_size


def _open_url(url: str, max_bytes: int) -> IO[bytes]:
    """A file at a URL: hf://, zip://NAME::ARCHIVE, what `datasets` names when it streams, or another of fsspec's."""
    import fsspec

    archive = url.rpartition("::")[2]  # checked first, since opening may read the whole file
    for part in dict.fromkeys((archive, url)):
        system, path = fsspec.url_to_fs(part)
        info = system.info(path)
        if info["type"] != "file":
            raise ValueError(_IRREGULAR)
    _check_size(info.get("size") or 0, max_bytes)
    opened: IO[bytes] = system.open(path, "rb")
    return opened


def _check_size(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise DataError(
            f"it has {num_bytes} bytes, more than data.max_media_bytes = {max_bytes}; raise that limit if the file is "
            "right"
        )


def raw_image(value: Any, where: str, folder: str) -> RawImage:
    """The image (or other file) that a value of a row contains or names: bytes, a path, a `data:` URL, or a struct.

    Raises: DataError: it is none of these.
    """
    if not isinstance(value, Mapping):
        value = {"bytes" if isinstance(value, bytes) else "path": value}
    data, path = value.get("bytes"), value.get("path")
    for part, kind in ((data, bytes), (path, str)):
        if part is not None and not isinstance(part, kind):
            raise DataError(f"{where}: a {type(part).__name__}; it must be a path, a data: URL, or bytes")
    if data is None and not path:
        raise DataError(f"{where}: it has neither bytes nor a path")
    if data is None and (path.startswith("data:") or _is_base64(path)):
        text = path.partition(",")[2] if path.startswith("data:") else path
        try:
            data, path = base64.b64decode(text, validate=True), None
        except ValueError as error:
            raise DataError(f"{where}: its base64 text is damaged: {error}") from None
    return RawImage(data=data, path=resolved(path or "", folder))


_BASE64 = re.compile(
    r"(?:/9j/|iVBORw0KGgo|R0lGOD|UklGR|Qk[0-3]|SUkqA|TU0AK|AAAA|SUQz|T2dnU|ZkxhQ)[A-Za-z0-9+/]{50,}={0,2}"
)
"""Base64 of a JPEG, PNG, GIF, RIFF (WebP, WAV), BMP, TIFF, MP4 or AVIF, MP3, Ogg or FLAC, by how each begins. A path is
never so: it has an ending, or is shorter."""


def _is_base64(text: str) -> bool:
    """Whether a text is an encoded file and not its path, as in TSV files and some parquet."""
    return len(text) % 4 == 0 and _BASE64.fullmatch(text) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class RawVideo:
    """An encoded video: one file, or an image for each of its frames."""

    file: RawImage | None = None
    """A video file, or a .npy or .npz file with the array of its frames."""
    frames: tuple[RawImage, ...] = ()
    fps: float | None = None
    """Frames a second, as the record says; None: it does not."""
    kind: str = "video"

    @property
    def name(self) -> str:
        """The file of the video or the folder of its frames, for errors; empty if it is in memory."""
        return self.file.path if self.file else str(Path(self.frames[0].path).parent) if self.frames[0].path else ""


def raw_video(value: Any, where: str, folder: str, fps: float | None) -> RawVideo:
    """The video that a value of a row contains or names: a list of images or the folder of one, a video file or array
    as path or bytes, or a struct.

    Raises: DataError: it is none of these, or has no frame.
    """
    path = value.get("path") if isinstance(value, Mapping) and value.get("bytes") is None else value
    if isinstance(path, str) and os.path.isdir(resolved(path, folder)):
        return RawVideo(frames=folder_frames(Path(resolved(path, folder)), where), fps=fps)
    if not isinstance(value, list):
        return RawVideo(file=raw_image(value, where, folder), fps=fps)
    if not value:
        raise DataError(f"{where}: an empty list of frames; it needs at least one image")
    return RawVideo(
        frames=tuple(raw_image(frame, f"frame {i} of {where}", folder) for i, frame in enumerate(value)), fps=fps
    )


def folder_frames(path: Path, where: str) -> tuple[RawImage, ...]:
    """The images of a folder in the order of their names. Raises: DataError: it has none."""
    files = sorted(file for file in path.iterdir() if file.suffix.lower() in FRAME_ENDINGS)
    if not files:
        endings = ", ".join(FRAME_ENDINGS)
        raise DataError(f"{where}: its folder {shown(str(path))} has no image; its endings are {endings}")
    return tuple(RawImage(data=None, path=str(file)) for file in files)


FRAME_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
"""Endings of the frames in a folder."""


def frame_rate(value: Any, where: str) -> float | None:
    """The number of frames a second in a row's `fps`; None: it has none.

    Raises: DataError: it is no number above 0.
    """
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise DataError(f"{where}: `fps` = {shown(value)}; it must be a number above 0")
    return float(value)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RawSound:
    """A sound: an encoded file, or its samples."""

    file: RawImage | None = None
    samples: np.ndarray | None = None
    """[samples] or [channels, samples] floats from -1 to 1, in place of a file."""
    rate: int = 0
    """Samples a second of `samples`."""
    kind: str = "audio"

    @property
    def name(self) -> str:
        """The file of the sound, for errors; empty if it is in memory."""
        return self.file.path if self.file else ""


RawMedium = RawImage | RawVideo | RawSound
"""What one placeholder of a record stands for."""


def raw_sound(value: Any, where: str, folder: str) -> RawSound:
    """The sound that a value of a row contains or names: bytes, a path, a `data:` URL, a struct of `bytes` and `path`,
    or decoded as `array` and `sampling_rate`.

    Raises: DataError: it is none of these.
    """
    if not isinstance(value, Mapping) or value.get("array") is None:
        return RawSound(file=raw_image(value, where, folder))
    rate = value.get("sampling_rate")
    if isinstance(rate, bool) or not isinstance(rate, int | float) or rate < 1 or rate % 1:
        raise DataError(f"{where}: `sampling_rate` = {shown(rate)}; write the samples a second of its `array`, above 0")
    try:
        samples = np.asarray(value["array"], np.float64)
    except (TypeError, ValueError, OverflowError):
        samples = np.empty(())
    if samples.ndim == 2 and len(samples) > samples.shape[1]:  # a sound has more samples than channels
        samples = samples.T
    if samples.ndim not in (1, 2) or (samples.ndim == 2 and not 1 <= len(samples) <= MOST_CHANNELS):
        raise DataError(
            f"{where}: its `array` has another form; write a list of numbers, or one for each of up to {MOST_CHANNELS} "
            "channels"
        )
    return RawSound(samples=samples, rate=int(rate))


MOST_CHANNELS = 256
"""The most channels of a sound."""


def check_text(text: str, what: str) -> str:
    """The text, if it can be encoded.

    Raises: DataError: naming it as `what`: it has a lone surrogate, which JSON can contain.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        surrogate = text[error.start]
        raise DataError(
            f"{what} has a lone surrogate, {surrogate!r}, at {error.start}; write the whole character or remove it"
        ) from None
    return text


def check_length(text: str, max_bytes: int, what: str) -> None:
    """Raises: TooLongError: the text, named as `what`, has more than max_bytes of UTF-8."""
    if len(text) * 4 > max_bytes and (num_bytes := len(text.encode(errors="surrogatepass"))) > max_bytes:
        raise TooLongError(
            f"{what} has {num_bytes} bytes, more than data.max_text_bytes = {max_bytes}; divide the sample, set "
            'data.too_long = "skip", or raise that limit (tokenizing takes some 200 times as much memory)'
        )


def resolved(path: str, folder: str) -> str:
    """The path or URL that a record means by `path`: `~` is expanded, and a relative path starts at `folder`, which may
    be a URL."""
    path = os.path.expanduser(path)
    if not path or "://" in path or os.path.isabs(path):
        return path
    return f"{folder}/{path}" if "://" in folder else str(Path(folder) / path)
