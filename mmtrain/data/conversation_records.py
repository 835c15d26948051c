"""Records of conversations with images, videos and sounds, made of the rows of a source in one of the forms in `FORMS`.

The columns of a row say which form it has. All forms give the same record: messages of role and content, and the
images, videos and sounds that `<image>`, `<video>` and `<audio>` in their text, or a part without content of its own,
stand for. They stay encoded. A placeholder after a backslash is text. `KINDS` is the table of these kinds; the further
encoders of a model add their own.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from mmtrain.config.model import ModelConfig, section_of
from mmtrain.data.media import RawImage, RawMedium, check_text, frame_rate, raw_image, raw_sound, raw_video
from mmtrain.data.record_keys import (
    CALLS,
    READ_COLUMNS,
    REFUSED_COLUMNS,
    SHOWN,
    SIZES,
    SYSTEM,
    check_columns,
    check_message,
    check_video_part,
    is_absent,
    tools_of,
    unread,
)
from mmtrain.data.sources import Make, RecordKind
from mmtrain.errors import ConfigError, DataError, shown
from mmtrain.modality.geometry import OwnSize
from mmtrain.modality.readers import readers_of_kinds

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


Message = Mapping[str, Any]
"""`role` and `content`: a text, or a list of parts; and what else the chat template may show."""

SPEAKERS = {"human": "user", "gpt": "assistant", "system": "system", "user": "user", "assistant": "assistant"}
"""`from` of a turn in ShareGPT's form -> role."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of content in addition to text."""

    columns: tuple[str, ...]
    """Columns with it: a list, or of the names in the singular also one. A row has a kind in one column at most."""
    raw: Callable[[Any, str, str, Any], RawMedium]
    """(value of a row, where it is, folder of relative paths, row) -> what it contains or names; raises DataError."""


def _image(value: Any, where: str, folder: str, row: Any) -> RawMedium:
    return raw_image(value, where, folder)


def _sound(value: Any, where: str, folder: str, row: Any) -> RawMedium:
    return raw_sound(value, where, folder)


def _video(value: Any, where: str, folder: str, row: Any) -> RawMedium:
    return raw_video(value, where, folder, frame_rate(row.get("fps"), where.partition(" of ")[2]))


KINDS: Mapping[str, Kind] = {
    "image": Kind(columns=("images", "image", "jpg", "jpeg", "png", "webp"), raw=_image),
    "video": Kind(columns=("videos", "video", "mp4"), raw=_video),
    "audio": Kind(columns=("audios", "audio", "wav", "flac", "mp3"), raw=_sound),
}
"""Name of a kind -> where a record has it. Its placeholder in a text is <NAME>."""


def kinds_of(model: ModelConfig) -> Mapping[str, Kind]:
    """The kinds of content of a model's records: those of `KINDS`, and one for each further encoder of its own.

    Raises: ConfigError: the name of an encoder means something else in a record.
    """
    kinds = dict(KINDS)
    for kind, module in readers_of_kinds(model).items():
        if kind in kinds:
            continue
        if kind in ("text", *PARTS, *_read_columns(KINDS)):
            raise ConfigError(
                f"[{section_of(module)}]: {kind!r} is another part or column of a record; call the encoder otherwise"
            )
        kinds[kind] = Kind(columns=(kind,), raw=_sound if model.encoders[module].kind == "audio" else _image)
    return kinds


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One sample of the source, not decoded."""

    sample: int
    """Its index in the source."""
    messages: tuple[Message, ...]
    images: tuple[RawMedium, ...]
    """Images, and behind them videos, sounds and those of further encoders, each kind in the order of its placeholders.
    """
    grade: str = ""
    source: str = ""
    """Name of the source; empty if the job has one."""
    tolerance: float | None = None
    """How far a number may be from that of the answer, and be right; None: an answer is right if it is equal."""
    tools: tuple[Any, ...] = ()
    """Descriptions of tools, for the chat template."""
    unread: tuple[str, ...] = ()
    """Keys of the row and of parts that are not read and not known to be harmless."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One way to write conversations into the columns of a source."""

    columns: tuple[str, ...]
    """A source of this form has all of them."""
    messages: Callable[[Any, str], Sequence[Message]]
    """(row, where it is) -> its messages; raises DataError."""
    one_turn: bool = False
    """Whether it is one question and its answer."""
    about_image: bool = False
    """Whether it is a text about an image, video or sound, which the source must have."""
    marks_images: bool = False
    """Whether texts say where images, videos and sounds are; else those without a placeholder come before the first
    question."""

    @property
    def name(self) -> str:
        """Its columns, for messages."""
        return " with ".join(f"`{column}`" for column in self.columns) + (
            " with an image, video or sound" if self.about_image else ""
        )

    def fits(self, columns: Sequence[str], kinds: Mapping[str, Kind] = KINDS) -> bool:
        """Whether a row with these columns can be of this form."""
        has_image = any(column in columns for kind in kinds.values() for column in kind.columns)
        return set(self.columns) <= set(columns) and (has_image or not self.about_image)


