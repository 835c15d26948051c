"""The sizes of each module of a model, by the name of the module. Pure; no weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mmtrain.config.model import ModelConfig
from mmtrain.families.catalogue import COMPOSITES, PROJECTORS
from mmtrain.families.shapes import LanguageShape, VisionShape
from mmtrain.spec.composites import projector_act
from mmtrain.spec.contrast import CONTRAST
from mmtrain.spec.model_shapes import DitShape, dit_shape, language_shape
from mmtrain.spec.vae_shapes import VaeShape, vae_shape
from mmtrain.spec.vision_shapes import vision_shape

ModuleShape = VisionShape | LanguageShape | DitShape | VaeShape

_SHAPES: Mapping[str, Callable[[ModelConfig], ModuleShape]] = {
    "vae": vae_shape,
    "language": language_shape,
    "dit": dit_shape,
    CONTRAST: language_shape,  # that of the captions' tower
}


def shape_of(model: ModelConfig, module: str) -> ModuleShape:
    """The sizes of a module of the model. Raises: ConfigError: its class does not support its config."""
    return vision_shape(model, module) if module in model.encoders else _SHAPES[module](model)


def families(model: ModelConfig) -> dict[str, str]:
    """Name of a module -> its `model_type`, each module after those that feed it."""
    return {module: shape_of(model, module).model_type for module in model.sections}


def whole_kind(model: ModelConfig) -> str:
    """The `model_type` of the whole model of transformers that the modules make together; empty: there is none.

    A class of transformers has one encoder, of which it reads certain features, and attends causally.
    """
    if len(model.encoders) != 1 or model.dit is not None or model.language.attention_mask != "causal":
        return ""
    (name,) = model.encoders
    shape, language = vision_shape(model, name), language_shape(model).model_type
    fits = (
        kind
        for kind, whole in COMPOSITES.items()
        if shape.model_type in whole.encoders and language in whole.languages and shape.final_norm == whole.final_norm
    )
    joined = ("", model.contrast.loss) if model.contrast else (model.projector_of(name).kind, "")
    return next((kind for kind in fits if (COMPOSITES[kind].projector, COMPOSITES[kind].loss) == joined), "")


def why_not_whole(model: ModelConfig) -> str:
    """Why the modules of a model with an encoder make no whole model of transformers."""
    if len(model.encoders) != 1:
        return f"transformers has no class for the encoders {', '.join(model.encoders)} (docs/models.md)"
    if model.language.attention_mask != "causal":
        return f'model.language.attention_mask = "{model.language.attention_mask}", but whole models attend causally'
    (name,) = model.encoders
    joined = f"loss {model.contrast.loss}" if model.contrast else f"projector {model.projector_of(name).kind}"
    parts = vision_shape(model, name).model_type, joined, language_shape(model).model_type
    return f"transformers has no class for {', '.join(parts)} (docs/models.md)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """The projector of an encoder's features into the language model."""

    kind: str
    """Key of `PROJECTORS`."""
    width: int
    """Columns between its two linear layers; 0: it has one."""
    hidden_act: str
    """Activation function between them."""
    outputs: int
    """Output columns."""


def projection_of(model: ModelConfig, module: str = "vision") -> Projection | None:
    """The projector of an encoder; None: the model does not have it.

    Raises: ConfigError: its activation function is unknown, or its source has a projector of another kind.
    """
    if module not in model.encoders or model.reads_pairs:
        return None
    shape, section = vision_shape(model, module), model.projector_of(module)
    outputs, merged = language_shape(model).width, shape.width * shape.features_per_token
    widths = {"merged": merged, "outputs": outputs, "": 0}
    width = section.hidden_size or widths[PROJECTORS[section.kind].inner]
    return Projection(kind=section.kind, width=width, hidden_act=projector_act(section), outputs=outputs)


def projector_sizes(model: ModelConfig, module: str = "vision") -> dict[str, int | str]:
    """The kind and sizes of a projector of our own, as an export writes them next to its weights."""
    projection, shape = projection_of(model, module), vision_shape(model, module)
    assert projection is not None
    sizes: dict[str, int | str] = {"kind": projection.kind, "language_width": projection.outputs}
    if projection.kind == "mlp":
        return sizes | {"spatial_merge": shape.merge, "hidden_size": projection.width}
    sizes |= {"vision_width": shape.width}
    chooses = PROJECTORS[projection.kind].chooses_act
    return sizes | ({"projector_hidden_act": projection.hidden_act} if chooses else {})
