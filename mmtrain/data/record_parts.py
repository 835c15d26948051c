"""The images, videos and sounds of a record: the kinds of content, and where messages and columns have items of them.

`<image>`, `<video>` and `<audio>` in a text, or a part without content of its own, stand for an item of a column. A
placeholder after a backslash is text. `KINDS` is the table of these kinds; the further encoders of a model add their
own.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from mmtrain.data.media import RawMedium, frame_rate, raw_image, raw_sound, raw_video
from mmtrain.data.record_keys import SIZES, unread
from mmtrain.errors import DataError, shown
from mmtrain.modality.geometry import OwnSize

ChatMessage = Mapping[str, Any]
"""`role` and `content`: a text, or a list of parts; and what else the chat template may show."""

PARTS = {
    "image_url": "image",
    "video_url": "video",
    "audio_url": "audio",
    "input_audio": "audio",
}
"""Type of a part of a content -> its kind, where they have other names."""


def placeholder(kind: str) -> str:
    """What stands for an item of a kind in a record's text."""
    return f"<{kind}>"


def literal(text: str, kind: str) -> str:
    """A text whose placeholders of a kind are text: they stand after a backslash."""
    return re.sub(rf"(?<!\\){re.escape(placeholder(kind))}", lambda mark: "\\" + mark[0], text)


def readable(text: str) -> str:
    """A text as a person reads it, without the backslashes of `literal`."""
    return re.sub(rf"\\(?=<(?:{'|'.join(KINDS)})>)", "", text)


@dataclass(frozen=True, slots=True, kw_only=True)
class MediumKind:
    """One kind of content in addition to text."""

    columns: tuple[str, ...]
    """Columns with it: a list, or of the names in the singular also one. A row has a kind in one column at most."""
    raw: Callable[[Any, str, str, Any], RawMedium]
    """A function (value of a row, where it is, folder of relative paths, row) -> the medium; raises DataError."""


def _image(value: Any, where: str, folder: str, row: Any) -> RawMedium:
    return raw_image(value, where, folder)


def _sound(value: Any, where: str, folder: str, row: Any) -> RawMedium:
    return raw_sound(value, where, folder)


def _video(value: Any, where: str, folder: str, row: Any) -> RawMedium:
    return raw_video(value, where, folder, frame_rate(row.get("fps"), where.partition(" of ")[2]))


KINDS: Mapping[str, MediumKind] = {
    "image": MediumKind(columns=("images", "image", "jpg", "jpeg", "png", "webp"), raw=_image),
    "video": MediumKind(columns=("videos", "video", "mp4"), raw=_video),
    "audio": MediumKind(columns=("audios", "audio", "wav", "flac", "mp3"), raw=_sound),
}
"""Name of a kind -> where a record has it. Its placeholder in a text is <NAME>."""


def column_values(row: Any, where: str, name: str, kind: MediumKind) -> list[Any]:
    """The values of a kind in the columns of a row."""
    held = [column for column in kind.columns if row.get(column) is not None and row[column] != []]
    if len(held) > 1:
        raise DataError(f"{where}: it has `{held[0]}` and `{held[1]}`; keep its {name}s in one of these columns")
    if not held:
        return []
    values = row[held[0]]
    if held[0] == f"{name}s" and not isinstance(values, list):
        raise DataError(f"{where}: `{held[0]}` is a {type(values).__name__}; it must be a list")
    return values if isinstance(values, list) else [values]


def num_placeholders(messages: Sequence[ChatMessage], kind: str = "image") -> int:
    """The number of items of a kind that messages show."""
    return sum(_num_placeholders(part, kind) for part in _parts(messages))


