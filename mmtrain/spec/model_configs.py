"""The complete config of the model that a section names. Pure; no weights.

A section `[model.encoder]`, `[model.language]`, `[model.dit]` or `[model.vae]` names a family by an inline Hugging Face
config or by the `config.json` of a folder or hub id.
"""

import importlib.util
import pkgutil
import re
from collections.abc import Mapping
from typing import Any

from mmtrain.config.model import DitConfig, EncoderConfig, LanguageConfig, VaeConfig
from mmtrain.config.toml_sections import shown
from mmtrain.errors import ConfigError, nearest
from mmtrain.families.catalogue import COMPOSITES, DITS, ENCODERS, LANGUAGES, VAES
from mmtrain.families.family import Network, named
from mmtrain.families.wan import IMAGE_KEYS
from mmtrain.spec.composites import part_config
from mmtrain.spec.config_values import check_dropout, check_rope, check_type
from mmtrain.spec.hub_files import find_file, read_json

_ROLES: dict[str, tuple[str, Mapping[str, Network]]] = {
    "model.encoder": ("encoder", ENCODERS),
    "model.language": ("language model", LANGUAGES),
    "model.dit": ("diffusion transformer", DITS),
    "model.vae": ("VAE", VAES),
}
"""Section of the config -> the kind of model that it names, and the supported families."""


def vae_config(section: VaeConfig) -> dict[str, Any]:
    """The complete diffusers config of a VAE; its `model_type` is a key of `VAES`.

    Missing keys have the defaults of the diffusers class.
    Raises: ConfigError: there is no such config, or it has an unknown family or key, or a wrong type.
    """
    values, inline = _read("model.vae", section)
    model_type = values.get("model_type") or values.get("_class_name", "")
    return _complete("model.vae", values, model_type, strict=inline)


def dit_config(section: DitConfig) -> dict[str, Any]:
    """The complete diffusers config of a diffusion transformer; its `model_type` is a key of `DITS`.

    Missing keys have the defaults of the diffusers class.
    Raises: ConfigError: there is no such config, or it has an unknown family or key, a wrong type, or belongs to a
        model that also reads images.
    """
    values, inline = _read("model.dit", section)
    model_type = values.get("model_type") or values.get("_class_name", "")
    config = _complete("model.dit", values, model_type, strict=inline)
    for key in IMAGE_KEYS:
        if config.pop(key, None) is not None:
            raise ConfigError(
                f"model.dit: {key} = {shown(values[key])} is of a model that also reads images; only text-to-video "
                "models are supported, remove it or choose another model"
            )
    patch = config["patch_size"] = tuple(config["patch_size"])
    if len(patch) != 3 or 0 in patch:
        raise ConfigError(
            f"model.dit: patch_size = {shown(patch)}; it is [frames, rows, columns] of latents, each at least 1"
        )
    if config["qk_norm"] != "rms_norm_across_heads":
        raise ConfigError(
            f"model.dit: qk_norm = {shown(config['qk_norm'])}, but the class always normalizes queries and keys across "
            'heads; write "rms_norm_across_heads", or leave it out'
        )
    return config


def encoder_config(section: EncoderConfig, where: str = "model.encoder") -> dict[str, Any]:
    """The complete Hugging Face config of an encoder; its `model_type` is a key of `ENCODERS`.

    Missing keys have the defaults of the Hugging Face class. Of a whole model with a
    `vision_config` it is that; the config of another one, which names this encoder, is also that of its encoder.
    Raises: ConfigError: there is no such config, or it has an unknown family or key, a wrong type, or dropout.
    """
    values, inline = _read(where, section)
    model_type = values.get("model_type", "")
    if isinstance(values.get("vision_config"), dict):
        values = values["vision_config"]
        model_type = values.get("model_type", model_type)
    return _complete(where, values, model_type, strict=inline)


