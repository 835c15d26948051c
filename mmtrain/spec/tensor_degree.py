"""Checks of the degree of tensor parallelism, before any process starts. Pure."""

import math

from mmtrain.config.model import ModelConfig, projector_section, section_of
from mmtrain.errors import ConfigError
from mmtrain.families.shapes import VisionShape
from mmtrain.spec.model_shapes import dit_shape, language_shape
from mmtrain.spec.module_sizes import projection_of
from mmtrain.spec.vision_shapes import vision_shape


def check_tensor_degree(model: ModelConfig, tp: int, *, whole_encoder: bool = False) -> None:
    """Checks that a tensor-parallel degree divides the heads, inner columns and vocabulary of the model.

    Args: whole_encoder: each rank holds the whole vision encoder and projector.
    Raises: ConfigError: it does not; names the first number that `tp` does not divide, and the largest fitting degree.
    """
    shape = language_shape(model)
    numbers = {
        "model.language: num_attention_heads": shape.num_heads,
        "model.language: num_key_value_heads": shape.num_kv_heads,
        "model.language: intermediate_size": shape.mlp_width,
        "model.language: vocab_size": shape.vocab_size,
    }
    for name in model.encoders if not whole_encoder else ():
        numbers |= _encoder_numbers(model, name, vision_shape(model, name))
    if model.dit is not None:
        dit = dit_shape(model)
        numbers |= {"model.dit: num_attention_heads": dit.num_heads, "model.dit: ffn_dim": dit.mlp_width}
    largest = math.gcd(*numbers.values())
    for name, number in numbers.items():
        if number % tp:
            fits = max(degree for degree in range(1, min(tp, largest) + 1) if largest % degree == 0)
            raise ConfigError(
                f"parallelism.tensor_parallel_degree = {tp} does not divide {name} = {number}; each rank takes an "
                f"equal part of them. The largest degree up to {tp} that fits this model is {fits}"
            )


def _encoder_numbers(model: ModelConfig, name: str, shape: VisionShape) -> dict[str, int]:
    projection = projection_of(model, name)
    assert projection is not None
    return {
        f"{section_of(name)}: number of attention heads": shape.num_heads,
        f"{section_of(name)}: inner columns of the MLP": shape.mlp_width,
        f"{projector_section(name)}: inner columns": projection.width,
    }
