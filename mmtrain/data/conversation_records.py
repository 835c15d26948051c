"""Records of conversations with images, videos and sounds, made of the rows of a source in one of the forms in `FORMS`.

The columns of a source say which form its rows have. All forms give the same record: messages of role and content, and
the images, videos and sounds that `<image>`, `<video>` and `<audio>` in their text, or a part without content of its
own, stand for. They stay encoded. `KINDS` is the table of these kinds; the further encoders of a model add their own.
"""

import difflib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from mmtrain.config.model import ModelConfig, section_of
from mmtrain.data.media import RawMedium, check_text, frame_rate, raw_image, raw_sound, raw_video
from mmtrain.data.sources import Make, RecordKind
from mmtrain.errors import ConfigError, DataError, shown
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


Message = Mapping[str, Any]
"""`role` and `content`: a text, or a list of parts."""

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
        if kind in ("text", *PARTS, *CONVERSATIONS.columns):
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
        """Whether a source with these columns can be of this form."""
        has_image = any(column in columns for kind in kinds.values() for column in kind.columns)
        return set(self.columns) <= set(columns) and (has_image or not self.about_image)


def conversation_form(name: str, columns: Sequence[str], kinds: Mapping[str, Kind] = KINDS) -> Form:
    """The form of the rows of a source. Args: name: of the source, for errors. kinds: what records may have.

    Raises: ConfigError: its columns are those of no form, or of several that say different things.
    """
    fitting = [form for form in FORMS if form.fits(columns, kinds)]
    if not fitting:
        raise ConfigError(
            f"data.source {name} has the columns {', '.join(columns)}, but a conversation needs "
            f"{' or '.join(form.name for form in FORMS)}{_hint(columns)}"
        )
    if fitting[0].one_turn and len(fitting) > 1:
        raise ConfigError(
            f"data.source {name} has {' and '.join(form.name for form in fitting)}, each of which may be its "
            "conversation; rename or remove one, or write `messages`"
        )
    return fitting[0]


def _hint(columns: Sequence[str]) -> str:
    """What may be meant by columns that are those of no form."""
    if not {"frames", "latents"}.isdisjoint(columns):
        return "; these are clips, which a job with [model.dit] reads"
    for form in FORMS:
        for wanted in form.columns:
            if wanted not in columns and (near := difflib.get_close_matches(wanted, columns, 1, cutoff=0.75)):
                return f"; did you mean {near[0]!r}? rename it to {wanted!r}"
    return "; rename yours, or write them as `messages` (docs/data.md has an example of each form)"


def make_record(
    form: Form, row: Any, index: int, name: str, folder: str = "", kinds: Mapping[str, Kind] = KINDS
) -> Record:
    """The record of a row. Args: kinds: what it may have.

    Raises: DataError: a column is missing or of another form.
    """
    where = f"sample {index} of {name}"
    missing = [column for column in form.columns if not isinstance(row, Mapping) or row.get(column) is None]
    if missing:
        has = ", ".join(map(str, row)) if isinstance(row, Mapping) else type(row).__name__
        raise DataError(f"{where}: no `{missing[0]}`; it has {has}")
    messages, images = form.messages(row, where), list[RawMedium]()
    for name_of_kind, kind in kinds.items():
        of_columns, mark = _column_values(row, where, name_of_kind, kind), placeholder(name_of_kind)
        if not form.marks_images and not any(mark in message["content"] for message in messages):
            first = {**messages[0], "content": mark * len(of_columns) + messages[0]["content"]}
            messages = [first, *messages[1:]]
        for number, value in enumerate(_with_own(messages, of_columns, name_of_kind)):
            raw = kind.raw(value, f"{name_of_kind} {number} of {where}", folder, row)
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
    return Record(sample=index, messages=tuple(messages), images=tuple(images), grade=grade, tolerance=tolerance)


# ---------------------------------------------------------------------------------------------- messages


def _turns(column: str) -> Callable[[Any, str], Sequence[Message]]:
    """The reader of a column with a list of turns: role and content, or ShareGPT's from and value."""

    def messages(row: Any, where: str) -> Sequence[Message]:
        return [
            _message(turn, where)
            for turn in _list_of_structs(row, column, "role and content, or from and value", where)
        ]

    return messages


def _message(turn: Message, where: str) -> Message:
    speaker = turn.get("from")
    if speaker is None:
        return turn
    if not isinstance(speaker, str) or speaker not in SPEAKERS:
        raise DataError(f"{where}: a turn is from {shown(speaker)}; it must be from {', '.join(SPEAKERS)}")
    return {"role": SPEAKERS[speaker], "content": turn.get("value")}


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


def _with_own(messages: Sequence[Message], of_columns: Sequence[Any], kind: str) -> list[Any]:
    """A record's items of a kind in the order of their placeholders: those of its columns, and those of its parts."""
    remaining, ordered = iter(of_columns), list[Any]()
    for part in _parts(messages):
        own = _own_content(part, kind)
        ordered += islice(remaining, _num_placeholders(part, kind)) if own is None else [own]
    return [*ordered, *remaining]


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
    names = (name for name, of in PARTS.items() if of == kind)
    value = next((part[key] for key in (*names, kind, "url", "path") if part.get(key) is not None), None)
    if isinstance(value, Mapping) and isinstance(value.get("data"), str):  # base64, as of OpenAI's `input_audio`
        return f"data:;base64,{value['data']}"
    return value["url"] if isinstance(value, Mapping) and "url" in value else value


def _num_placeholders(part: Any, kind: str) -> int:
    if (of := kind_of(part)) is not None:
        return of == kind
    text = part.get("text") if isinstance(part, Mapping) else part
    return text.count(placeholder(kind)) if isinstance(text, str) else 0


# ------------------------------------------------------------------------------------------------- forms

FORMS = (
    Form(columns=("messages",), messages=_turns("messages"), marks_images=True),
    Form(columns=("conversations",), messages=_turns("conversations"), marks_images=True),
    Form(columns=("texts",), messages=_pairs),
    Form(columns=("question", "answer"), messages=_question, one_turn=True),
    Form(columns=("caption",), messages=_about_image("caption"), one_turn=True, about_image=True),
    Form(columns=("text",), messages=_about_image("text"), one_turn=True, about_image=True),
)
"""All forms. A source is of the first one that fits, but may not be of several with one turn."""


def record_kind(kinds: Mapping[str, Kind]) -> RecordKind[Record]:
    """Records of conversations. Args: kinds: what they may have."""

    def recognise(name: str, columns: list[str]) -> Make[Record]:
        form = conversation_form(name, columns, kinds)
        return lambda row, index, name, folder: make_record(form, row, index, name, folder, kinds)

    return RecordKind(
        columns=(
            *dict.fromkeys(column for form in FORMS for column in form.columns),
            *(column for kind in kinds.values() for column in kind.columns),
            "fps",
            "grade",
            "tolerance",
        ),
        recognise=recognise,
    )


CONVERSATIONS = record_kind(KINDS)
"""Records of conversations, as of a model without encoders of its own names."""
