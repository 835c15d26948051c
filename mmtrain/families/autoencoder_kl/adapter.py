"""The class of AutoencoderKL in diffusers."""

from typing import Any

import torch
from torch import Tensor

from mmtrain.models.vae import VaeAdapter

_PIXELS_AT_ONCE = 1 << 20
"""Pixels of the frames that a VAE of single images encodes together."""


class AutoencoderKL(VaeAdapter):
    """The VAE of images, which encodes each frame by itself."""

    name = "AutoencoderKL"

    def mode(self, vae: Any, pixels: Tensor) -> Tensor:
        _, _, height, width = pixels.shape
        frames = pixels.transpose(0, 1).split(max(1, _PIXELS_AT_ONCE // (height * width)))
        latents_FCHW = torch.cat([vae.encode(part).latent_dist.mode() for part in frames])
        return latents_FCHW.transpose(0, 1)

    def decode(self, vae: Any, latents_CFHW: Tensor) -> Tensor:
        frames = [vae.decode(frame[None]).sample for frame in latents_CFHW.transpose(0, 1)]
        return torch.cat(frames).transpose(0, 1)


ADAPTERS = {"autoencoder_kl": AutoencoderKL}
