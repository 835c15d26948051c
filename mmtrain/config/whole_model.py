"""[model] pretrained: a whole vision-language model by one id or folder. Pure; reads no file."""

from collections.abc import Mapping
from typing import Any

from mmtrain.config.toml_sections import shown
from mmtrain.errors import ConfigError


def with_parts(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The table of a job in which the sections of the model's parts, and the tokenizer, name the whole model.

    A section that has a source of its own keeps it. The projector is then the encoder's own merger, unless its `kind`
    or the encoder's section says otherwise; of kind `llava` it is that of the whole model.

    Args: where: the file, for errors.
    Raises: ConfigError: neither the encoder nor the language model is that of the whole model.
    """
    model = table.get("model")
    whole = model.get("pretrained") if isinstance(model, Mapping) else None
    if not isinstance(whole, str) or not whole:  # other types are refused later
        return dict(table)
    assert isinstance(model, Mapping)
    parts = {name: _part(model.get(name, {}), whole) for name in ("encoder", "language")}
    taken = [name for name, section in parts.items() if _source(section) == whole]
    if not taken:
        raise ConfigError(
            f"{where}: model.pretrained = {shown(whole)} has no effect: [model.encoder] and [model.language] name "
            'other models; set it to "", or remove what these name'
        )
    projector, tokenizer = model.get("projector", {}), table.get("tokenizer", {})
    if "encoder" in taken and isinstance(projector, Mapping):
        projector = {"kind": "native", **projector}
        if projector["kind"] == "llava":
            projector = {"pretrained": whole, **projector}
    if isinstance(tokenizer, Mapping):
        tokenizer = {"path": whole, **tokenizer}
    return {**table, "model": {**model, **parts, "projector": projector}, "tokenizer": tokenizer}


def _part(section: Any, whole: str) -> Any:
    if not isinstance(section, Mapping) or _source(section):
        return section
    return {**section, "pretrained": whole}


def _source(section: Any) -> Any:
    return (section.get("pretrained") or section.get("config")) if isinstance(section, Mapping) else None
