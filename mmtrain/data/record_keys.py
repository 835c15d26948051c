"""The keys of a record's rows, messages and parts: which change what is learnt, which are harmless, which are refused.

A key is honoured, or known to be harmless, or refused by its name because it asks for something else than is learnt.
Any other one is named once in the log. A key whose value is null, or an empty text, list or object, is as if absent.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mmtrain.errors import DataError, one_line, shown

Keys = Mapping[str, Any]
Render = Callable[[Sequence[Keys], Sequence[Any]], str]
"""A function that makes the text of messages and tools by the chat template; raises DataError."""

SYSTEM = ("system", "system_prompt")
"""Columns with the text of a first message of the role system."""

WEIGHTS = ("weight", "loss", "train", "training")
"""Keys of a message that say whether it is learnt: 0 or 1, false or true."""

SIZES = ("min_pixels", "max_pixels", "resized_height", "resized_width")
"""Keys of a part that say the size of its image, as of Qwen."""

SHOWN = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking", "refusal")
"""Keys of a message with something that is said in addition to its content, if the chat template shows it."""

CALLS = ("tool_calls", "function_call")
"""The keys that a message without content may have."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_HARMLESS_COLUMNS = _words("""
    id _id idx index uid uuid key row_id sample_id image_id video_id audio_id question_id conversation_id source dataset
    dataset_name data_source origin subset split category categories task task_name task_type topic domain type tags
    language lang license url width height image_width image_height image_size num_turns num_tokens length model
    generator annotator metadata meta info comment comments note notes version created created_at timestamp date author
    file_name filename file_path hash md5 sha256 score difficulty level channel parallel_tool_calls __key__ __url__
    __local_path__ __index_level_0__
""")
_HARMLESS_MESSAGE_KEYS = _words("""
    id index name tool_call_id timestamp created_at model type language annotations num_tokens score
""")
_HARMLESS_PART_KEYS = _words("id index detail format name filename mime_type width height cache_control")

_OF_VIDEO = (
    *SIZES,
    *("fps", "nframes", "min_frames", "max_frames", "total_pixels", "sample_fps", "video_start", "video_end"),
)
"""Keys of a part that say which of its video's frames are read, and how large."""

_PREFERENCE = "is of training on preferences, which mmtrain does not do; keep the answer to learn, and remove it"
_NO_WEIGHT = "is not supported; give an answer `weight` 0 or 1"
_IN_PART = "is not read for a whole record; write it into the part of its image, or remove it"
_TEMPLATE = "is not supported; name one template for all records in tokenizer.chat_template, and remove it"
_OUTSIDE = "is not read there; keep images, videos and sounds in columns of the row, or write parts"

_REFUSED_COLUMNS: Mapping[str, str] = {
    **dict.fromkeys(
        ("chosen", "rejected", "rejected_response", "rejected_messages", "rejected_images", "kto_tag"), _PREFERENCE
    ),
    **dict.fromkeys(("loss", "loss_mask", "loss_weight", "loss_scale", "sample_weight", "assistant_masks"), _NO_WEIGHT),
    **dict.fromkeys(("chat_template", "chat_template_kwargs"), _TEMPLATE),
    **dict.fromkeys(SIZES, _IN_PART),
    "label": _PREFERENCE,
    "history": "is not read; write its turns as `messages`",
    "functions": "is not read; write them as `tools`",
    "objects": "is not read, and the text has `<bbox>` or `<ref-object>` for it; write coordinates and names as text",
}
_REFUSED_MESSAGE_KEYS: Mapping[str, str] = {
    **dict.fromkeys(("loss_mask", "loss_weight", "loss_scale", "mask", "masked", "train_detail"), _NO_WEIGHT),
    **dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), _OUTSIDE),
}

_IS_HARMLESS: Mapping[str, Callable[[Any, Any], bool]] = {
    **dict.fromkeys(("loss", "loss_weight", "loss_scale", "sample_weight"), lambda value, row: value == 1),
    **dict.fromkeys(("mask", "masked"), lambda value, row: value == 0),
    "label": lambda value, row: not isinstance(value, bool) or row.keys().isdisjoint(("messages", "conversations")),
    "objects": lambda value, row: not any(mark in str(row) for mark in ("<bbox>", "<ref-object>")),
}
"""For each refused key, whether a value of it changes nothing, given the value and its row or message."""

READ_COLUMNS = ("tools", *SYSTEM)
REFUSED_COLUMNS = tuple(_REFUSED_COLUMNS)


def is_absent(value: Any) -> bool:
    """Whether a key with this value is as if it were absent."""
    return value is None or (isinstance(value, str | list | dict) and not value)


def check_columns(row: Keys, read: Sequence[str], where: str) -> None:
    """Raises: DataError: a column asks for something else than is learnt. Args: read: columns that are read."""
    held = {key: row[key] for key in _REFUSED_COLUMNS if key in row and key not in read}
    _check_refused(held, _REFUSED_COLUMNS, row, where)


def check_message(message: Keys, where: str) -> None:
    """Raises: DataError: a key of a message asks for something else than is learnt."""
    _check_refused(message, _REFUSED_MESSAGE_KEYS, message, f"{where}: a message")
    for key in WEIGHTS:
        value = message.get(key)
        if value is None:
            continue
        if not isinstance(value, int | float) or value not in (0, 1):
            raise DataError(f"{where}: a message has `{key}` = {shown(value)}; it must be 0 or 1, false or true")
        if value and message.get("role") != "assistant":
            raise DataError(
                f"{where}: a message of the role {shown(message.get('role'))} has `{key}` = {shown(value)}, but "
                "answers of the role 'assistant' alone are learnt; remove it"
            )


