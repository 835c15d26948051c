"""Sections of a TOML file as dataclasses, and back: strict, and unaware of what they mean, but for two keys. `config`
holds an inline model config, which stays one value; `job` says what and where one run is, and is not inherited. Pure.

An unknown key, a wrong type, a value outside of its choices or a missing key is refused with its dotted path.
"""

import dataclasses
import json
import math
import os
import tomllib
import types
import typing
from pathlib import Path
from typing import Annotated, Any, Literal

from mmtrain.config.moved_keys import brought_up_to_date
from mmtrain.config.toml_text import read_toml
from mmtrain.errors import ConfigError, UnknownKeyError, nearest

FilePath = Annotated[str, "path"]
"""A file, a folder, or a name of another kind; `~` at its beginning is a home folder."""


def at_home(value: str, path: str) -> str:
    """A path with `~` expanded. Args: path: what has this value, for errors. Raises: ConfigError: there is no such
    home folder."""
    expanded = os.path.expanduser(value)
    if expanded.startswith("~") and not os.path.exists(expanded):
        raise ConfigError(
            f"{path} = {shown(value)}: there is no user {expanded.split('/')[0][1:]!r} with a home folder; write the "
            f"path in full (./{expanded} if the folder has this name)"
        )
    return expanded


def to_dict(config: Any) -> dict[str, Any]:
    """The configuration as nested dictionaries that TOML can hold (an absent section is left out)."""
    out: dict[str, Any] = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            out[f.name] = to_dict(value)
        elif isinstance(value, list) and value and dataclasses.is_dataclass(value[0]):
            out[f.name] = [to_dict(item) for item in value]
        elif isinstance(value, dict) and any(map(dataclasses.is_dataclass, value.values())):
            out[f.name] = {key: to_dict(item) for key, item in value.items()}
        elif value is not None:
            out[f.name] = value
    return out


