"""The training data of a clip: its noisy latents, its timestep, and the target of the DiT.

Every random choice follows from the job's seed, the step and the clip's name, so each rank that needs one draws it by
itself: the first rank of the DiT mixes latents with noise, the last one forms the targets with the same noise.

Legend: t in (0, 1), 0 without noise; latents x = a data + s noise, where a and s follow from t.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmtrain.config.config import Config
from mmtrain.config.data import DiffusionConfig
from mmtrain.errors import ConfigError
from mmtrain.modality.buckets import clip_seed
from mmtrain.modality.metadata import ClipMeta
from mmtrain.spec.vae_shapes import LatentScale, latent_scale

NUM_TIMESTEPS = 1000
"""A DiT is told 1000 t."""

_LEAST = 1e-6
"""The least value of t and of 1 - t."""

_NOISE = 0x6E6F697365
"""Keeps the stream of the noise apart from that of the other choices of a clip."""


class ClipNoise:
    """The random choices for all clips of one step."""

    wants_predictions = False
    """Whether the outcome of the step has what the DiT predicts for each clip."""

    def __init__(self, section: DiffusionConfig, job_seed: int, step: int, *, null_token: int | None) -> None:
        """Args:
        job_seed: `debug.seed`.
        step: of training, from 1; batch b of a validation is step -1 - b, so that all of them meet equal noise.
        null_token: token of hidden captions; None: no caption is hidden, as in a validation.
        """
        self._section = section
        self._key = job_seed, step
        self._null_token = null_token
        self._alphas = None if section.prediction == "flow" else _squared_alphas()

    def timestep(self, clip: ClipMeta) -> float:
        """The amount of noise in a clip, 0 to 1000."""
        return self._drawn(clip)[0]

    def hides_caption(self, clip: ClipMeta) -> bool:
        """Whether a clip's caption is hidden."""
        return self._null_token is not None and self._drawn(clip)[1] < self._section.caption_dropout

    def prompts(self, clips: Sequence[ClipMeta], text_ids_T: Tensor) -> Tensor:
        """[T]: the captions of the clips, one after another, for the text encoder; a hidden one is replaced by as many
        null tokens."""
        parts = text_ids_T.split([clip.num_text_tokens for clip in clips])
        return torch.cat(
            [
                torch.full_like(part, self._null_token or 0) if self.hides_caption(clip) else part
                for clip, part in zip(clips, parts, strict=True)
            ]
        )

    def noisy(self, clip: ClipMeta, latents_CFHW: Tensor) -> Tensor:
        """[C, F, H, W]: the noisy latents that the DiT reads; device and dtype (float32) of the latents."""
        a, s = self._mix(clip)
        return a * latents_CFHW + s * self._noise(clip, latents_CFHW)

    def target(self, clip: ClipMeta, latents_CFHW: Tensor) -> Tensor | None:
        """[C, F, H, W]: the target of the DiT for a clip; None: the clip is blank and has no loss."""
        if clip.blank:
            return None
        noise = self._noise(clip, latents_CFHW)
        if self._section.prediction == "flow":
            return noise - latents_CFHW
        a, s = self._mix(clip)
        return noise if self._section.prediction == "epsilon" else a * noise - s * latents_CFHW

    def _drawn(self, clip: ClipMeta) -> tuple[float, float]:
        """The timestep, and a uniform number for the caption."""
        section, generator = self._section, torch.Generator().manual_seed(self._seed(clip))
        if section.timestep_sampling == "uniform":
            t = float(torch.rand(1, generator=generator, dtype=torch.float64))
        else:
            normal = torch.randn(1, generator=generator, dtype=torch.float64)
            t = float(torch.sigmoid(section.logit_mean + section.logit_std * normal))
        t = min(max(t, _LEAST), 1 - _LEAST)
        uniform = float(torch.rand(1, generator=generator))
        if self._alphas is None:
            return NUM_TIMESTEPS * section.shift * t / (1 + (section.shift - 1) * t), uniform
        return float(min(NUM_TIMESTEPS - 1, int(NUM_TIMESTEPS * t))), uniform

    def _mix(self, clip: ClipMeta) -> tuple[float, float]:
        """The factors a of the data and s of the noise."""
        timestep = self.timestep(clip)
        if self._alphas is None:
            return 1 - timestep / NUM_TIMESTEPS, timestep / NUM_TIMESTEPS
        squared = self._alphas[int(timestep)]
        return squared**0.5, (1 - squared) ** 0.5

    def _noise(self, clip: ClipMeta, like: Tensor) -> Tensor:
        """Equal on all devices of one kind."""
        generator = torch.Generator(like.device).manual_seed(self._seed(clip) ^ _NOISE)
        return torch.randn(like.shape, generator=generator, device=like.device)

    def _seed(self, clip: ClipMeta) -> int:
        return clip_seed(*self._key, clip.sample, clip.index)


