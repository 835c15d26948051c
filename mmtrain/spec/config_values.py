"""Checks of the values of a Hugging Face config: types, bounds, and features that mmtrain does not support. Pure."""

from collections.abc import Callable, Mapping
from typing import Any

from mmtrain.config.toml_sections import shown
from mmtrain.errors import ConfigError
from mmtrain.families.catalogue import LANGUAGES
from mmtrain.families.shapes import MOST

ACTIVATIONS = (
    *("gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh"),
    *("gelu_pytorch_tanh", "laplace", "leaky_relu", "linear", "mish", "quick_gelu", "relu", "relu2", "relu6"),
    *("sigmoid", "silu", "swish", "tanh"),
)
"""Names of activation functions without parameters in Hugging Face configs."""
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
"""Types of rotary positions along one axis in Hugging Face configs."""

MOST_LAYERS = 10_000
_LAYERS = ("depth", "num_hidden_layers", "num_layers", "encoder_layers", "layers_per_block", "num_res_blocks")
"""Keys that count layers."""
_SIDES = ("patch_size", "temporal_patch_size", "image_size", "window_size")
"""Keys that may also be a list with one number for each side; the shapes of families check those."""
_ITEMS: dict[type, tuple[Callable[[Any], bool], str]] = {
    int: (lambda item: type(item) is int and 0 <= item <= MOST, f"integers from 0 to {MOST}"),
    bool: (lambda item: isinstance(item, bool), "true and false"),
    float: (lambda item: type(item) in (int, float) and abs(item) <= 1e21, "finite numbers"),
    str: (lambda item: isinstance(item, str), "strings"),
}
"""Type of the items of a list -> check of an item, and its description."""


def check_type(where: str, key: str, value: Any, default: Any) -> None:
    """Checks that a value has the type of the default and a size that a model can have.

    Raises: ConfigError: it does not; or an unknown activation function.
    """
    if isinstance(default, bool):
        fits, expected = isinstance(value, bool), "true or false"
    elif isinstance(default, float):
        fits, expected = type(value) in (int, float) and 0 <= value <= 1e21, "a number of at least 0"
    elif isinstance(default, int | None):
        largest = MOST_LAYERS if key in _LAYERS else MOST
        fits = type(value) is int and 0 < value <= largest
        fits = fits or (key in _SIDES and isinstance(value, list | tuple)) or value is default is None
        expected = f"an integer above 0, and at most {largest}"
    elif isinstance(default, tuple):
        item_fits, items = _ITEMS[type(default[0])]
        fits, expected = isinstance(value, list | tuple) and all(map(item_fits, value)), f"a list of {items}"
    elif isinstance(default, dict):
        fits, expected = isinstance(value, dict), "a table"
    else:
        fits, expected = isinstance(value, str), "a string"
    if not fits:
        raise ConfigError(f"{where}: {key} = {shown(value)}; it must be {expected}")
    if key in ("hidden_act", "activation_function") and value not in ACTIVATIONS:
        raise ConfigError(
            f"{where}: {key} = {shown(value)} is no activation function; known are {', '.join(ACTIVATIONS)}"
        )


def check_dropout(where: str, key: str, value: float | None) -> None:
    """Checks that there is no dropout: its mask would depend on the pipeline layout and on recomputation.

    Raises: ConfigError: the value is not 0.
    """
    if value:
        raise ConfigError(
            f"{where}: {key} = {value}; dropout is not supported, since its random mask would depend on "
            "how the pipeline is cut. Set it to 0"
        )


def check_rope(name: str, rope: Mapping[str, Any], axes: int) -> None:
    """Checks that a model can have such rotary positions. Args: axes: those that its family's class computes.

    Raises: ConfigError: it cannot.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    if axes == 1 and (kind == "mrope" or "mrope_section" in rope):
        *others, last = (name for name, language in LANGUAGES.items() if language.axis_columns)
        raise ConfigError(
            f"{name} = {shown(rope)}: positions on three axes (mrope) are those of the model types "
            f"{', '.join(others)} and {last}; the class of this one has positions along the text alone. Take the "
            "model_type that the weights were trained with, or remove the key to train it with positions along the text"
        )
    if kind not in (*ROPE_TYPES, "mrope"):
        raise ConfigError(f"{name} has the type {shown(kind)}; choose one of {', '.join(ROPE_TYPES)}")