def conversation_form(name: str, columns: Sequence[str], kinds: Mapping[str, Kind] = KINDS) -> Form:
    """The form of rows with these columns. Args: name: of the source, for errors. kinds: what records may have.

    Raises: ConfigError: the columns are those of no form, or of several that say different things.
    """
    fitting = [form for form in FORMS if form.fits(columns, kinds)]
    if not fitting:
        raise ConfigError(
            f"data.source {name} has the columns {', '.join(columns)}, but a conversation needs {_forms()}"
            f"{_hint(columns)}"
        )
    if names := _several(fitting):
        raise ConfigError(f"data.source {name} has {names}, {_ONE_OF_THEM}; rename or remove one, or write `messages`")
    return fitting[0]


def _several(fitting: Sequence[Form]) -> str:
    """The forms of columns, if these are several with one turn; else empty."""
    return " and ".join(form.name for form in fitting) if fitting[0].one_turn and len(fitting) > 1 else ""


_ONE_OF_THEM = "each of which may be its conversation"


def _forms() -> str:
    about_image = ", ".join(f"`{form.columns[0]}`" for form in FORMS if form.about_image)
    others = ", ".join(form.name for form in FORMS if not form.about_image)
    return f"{others}, or an image, video or sound with one of {about_image}"


def _hint(columns: Sequence[str]) -> str:
    """What may be meant by columns that are those of no form."""
    if not {"frames", "latents"}.isdisjoint(columns):
        return "; these are clips, which a job with [model.dit] reads"
    if not {"chosen", "rejected"}.isdisjoint(columns):
        return (
            "; these are of training on preferences, which mmtrain does not do: write the answer to learn as `messages`"
        )
    for wanted, near in ((wanted, near) for wanted in ("messages", "conversations") for near in columns):
        if near.lower() in (wanted, wanted[:-1]):
            return f"; if {near!r} is a list of turns, rename it to {wanted!r}"
    return "; rename yours, or write them as `messages` (docs/data.md has an example of each form)"


def row_form(row: Any, where: str, kinds: Mapping[str, Kind] = KINDS) -> Form:
    """The form of one row. Raises: DataError: it is of none, or of several that say different things."""
    if not isinstance(row, Mapping):
        raise DataError(f"{where}: it is a {type(row).__name__}; it must be an object with {_forms()}")
    columns = [column for column, value in row.items() if value is not None and value != []]
    fitting = [form for form in FORMS if form.fits(columns, kinds)]
    if not fitting:
        raise DataError(f"{where}: {_no_form(row, columns)}")
    if names := _several(fitting):
        raise DataError(f"{where}: it has {names}, {_ONE_OF_THEM}; rename or remove one, or write `messages`")
    return fitting[0]


def _no_form(row: Mapping[str, Any], columns: Sequence[str]) -> str:
    """Why a row is of no form. Args: columns: those with a value."""
    has = f"its columns are {', '.join(map(str, row)) or 'none'}"
    for form in FORMS:
        missing = next((column for column in form.columns if column not in columns), None)
        if missing is None:
            return f"no image, video or sound; it has only `{form.columns[0]}`, a text about one"
        if missing in row:
            return f"its `{missing}` is {'null' if row[missing] is None else 'empty'}; {has}"
        if not set(form.columns).isdisjoint(row):
            return f"no `{missing}`; {has}"
    return f"no conversation; {has}; it needs {_forms()}"


