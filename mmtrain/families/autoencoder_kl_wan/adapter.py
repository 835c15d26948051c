"""The class of AutoencoderKLWan in diffusers."""

from typing import Any

from torch import Tensor, nn

from mmtrain.models.vae import VaeAdapter


class AutoencoderKLWan(VaeAdapter):
    """The first frame, then four at a time."""

    name = "AutoencoderKLWan"

    def mode(self, vae: Any, pixels: Tensor) -> Tensor:
        latents: Tensor = vae.encode(pixels[None]).latent_dist.mode()[0]
        return latents

    def decode(self, vae: Any, latents_CFHW: Tensor) -> Tensor:
        pixels: Tensor = vae.decode(latents_CFHW[None]).sample[0]
        return pixels

    def init_own(self, module: nn.Module) -> None:
        if isinstance(scale := getattr(module, "gamma", None), nn.Parameter):
            nn.init.ones_(scale)
        super().init_own(module)


ADAPTERS = {"autoencoder_kl_wan": AutoencoderKLWan}