def check_video_part(part: Keys, where: str) -> None:
    """Raises: DataError: a part says which frames of its video are read, or how large."""
    for key in _OF_VIDEO:
        if not is_absent(part.get(key)):
            raise DataError(
                f"{where}: a part with a video has `{key}`, which is not supported; set data.video_fps, "
                "data.video_max_frames, data.video_max_pixels for all videos, and remove it"
            )


def _check_refused(values: Keys, refused: Mapping[str, str], whole: Keys, where: str) -> None:
    for key, value in values.items():
        if key not in refused or is_absent(value) or (key in _IS_HARMLESS and _IS_HARMLESS[key](value, whole)):
            continue
        raise DataError(f"{where}: `{key}` {refused[key]}")


def unread(keys: Keys, read: Sequence[str], of: str = "") -> Iterator[str]:
    """Keys that nobody reads and that are not known to be harmless, for the log. Args: of: "", "message" or "part"."""
    harmless = {"message": _HARMLESS_MESSAGE_KEYS, "part": _HARMLESS_PART_KEYS}.get(of, _HARMLESS_COLUMNS)
    refused = {"message": _REFUSED_MESSAGE_KEYS, "part": {}}.get(of, _REFUSED_COLUMNS)
    for key, value in keys.items():
        if key not in read and key not in harmless and key not in refused and value is not None:
            yield f"{shown(key)} of a {of}" if of else shown(key)


class UnreadKeys:
    """Keys of records that nobody reads, each named once for the log."""

    def __init__(self) -> None:
        self._known: set[tuple[str, str]] = set()
        self._notes: list[str] = []

    def add(self, sample: str, source: str, keys: Sequence[str]) -> None:
        """Args: sample, source: the names of the record's."""
        new = [key for key in dict.fromkeys(keys) if (source, key) not in self._known]
        if new and len(self._known) < _MOST_KEYS:
            self._known |= {(source, key) for key in new}
            self._notes.append(f"data: {sample} has keys that are not read: {one_line(', '.join(new))}")

    def take(self) -> list[str]:
        """What is new since the last call, a line for each record with new ones."""
        notes, self._notes = self._notes, []
        return notes


_MOST_KEYS = 100
"""Keys that are named."""


# --------------------------------------------------------------------------------------------- what is learnt


def is_learnt(message: Keys) -> bool:
    """Whether a message is an answer that is a target."""
    return message.get("role") == "assistant" and all(message.get(key, 1) != 0 for key in WEIGHTS)


def is_spoken(message: Keys) -> bool:
    """Whether a message is an answer that is a target, and a text and no call."""
    return is_learnt(message) and message.keys().isdisjoint(CALLS)


def check_shown(messages: Sequence[Keys], tools: Sequence[Any], template: str, render: Render, where: str) -> None:
    """Checks that the chat template shows the tools, and what messages say in addition to their content.

    Args: template: its text.
    Raises: DataError: it shows the same without one of them.
    """

    def check(key: str, index: int, without: tuple[Sequence[Keys], Sequence[Any]]) -> None:
        if key in template and render(messages[: index + 1], tools) != _rendered(render, *without):
            return
        raise DataError(
            f"{where}: it has `{key}`, which the tokenizer's chat template does not show; name a template that shows "
            "them in tokenizer.chat_template, or write them into the text"
        )

    if tools:
        check("tools", len(messages) - 1, (messages, ()))
    for index, message in enumerate(messages):
        for key in message.keys() & set(SHOWN):
            rest = {name: value for name, value in message.items() if name != key}
            check(key, index, ([*messages[:index], rest], tools))


def _rendered(render: Render, messages: Sequence[Keys], tools: Sequence[Any]) -> str | None:
    try:
        return render(messages, tools)
    except DataError:
        return None


# ---------------------------------------------------------------------------------------------------- tools


def tools_of(row: Keys, where: str) -> tuple[Any, ...]:
    """The tools of a row: a list of objects, each of which may be a text of JSON, as may be the list.

    Raises: DataError: they are none.
    """
    tools = _from_json(row.get("tools"))
    if is_absent(tools):
        return ()
    tools = [_from_json(tool) for tool in tools] if isinstance(tools, list) else None
    if tools is None or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"{where}: `tools` is {shown(row['tools'])}; write a list of objects, or that list as JSON")
    return tuple(tools)


def _from_json(value: Any) -> Any:
    """The value of a text of JSON; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


_ARGUMENTS = '{"number": 1}'


def encodes_arguments(render: Render, user: Keys) -> bool:
    """Whether a chat template writes the arguments of a call as JSON, so that a text of JSON would be quoted once more.

    Args: user: a message of the user.
    """
    call = {"id": "call00000", "type": "function", "function": {"name": "name", "arguments": _ARGUMENTS}}
    text = _rendered(render, [user, {"role": "assistant", "content": "", "tool_calls": [call]}], ())
    return text is not None and json.dumps(_ARGUMENTS) in text


def with_arguments(calls: Any) -> Any:
    """The calls of a message in which arguments that are a text of JSON, as of OpenAI, are the value of that text."""
    if not isinstance(calls, list):
        return calls
    return [_with_arguments(call) for call in calls]


def _with_arguments(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_arguments(call["function"])}
    return {**call, "arguments": _from_json(call["arguments"])} if "arguments" in call else call
