"""The sizes of each module of a model, by the name of the module. Pure; no weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mmtrain.config.model import ModelConfig
from mmtrain.spec.shapes import DitShape, LanguageShape, VisionShape, dit_shape, language_shape, vision_shape
from mmtrain.spec.vae_shapes import VaeShape, vae_shape

Shape = VisionShape | LanguageShape | DitShape | VaeShape

_SHAPES: Mapping[str, Callable[[ModelConfig], Shape]] = {
    "vae": vae_shape,
    "vision": vision_shape,
    "language": language_shape,
    "dit": dit_shape,
}


def shape_of(model: ModelConfig, module: str) -> Shape:
    """The sizes of a module of the model. Raises: ConfigError: its class does not support its config."""
    return _SHAPES[module](model)


def families(model: ModelConfig) -> dict[str, str]:
    """Name of a module -> its `model_type`, each module after those that feed it."""
    return {module: shape_of(model, module).model_type for module in model.modules}


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """The projector of an encoder's features into the language model."""

    width: int
    """Columns between its two linear layers."""
    native: bool
    """It is the encoder's own merger."""
    outputs: int
    """Output columns."""


def projection_of(model: ModelConfig) -> Projection | None:
    """The projector of a model; None: it has no encoder."""
    if model.encoder is None:
        return None
    shape, section = vision_shape(model), model.projector
    merged, native = shape.width * shape.patches_per_token, section.kind == "native"
    return Projection(
        width=merged if native else section.hidden_size or merged,
        native=native,
        outputs=language_shape(model).width,
    )
