"""Whole models whose folder holds several modules: where each one's config and weights are. Pure; no weights.

A section names such a folder with `pretrained` and takes its own part out of it. A whole model with one encoder alone,
whose config has just a `vision_config`, is none of `COMPOSITES`.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from mmtrain.config.model import ContrastConfig, EncoderConfig, FeatureSelect, ProjectorConfig
from mmtrain.config.toml_sections import shown
from mmtrain.errors import ConfigError
from mmtrain.families.catalogue import COMPOSITES, NETWORKS, PROJECTORS
from mmtrain.families.composite import Part, Spelling
from mmtrain.spec.config_values import check_type
from mmtrain.spec.hub_files import find_file, read_json


def class_name(kind: str) -> str:
    """The class of transformers of a whole model. Args: kind: key of `COMPOSITES`."""
    return COMPOSITES[kind].model_class


def whole_section(where: str) -> str:
    """The key in `Composite.parts` of a section: what it is for [model.encoder] it is for [model.modules.NAME]."""
    if not where.startswith("model.modules."):
        return where
    return "model.projector" if where.endswith(".projector") else "model.encoder"


def part_config(where: str, values: Mapping[str, Any]) -> dict[str, Any] | None:
    """The config of a section's module inside of a whole model's config; None: the config is not of a whole model.

    Raises: ConfigError: the whole model's config lacks it.
    """
    part = _part(where, values)
    if part is None:
        return None
    config = (values.get(part.older) if part.older else None) or values.get(part.config)
    if config is None and part.flat:
        config = {key: value for key, value in values.items() if key not in ("model_type", "vision_config")}
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"{where}.pretrained: the config.json of this {values['model_type']} model has no {part.config}; "
            "choose a folder that transformers saved"
        )
    switches = {key: True for key in part.shared if values.get(key) is True}
    switches |= {key: values.get(key, default) for key, default in part.decided.items()}
    return {"model_type": part.model_type, **config, **switches, **part.fixed}


def part_spellings(where: str, source: str) -> tuple[Spelling, ...]:
    """How the weights of a section's module are called in a whole model's folder; empty: it is no whole model's.

    Args: source: folder or hub id.
    """
    part = _part(where, _read(where, source))
    return part.spellings if part else ()


def spellings_of(where: str, source: str, model_type: str) -> tuple[Spelling, ...]:
    """How the weights of a section's network may be called in a folder or on the hub, also in a folder of its own."""
    return part_spellings(where, source) or NETWORKS[model_type].spellings


def occurring(on_disk: Collection[str], spellings: Sequence[Spelling]) -> Spelling:
    """The first spelling that occurs on disk; if none does, that of a module by itself."""
    found = (s for s in spellings if any(name.startswith(next(iter(s))) for name in on_disk))
    return next(found, {"": ""})


def part_names(on_disk: Collection[str], spelling: Spelling) -> dict[str, str]:
    """Name in the class of one module -> name on disk, of its part of a larger model."""
    pairs = ((name, old, new) for name in on_disk for old, new in spelling.items())
    return {new + name.removeprefix(old): name for name, old, new in pairs if name.startswith(old)}


def check_embeds(where: str, source: str, model_type: str, on_disk: Collection[str]) -> None:
    """Refuses stored weights of a tower without what makes its embedding.

    Args: where: its section. source: folder or hub id. on_disk: the names of all weights there.
    Raises: ConfigError.
    """
    embeds = NETWORKS[model_type].embeds
    names = part_names(on_disk, occurring(on_disk, spellings_of(where, source, model_type)))
    if not any(name.startswith(f"{embeds}.") for name in names):
        raise ConfigError(
            f"{where}.pretrained = {shown(source)} has no weights of {embeds}, which makes the embedding of a "
            f'{model_type}; name a folder of a tower with it or of a whole model, or set weights = "random"'
        )


def check_contrast(section: ContrastConfig) -> None:
    """Refuses stored parameters of another loss. Raises: ConfigError."""
    if not section.pretrained:
        return
    stored = _read("model.contrast", section.pretrained)
    whole = COMPOSITES.get(str(stored.get("model_type")))
    loss = whole.loss if whole else stored.get("loss")
    if loss != section.loss:
        raise ConfigError(
            f"model.contrast.pretrained = {shown(section.pretrained)} has "
            + (f'the parameters of the loss "{loss}", not of "{section.loss}"' if loss else "no parameters of a loss")
            + "; remove it, for parameters as they are in new models"
        )


class Features(NamedTuple):
    """The features of an encoder that the projector reads, in the words of `EncoderConfig`."""

    layer: int
    """The layer whose output is read. 0: the output of the encoder."""
    select: FeatureSelect
    """The selected rows. auto: all patches without a class token."""


def selected_features(section: EncoderConfig) -> Features:
    """The features that the projector reads, from the section, or from the whole model that it names.

    Raises: ConfigError: the whole model joins the outputs of several layers.
    """
    source = f"model.encoder.pretrained = {shown(section.pretrained)}"
    values = _settings(section.pretrained) if section.pretrained else {}
    layer = section.feature_layer or values.get("vision_feature_layer", 0)
    if not isinstance(layer, int):
        raise ConfigError(
            f"{source}: vision_feature_layer = {shown(layer)} joins the outputs of several blocks, which is not "
            "supported; choose one with model.encoder.feature_layer"
        )
    if section.feature_select != "auto":
        return Features(layer, section.feature_select)
    select = values.get("vision_feature_select_strategy", "auto")
    if select not in ("auto", "default", "full"):
        raise ConfigError(
            f"{source}: vision_feature_select_strategy = {shown(select)}; choose one with model.encoder.feature_select"
        )
    return Features(layer, select)


def projector_act(section: ProjectorConfig) -> str:
    """The activation function between the two linear layers of a projector.

    Raises: ConfigError: it is unknown, or `pretrained` names a whole model with another kind of projector.
    """
    source = f"model.projector.pretrained = {shown(section.pretrained)}"
    stored = _read("model.projector", section.pretrained) if section.pretrained else {}
    kind = str(stored.get("model_type"))
    if kind in COMPOSITES and COMPOSITES[kind].projector != section.kind:
        raise ConfigError(
            f'{source} is a {kind} model, whose projector is not of kind "{section.kind}"; set kind = '
            f'"{COMPOSITES[kind].projector}"'
        )
    if stored.get("multimodal_projector_bias") is False:
        raise ConfigError(
            f"{source}: multimodal_projector_bias = false; only projectors with biases are supported, choose another "
            "model"
        )
    if not PROJECTORS[section.kind].chooses_act:
        return "gelu"
    act = section.hidden_act or stored.get("projector_hidden_act", "gelu")
    check_type("model.projector", "hidden_act", act, "gelu")
    return str(act)


def _settings(source: str) -> dict[str, Any]:
    """The settings of a whole model that join its parts; empty: the folder is not of a whole model."""
    values = _read("model.encoder", source)
    composite = COMPOSITES.get(str(values.get("model_type")))
    return {key: values.get(key, default) for key, default in composite.defaults.items()} if composite else {}


def _part(where: str, values: Mapping[str, Any]) -> Part | None:
    composite = COMPOSITES.get(str(values.get("model_type")))
    return composite.parts.get(whole_section(where)) if composite else None


def _read(where: str, source: str) -> dict[str, Any]:
    key = f"{where}.pretrained"
    path = find_file(key, source, "config.json")
    assert path is not None
    return read_json(key, path)
