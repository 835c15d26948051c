"""Tiny text-to-video models, and the clips that tests give them."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmtrain.config.model import DitConfig, LanguageConfig, ModelConfig, VaeConfig
from mmtrain.models.build import build_chunk
from mmtrain.models.chunk import Chunk
from mmtrain.models.initialise import init_weights
from mmtrain.spec.builders import model_spec
from mmtrain.spec.spec import ModelSpec, clips_work
from mmtrain.spec.work_size import WorkSize

TEXT = {
    "model_type": "qwen2",
    "vocab_size": 96,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
WAN = {
    "model_type": "wan",
    "patch_size": [1, 2, 2],
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 4,
    "out_channels": 3,
    "text_dim": 24,
    "freq_dim": 8,
    "ffn_dim": 40,
    "num_layers": 3,
    "rope_max_seq_len": 16,
}


KL = {
    "model_type": "autoencoder_kl",
    "block_out_channels": [8, 12],
    "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2,
    "norm_num_groups": 4,
    "latent_channels": 4,
    "scaling_factor": 1.7,
    "shift_factor": 0.1,
}
WAN_VAE = {
    "model_type": "autoencoder_kl_wan",
    "base_dim": 8,
    "dim_mult": [1, 1, 2, 2],
    "num_res_blocks": 1,
    "z_dim": 4,
    "latents_mean": [0.1, -0.2, 0.3, 0.0],
    "latents_std": [0.5, 0.4, 0.6, 1.1],
}
VAES = {"kl": KL, "wan": WAN_VAE}


def t2v(
    *,
    frozen: tuple[str, ...] = (),
    text: dict[str, Any] | None = None,
    vae: str = "",
    segments: tuple[int, int] = (0, 0),
    **dit: Any,
) -> ModelConfig:
    """A tiny model.

    Args: frozen: the sections to freeze. text, dit: change the configs. vae: a name of `VAES`; the DiT then predicts as
        many channels as it reads. segments: K of text encoder and DiT.
    """
    given = VaeConfig(config=VAES[vae]) if vae else None
    dit = {**WAN, **({"out_channels": 4} if vae else {}), **dit}
    return ModelConfig(
        language=LanguageConfig(
            config={**TEXT, **(text or {})}, trainable="language" not in frozen, num_segments=segments[0]
        ),
        dit=DitConfig(config=dit, trainable="dit" not in frozen, num_segments=segments[1]),
        vae=given,
    )


@dataclass(frozen=True, kw_only=True)
class Clips:
    """Some clips with their prompts."""

    grids: tuple[tuple[int, int, int], ...]
    text_lengths: tuple[int, ...]
    latents: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    timesteps: tuple[float, ...]
    ids: Tensor
    """[T] of all prompts."""

    @classmethod
    def draw(
        cls,
        model: ModelConfig,
        grids: tuple[tuple[int, int, int], ...] = ((2, 2, 3), (1, 2, 2), (2, 2, 3)),
        text_lengths: tuple[int, ...] = (5, 3, 7),
        seed: int = 0,
    ) -> "Clips":
        """Clips of these patches."""
        assert model.dit is not None
        values, generator = model.dit.config, torch.Generator().manual_seed(seed)

        def latents(channels: int) -> tuple[Tensor, ...]:
            sides = [[g * p for g, p in zip(grid, values["patch_size"], strict=True)] for grid in grids]
            return tuple(torch.randn(channels, *side, generator=generator) for side in sides)

        return cls(
            grids=grids,
            text_lengths=text_lengths,
            latents=latents(values["in_channels"]),
            targets=latents(values["out_channels"]),
            timesteps=tuple((1000 * torch.rand(len(grids), generator=generator)).tolist()),
            ids=torch.randint(0, TEXT["vocab_size"], (sum(text_lengths),), generator=generator),
        )

    @property
    def size(self) -> WorkSize:
        """What they ask of a DiT."""
        tokens = [math.prod(grid) for grid in self.grids]
        return clips_work(tokens, self.text_lengths, sum(tokens), self.grids)

    @property
    def common(self) -> dict[str, Any]:
        """What every chunk of the DiT is told."""
        return {"grids": self.grids, "text_lengths": self.text_lengths}


def chunk(
    model: ModelConfig,
    module: str,
    layers: tuple[int, int] | None = None,
    *,
    spec: ModelSpec | None = None,
    dtype: torch.dtype = torch.float32,
) -> Chunk:
    """Layers of a module (default: all) with initial weights."""
    spec = spec or model_spec(model, dtype_bytes=dtype.itemsize)
    made = build_chunk(model, spec, module, layers or (0, len(spec.module(module).layers)), device="cpu", dtype=dtype)
    init_weights(made, 0)
    return made
