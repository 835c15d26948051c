"""One chunk of a model by the name of its module: built on the meta device, then given memory."""

import torch
from torch import nn

from mmtrain.config.model import ModelConfig, section_of
from mmtrain.errors import ConfigError
from mmtrain.models.adapters import decoder, vision_adapter
from mmtrain.models.chunk import Chunk, LanguageChunk, VisionChunk
from mmtrain.models.contrast import ContrastChunk
from mmtrain.models.dit import DitChunk
from mmtrain.models.vae import VaeChunk
from mmtrain.models.vocabulary import LossChunk, VocabularyPart
from mmtrain.spec.contrast import CONTRAST
from mmtrain.spec.model_shapes import dit_shape, language_shape
from mmtrain.spec.spec import ModelSpec
from mmtrain.spec.vae_shapes import vae_shape
from mmtrain.spec.vision_shapes import vision_shape


def build_chunk(
    model: ModelConfig,
    spec: ModelSpec,
    module: str,
    layers: tuple[int, int],
    *,
    device: torch.device | str = "meta",
    dtype: torch.dtype = torch.float32,
) -> Chunk:
    """Layers [lo, hi) of a module, with real buffers and parameters whose values are not yet set.

    Layers of other chunks are dropped while they are still on the meta device.
    Args: module: an encoder, `language`, `dit` or `vae`. device: `meta` defers the parameters to `materialise`.
    Raises: ConfigError: a config that cannot be built, or layers that do not exist.
    """
    lo, hi = layers
    num_layers = len(spec.module(module).layers)
    if not 0 <= lo < hi <= num_layers:
        raise ConfigError(f"{module}: layers {lo}..{hi - 1} were asked for, but it has 0..{num_layers - 1}")
    chunk: Chunk
    try:
        if module in model.encoders:
            vision = vision_shape(model, module)
            chunk = VisionChunk(model, vision, vision_adapter(vision.model_type), spec, layers, module)
        elif module == "dit":
            chunk = DitChunk(model, dit_shape(model), spec, layers)
        elif module == "vae":
            chunk = VaeChunk(model, vae_shape(model), spec, layers)
        elif spec.module(module).vocabulary is not None:
            language = language_shape(model)
            chunk = VocabularyPart(model, language, decoder(language.model_type), spec, module)
        elif module == CONTRAST:
            chunk = ContrastChunk(model, spec)
        elif module == "loss":
            chunk = LossChunk(model, spec)
        else:
            language = language_shape(model)
            chunk = LanguageChunk(model, language, decoder(language.model_type), spec, layers)
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if text.startswith("model.") else f"{section_of(module)}: {text}") from error
    materialise(chunk, device, dtype)
    chunk.train()
    return chunk


def materialise(chunk: nn.Module, device: torch.device | str, dtype: torch.dtype) -> None:
    """Gives the parameters of a chunk memory on a device, with undefined values, and moves its buffers there.

    Buffers keep their dtype: rotary frequencies stay float32. A shared parameter stays shared.
    """
    done: dict[nn.Parameter, nn.Parameter] = {}
    for module in chunk.modules():
        for name, param in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
            if param not in done:
                empty = torch.empty_like(param, device=device, dtype=dtype)
                done[param] = nn.Parameter(empty, requires_grad=param.requires_grad)
            setattr(module, name, done[param])
        if torch.device(device).type != "meta":
            for name, buffer in [*module.named_buffers(recurse=False, remove_duplicate=False)]:
                setattr(module, name, buffer.to(device))