def make_record(
    row: Any, index: int, name: str, folder: str = "", kinds: Mapping[str, Kind] = KINDS, columns: Sequence[str] = ()
) -> Record:
    """The record of a row. Args: kinds: what it may have. columns: of its source, which may not all be decoded.

    Raises: DataError: a column is missing or of another form, or asks for something else than is learnt.
    """
    where = f"sample {index} of {name}"
    form = row_form(row, where, kinds)
    read = _read_columns(kinds)
    check_columns(row, read, where)
    messages, images = form.messages(row, where), list[RawMedium]()
    for message in messages:
        check_message(message, where)
    ignored = [*unread({**dict.fromkeys(columns, True), **row}, read), *_unread_in_parts(messages)]
    for name_of_kind, kind in kinds.items():
        of_columns, mark = _column_values(row, where, name_of_kind, kind), placeholder(name_of_kind)
        if not form.marks_images and not num_placeholders(messages, name_of_kind):
            first = {**messages[0], "content": mark * len(of_columns) + messages[0]["content"]}
            messages = [first, *messages[1:]]
        messages = _with_literals(messages, of_columns, name_of_kind)
        for number, (value, part) in enumerate(_with_own(messages, of_columns, name_of_kind)):
            at = f"{name_of_kind} {number} of {where}"
            raw = kind.raw(value, at, folder, row)
            if isinstance(raw, RawImage):
                raw = replace(raw, size=_own_size({**(value if isinstance(value, Mapping) else {}), **part}, at))
            images.append(replace(raw, kind=name_of_kind))
    if form.about_image and not images:
        raise DataError(f"{where}: no image, video or sound; it has only `{form.columns[0]}`, a text about one")
    grade = row.get("grade") or ""
    if not isinstance(grade, str):
        raise DataError(f"{where}: `grade` = {shown(grade)}; it must be text")
    grade = check_text(grade, f"{where}: `grade`")
    tolerance = row.get("tolerance")
    if tolerance is not None and not (type(tolerance) in (int, float) and 0 <= tolerance < math.inf):
        raise DataError(f"{where}: `tolerance` = {shown(tolerance)}; it must be a number of at least 0")
    return Record(
        sample=index,
        messages=(*_system(row, messages, where), *messages),
        images=tuple(images),
        grade=grade,
        tolerance=tolerance,
        tools=tools_of(row, where),
        unread=tuple(ignored),
    )


def _read_columns(kinds: Mapping[str, Kind]) -> tuple[str, ...]:
    """All columns that records are made of."""
    return (
        *dict.fromkeys(column for form in FORMS for column in form.columns),
        *(column for kind in kinds.values() for column in kind.columns),
        "fps",
        "grade",
        "tolerance",
        *READ_COLUMNS,
    )


# ---------------------------------------------------------------------------------------------- messages


def _system(row: Mapping[str, Any], messages: Sequence[Message], where: str) -> Sequence[Message]:
    """The message of a row's column `system`. Raises: DataError: it is no text, or its messages begin with another."""
    column = next((column for column in SYSTEM if not is_absent(row.get(column))), None)
    if column is None:
        return ()
    said = _said("system", row[column], f"{where}: `{column}`")
    if messages and messages[0].get("role") == "system":
        if messages[0].get("content") == said["content"]:
            return ()
        raise DataError(f"{where}: it has `{column}`, and its messages begin with another of the role system; keep one")
    return (said,)


def _turns(column: str) -> Callable[[Any, str], Sequence[Message]]:
    """The reader of a column with a list of turns: role and content, or ShareGPT's from and value."""

    def messages(row: Any, where: str) -> Sequence[Message]:
        return [
            _message(turn, where)
            for turn in _list_of_structs(row, column, "role and content, or from and value", where)
        ]

    return messages


def _message(turn: Message, where: str) -> Message:
    """A turn as a message, without keys that are as if absent."""
    turn = {key: value for key, value in turn.items() if value is not None and not (key in SHOWN and is_absent(value))}
    speaker = turn.pop("from", None)
    if speaker is not None:
        if not isinstance(speaker, str) or speaker not in SPEAKERS:
            raise DataError(f"{where}: a turn is from {shown(speaker)}; it must be from {', '.join(SPEAKERS)}")
        turn = {"role": SPEAKERS[speaker], "content": turn.pop("value", None), **turn}
    if isinstance(turn.get("content"), list):
        turn["content"] = [_part(part, where) for part in turn["content"]]
    elif not turn.keys().isdisjoint(CALLS):
        turn.setdefault("content", None)
    return turn


def _part(part: Any, where: str) -> Any:
    """A part of a content; a text that is called `value`, as of LLaMA-Factory, has its usual name."""
    if not isinstance(part, Mapping):
        return part
    if part.get("type") == "text" and part.get("text") is None and part.get("value") is not None:
        part = {**{key: value for key, value in part.items() if key != "value"}, "text": part["value"]}
    if kind_of(part) == "video":
        check_video_part(part, where)
    return part


