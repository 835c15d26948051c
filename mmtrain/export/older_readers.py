"""What an exported folder says twice, so that transformers 4 reads from it what transformers 5 reads."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mmtrain.families.catalogue import COMPOSITES
from mmtrain.spec.hub_files import PROCESSOR_FILES, read_json

_TOKENIZER_CLASSES = {"TokenizersBackend": "PreTrainedTokenizerFast"}
"""Classes of tokenizers that transformers 4 does not have -> those that do the same in both."""

_PLAIN = ("default", "axial")
"""Types of rotary positions that transformers 4 has without `rope_scaling`."""


def add_older_keys(folder: Path) -> None:
    """Adds to the files of a folder, and of the folders in it, the keys that transformers 4 looks for.

    Source: transformers 4.57.3 and 5.23, whose keys mean the same.
    """
    changes: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]]
    changes = {"config.json": _older_config, "tokenizer_config.json": _older_tokenizer}
    for name, changed in changes.items():
        for path in folder.rglob(name):
            _write(path, changed(read_json(str(folder), path)))
    whole = folder / "processor_config.json"
    nested = read_json(str(folder), whole) if whole.exists() else {}
    for content, name in PROCESSOR_FILES.items():
        values = nested.get(f"{content}_processor")
        if isinstance(values, dict) and not (folder / name).exists():
            _write(folder / name, values)


def _older_config(values: dict[str, Any]) -> dict[str, Any]:
    """A config that has `rope_theta` and `rope_scaling` next to each `rope_parameters`."""
    values = {key: _older_config(value) if isinstance(value, dict) else value for key, value in values.items()}
    whole = COMPOSITES.get(str(values.get("model_type")))
    if whole is not None and whole.class_in_text and "text_config" in values:
        values["text_config"] = {"architectures": values.get("architectures"), **values["text_config"]}
    rope = values.get("rope_parameters")
    if not isinstance(rope, dict) or "rope_theta" not in rope:
        return values
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    plain = scaling.get("rope_type", "default") in _PLAIN and "mrope_section" not in scaling
    return values | {"rope_theta": rope["rope_theta"]} | ({} if plain else {"rope_scaling": scaling})


def _older_tokenizer(values: dict[str, Any]) -> dict[str, Any]:
    name, extra = str(values.get("tokenizer_class")), values.get("extra_special_tokens")
    if name in _TOKENIZER_CLASSES:
        values = values | {"tokenizer_class": _TOKENIZER_CLASSES[name]}
    if isinstance(extra, list):  # transformers 4 takes named tokens under this key
        values = {key: value for key, value in values.items() if key != "extra_special_tokens"}
        values["additional_special_tokens"] = extra
    return values


def _write(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
