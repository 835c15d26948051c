"""Whole models whose folder holds several modules: where each one's config and weights are. Pure; no weights.

A section names such a folder with `pretrained` and takes its own part out of it. A whole model with one encoder alone,
whose config has just a `vision_config`, needs no entry here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mmtrain.config.model import EncoderConfig, FeatureSelect, ProjectorConfig
from mmtrain.config.toml_sections import shown
from mmtrain.errors import ConfigError
from mmtrain.spec.config_values import check_type
from mmtrain.spec.hub_files import find_file, read_json

Spelling = Mapping[str, str]
"""How names of stored weights begin -> how they begin in the class of the part alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One module inside of a whole model."""

    config: str = ""
    """Key of its config; empty: its settings are keys of the whole model's config."""
    flat: bool = False
    """Whether older files have its settings as keys of the whole model's config."""
    model_type: str = ""
    """Of a config that names none."""
    shared: tuple[str, ...] = ()
    """Switches that are on for the part if they are on for the whole model."""
    decided: Mapping[str, Any] = field(default_factory=dict)
    """Keys whose value in the whole model's config alone counts, with the defaults of its class."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Keys that the class of the whole model does not read, with the values of what it does."""
    spellings: tuple[Spelling, ...]
    """Its names in stored weights; the first one that occurs counts."""
    written: int = 0
    """Which of them an export of a part from elsewhere has."""
    newer: tuple[int, ...] = ()
    """Which of them transformers 5 alone reads; an export of such a part has that `written`."""
    in_class: int
    """Which of them the class of the whole model has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Composite:
    """A whole model of several modules."""

    parts: Mapping[str, Part]
    """Section -> its part. Of every encoder, also [model.modules.NAME], it is model.encoder; see `whole_section`."""
    class_name: str
    """How the names of its classes begin."""
    encoders: tuple[str, ...]
    """Families of encoders that it can have."""
    languages: tuple[str, ...]
    """Families of language models that it can have."""
    projector: str
    """Its kind of projector."""
    final_norm: bool = False
    """Whether its projector reads what the encoder's final norm makes."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the whole model's config that concern how parts are joined, with the defaults of its class."""


def _removed(*beginnings: str) -> tuple[Spelling, ...]:
    return tuple({beginning: ""} for beginning in beginnings)


def _qwen_vl(name: str, class_name: str, *, older: bool = True) -> Composite:
    """Args: older: its files may have names of weights, and a form of the config, that are older than its class; then
    the text config, too, may say that its head is tied."""
    tied = "tie_word_embeddings"
    return Composite(
        class_name=class_name,
        encoders=(f"{name}_vision",),
        languages=(f"{name}_text",),
        projector="native",
        parts={
            "model.encoder": Part(
                config="vision_config",
                model_type=f"{name}_vision",
                spellings=_removed("model.visual.", "visual.")[: 1 + older],
                written=int(older),
                in_class=0,
            ),
            "model.language": Part(
                config="text_config",
                flat=older,
                model_type=f"{name}_text",
                shared=(tied,) if older else (),
                decided={} if older else {tied: False},
                spellings=(
                    {"model.language_model.": "model.", "lm_head.": "lm_head."},
                    {"model.": "model.", "lm_head.": "lm_head."},
                )[: 1 + older],
                written=int(older),
                in_class=0,
            ),
        },
    )


_PROJECTOR = Part(spellings=_removed("multi_modal_projector.", "model.multi_modal_projector."), in_class=1)
_LANGUAGE: Mapping[str, Any] = {
    "spellings": ({"language_model.": ""}, {"model.language_model.": "model.", "lm_head.": "lm_head."}),
    "in_class": 1,
}
"""Names of a language model whose class is a part of the whole one's."""

COMPOSITES: Mapping[str, Composite] = {
    "qwen2_vl": _qwen_vl("qwen2_vl", "Qwen2VL"),
    "qwen2_5_vl": _qwen_vl("qwen2_5_vl", "Qwen2_5_VL"),
    "qwen3_vl": _qwen_vl("qwen3_vl", "Qwen3VL", older=False),
    "llava": Composite(
        class_name="Llava",
        encoders=("clip_vision_model", "siglip_vision_model"),
        languages=("llama", "qwen2", "qwen3", "mistral"),
        projector="llava",
        parts={
            "model.encoder": Part(
                config="vision_config",
                model_type="clip_vision_model",
                spellings=_removed(
                    "vision_tower.vision_model.",
                    "model.vision_tower.vision_model.",
                    "vision_tower.",
                    "model.vision_tower.",
                ),
                newer=(2, 3),
                in_class=3,
            ),
            "model.projector": _PROJECTOR,
            "model.language": Part(
                config="text_config", model_type="llama", shared=("tie_word_embeddings",), **_LANGUAGE
            ),
        },
        defaults={
            "vision_feature_layer": -2,
            "vision_feature_select_strategy": "default",
            "projector_hidden_act": "gelu",
            "multimodal_projector_bias": True,
        },
    ),
    "qwen2_audio": Composite(
        class_name="Qwen2Audio",
        encoders=("qwen2_audio_encoder",),
        languages=("qwen2",),
        projector="linear",
        final_norm=True,
        parts={
            "model.encoder": Part(
                config="audio_config",
                model_type="qwen2_audio_encoder",
                spellings=_removed("audio_tower.", "model.audio_tower."),
                in_class=1,
            ),
            "model.projector": _PROJECTOR,
            "model.language": Part(
                config="text_config", model_type="qwen2", fixed={"tie_word_embeddings": False}, **_LANGUAGE
            ),
        },
    ),
}
"""By the `model_type` of the whole model."""


def class_name(kind: str) -> str:
    """The class of transformers of a whole model. Args: kind: key of `COMPOSITES`."""
    return f"{COMPOSITES[kind].class_name}ForConditionalGeneration"


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
    config = values.get(part.config)
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


class Features(NamedTuple):
    """Which features of an encoder the projector reads, in the words of `EncoderConfig`."""

    layer: int
    """0: the output of the encoder."""
    select: FeatureSelect
    """auto: all patches without a class token."""


def selected_features(section: EncoderConfig) -> Features:
    """The features that the projector reads, from the section, or from the LLaVA model that it names.

    Raises: ConfigError: the LLaVA model joins the outputs of several layers.
    """
    source = f"model.encoder.pretrained = {shown(section.pretrained)}"
    values = _settings("model.encoder", section.pretrained) if section.pretrained else {}
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
    if section.kind != "llava":
        return "gelu"
    act = section.hidden_act or stored.get("projector_hidden_act", "gelu")
    check_type("model.projector", "hidden_act", act, "gelu")
    return str(act)


def _settings(where: str, source: str) -> dict[str, Any]:
    """The settings of a whole model that join its parts; empty: the folder is not of a whole model."""
    values = _read(where, source)
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