def dump_table(table: dict[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    """Adds a table as lines of TOML, its sections last. Args: path: names of the sections around it."""

    def is_section(key: str, value: Any) -> bool:
        return isinstance(value, dict) and key != "config"  # an inline model config stays one value

    if path:
        lines += ["", f"[{'.'.join(path)}]"]
    for key, value in table.items():
        if not is_section(key, value):
            lines.append(f"{_toml_key(key)} = {_toml_value(value)}")
    for key, value in table.items():
        if is_section(key, value):
            dump_table(value, (*path, key), lines)


def _toml_key(key: str) -> str:
    bare = key and all(c.isascii() and (c.isalnum() or c in "_-") for c in key)
    return key if bare else _toml_value(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON's escapes are TOML's too
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml_value(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml_key(k)} = {_toml_value(v)}" for k, v in value.items()) + "}"
    raise ConfigError(f"{value!r} of type {type(value).__name__} has no TOML form")


RUN_FILE = "config.toml"
"""What a run calls the whole configuration that it writes into its folder."""
_OF_ONE_FILE = ("description", "dump_folder")
"""Keys of [job] that a file does not inherit: two jobs are two runs."""


def read_with_bases(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    """The table of a file over those that it `extends`.

    Args: seen: files that led here.
    Raises: ConfigError: not TOML, a base that does not exist, or a circle of them.
    """
    path = path.resolve()
    if path in seen:
        chain = " -> ".join(p.name for p in (*seen, path))
        raise ConfigError(f"{path.name}: `extends` goes in a circle: {chain}; remove one")
    table = read_toml(path)
    if path.name == RUN_FILE:
        table = brought_up_to_date(table)
    base = table.pop("extends", None)
    if base is None:
        return table
    if not isinstance(base, str):
        raise ConfigError(f"{path}: extends = {shown(base)}; it names one file, as a string")
    base_path = path.parent / at_home(base, f"{path}: extends")
    if not os.path.isfile(base_path):  # which is false of names that cannot exist
        raise ConfigError(f"{path}: extends = {shown(base)}, but {shown(str(base_path))} does not exist")
    inherited = read_with_bases(base_path, (*seen, path))
    if isinstance(inherited.get("job"), dict):
        for key in _OF_ONE_FILE:
            inherited["job"].pop(key, None)
    return merged_tables(inherited, table)


def merged_tables(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """base with the keys of over; tables merge, except an inline model config, which is replaced whole."""
    out = dict(base)
    for key, value in over.items():
        both_tables = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = merged_tables(out[key], value) if both_tables and key != "config" else value
    return out


def apply_override(table: dict[str, Any], override: str) -> None:
    """Sets one value of a table. Args: override: `--section.key=value`. Raises: ConfigError: it has another form."""
    text = override.removeprefix("--")
    key, equals, raw = text.partition("=")
    if not equals or not key.strip():
        raise UnknownKeyError(
            f"override {shown(override)} is not of the form --section.key=value; write it with `=`", text
        )
    try:
        parsed = tomllib.loads(f"value = {raw}")
        value = parsed["value"] if len(parsed) == 1 else raw  # a line break in it would begin another key
    except (ValueError, RecursionError):
        value = raw
    *sections, last = key.strip().split(".")
    if not sections:
        raise UnknownKeyError(
            f"override {shown(override)}: {shown(last)} names no section; write --section.key=value", last
        )
    node = table
    for section in sections:
        node = node.setdefault(section, {})
        if not isinstance(node, dict):
            raise ConfigError(f"override {shown(override)}: {shown(section)} is a value, not a section")
    node[last] = value


def build(cls: type, table: Any, path: str, where: str) -> Any:
    """A dataclass whose fields are the keys of a table, nested ones its sections.

    Args: path: dotted name of the table; empty: the whole. where: the file, for errors.
    Raises: ConfigError: as the module says, or what the dataclass itself refuses.
    """
    if not isinstance(table, dict):
        raise ConfigError(f"{where}: {path} = {shown(table)}; it is a section, written [{path}]")
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    prefix = f"{path}." if path else ""
    for key in table:
        if key not in fields:
            near = nearest(key, fields)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"{path or 'a file'} has {', '.join(fields)}"
            raise UnknownKeyError(f"{where}: unknown key {prefix}{_toml_key(key)}; {hint}", prefix + key)
    values = {}
    for name, f in fields.items():
        if name in table:
            values[name] = _convert(hints[name], table[name], prefix + name, where)
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            kind = "section" if dataclasses.is_dataclass(hints[name]) else "key"
            raise ConfigError(f"{where}: the {kind} {prefix}{name} is missing")
    try:
        return cls(**values)
    except ConfigError as error:  # of a class of several sections it speaks of the usual one
        raise ConfigError(f"{where}: {str(error).replace(getattr(cls, 'SECTION', path), path)}") from None


def _convert(hint: Any, value: Any, path: str, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), value, path, where)
    origin = typing.get_origin(hint)
    if origin is list and dataclasses.is_dataclass(section := typing.get_args(hint)[0]):
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise ConfigError(f"{where}: {path} = {shown(value)}; it is a list of sections, each written [[{path}]]")
        return [build(typing.cast(type, section), item, f"{path}[{i}]", where) for i, item in enumerate(value)]
    if origin is dict and dataclasses.is_dataclass(section := typing.get_args(hint)[1]) and isinstance(value, dict):
        return {key: build(typing.cast(type, section), item, f"{path}.{key}", where) for key, item in value.items()}
    if origin in (typing.Union, types.UnionType) and any(map(dataclasses.is_dataclass, typing.get_args(hint))):
        (section,) = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        return build(typing.cast(type, section), value, path, where)
    _check_representable(value, path, where)
    if origin is Annotated:
        return at_home(_convert(hint.__origin__, value, path, where), f"{where}: {path}")
    if origin in (typing.Union, types.UnionType):
        inner = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        if len(inner) == 1:
            return _convert(inner[0], value, path, where)
        if type(value) not in inner:
            kinds = " or ".join(_TOML_TYPES[kind] for kind in inner)
            raise ConfigError(f"{where}: {path} = {shown(value)} is {_toml_type(value)}; it must be {kinds}")
        return value
    if origin is Literal:
        choices = typing.get_args(hint)
        if not any(value == choice and type(value) is type(choice) for choice in choices):
            known = [_toml_value(choice) for choice in choices]
            near = nearest(str(value), [str(c) for c in choices])
            hint_text = f"; did you mean {_toml_value(near[0])}?" if near else ""
            raise ConfigError(f"{where}: {path} = {shown(value)}; choose one of {', '.join(known)}{hint_text}")
        return value
    if origin is dict:
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: {path} = {shown(value)} is {_toml_type(value)}; it must be a table")
        return value
    if origin is list:
        (inner,) = typing.get_args(hint)
        if not isinstance(value, list) or not all(type(item) is inner for item in value):
            kind = {str: "strings", int: "integers"}[inner]
            raise ConfigError(f"{where}: {path} = {shown(value)}; it must be an array of {kind}")
        return value
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise ConfigError(f"{where}: {path} = {shown(value)} is {_toml_type(value)}; it must be {_TOML_TYPES[hint]}")
    return value


_DEEPEST = 32
"""Tables and arrays inside of each other."""
_LONGEST = 4096
"""Characters of a string, as of a path on Linux."""


def _check_representable(value: Any, path: str, where: str, depth: int = 0) -> None:
    """Refuses values of TOML that a job could not use: they would end it later, in a library."""
    if depth > _DEEPEST:
        raise ConfigError(f"{where}: {path} is nested more than {_DEEPEST} deep; write it flatter")
    if isinstance(value, dict):
        for key, item in value.items():
            _check_representable(key, f"a key of {path}", where)
            _check_representable(item, f"{path}.{key}", where, depth + 1)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_representable(item, f"{path}[{index}]", where, depth + 1)
    elif isinstance(value, str):
        if "\0" in value or value.encode(errors="ignore").decode() != value:
            raise ConfigError(f"{where}: {path} = {shown(value)}; it must be text in UTF-8, without the character NUL")
        if len(value) > _LONGEST:
            raise ConfigError(f"{where}: {path} = {shown(value)}; it must be text of at most {_LONGEST} characters")
    elif isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise ConfigError(f"{where}: {path} = {shown(value)}; it must be an integer of 64 bits")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ConfigError(f"{where}: {path} = {value}; it must be finite")
    else:
        raise ConfigError(f"{where}: {path} = {value}; a {type(value).__name__} has no meaning here, leave it out")


_TOML_TYPES = {
    bool: "a boolean",
    int: "an integer",
    float: "a float",
    str: "a string",
    list: "an array",
    dict: "a table",
}


def _toml_type(value: Any) -> str:
    return _TOML_TYPES.get(type(value), type(value).__name__)


_SHOWN = 120
"""Characters of a value in a message."""


def shown(value: Any) -> str:
    """A value as the user wrote it; of a long one the beginning and the end."""
    if isinstance(value, dict):
        text = "{" + ", ".join(f"{_toml_key(str(key))} = {shown(item)}" for key, item in value.items()) + "}"
    elif isinstance(value, list | tuple):
        text = "[" + ", ".join(map(shown, value)) + "]"
    elif isinstance(value, int) and value.bit_length() > 64:  # Python writes no integer of 4300 digits
        text = hex(value)
    else:
        text = _toml_value(value) if isinstance(value, bool | str | int | float) else str(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 23]}...{text[-20:]}"
