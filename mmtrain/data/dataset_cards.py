"""What a data set's card (README.md, .huggingface.yaml) may name: files of its own folder, and nothing else."""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mmtrain.errors import ConfigError, one_line, shown

_CARD, _YAML = "README.md", ".huggingface.yaml"
_NAMING = ("data_files", "data_dir")
"""Keys of a config in a card that name files."""
_ELSEWHERE = re.compile(r"[/\\~]|[\w+.-]*:")
"""How a path begins that is not of the data set's folder: at the root, in a home folder, on a server or drive."""


def check_card(key: str, folder: Path) -> None:
    """Checks the card of a local folder before `datasets` looks for what it names.

    Args: key: of the config that names the folder, with its value, for errors.
    Raises: ConfigError: it names addresses or files outside of the folder, or cannot be read.
    """
    for name in (_CARD, _YAML):
        if (folder / name).is_file():
            for named in _named(key, folder / name):
                if is_outside(named):
                    raise _outside(key, f"its {name} names {shown(named)}")


def is_outside(named: str) -> bool:
    """Whether a path in a file of a data set is not one of its folder."""
    return "::" in named or bool(_ELSEWHERE.match(named)) or ".." in re.split(r"[/\\]", named)


def check_files(key: str, root: str, files: Mapping[Any, Iterable[Any]]) -> None:
    """Checks the files of each split that `datasets` found. Args: root: how paths of the data set's own files begin.

    Raises: ConfigError: one is outside.
    """
    for file in (str(file) for names in files.values() for file in names):
        if not file.startswith(root):
            raise _outside(key, f"it names {shown(file)}")


def _named(key: str, path: Path) -> Iterator[str]:
    """The texts under `data_files` and `data_dir` in a card."""
    import yaml
    from huggingface_hub import DatasetCard

    try:
        if path.name == _CARD:
            values = DatasetCard.load(path, ignore_metadata_errors=True).data.to_dict()
        else:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except Exception as error:  # of YAML, of its values, of the text
        raise ConfigError(f"{key}: its {path.name} cannot be read: {one_line(error, 200)}; correct it") from None
    configs = values.get("configs") if isinstance(values, Mapping) else None
    for config in configs if isinstance(configs, list) else []:
        for name in _NAMING if isinstance(config, Mapping) else ():
            yield from _texts(config.get(name))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts(list(value.values()))
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _outside(key: str, what: str) -> ConfigError:
    return ConfigError(
        f"{key} is refused: {what}, which is outside of the data set; a data set's card names files of its own folder, "
        "copy the file there, or make it another source"
    )
