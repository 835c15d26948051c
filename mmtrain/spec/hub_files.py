"""Files that a config names by a local path or by an id on the Hugging Face hub. Pure."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmtrain.errors import ConfigError, nearest, one_line, shown

_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
"""Ids on the hub: OWNER/NAME, or NAME."""
PROCESSOR_FILES = {"image": "preprocessor_config.json", "video": "video_preprocessor_config.json"}
"""Content -> the file of its Hugging Face processor."""
_MOST_BYTES = 2**28
"""The most bytes of a file of JSON: the largest tokenizers and indexes have a tenth of it."""
_DATA_FILES = (".parquet", ".json", ".jsonl")


def local_path(key: str, value: str) -> Path | None:
    """The existing file or folder that a value names, with `~` expanded; None: it may be an id on the hub.

    Args: key: key of the config with this value, for errors.
    Raises: ConfigError: it does not exist and cannot be an id, or its owner is a local folder: a typing error.
    """
    path = Path(os.path.expanduser(value))
    if os.path.exists(path):  # it is false for names that cannot exist
        return path
    if str(path).startswith("~"):
        raise ConfigError(
            f"{key} = {shown(value)} does not exist: there is no user {path.parts[0][1:]!r} with a home folder; write "
            "the path in full"
        )
    if "://" in value:
        raise ConfigError(f"{key} = {shown(value)} is an address; download what it names, and name that file or folder")
    instead = _what_exists(path)
    if value.startswith((".", "/", "~")) or path.suffix in _DATA_FILES or not _ID.fullmatch(value):
        raise ConfigError(f"{key} = {shown(value)} does not exist; {instead}")
    if "/" in value and path.parent.is_dir():
        raise ConfigError(
            f"{key} = {shown(value)} does not exist; {instead} (it is not looked for on the hub, since "
            f"{str(path.parent)!r} is a folder here)"
        )
    return None


def unreachable(source: str) -> str:
    """The reason why the hub cannot be reached for a model; empty if it answers.

    There is one request with a time-out of 10 s; the hub's client would retry for a minute.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().model_info(source, timeout=10)
    except HfHubHTTPError:  # the hub answered; fetching the file explains the answer
        pass
    except Exception as error:  # no network, a time-out, HF_HUB_OFFLINE
        return one_line(error).rstrip(".")
    return ""


def find_file(key: str, source: str, name: str, *, optional: bool = False) -> Path | None:
    """The path of one file of a local folder or a hub id (fetched into the local cache), or None if optional
    and absent.

    Without network a file that a cached model lacks counts as absent, as in transformers.

    Args: key: key of the config that names the source, for errors.
    Raises: ConfigError: the folder, id or file does not exist, or the hub cannot be reached.
    """
    folder = local_path(key, source)
    if folder is not None:
        if (folder / name).is_file():
            return folder / name
        if not folder.is_dir():
            raise ConfigError(f"{key} = {shown(source)} is a file; name the folder that it is in")
        if optional:
            return None
        raise ConfigError(f"{key} = {shown(source)}: the folder has no {name}; choose another folder")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    offline = unreachable(source)
    try:
        return Path(hf_hub_download(source, name, local_files_only=bool(offline)))
    except Exception as error:  # the hub client raises errors of its own, of its transport and of the OS
        unknown = isinstance(error, LocalEntryNotFoundError)  # a subclass of EntryNotFoundError
        if optional and isinstance(error, EntryNotFoundError) and (not unknown or (offline and cached_folder(source))):
            return None
        no_path, reason = no_folder(source), offline or one_line(error, 300)
        raise ConfigError(
            f"{key} = {shown(source)}: {no_path}, and {name} could not be fetched from the hub "
            f"({reason}); give a folder, or an id that is cached or can be reached"
        ) from error


def fetched(source: str, name: str, *, offline: bool) -> Path | None:
    """A file of a hub id in the local cache, fetched unless `offline`; None: the model has none, or it is not cached.

    Raises: errors of the hub's client.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return Path(hf_hub_download(source, name, local_files_only=offline))
    except EntryNotFoundError:
        return None


def cached_folder(source: str) -> Path | None:
    """The folder in the local cache with the files of a hub id; None: it has none of them."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(source, local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def read_json(key: str, path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Args: key: key of the config that names the file, for errors.
    Raises: ConfigError: the file is not valid JSON, holds no object, or is larger than any that a model has.
    """
    if path.stat().st_size > _MOST_BYTES:
        raise ConfigError(f"{key}: {path} has over {_MOST_BYTES:,} bytes; fetch it again from the model's own authors")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # of JSON, UTF-8, a number of 4300 digits, or nesting
        raise ConfigError(f"{key}: {path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{key}: {path} holds no JSON object")
    return values


def processor_config(key: str, source: str, content: str = "image") -> Mapping[str, Any] | None:
    """The image or video processor of a folder or hub id; None if it has none. As in transformers, that inside of a
    processor_config.json comes before a file of its own.

    Args: key: of the config that names the source, for errors. content: "image" or "video".
    Raises: ConfigError: the source does not exist, or a file is not valid JSON.
    """
    names = ("processor_config.json", PROCESSOR_FILES[content])
    whole, alone = (find_file(key, source, name, optional=True) for name in names)
    nested = read_json(key, whole).get(f"{content}_processor") if whole else None
    if isinstance(nested, Mapping):
        return nested
    return read_json(key, alone) if alone else None


def no_folder(source: str) -> str:
    """A message that a value is no existing path, with a similar name if there is one."""
    near = near_name(Path(source))
    return f"there is no such folder here{f' ({near})' if near else ''}"


def near_name(path: Path) -> str:
    """A question with a name similar to that of a path that does not exist; empty if there is none."""
    folder, missing = _nearest_folder(path)
    near = nearest(missing, _names(folder))
    return f"did you mean {folder / near[0]}?" if near else ""


def _what_exists(path: Path) -> str:
    """A hint for a path that does not exist: a similar name, or the names in its folder."""
    folder, missing = _nearest_folder(path)
    names = [name for name in _names(folder) if not name.startswith(".")]
    listed = ", ".join([*names[:10], "..."] if len(names) > 10 else names) or "no file"
    nearest = "" if missing == path.name else "the nearest folder that exists, "
    return near_name(path) or f"{nearest}{folder.absolute()}{',' if nearest else ''} has {listed}"


def _nearest_folder(path: Path) -> tuple[Path, str]:
    """The innermost existing folder of a path, and the next name of the path, which it does not have."""
    folder = next((parent for parent in path.parents if os.path.isdir(parent)), Path())
    return folder, path.relative_to(folder).parts[0] if path.parts else ""


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
