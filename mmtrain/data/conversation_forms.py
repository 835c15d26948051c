"""The forms in which the columns of a source hold conversations: the messages of a row, by the columns that it has."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmtrain.data.record_keys import CALLS, SHOWN, SYSTEM, check_video_part, is_absent
from mmtrain.data.record_parts import KINDS, ChatMessage, MediumKind, kind_of
from mmtrain.errors import ConfigError, DataError, shown

SPEAKERS = {"human": "user", "gpt": "assistant", "system": "system", "user": "user", "assistant": "assistant"}
"""`from` of a turn in ShareGPT's form -> role."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One way to write conversations into the columns of a source."""

    columns: tuple[str, ...]
    """A source of this form has all of them."""
    messages: Callable[[Any, str], Sequence[ChatMessage]]
    """A function that makes the messages of a row, given where it is; raises DataError."""
    one_turn: bool = False
    """Whether it is one question and its answer."""
    about_image: bool = False
    """Whether it is a text about an image, video or sound, which the source must have."""
    optional: tuple[str, ...] = ()
    """Further columns that are read where a row has them."""
    marks_images: bool = False
    """Whether texts say where images, videos and sounds are; else those without a placeholder come before the first
    question."""

    @property
    def name(self) -> str:
        """The columns of the form, for error messages."""
        return " with ".join(f"`{column}`" for column in self.columns) + (
            " with an image, video or sound" if self.about_image else ""
        )

    def fits(self, columns: Sequence[str], kinds: Mapping[str, MediumKind] = KINDS) -> bool:
        """Whether a row with these columns can be of this form."""
        has_image = any(column in columns for kind in kinds.values() for column in kind.columns)
        return set(self.columns) <= set(columns) and (has_image or not self.about_image)


def conversation_form(name: str, columns: Sequence[str], kinds: Mapping[str, MediumKind] = KINDS) -> Form:
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


def row_form(row: Any, where: str, kinds: Mapping[str, MediumKind] = KINDS) -> Form:
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


def system_message(row: Mapping[str, Any], messages: Sequence[ChatMessage], where: str) -> Sequence[ChatMessage]:
    """The message of a row's column `system`. Raises: DataError: it is no text, or its messages begin with another."""
    column = next((column for column in SYSTEM if not is_absent(row.get(column))), None)
    if column is None:
        return ()
    message = _text_message("system", row[column], f"{where}: `{column}`")
    if messages and messages[0].get("role") == "system":
        if messages[0].get("content") == message["content"]:
            return ()
        raise DataError(f"{where}: it has `{column}`, and its messages begin with another of the role system; keep one")
    return (message,)


def _turns(column: str) -> Callable[[Any, str], Sequence[ChatMessage]]:
    """The reader of a column with a list of turns: role and content, or ShareGPT's from and value."""

    def messages(row: Any, where: str) -> Sequence[ChatMessage]:
        return [
            _message(turn, where)
            for turn in _list_of_structs(row, column, "role and content, or from and value", where)
        ]

    return messages


def _message(turn: ChatMessage, where: str) -> ChatMessage:
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


def _list_of_structs(row: Any, column: str, of: str, where: str) -> list[ChatMessage]:
    turns = row[column]
    if isinstance(turns, Mapping):  # the form of a list of structs in older `datasets`
        columns = list(turns.values())
        if all(isinstance(values, list) and len(values) == len(columns[0]) for values in columns):
            turns = [dict(zip(turns, values, strict=True)) for values in zip(*columns, strict=True)]
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        raise DataError(f"{where}: `{column}` is not a list of {of}")
    return turns


def _pairs(row: Any, where: str) -> Sequence[ChatMessage]:
    """The messages of `texts`, the form of The Cauldron."""
    pairs = _list_of_structs(row, "texts", "user and assistant", where)
    if not pairs:
        raise DataError(f"{where}: `texts` is empty; it needs a question with its answer")
    return [_text_message(role, pair.get(role), f"{where}: `{role}` of `texts`") for pair in pairs for role in _PAIR]


_PAIR = ("user", "assistant")


def _question(row: Any, where: str) -> Sequence[ChatMessage]:
    columns = zip(_PAIR, ("question", "answer"), strict=True)
    return [_text_message(role, row[column], f"{where}: `{column}`") for role, column in columns]


def _instruction(row: Any, where: str) -> Sequence[ChatMessage]:
    """The messages of Alpaca's form: earlier turns, then the instruction with its input, and the answer."""
    turns = [] if is_absent(row.get("history")) else row["history"]
    if not isinstance(turns, list) or not all(isinstance(turn, list | tuple) and len(turn) == 2 for turn in turns):
        raise DataError(f"{where}: `history` is not a list of pairs; write a question and its answer")
    before = [
        _text_message(role, text, f"{where}: `history`")
        for turn in turns
        for role, text in zip(_PAIR, turn, strict=True)
    ]
    parts = [
        _text_message("user", row[column], f"{where}: `{column}`")["content"]
        for column in ("instruction", "input")
        if not is_absent(row.get(column))
    ]
    return [
        *before,
        _text_message("user", "\n".join(parts), where),
        _text_message("assistant", row["output"], f"{where}: `output`"),
    ]


def _about_image(column: str) -> Callable[[Any, str], Sequence[ChatMessage]]:
    """The reader of a column with a text about an image, which is the answer to the image alone."""
    return lambda row, where: [
        _text_message("user", "", where),
        _text_message("assistant", row[column], f"{where}: `{column}`"),
    ]


def _text_message(role: str, text: Any, what: str) -> ChatMessage:
    if not isinstance(text, str):
        raise DataError(f"{what} is a {type(text).__name__}; it must be text")
    return {"role": role, "content": text}


FORMS = (
    Form(columns=("messages",), messages=_turns("messages"), marks_images=True),
    Form(columns=("conversations",), messages=_turns("conversations"), marks_images=True),
    Form(columns=("texts",), messages=_pairs),
    Form(columns=("question", "answer"), messages=_question, one_turn=True),
    Form(columns=("instruction", "output"), messages=_instruction, one_turn=True, optional=("input", "history")),
    Form(columns=("caption",), messages=_about_image("caption"), one_turn=True, about_image=True),
    Form(columns=("text",), messages=_about_image("text"), one_turn=True, about_image=True),
    Form(columns=("txt",), messages=_about_image("txt"), one_turn=True, about_image=True),
)
"""All forms. A row is of the first one that fits, but may not be of several with one turn."""
