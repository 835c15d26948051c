"""Data sets that a `dataset_info.json` of LLaMA-Factory lists: the file of one, and its rows as `messages`.

The split names the entry. Relative paths of images start at the folder of the list.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmtrain.data.dataset_cards import is_outside
from mmtrain.data.record_keys import is_absent
from mmtrain.errors import ConfigError, DataError, nearest, shown
from mmtrain.spec.hub_files import read_json

LIST = "dataset_info.json"

_FILE = "file_name"
_KEYS = (_FILE, "formatting", "columns", "tags")
_WITHOUT_EFFECT = ("split",)
"""Keys that say nothing of a file; `split` is of a data set on a hub."""
_FORMATTINGS = ("alpaca", "sharegpt")
_MEDIA = ("images", "videos", "audios")
_COLUMNS: Mapping[str, Mapping[str, str]] = {
    "alpaca": {"prompt": "instruction", "query": "input", "response": "output", "history": ""},
    "sharegpt": {"messages": "conversations"},
}
"""Formatting -> what a column says -> its name unless the entry gives another; empty: there is none."""
_BOTH = {"system": "", "tools": "", **dict.fromkeys(_MEDIA, "")}
"""The columns of both formattings: what a column says -> its name unless the entry gives another."""
_TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "system_tag": "system",
    "observation_tag": "observation",
    "function_tag": "function_call",
}
"""How keys and speakers of a list of turns are called unless the entry says otherwise."""
_ROLES = {"user_tag": "user", "assistant_tag": "assistant", "system_tag": "system"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedSet:
    """One data set of a list."""

    file: Path
    folder: str
    """The folder at which relative paths start."""
    formatting: str
    columns: Mapping[str, str] = field(default_factory=dict)
    """What a column says -> its name; absent: there is none."""
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def made_columns(self) -> list[str]:
        """The columns of its rows as `row` makes them."""
        return ["messages", *(name for name in _BOTH if name in self.columns)]

    def row(self, row: Any, where: str) -> dict[str, Any]:
        """A row of the file as one with `messages`, and images, videos, sounds, tools and a system text if it has them.

        Raises: DataError: it lacks a column, or has turns that are not read.
        """
        if not isinstance(row, Mapping):
            raise DataError(f"{where}: it is a {type(row).__name__}; it must be an object")
        messages = self._turns(row, where) if self.formatting == "sharegpt" else self._alpaca(row, where)
        others = {name: row.get(self.columns[name]) for name in _BOTH if name in self.columns}
        media = {name: [value] for name, value in others.items() if name in _MEDIA and isinstance(value, str | Mapping)}
        return {"messages": messages} | {k: v for k, v in (others | media).items() if not is_absent(v)}

    def _alpaca(self, row: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
        turns: list[tuple[Any, Any]] = []
        history = row.get(self.columns["history"]) if "history" in self.columns else None
        for pair in history if isinstance(history, list) else [history] if history else ():
            if not isinstance(pair, list | tuple) or len(pair) != 2:
                raise DataError(
                    f"{where}: `{self.columns['history']}` has {shown(pair)}; write a question and its answer"
                )
            turns.append((pair[0], pair[1]))
        prompt, query, response = (row.get(self.columns[name]) for name in ("prompt", "query", "response"))
        if response is None:
            raise DataError(f"{where}: no `{self.columns['response']}`; its columns are {', '.join(map(str, row))}")
        turns.append(("\n".join(_text(part, where) for part in (prompt, query) if part), response))
        return [
            {"role": role, "content": _text(content, where)}
            for turn in turns
            for role, content in zip(("user", "assistant"), turn, strict=True)
        ]

    def _turns(self, row: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
        column, tags = self.columns["messages"], self.tags
        turns = row.get(column)
        if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
            raise DataError(f"{where}: `{column}` is no list of turns; its columns are {', '.join(map(str, row))}")
        role_of = {tags[tag]: role for tag, role in _ROLES.items()}
        messages = []
        for turn in turns:
            speaker = turn.get(tags["role_tag"])
            if not isinstance(speaker, str) or speaker not in role_of:
                calls = speaker in (tags["function_tag"], tags["observation_tag"])
                why = (
                    "calls of tools are read as `messages` with `tool_calls` alone" if calls else "nobody of this name"
                )
                raise DataError(f"{where}: a turn is from {shown(speaker)}: {why}; turns are from {', '.join(role_of)}")
            messages.append({"role": role_of[speaker], "content": _text(turn.get(tags["content_tag"]), where)})
        return messages

    def wrapped(self, make: Callable[[Any, int, str, str], Any]) -> Callable[[Any, int, str, str], Any]:
        """How a row of the file becomes a record. Args: make: how one with `messages` does."""
        return lambda row, index, name, folder: make(self.row(row, f"sample {index} of {name}"), index, name, folder)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: the text of a turn is {shown(value)}; it must be text")
    return value


def listed_set(path: Path, split: str) -> ListedSet | None:
    """The data set that a split names in a list; None: the path is no list.

    Raises: ConfigError: there is no such entry, its file does not exist or is outside of the folder, or it has a key or
        a value that is not supported.
    """
    if path.name != LIST or not path.is_file():
        return None
    source = f"data.source = {str(path)!r}"
    entries = {name: entry for name, entry in read_json("data.source", path).items() if isinstance(entry, Mapping)}
    if split not in entries:
        near = nearest(split, list(entries))
        hint = f"did you mean {near[0]!r}? " if near else ""
        names = ", ".join(list(entries)[:20]) or "none"
        raise ConfigError(f"{source}: no data set {split!r}; {hint}data.split names one of its entries: {names}")
    entry, where = entries[split], f"{source}: {split}"
    formatting = entry.get("formatting", "alpaca")
    if formatting not in _FORMATTINGS:
        raise ConfigError(f"{where}: formatting = {shown(formatting)} is not supported; convert it to sharegpt")
    known = {*_KEYS, *_WITHOUT_EFFECT}
    _refuse(where, [key for key, value in entry.items() if key not in known and not _is_off(value)], _KEYS)
    columns, tags = (_names(f"{where}: {key}", entry.get(key)) for key in ("columns", "tags"))
    _refuse(
        f"{where}: columns",
        [key for key in columns if key not in (*_COLUMNS[formatting], *_BOTH)],
        (*_COLUMNS[formatting], *_BOTH),
    )
    _refuse(f"{where}: tags", [key for key in tags if key not in _TAGS], tuple(_TAGS))
    named = {**_COLUMNS[formatting], **_BOTH, **columns}
    return ListedSet(
        file=_file(where, path.parent, entry.get(_FILE)),
        folder=str(path.parent.absolute()),
        formatting=formatting,
        columns={key: value for key, value in named.items() if value},
        tags={**_TAGS, **tags},
    )


def _names(where: str, value: Any) -> dict[str, str]:
    """The names that an entry gives. Raises: ConfigError: they are none."""
    names = {} if value is None else value
    if not isinstance(names, Mapping) or not all(isinstance(name, str | None) for name in names.values()):
        raise ConfigError(f"{where} = {shown(value)}; it must be an object of names")
    return {key: name for key, name in names.items() if name}


def _is_off(value: Any) -> bool:
    return value is False or is_absent(value)


def _refuse(where: str, keys: list[str], known: Sequence[str]) -> None:
    if keys:
        raise ConfigError(f"{where}: {keys[0]} is not supported; remove it, read are {', '.join(known)}")


def _file(where: str, folder: Path, name: Any) -> Path:
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}: no {_FILE}; download the data set, and name its file there")
    if is_outside(name):
        raise ConfigError(f"{where}: {_FILE} = {shown(name)} is outside of the folder of the list; copy the file there")
    path = folder / name
    if path.suffix not in (".json", ".jsonl", ".parquet"):
        raise ConfigError(f"{where}: {_FILE} = {shown(name)}: a file must end in .parquet, .jsonl or .json")
    if not path.is_file():
        raise ConfigError(f"{where}: {_FILE} = {shown(name)} does not exist; restore it")
    return path
