"""Records of video clips with captions, made of the rows of a source.

A row has `caption`, and one of: `frames` (a list of images: the `Image` feature, or in jsonl paths relative to the
file; or one folder, whose images sorted by name are the frames), `latents` (a .npy or .npz file, as a path or its
bytes) or `video` (the `Video` feature, or a path). It may have `fps`. All content stays encoded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mmtrain.data.media import RawImage, check_text, folder_frames, frame_rate, raw_image, resolved
from mmtrain.data.record_keys import REFUSED_COLUMNS, check_columns, unread
from mmtrain.data.sources import MakeRecord, RecordKind
from mmtrain.errors import ConfigError, DataError, nearest, shown

CONTENTS = ("frames", "latents", "video")
"""Columns with content: a record has exactly one of them."""

_READ = ("caption", *CONTENTS, "fps")


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoRecord:
    """One clip of the source: frames, or latents, or a video file."""

    sample: int
    """The index of the record in the source."""
    source: str = ""
    """Name of the source; empty if the job has one."""
    caption: str
    frames: tuple[RawImage, ...] = ()
    latents: RawImage | None = None
    """A .npy or .npz file."""
    video: RawImage | None = None
    fps: float | None = None
    """Frames (or latent frames) a second; None: not in the record."""
    unread: tuple[str, ...] = ()
    """Keys of the row that are not read and not known to be harmless."""


def make_video_record(row: Any, index: int, name: str, folder: str = "", columns: Sequence[str] = ()) -> VideoRecord:
    """The clip of a row. Args: columns: of its source, which may not all be decoded.

    Raises: DataError: a column is missing or invalid, or the row has not exactly one kind of content, or asks for
        something else than is learnt.
    """
    where = f"sample {index} of {name}"
    if not isinstance(row, Mapping):
        raise DataError(f"{where}: a {type(row).__name__}; it must have a `caption` and frames, latents or a video")
    caption = row.get("caption")
    if not isinstance(caption, str) or not caption.strip():
        caption_text = "no `caption`" if caption is None else f"`caption` = {shown(caption)}"
        raise DataError(f"{where}: {caption_text}; it must be a text that is not empty")
    held = [column for column in CONTENTS if row.get(column) is not None]
    if len(held) != 1:
        has = " and ".join(f"`{column}`" for column in held) or ", ".join(map(str, row))
        raise DataError(f"{where}: it has {has}; it must have one of `frames`, `latents` and `video`")
    check_text(caption, f"{where}: `caption`")
    check_columns(row, _READ, where)
    keys = tuple(unread({**dict.fromkeys(columns, True), **row}, _READ))
    made = VideoRecord(sample=index, caption=caption, fps=frame_rate(row.get("fps"), where), unread=keys)
    return _with_content(made, held[0], row[held[0]], where, folder)


def _with_content(record: VideoRecord, column: str, value: Any, where: str, folder: str) -> VideoRecord:
    if column == "latents":
        return replace(record, latents=raw_image(value, f"`latents` of {where}", folder))
    if column == "video":
        return replace(record, video=raw_image(value, f"`video` of {where}", folder))
    return replace(record, frames=_frames(value, where, folder))


def _frames(value: Any, where: str, folder: str) -> tuple[RawImage, ...]:
    if isinstance(value, str):
        path = Path(resolved(value, folder))
        if not path.is_dir():
            raise DataError(
                f"{where}: `frames` names {shown(str(path))}, which is no folder; name a folder, or list the images"
            )
        return folder_frames(path, where)
    if not isinstance(value, list) or not value:
        description = "an empty list" if isinstance(value, list) else f"a {type(value).__name__}"
        raise DataError(f"{where}: `frames` is {description}; it must be a list of images, or one folder of them")
    return tuple(raw_image(frame, f"frame {i} of {where}", folder) for i, frame in enumerate(value))


def _recognise(name: str, columns: list[str]) -> MakeRecord[VideoRecord]:
    if "caption" not in columns:
        near = nearest("caption", columns, cutoff=0.75)
        hint = f"; did you mean {near[0]!r}? rename it" if near else ""
        raise ConfigError(f"data.source {name} has no column `caption`; it has {', '.join(columns)}{hint}")
    if not set(CONTENTS) & set(columns):
        raise ConfigError(
            f"data.source {name} has none of the columns `frames`, `latents` and `video`; it has {', '.join(columns)}"
        )
    return lambda row, index, name, folder: make_video_record(row, index, name, folder, columns)


CLIPS = RecordKind(columns=(*_READ, *REFUSED_COLUMNS), recognise=_recognise)
"""Records of video clips with captions."""