def language_config(section: LanguageConfig) -> dict[str, Any]:
    """The complete Hugging Face config of a language model; its `model_type` is a key of `LANGUAGES`.

    Of a whole model of `composites` it is the `text_config`, or the part outside of `vision_config` in older files.
    Raises: ConfigError: there is no such config, or it has an unknown family or key, a wrong type, dropout, layers with
        partial attention, or positions on axes that the family does not have.
    """
    values, inline = _read("model.language", section)
    model_type = values.get("model_type", "")
    if {"text_config", "vision_config"} & set(values):
        raise ConfigError(
            f"model.language: {shown(section.pretrained or 'config')} is a whole model with model_type = "
            f"{shown(model_type)}; supported whole models are {', '.join(COMPOSITES)}. Name one of them, or a "
            "language model by itself"
        )
    config = _complete("model.language", values, model_type, strict=inline)
    family = LANGUAGES[config["model_type"]]
    if config.get("use_sliding_window"):
        raise ConfigError(
            "model.language: use_sliding_window = true; packed documents attend in full here. Set it to false"
        )
    if family.sliding_window:
        config.setdefault("sliding_window", family.sliding_window)
    if set(config.get("layer_types") or ()) - {"full_attention"}:
        raise ConfigError(
            f"model.language: layer_types = {shown(config['layer_types'])}; packed documents attend in full here, in "
            'every layer. Write "full_attention" for each, or leave the key out'
        )
    for key in ("rope_parameters", "rope_scaling"):
        check_rope(f"model.language: {key}", config.get(key) or {}, family.position_axes)
    return config


def _read(where: str, section: EncoderConfig | LanguageConfig | DitConfig | VaeConfig) -> tuple[dict[str, Any], bool]:
    """The raw config, and whether it is inline (then its keys are checked)."""
    if section.config:
        return dict(section.config), True
    key = f"{where}.pretrained"
    path = find_file(key, section.pretrained, "config.json")
    assert path is not None
    values = read_json(key, path)
    return part_config(where, values) or values, False


def _complete(where: str, values: dict[str, Any], model_type: Any, *, strict: bool) -> dict[str, Any]:
    """The values with aliases replaced by their keys, with `model_type` and all defaults."""
    _, families = _ROLES.get(where, _ROLES["model.encoder"])
    names = named(families)
    if not isinstance(model_type, str) or model_type not in names:
        raise _unknown_family(where, model_type)
    family = families[names[model_type]]
    keys = {**family.defaults, **family.optional}
    config = dict(family.defaults)
    for key, value in values.items():
        name = family.aliases.get(key, key)
        if key == "model_type":
            continue
        if strict and name not in keys:
            near = nearest(key, [*keys, *family.aliases])
            hint = f"did you mean {shown(near[0])}?" if near else f"{names[model_type]} has {', '.join(keys)}"
            raise ConfigError(f"{where}.config: unknown key {shown(key)}; {hint}")
        if name in family.defaults or (value is not None and keys.get(name) is not None):
            check_type(where, key, value, keys[name])
        config[name] = value
    config["model_type"] = names[model_type]
    for key in family.dropout:
        check_dropout(where, key, config[key])
    return config


def _unknown_family(where: str, model_type: Any) -> ConfigError:
    """The error for an unsupported `model_type`.

    Another one is suggested only for a typing error: "qwen3" is no misspelt "qwen2", nor "vivit" a "vit".
    """
    kind, families = _ROLES.get(where, _ROLES["model.encoder"])
    names, wrong_type, hint = list(named(families)), str(model_type), ""
    near = nearest(wrong_type, names, cutoff=0.75)
    if near and re.findall(r"\d+", wrong_type) == re.findall(r"\d+", near[0]) and wrong_type not in _library_families():
        hint = f"; did you mean {shown(near[0])}?"
    for section, (_, other_families) in _ROLES.items():
        if wrong_type in named(other_families):
            hint = f"; [{section}] takes it"
    return ConfigError(
        f"{where}: model_type = {shown(model_type)} is no supported {kind}; supported are {', '.join(names)}{hint}"
    )


def _library_families() -> set[str]:
    """Names of the model families of the transformers library, which is not imported."""
    spec = importlib.util.find_spec("transformers")
    folders = [f"{folder}/models" for folder in (spec and spec.submodule_search_locations) or ()]
    return {module.name for module in pkgutil.iter_modules(folders)}
