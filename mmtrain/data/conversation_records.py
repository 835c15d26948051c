"""Records of conversations with images, videos and sounds, made of the rows of a source in one of the forms in `FORMS`.

The columns of a row say which form it has. All forms give the same record: messages of role and content, and the
images, videos and sounds that stand in them, see `record_parts`. They stay encoded.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mmtrain.config.model import ModelConfig, section_of
from mmtrain.data.conversation_forms import FORMS, conversation_form, row_form, system_message
from mmtrain.data.media import RawImage, RawMedium, check_text
from mmtrain.data.record_keys import (
    READ_COLUMNS,
    REFUSED_COLUMNS,
    check_columns,
    check_message,
    tools_of,
    unread,
)
from mmtrain.data.record_parts import (
    KINDS,
    PARTS,
    ChatMessage,
    MediumKind,
    column_values,
    num_placeholders,
    own_size,
    placeholder,
    unread_in_parts,
    with_literals,
    with_own,
)
from mmtrain.data.sources import MakeRecord, RecordKind
from mmtrain.errors import ConfigError, DataError, shown
from mmtrain.modality.encoder_choice import readers_of_kinds


def kinds_of(model: ModelConfig) -> Mapping[str, MediumKind]:
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
        is_sound = model.encoders[module].kind == "audio"
        kinds[kind] = replace(KINDS["audio" if is_sound else "image"], columns=(kind,))
    return kinds


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One sample of the source, not decoded."""

    sample: int
    """The index of the record in the source."""
    messages: tuple[ChatMessage, ...]
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


def make_record(
    row: Any,
    index: int,
    name: str,
    folder: str = "",
    kinds: Mapping[str, MediumKind] = KINDS,
    columns: Sequence[str] = (),
) -> Record:
    """The record of a row. Args: kinds: what it may have. columns: of its source, which may not all be decoded.

    Raises: DataError: a column is missing or of another form, or asks for something else than is learnt.
    """
    where = f"sample {index} of {name}"
    form = row_form(row, where, kinds)
    read = [column for column in _read_columns(kinds) if column in form.optional or column not in _OPTIONAL]
    check_columns(row, read, where)
    messages, images = form.messages(row, where), list[RawMedium]()
    for message in messages:
        check_message(message, where)
    ignored = [*unread({**dict.fromkeys(columns, True), **row}, read), *unread_in_parts(messages)]
    for name_of_kind, kind in kinds.items():
        of_columns, mark = column_values(row, where, name_of_kind, kind), placeholder(name_of_kind)
        if not form.marks_images and not num_placeholders(messages, name_of_kind):
            first = {**messages[0], "content": mark * len(of_columns) + messages[0]["content"]}
            messages = [first, *messages[1:]]
        messages = with_literals(messages, of_columns, name_of_kind)
        for number, (value, part) in enumerate(with_own(messages, of_columns, name_of_kind)):
            at = f"{name_of_kind} {number} of {where}"
            raw = kind.raw(value, at, folder, row)
            if isinstance(raw, RawImage):
                raw = replace(raw, size=own_size({**(value if isinstance(value, Mapping) else {}), **part}, at))
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
        messages=(*system_message(row, messages, where), *messages),
        images=tuple(images),
        grade=grade,
        tolerance=tolerance,
        tools=tools_of(row, where),
        unread=tuple(ignored),
    )


_OPTIONAL = {column for form in FORMS for column in form.optional}
"""Columns that some forms read, and others do not."""


def _read_columns(kinds: Mapping[str, MediumKind]) -> tuple[str, ...]:
    """All columns that records are made of."""
    return (
        *dict.fromkeys(column for form in FORMS for column in (*form.columns, *form.optional)),
        *(column for kind in kinds.values() for column in kind.columns),
        "fps",
        "grade",
        "tolerance",
        *READ_COLUMNS,
    )


def record_kind(kinds: Mapping[str, MediumKind]) -> RecordKind[Record]:
    """Records of conversations. Args: kinds: what they may have."""

    def recognise(name: str, columns: list[str]) -> MakeRecord[Record]:
        conversation_form(name, columns, kinds)
        return lambda row, index, name, folder: make_record(row, index, name, folder, kinds, columns)

    return RecordKind(columns=(*_read_columns(kinds), *REFUSED_COLUMNS), recognise=recognise)


CONVERSATIONS = record_kind(KINDS)
"""Records of conversations, as of a model without encoders of its own names."""