class GivenNoise(ClipNoise):
    """The noise of sampling: all clips are noisy already, at one timestep, and have no target."""

    wants_predictions = True

    def __init__(self, timestep: float) -> None:
        self._timestep = timestep

    def timestep(self, clip: ClipMeta) -> float:
        return self._timestep

    def prompts(self, clips: Sequence[ClipMeta], text_ids_T: Tensor) -> Tensor:
        return text_ids_T

    def noisy(self, clip: ClipMeta, latents_CFHW: Tensor) -> Tensor:
        return latents_CFHW

    def target(self, clip: ClipMeta, latents_CFHW: Tensor) -> Tensor | None:
        return None


@dataclass(frozen=True, slots=True)
class Denoising:
    """The training task of a text-to-video job."""

    section: DiffusionConfig
    seed: int
    """The seed, `debug.seed`."""
    null_token: int
    """Token of hidden captions."""
    scale: LatentScale | None
    """Size in pixels of one latent position; None: the latents are given."""

    @classmethod
    def of(cls, config: Config, null_token: int) -> "Denoising":
        """The denoising of a job with a DiT."""
        vae = config.model.vae
        scale = latent_scale(vae) if vae is not None else None
        return cls(config.diffusion, config.debug.seed, null_token, scale)

    def noise(self, step: int, *, hides: bool) -> ClipNoise:
        """The random choices of a step. Args: step: as of `ClipNoise`. hides: captions may be hidden."""
        return ClipNoise(self.section, self.seed, step, null_token=self.null_token if hides else None)


@functools.cache
def _squared_alphas() -> list[float]:
    """The square of a at each timestep, as the scheduler of epsilon and v has it."""
    alphas: list[float] = make_scheduler(DiffusionConfig(prediction="v")).alphas_cumprod.tolist()
    return alphas


def make_scheduler(section: DiffusionConfig) -> Any:
    """The scheduler of diffusers for sampling from the model of such a job; epsilon and v are trained on its own
    schedule.

    Raises: ConfigError: diffusers is not installed.
    """
    try:
        import diffusers

        library: Any = diffusers
    except ImportError as error:
        raise ConfigError(
            f"[diffusion] needs the library diffusers, which cannot be imported ({error}); install mmtrain[video]"
        ) from error
    if section.prediction == "flow":
        return library.FlowMatchEulerDiscreteScheduler(num_train_timesteps=NUM_TIMESTEPS, shift=section.shift)
    return library.DDIMScheduler(
        num_train_timesteps=NUM_TIMESTEPS,
        beta_schedule="squaredcos_cap_v2",
        prediction_type="epsilon" if section.prediction == "epsilon" else "v_prediction",
        clip_sample=False,
    )


def null_token(tokenizer: Any) -> int:
    """The token that a hidden caption is made of: padding, or the end of a text, or token 0."""
    return next((token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None), 0)