def _list_of_structs(row: Any, column: str, of: str, where: str) -> list[Message]:
    turns = row[column]
    if isinstance(turns, Mapping):  # the form of a list of structs in older `datasets`
        columns = list(turns.values())
        if all(isinstance(values, list) and len(values) == len(columns[0]) for values in columns):
            turns = [dict(zip(turns, values, strict=True)) for values in zip(*columns, strict=True)]
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        raise DataError(f"{where}: `{column}` is not a list of {of}")
    return turns


def _pairs(row: Any, where: str) -> Sequence[Message]:
    """The messages of `texts`, the form of The Cauldron."""
    pairs = _list_of_structs(row, "texts", "user and assistant", where)
    if not pairs:
        raise DataError(f"{where}: `texts` is empty; it needs a question with its answer")
    return [_said(role, pair.get(role), f"{where}: `{role}` of `texts`") for pair in pairs for role in _PAIR]


_PAIR = ("user", "assistant")


def _question(row: Any, where: str) -> Sequence[Message]:
    columns = zip(_PAIR, ("question", "answer"), strict=True)
    return [_said(role, row[column], f"{where}: `{column}`") for role, column in columns]


def _about_image(column: str) -> Callable[[Any, str], Sequence[Message]]:
    """The reader of a column with a text about an image, which is the answer to the image alone."""
    return lambda row, where: [_said("user", "", where), _said("assistant", row[column], f"{where}: `{column}`")]


def _said(role: str, text: Any, what: str) -> Message:
    if not isinstance(text, str):
        raise DataError(f"{what} is a {type(text).__name__}; it must be text")
    return {"role": role, "content": text}


# ------------------------------------------------------------------------------------------------ images


def _column_values(row: Any, where: str, name: str, kind: Kind) -> list[Any]:
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


def num_placeholders(messages: Sequence[Message], kind: str = "image") -> int:
    """The number of items of a kind that messages show."""
    return sum(_num_placeholders(part, kind) for part in _parts(messages))


def _with_literals(messages: Sequence[Message], of_columns: Sequence[Any], kind: str) -> Sequence[Message]:
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


def _with_own(messages: Sequence[Message], of_columns: Sequence[Any], kind: str) -> list[tuple[Any, Mapping[str, Any]]]:
    """A record's items of a kind in the order of their placeholders, those of its columns and those of its parts; and
    of each the part, which is empty for a placeholder in a text."""
    remaining, ordered = iter(of_columns), list[tuple[Any, Mapping[str, Any]]]()
    for part in _parts(messages):
        own, typed = _own_content(part, kind), part if kind_of(part) == kind else {}
        values = islice(remaining, _num_placeholders(part, kind)) if own is None else [own]
        ordered += [(value, typed) for value in values]
    return [*ordered, *((value, {}) for value in remaining)]


def _own_size(keys: Mapping[str, Any], where: str) -> OwnSize | None:
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


def _unread_in_parts(messages: Sequence[Message]) -> Iterator[str]:
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


def _parts(messages: Sequence[Message]) -> Iterator[Any]:
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


# ------------------------------------------------------------------------------------------------- forms

FORMS = (
    Form(columns=("messages",), messages=_turns("messages"), marks_images=True),
    Form(columns=("conversations",), messages=_turns("conversations"), marks_images=True),
    Form(columns=("texts",), messages=_pairs),
    Form(columns=("question", "answer"), messages=_question, one_turn=True),
    Form(columns=("caption",), messages=_about_image("caption"), one_turn=True, about_image=True),
    Form(columns=("text",), messages=_about_image("text"), one_turn=True, about_image=True),
    Form(columns=("txt",), messages=_about_image("txt"), one_turn=True, about_image=True),
)
"""All forms. A row is of the first one that fits, but may not be of several with one turn."""


def record_kind(kinds: Mapping[str, Kind]) -> RecordKind[Record]:
    """Records of conversations. Args: kinds: what they may have."""

    def recognise(name: str, columns: list[str]) -> Make[Record]:
        conversation_form(name, columns, kinds)
        return lambda row, index, name, folder: make_record(row, index, name, folder, kinds, columns)

    return RecordKind(columns=(*_read_columns(kinds), *REFUSED_COLUMNS), recognise=recognise)


CONVERSATIONS = record_kind(KINDS)
"""Records of conversations, as of a model without encoders of its own names."""
