"""Images, latents and videos of a record, still encoded: in memory, or in a file that is opened with care.

Records may be untrusted. So a file is opened only if it is a regular one (reading a device or a pipe might never end)
and not larger than `data.max_media_bytes`.
"""

import base64
import io
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

from mmtrain.errors import DataError, one_line, shown

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RawImage:
    """An encoded image (or another file of a record), in memory or in a file."""

    data: bytes | None
    path: str = ""
    """Local path or URL; read when `data` is None."""

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
            if isinstance(error, FileNotFoundError):
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
    if data is None and path.startswith("data:"):
        try:
            data, path = base64.b64decode(path.partition(",")[2], validate=True), None
        except ValueError as error:
            raise DataError(f"{where}: its base64 text is damaged: {error}") from None
    return RawImage(data=data, path=resolved(path or "", folder))


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


def resolved(path: str, folder: str) -> str:
    """The path or URL that a record means by `path`: `~` is expanded, and a relative path starts at `folder`, which may
    be a URL."""
    path = os.path.expanduser(path)
    if not path or "://" in path or os.path.isabs(path):
        return path
    return f"{folder}/{path}" if "://" in folder else str(Path(folder) / path)
