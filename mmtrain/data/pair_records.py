"""Records of images with captions, made of the rows of a source.

A row has one image, in a column of `record_parts.KINDS`, and a caption in one of
`CAPTIONS`, or several. Images stay encoded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmtrain.data.media import RawImage, check_text, raw_image
from mmtrain.data.record_keys import REFUSED_COLUMNS, check_columns, unread
from mmtrain.data.record_parts import KINDS, column_values
from mmtrain.data.sources import MakeRecord, RecordKind
from mmtrain.errors import ConfigError, DataError, nearest, shown

CAPTIONS = ("caption", "captions", "text", "txt")
"""Columns with a caption, or a list of them: a record has exactly one."""

_IMAGES = KINDS["image"].columns
_READ = (*CAPTIONS, *_IMAGES)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRecord:
    """One image of the source and its caption."""

    sample: int
    """The index of the record in the source."""
    source: str = ""
    """Name of the source; empty if the job has one."""
    captions: tuple[str, ...]
    """The captions, at least one; each of them alone says what is seen."""
    image: RawImage
    unread: tuple[str, ...] = ()
    """Keys of the row that are not read and not known to be harmless."""


def make_pair_record(row: Any, index: int, name: str, folder: str = "", columns: Sequence[str] = ()) -> PairRecord:
    """The pair of a row. Args: columns: of its source, which may not all be decoded.

    Raises: DataError: the caption or the image is missing or invalid, or there are several images; or the row asks for
        something else than is learnt.
    """
    where = f"sample {index} of {name}"
    if not isinstance(row, Mapping):
        raise DataError(f"{where}: a {type(row).__name__}; it must have an image and a caption")
    captions = _captions(row, where)
    images = column_values(row, where, "image", KINDS["image"])
    if len(images) != 1:
        raise DataError(f"{where}: it has {len(images) or 'no'} images; a pair has one (columns {', '.join(_IMAGES)})")
    for caption in captions:
        check_text(caption, f"{where}: its caption")
    check_columns(row, _READ, where)
    keys = tuple(unread({**dict.fromkeys(columns, True), **row}, _READ))
    image = raw_image(images[0], f"the image of {where}", folder)
    return PairRecord(sample=index, captions=captions, image=image, unread=keys)


def _captions(row: Mapping[str, Any], where: str) -> tuple[str, ...]:
    held = [column for column in CAPTIONS if row.get(column) is not None]
    if len(held) != 1:
        has = " and ".join(f"`{column}`" for column in held) or "no caption"
        raise DataError(f"{where}: it has {has}; it must have one of {', '.join(CAPTIONS)}")
    value = row[held[0]]
    texts = [
        text.decode("utf-8", "replace") if isinstance(text, bytes) else text  # a .txt file of a shard
        for text in (value if isinstance(value, list) else [value])
    ]
    if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise DataError(
            f"{where}: `{held[0]}` = {shown(value)}; it must be a text that is not empty, or a list of them"
        )
    return tuple(texts)


def _recognise(name: str, columns: list[str]) -> MakeRecord[PairRecord]:
    for what, known in (("caption", CAPTIONS), ("image", _IMAGES)):
        if not set(known) & set(columns):
            near = nearest(what, columns, cutoff=0.75)
            hint = f"; did you mean {near[0]!r}? rename it" if near else ""
            raise ConfigError(
                f"data.source {name} has no column with {what}s ({', '.join(known)}); it has {', '.join(columns)}{hint}"
            )
    return lambda row, index, name, folder: make_pair_record(row, index, name, folder, columns)


PAIRS = RecordKind(columns=(*_READ, *REFUSED_COLUMNS), recognise=_recognise)
"""Records of images with captions."""
