"""A pipeline chunk of a frozen VAE: diffusers' class without its decoder, names `vae.<its name>`. And its decoder.

Clips are encoded one by one, so that the latents of a clip do not depend on its neighbours. The latents are the mode
of the posterior, equal for each use of a clip.

Shape legend: N clips; C, F, H, W channels, frames, rows and columns of latents; V latent positions of all clips.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmtrain.config.model import ModelConfig
from mmtrain.errors import DataError
from mmtrain.models.adapters import adapters_of, build_diffusers
from mmtrain.models.chunk import Chunk
from mmtrain.models.transfer import to_device
from mmtrain.spec.model_configs import vae_config
from mmtrain.spec.spec import ModelSpec
from mmtrain.spec.vae_shapes import PIXEL_CHANNELS, Size, VaeShape, vae_shape


class VaeAdapter(ABC):
    """How one class of VAEs is called."""

    name: str
    """The name of the class in diffusers."""

    def build(self, values: dict[str, Any]) -> Any:
        """The whole module with parameters on the meta device.

        Raises: ConfigError: diffusers is not installed, or its class refuses the config.
        """
        return build_diffusers("model.vae", self.name, values)

    @abstractmethod
    def mode(self, vae: Any, pixels: Tensor) -> Tensor:
        """The mode of the posterior of one clip, [C, F, H, W]. Args: pixels: [3, frames, height, width]."""

    @abstractmethod
    def decode(self, vae: Any, latents_CFHW: Tensor) -> Tensor:
        """[3, frames, height, width] that one clip's latents stand for; in their own scale, not a DiT's."""

    def init_own(self, module: nn.Module) -> None:
        """Initialises the parameters that a module of the VAE holds itself, by its class's rule."""
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def vae_adapter(model_type: str) -> VaeAdapter:
    """The adapter of a VAE."""
    adapter: VaeAdapter = adapters_of(model_type).ADAPTERS[model_type]()
    return adapter


class VaeChunk(Chunk):
    """The encoder of a VAE."""

    def __init__(self, model: ModelConfig, shape: VaeShape, spec: ModelSpec, layers: tuple[int, int]) -> None:
        assert model.vae is not None
        super().__init__(spec.module("vae"), layers)
        self.shape, self.adapter = shape, vae_adapter(shape.model_type)
        self.vae = self.adapter.build(vae_config(model.vae))
        self.vae.decoder = self.vae.post_quant_conv = None
        self.vae.requires_grad_(False)

    def blocks(self) -> list[nn.Module]:
        return []

    def forward(self, pixels: Sequence[Tensor], *, latents: tuple[Size, ...]) -> Tensor:
        """[V, C]: the latents of all clips in the scale that a DiT reads, positions frame by frame and row by row.

        Args:
            pixels: [3, frames, height, width] of each clip, between -1 and 1.
            latents: frames, rows and columns of each clip's latents.
        Raises: DataError: pixels of another size than that of the latents.
        """
        expected = [[PIXEL_CHANNELS, *self.shape.scale.pixels(size)] for size in latents]
        shapes = [list(clip.shape) for clip in pixels]
        if shapes != expected:
            raise DataError(
                f"vae: clips of shapes {shapes} arrived; their latents {list(latents)} are made of {expected}"
            )
        weight = next(self.parameters())
        shift, factor = _scale(self.shape, weight)
        clips = [self.adapter.mode(self.vae, clip.to(weight.dtype)).flatten(1).transpose(0, 1) for clip in pixels]
        return (torch.cat(clips) - shift) * factor


class VaeDecoder(nn.Module):
    """The decoder of a VAE, which no training needs; parameters on the meta device until it is filled."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        assert model.vae is not None
        self.shape = vae_shape(model)
        self.adapter = vae_adapter(self.shape.model_type)
        self.vae = self.adapter.build(vae_config(model.vae))
        self.vae.encoder = self.vae.quant_conv = None
        self.vae.requires_grad_(False)

    @torch.no_grad()
    def forward(self, latents_CFHW: Tensor) -> Tensor:
        """[3, frames, height, width], about between -1 and 1, of one clip's latents in the scale that a DiT reads."""
        shift, factor = (numbers[:, None, None, None] for numbers in _scale(self.shape, latents_CFHW))
        return self.adapter.decode(self.vae, latents_CFHW / factor + shift)


def _scale(shape: VaeShape, like: Tensor) -> list[Tensor]:
    """Shift and factor of the latents' channels, [C] each. Args: like: whose device and dtype they have."""
    return [to_device(torch.tensor(numbers, dtype=like.dtype), like.device) for numbers in (shape.shift, shape.factor)]