def with_literals(messages: Sequence[ChatMessage], of_columns: Sequence[Any], kind: str) -> Sequence[ChatMessage]:
    """The messages; if all items of a kind have parts of their own, placeholders in their texts are text, as they are
    for transformers."""
    parts = [part for part in _parts(messages) if kind_of(part) == kind]
    if not parts or sum(_own_content(part, kind) is None for part in parts) != len(of_columns):
        return messages

    def text(part: Any) -> Any:
        if isinstance(part, Mapping):
            return {**part, "text": literal(part["text"], kind)} if isinstance(part.get("text"), str) else part
        return literal(part, kind) if isinstance(part, str) else part

    def content(value: Any) -> Any:
        return [text(part) for part in value] if isinstance(value, list) else text(value)

    return [{**m, "content": content(m["content"])} if "content" in m else m for m in messages]


def with_own(
    messages: Sequence[ChatMessage], of_columns: Sequence[Any], kind: str
) -> list[tuple[Any, Mapping[str, Any]]]:
    """A record's items of a kind in the order of their placeholders, those of its columns and those of its parts; and
    of each the part, which is empty for a placeholder in a text."""
    remaining, ordered = iter(of_columns), list[tuple[Any, Mapping[str, Any]]]()
    for part in _parts(messages):
        own, typed = _own_content(part, kind), part if kind_of(part) == kind else {}
        values = islice(remaining, _num_placeholders(part, kind)) if own is None else [own]
        ordered += [(value, typed) for value in values]
    return [*ordered, *((value, {}) for value in remaining)]


def own_size(keys: Mapping[str, Any], where: str) -> OwnSize | None:
    """What a part says about the size of its image. Raises: DataError: it is no size."""
    sizes = {key: keys[key] for key in SIZES if keys.get(key) is not None}
    for key, value in sizes.items():
        if type(value) is not int or not 1 <= value < 2**31:
            raise DataError(f"{where}: `{key}` = {shown(value)}; it must be a whole number of pixels, at least 1")
    size = OwnSize(**sizes)
    if bool(size.resized_height) != bool(size.resized_width):
        raise DataError(f"{where}: it has one of `resized_height` and `resized_width`; give both, or remove it")
    if size.max_pixels and size.max_pixels < size.min_pixels:
        raise DataError(
            f"{where}: `max_pixels` = {size.max_pixels} is below `min_pixels` = {size.min_pixels}; raise it"
        )
    return size if sizes else None


def unread_in_parts(messages: Sequence[ChatMessage]) -> Iterator[str]:
    """Keys of parts that are not read."""
    for part in _parts(messages):
        if isinstance(part, Mapping):
            yield from unread(part, _read_keys(part), "part")


def _read_keys(part: Mapping[str, Any]) -> tuple[str, ...]:
    kind = kind_of(part)
    if kind is None:
        return "type", "text"
    sizes = SIZES if kind != "audio" else ()
    return ("type", *_names(kind), *sizes)


def _names(kind: str) -> tuple[str, ...]:
    """Keys of a part of a kind that its content may have, the first one first."""
    return *(name for name, of in PARTS.items() if of == kind), kind, "url", "path", "value"


def _parts(messages: Sequence[ChatMessage]) -> Iterator[Any]:
    """The parts of all contents; a text is one."""
    for message in messages:
        content = message.get("content")
        yield from content if isinstance(content, list) else [content]


def kind_of(part: Any) -> str | None:
    """The kind of content that a part is, which need not be one that a record may have; None: it is a text."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    return PARTS.get(kind, kind) if isinstance(kind, str) and kind != "text" else None


def _own_content(part: Any, kind: str) -> Any:
    """What a part of a kind says itself about its content, a path, URL, bytes or struct; None if it says nothing."""
    if kind_of(part) != kind:
        return None
    value = next((part[key] for key in _names(kind) if part.get(key) is not None), None)
    if isinstance(value, Mapping) and isinstance(value.get("data"), str):  # base64, as of OpenAI's `input_audio`
        return f"data:;base64,{value['data']}"
    return value["url"] if isinstance(value, Mapping) and "url" in value else value


def _num_placeholders(part: Any, kind: str) -> int:
    if (of := kind_of(part)) is not None:
        return of == kind
    text = part.get("text") if isinstance(part, Mapping) else part
    mark = placeholder(kind)
    return text.count(mark) - text.count(f"\\{mark}") if isinstance(text, str) else 0
