"""The parts of an encoder behind the features that the projector reads. A job has no memory or time for them; an export
completes the Hugging Face class with the values that they started with. Towers have none."""

import torch
from torch import Tensor

from mmtrain.config.model import ModelConfig, section_of
from mmtrain.families.catalogue import ENCODERS
from mmtrain.models.adapters import vision_adapter
from mmtrain.models.build import materialise
from mmtrain.models.initialise import init_encoder
from mmtrain.models.pretrained import load_encoder
from mmtrain.spec.model_configs import encoder_config
from mmtrain.spec.vision_shapes import vision_shape


@torch.no_grad()
def unused_weights(model: ModelConfig, seed: int, module: str = "vision") -> dict[str, Tensor]:
    """Name in the Hugging Face class -> value, of blocks and the norm that no job of this model builds.

    They are those of the encoder's `pretrained`, otherwise initial ones as of the other blocks.

    Args: seed: of the job, `debug.seed`. module: name of the encoder.
    Raises: ConfigError: they cannot be read.
    """
    section, where = model.encoders[module], section_of(module)
    shape, values = vision_shape(model, module), encoder_config(section, where)
    if shape.pooling:
        return {}
    adapter = vision_adapter(shape.model_type)
    blocks = list(range(shape.depth, values[ENCODERS[shape.model_type].sizes["depth"]]))
    encoder = adapter.build(values)
    adapter.keep(encoder, embed=False, blocks=blocks, norm=not shape.final_norm)
    if not any(True for _ in encoder.parameters()):
        return {}
    materialise(encoder, "cpu", torch.float32)
    init_encoder(encoder, adapter, seed, module)
    load_encoder(encoder, section, shape.model_type, where=where)
    return dict(encoder.state_dict())
