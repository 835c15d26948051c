"""The whole model in one process, without schedule or sharding: the reference of pipelines."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from mmtrain.config.model import ModelConfig
from mmtrain.modality.bitfield import language_bits, prompt_bits
from mmtrain.modality.metadata import IterationMeta, MicrobatchMeta
from mmtrain.modality.positions import token_positions
from mmtrain.modality.submesh import language_mask
from mmtrain.models.adapter_weights import load_adapters
from mmtrain.models.attention.context import attention_context
from mmtrain.models.batch import (
    Batch,
    ClipMicrobatch,
    Microbatch,
    by_module,
    document_positions,
    head_arguments,
    labelled_tokens,
)
from mmtrain.models.build import build_chunk
from mmtrain.models.chunk import Chunk, FeatureRows
from mmtrain.models.diffusion import ClipNoise
from mmtrain.models.initialise import init_weights
from mmtrain.models.loss import LossOutput, loss_of
from mmtrain.models.pretrained import load_pretrained
from mmtrain.models.vae import VaeChunk, vae_adapter
from mmtrain.spec.model_configs import vae_config
from mmtrain.spec.model_shapes import dit_shape
from mmtrain.spec.spec import ModelSpec


class ReferenceModel(nn.Module):
    """All layers of all modules as one chunk each, with weights set."""

    def __init__(
        self,
        model: ModelConfig,
        spec: ModelSpec,
        *,
        seed: int,
        device: torch.device | str = "cpu",
        stored: Callable[[str], Chunk] | None = None,
    ) -> None:
        """Args: stored: name of a module -> all its layers with their weights; None: they are built and initialised."""
        super().__init__()
        self.mask = language_mask(model)
        self.position_axes = spec.text.position_axes
        self.patch = dit_shape(model).patch if model.dit is not None else (1, 1, 1)
        self.loss = loss_of(model)
        self.encodes = model.vae is not None
        self.contrast = model.contrast
        self.chunks = nn.ModuleDict()
        for module in spec.modules:
            if stored is not None:
                self.chunks[module.name] = stored(module.name)
                continue
            whole = (0, len(module.layers))
            # The DiT is built as if there were no VAE: its latents come from this class.
            chunk_model = replace(model, vae=None) if module.name == "dit" else model
            chunk = build_chunk(chunk_model, spec, module.name, whole, device=device, dtype=torch.float32)
            init_weights(chunk, seed)
            load_pretrained(chunk, model)
            load_adapters(chunk, model)
            self.chunks[module.name] = _WholeVae(model, chunk) if isinstance(chunk, VaeChunk) else chunk

    def weights(self) -> dict[str, nn.Parameter]:
        """All parameters by the names that they have in any pipeline."""
        return {name: param for chunk in self.chunks.values() for name, param in chunk.named_parameters()}

    def forward(
        self, batch: Batch, meta: IterationMeta, *, noise: ClipNoise | None = None, want_predictions: bool = False
    ) -> list[LossOutput]:
        """The output of each microbatch, or of each group of them that has one loss; a step's loss is their `loss_sum`
        over `loss.num_values` of the step.

        Args: noise: of the step, for a text-to-video model.
        """
        if batch.clips:
            assert noise is not None
            clips = zip(batch.clips, meta.microbatches, strict=True)
            return [self.clips(tensors, counts, noise, want_predictions) for tensors, counts in clips]
        pairs = list(zip(batch.microbatches, meta.microbatches, strict=True))
        if self.contrast is not None:
            size = self.contrast.microbatches or len(pairs)
            groups = [pairs[start : start + size] for start in range(0, len(pairs), size)]
            return [self.pairs(group, want_predictions) for group in groups]
        return [self.microbatch(tensors, counts, want_predictions) for tensors, counts in pairs]

    def loss_sum(self, batch: Batch, meta: IterationMeta, noise: ClipNoise | None = None) -> Tensor:
        """Float32 scalar: the loss summed over all targets.

        Args: noise: of the step, for a text-to-video model.
        """
        return torch.stack([output.loss_sum for output in self(batch, meta, noise=noise)]).sum()

    def microbatch(self, tensors: Microbatch, counts: MicrobatchMeta, want_predictions: bool = False) -> LossOutput:
        """The output of one microbatch, its images in one sub-microbatch."""
        return self.text(tensors, counts, self.features(tensors, counts), want_predictions)

    def pairs(self, group: list[tuple[Microbatch, MicrobatchMeta]], want_predictions: bool = False) -> LossOutput:
        """The output of two towers for microbatches that have one loss."""
        images = [of for tensors, counts in group for of in self.features(tensors, counts).values()]
        captions = [
            self.chunks["language"](
                tensors.input_ids,
                attention=attention_context(language_bits(counts, self.mask)),
                position_ids=torch.from_numpy(token_positions(counts.documents, self.position_axes)),
                labelled=torch.from_numpy(labelled),
            )
            for (tensors, counts), labelled in zip(group, labelled_tokens(t.labels for t, _ in group), strict=True)
        ]
        output: LossOutput = self.chunks["contrast"](*images, *captions, want_predictions=want_predictions)
        return output

    def features(self, tensors: Microbatch, counts: MicrobatchMeta) -> dict[str, Tensor]:
        """Encoder -> the features of all its images of a microbatch, of those that have any."""
        inputs = by_module(tensors, counts)
        return {name: self.chunks[name](torch.cat(of.pixels), grids=of.grids) for name, of in inputs.items()}

    def text(
        self,
        tensors: Microbatch,
        counts: MicrobatchMeta,
        features: Mapping[str, Tensor],
        want_predictions: bool = False,
    ) -> LossOutput:
        """The output of the language model for one microbatch. Args: features: those of `features`."""
        fills = {name: FeatureRows(of.slots) for name, of in by_module(tensors, counts).items()}
        output: LossOutput = self.chunks["language"](
            tensors.input_ids,
            attention=attention_context(language_bits(counts, self.mask)),
            position_ids=torch.from_numpy(token_positions(counts.documents, self.position_axes)),
            features=features,
            fills=fills,
            **head_arguments(tensors.labels),
            want_predictions=want_predictions,
        )
        return output

    def clips(
        self, tensors: ClipMicrobatch, counts: MicrobatchMeta, noise: ClipNoise, want_predictions: bool = False
    ) -> LossOutput:
        """The output of one microbatch of clips, all in one sub-microbatch."""
        lengths, clips = counts.text_lengths, counts.clips
        features = self.chunks["language"](
            noise.prompts(clips, tensors.text_ids),
            attention=attention_context(prompt_bits(lengths)),
            position_ids=document_positions(lengths),
        )
        latents = [self.chunks["vae"](pixels) for pixels in tensors.latents] if self.encodes else tensors.latents
        pairs = list(zip(clips, latents, strict=True))
        output: LossOutput = self.chunks["dit"](
            [noise.noisy(clip, latents) for clip, latents in pairs],
            grids=tuple(clip.grid(self.patch) for clip in clips),
            text_lengths=lengths,
            features=features,
            timesteps=[noise.timestep(clip) for clip in clips],
            targets=[noise.target(clip, latents) for clip, latents in pairs],
            want_predictions=want_predictions,
        )
        return output


class _WholeVae(nn.Module):
    """The whole class of diffusers with the weights of a chunk; its decoder has none."""

    def __init__(self, model: ModelConfig, chunk: VaeChunk) -> None:
        super().__init__()
        assert model.vae is not None
        self._shape = chunk.shape
        self.vae = vae_adapter(chunk.shape.model_type).build(vae_config(model.vae))
        self.vae.load_state_dict(chunk.vae.state_dict(), strict=False, assign=True)
        self.vae.requires_grad_(False)

    def forward(self, pixels: Tensor) -> Tensor:
        """[C, F, H, W]: normalised latents of one clip's pixels [3, frames, height, width]."""
        images = self._shape.model_type == "autoencoder_kl"
        latents = self.vae.encode(pixels.transpose(0, 1) if images else pixels[None]).latent_dist.mode()
        latents_CFHW = latents.transpose(0, 1) if images else latents[0]
        if images:
            return (latents_CFHW - (self.vae.config.shift_factor or 0.0)) * self.vae.config.scaling_factor
        mean, std = (torch.tensor(x) for x in (self.vae.config.latents_mean, self.vae.config.latents_std))
        return (latents_CFHW - mean[:, None, None, None]) / std[:, None, None, None]
