"""[model] pretrained: a whole model by one id or folder. Pure; reads at most its config.json."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmtrain.config.model import WHOLE_LOSSES, WHOLE_PROJECTORS
from mmtrain.config.toml_sections import shown
from mmtrain.errors import ConfigError

SOUND = "audio"
"""Name of the encoder of a whole model that hears, unless the job calls it otherwise."""
_HEARS = ("qwen2_audio",)
"""Values of `model_type` of whole models whose encoder is [model.modules.audio]."""
_HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
_SOUND_TABLE = {"kind": "audio", "token": "<|AUDIO|>"}


def with_parts(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The table of a job in which the sections of the model's parts, and the tokenizer, name the whole model.

    A section that has a source of its own keeps it. The projector is then the encoder's own merger, or of the
    kind in `WHOLE_PROJECTORS`, unless its `kind` or the encoder's section says otherwise; of such a kind it is that of
    the whole model. A whole model that hears has [model.modules.audio] with its projector instead of [model.encoder]:
    by its config.json, or where the job has a section of kind "audio" without a source. Two towers, which have
    [model.contrast], or come both from a whole model of towers, have no projector; their loss with its parameters is
    that of the whole model, unless the section names another.

    Args: where: the file, for errors.
    Raises: ConfigError: neither the encoder nor the language model is that of the whole model.
    """
    model = table.get("model")
    whole = model.get("pretrained") if isinstance(model, Mapping) else None
    if not isinstance(whole, str) or not whole:  # other types are refused later
        return dict(table)
    assert isinstance(model, Mapping)
    hears = _hearing(model, whole)
    section = model.get("modules", {}).get(hears, {}) if hears else model.get("encoder", {})
    encoder, language = (_part(part, whole) for part in (section, model.get("language", {})))
    if all(_source(part) != whole for part in (encoder, language)):
        own = f"[model.modules.{hears}]" if hears else "[model.encoder]"
        raise ConfigError(
            f"{where}: model.pretrained = {shown(whole)} has no effect: {own} and [model.language] name "
            'other models; set it to "", or remove what these name'
        )
    tokenizer = table.get("tokenizer", {})
    if isinstance(tokenizer, Mapping):
        tokenizer = {"path": whole, **tokenizer}
    if hears:
        if _source(encoder) == whole:
            projector = encoder.get("projector", {})
            projector = {"kind": "linear", **projector} if isinstance(projector, Mapping) else projector
            encoder = {**_SOUND_TABLE, **encoder, "projector": _of_whole(projector, ("linear",), whole)}
        parts = {"modules": {**model.get("modules", {}), hears: encoder}}
    elif "contrast" in model or (_source(encoder) == _source(language) and _loss(whole)):
        parts = {"encoder": encoder, "contrast": _contrast(model.get("contrast", {}), whole)}
    else:
        projector = model.get("projector", {})
        if _source(encoder) == whole and isinstance(projector, Mapping):
            if "kind" not in projector:
                projector = {"kind": WHOLE_PROJECTORS.get(str(_model_type(whole)), "native"), **projector}
            projector = _of_whole(projector, (*WHOLE_PROJECTORS.values(),), whole)
        parts = {"encoder": encoder, "projector": projector}
    return {**table, "model": {**model, **parts, "language": language}, "tokenizer": tokenizer}


def _loss(whole: str) -> str:
    """The loss of a whole model of two towers; empty: it is none."""
    return WHOLE_LOSSES.get(str(_model_type(whole)), "")  # type: ignore[return-value]


def _contrast(section: Any, whole: str) -> Any:
    """The section of the loss of two towers, whose parameters are those of the whole model if it has that loss."""
    loss = _loss(whole)
    if not loss or not isinstance(section, Mapping):
        return section
    section = {"loss": loss, **section}
    return {"pretrained": whole, **section} if section["loss"] == loss else section


def _hearing(model: Mapping[str, Any], whole: str) -> str:
    """The name of the encoder of a whole model that hears; empty: it sees."""
    modules = model.get("modules", {})
    if "encoder" in model or not isinstance(modules, Mapping):
        return ""
    for name, section in modules.items():
        if isinstance(section, Mapping) and section.get("kind") == "audio" and (_source(section) or whole) == whole:
            return str(name)
    return SOUND if _model_type(whole) in _HEARS else ""


def _model_type(whole: str) -> Any:
    """The `model_type` in the config.json of a whole model; None: it cannot be read, as is told where the config is
    needed."""
    try:
        path = _hub_config(whole) or Path(whole).expanduser() / "config.json"
        values = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return None
    return values.get("model_type") if isinstance(values, Mapping) else None


def _hub_config(source: str) -> Path | None:
    """The config.json of a hub id, fetched if it is not cached; None: it is no id, or cannot be had."""
    folder = Path(source).parent  # of an id that is a misspelt path
    if not _HUB_ID.fullmatch(source) or Path(source).exists() or (folder != Path() and folder.is_dir()):
        return None
    from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache

    cached = try_to_load_from_cache(source, "config.json")
    if isinstance(cached, str):
        return Path(cached)
    try:
        HfApi().model_info(source, timeout=10)  # the download would retry for a minute without network
        return Path(hf_hub_download(source, "config.json"))
    except Exception:  # no network, HF_HUB_OFFLINE, no such model, no permission
        return None


def _of_whole(projector: Any, kinds: Sequence[str], whole: str) -> Any:
    """The section of a projector, which is that of the whole model if it is of a kind that such a model has."""
    if isinstance(projector, Mapping) and projector["kind"] in kinds:
        return {"pretrained": whole, **projector}
    return projector


def _part(section: Any, whole: str) -> Any:
    if not isinstance(section, Mapping) or _source(section):
        return section
    return {**section, "pretrained": whole}


def _source(section: Any) -> Any:
    return (section.get("pretrained") or section.get("config")) if isinstance(section, Mapping) else None
