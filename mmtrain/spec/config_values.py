"""What the values of a Hugging Face config may be: types, bounds, and what this trainer does not compute. Pure."""

from collections.abc import Callable, Mapping
from typing import Any

from mmtrain.config.toml_sections import shown
from mmtrain.errors import ConfigError

ACTIVATIONS = (
    *("gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh"),
    *("gelu_pytorch_tanh", "laplace", "leaky_relu", "linear", "mish", "quick_gelu", "relu", "relu2", "relu6"),
    *("sigmoid", "silu", "swish", "tanh"),
)
"""Names of activation functions without parameters in Hugging Face configs."""
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
"""Rotary positions along one axis in Hugging Face configs."""

MOST = 2**24
"""Of rows, columns, channels, tokens and positions: what is above needs terabytes, or is a slip."""
MOST_LAYERS = 10_000
_LAYERS = ("depth", "num_hidden_layers", "num_layers", "encoder_layers", "layers_per_block", "num_res_blocks")
"""Keys that count layers."""
_SIDES = ("patch_size", "temporal_patch_size", "image_size", "window_size")
"""Keys that Hugging Face also allows one number a side for; `shapes` judges those."""
_ITEMS: dict[type, tuple[Callable[[Any], bool], str]] = {
    int: (lambda item: type(item) is int and 0 <= item <= MOST, f"integers from 0 to {MOST}"),
    bool: (lambda item: isinstance(item, bool), "true and false"),
    float: (lambda item: type(item) in (int, float) and abs(item) <= 1e21, "finite numbers"),
    str: (lambda item: isinstance(item, str), "strings"),
}
"""Type of the items of a list -> which values it may have, and in words."""


def check_type(where: str, key: str, value: Any, default: Any) -> None:
    """Refuses a value of another type than the default, or one that no model has."""
    if isinstance(default, bool):
        fits, wanted = isinstance(value, bool), "true or false"
    elif isinstance(default, float):
        fits, wanted = type(value) in (int, float) and 0 <= value <= 1e21, "a number of at least 0"
    elif isinstance(default, int | None):
        most = MOST_LAYERS if key in _LAYERS else MOST
        fits = type(value) is int and 0 < value <= most
        fits = fits or (key in _SIDES and isinstance(value, list | tuple)) or value is default is None
        wanted = f"an integer above 0, and at most {most}"
    elif isinstance(default, tuple):
        item_fits, items = _ITEMS[type(default[0])]
        fits, wanted = isinstance(value, list | tuple) and all(map(item_fits, value)), f"a list of {items}"
    elif isinstance(default, dict):
        fits, wanted = isinstance(value, dict), "a table"
    else:
        fits, wanted = isinstance(value, str), "a string"
    if not fits:
        raise ConfigError(f"{where}: {key} = {shown(value)}; it must be {wanted}")
    if key in ("hidden_act", "activation_function") and value not in ACTIVATIONS:
        raise ConfigError(
            f"{where}: {key} = {shown(value)} is no activation function; known are {', '.join(ACTIVATIONS)}"
        )


def check_dropout(where: str, key: str, value: float | None) -> None:
    """Dropout is refused: its mask would depend on the pipeline layout and on recomputation."""
    if value:
        raise ConfigError(
            f"{where}: {key} = {value}; dropout is not supported, since its random mask would depend on "
            "how the pipeline is cut. Set it to 0"
        )


def check_rope(name: str, rope: Mapping[str, Any]) -> None:
    """Refuses rotary positions that this trainer does not compute."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "mrope" or "mrope_section" in rope:
        raise ConfigError(
            f"{name} = {shown(rope)}: this language model gives image tokens positions on three axes (mrope), which is "
            "not supported yet; it would be trained with positions along the text alone. Choose a language model "
            'without mrope, as "Qwen/Qwen2-7B-Instruct", or remove the key from its config to train it so on purpose'
        )
    if kind not in ROPE_TYPES:
        raise ConfigError(f"{name} has the type {shown(kind)}; choose one of {', '.join(ROPE_TYPES)}")
