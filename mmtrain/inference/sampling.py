"""Clips for prompts, from a checkpoint of a text-to-video job, in one process without process groups.

OUT/01-<prompt>.gif ...      a clip each, moving at the job's rate (.npy: latents that are no pixels)
OUT/sheet.png                all of them, their frames side by side under their prompts
OUT/samples.json             how they were made

Shape legend: N clips; T text tokens of one prompt; C, F, H, W channels, frames, rows and columns of latents.
"""

import json
import logging
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmtrain.checkpoint.run_folder import CheckpointStep, StoredRun, Weights, load_decoder, load_module, open_run
from mmtrain.config.config import Config
from mmtrain.data.clip_images import save_gif, sheet, shown_frames, some_of
from mmtrain.data.tokenizer import job_tokenizer
from mmtrain.data.toy.easy_judge import PROMPTS, ClipVerdict, judge
from mmtrain.data.toy.shape_clips import EASY_BUCKET
from mmtrain.data.toy.shapes import is_easy
from mmtrain.errors import ConfigError, MMTrainError
from mmtrain.launch.atomic_files import new_folder
from mmtrain.modality.buckets import VideoGeometry, check_video, default_bucket, video_geometry
from mmtrain.models.chunk import LanguageChunk
from mmtrain.models.denoising import (
    GUIDANCE,
    NUM_STEPS,
    denoise,
    encode_prompts,
    predictor,
    start_noise,
    to_pixels,
)
from mmtrain.models.diffusion import NUM_TIMESTEPS, make_scheduler, null_token
from mmtrain.models.dit import DitChunk
from mmtrain.observe.job_summary import few_clips
from mmtrain.spec.model_shapes import dit_shape

logger = logging.getLogger("mmtrain")

Progress = Callable[[int, int], None]
"""Called with (steps done, number of steps)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRequest:
    """The request for clips. Raises: ConfigError: a value out of its range."""

    prompts: tuple[str, ...]
    negative: str | None = None
    """The negative prompt of guidance; None: null tokens, with which training hides captions."""
    frames: int | None = None
    height: int | None = None
    width: int | None = None
    """The width in latents, which are pixels if they have 3 channels; with a VAE in pixels. None: as
    `default_bucket`."""
    num_steps: int = NUM_STEPS
    guidance: float | None = None
    """The guidance scale. 1: no guidance. None: `GUIDANCE`, or 1 if the job hid no captions."""
    num_samples: int = 1
    """Clips of each prompt."""
    seed: int = 0
    """Seed of the noise."""
    judged: bool = False
    """Whether to judge the clips by their pixels, of a job that learns the easy level of moving shapes."""

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ConfigError("sample: there is no prompt; give one with --prompt")
        for name in ("frames", "height", "width", "num_steps", "num_samples", "seed", "guidance"):
            value, least = getattr(self, name), 0 if name in ("seed", "guidance") else 1
            most = NUM_TIMESTEPS if name == "num_steps" else math.inf
            if value is not None and not (math.isfinite(value) and least <= value <= most):
                above = "" if most == math.inf else f" and at most {most}"
                raise ConfigError(f"sample: --{name.replace('_', '-')} {value}; it is at least {least}{above}")
        if self.negative is not None and self.guidance == 1:
            raise ConfigError("sample: --negative has no effect with --guidance 1; raise the guidance or leave it out")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Result of sampling."""

    step: int
    """Step of the checkpoint."""
    weights: Weights
    shape: tuple[int, int, int, int]
    """Channels, frames, height and width of the clips."""
    guidance: float
    files: tuple[str, ...]
    """One a clip, ordered by prompt; then the sheet, if the clips are images."""
    verdict: ClipVerdict | None
    """The verdict on clips that were to be judged."""

    @property
    def is_pixels(self) -> bool:
        """Whether the files are images, not latents."""
        return self.shape[0] == 3


def sample(
    folder: Path,
    out: Path,
    wanted: SamplingRequest,
    *,
    step: CheckpointStep | None = None,
    weights: Weights | None = None,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> Sampled:
    """The result of sampling into `out`, which appears only when it is complete. Equal arguments give equal bytes.

    Args:
        folder: a job's dump folder, with config.toml and checkpoints.
        step: of the checkpoint, see `open_run`; None: the newest complete one.
        weights: None: averages, if the checkpoint has any.
    Raises:
        ConfigError: `out` exists, `folder` is no dump folder of a text-to-video job, no such checkpoint, or the model
            does not support a prompt or size.
        MMTrainError: the model produces values that are not finite.
    """
    run = open_run(folder, step, weights=weights)
    question = _resolved(run, wanted)
    if wanted.judged:
        _check_judged(run, wanted, question.shape)
    clips = run.checkpoint.state.get("clips")
    if few := few_clips(run.job, clips if isinstance(clips, int) else None):
        logger.warning("%s", few)
    with new_folder(out) as aside:
        where = torch.device(device)
        clips = _decoded(run, _latents(run, wanted, question, where, progress), where)
        for prompt, clip in zip(_of_clips(wanted), clips, strict=True):
            if not clip.isfinite().all():
                raise MMTrainError(
                    f"{folder}: after step {run.step} the model makes values that are not finite for the prompt "
                    f"{_shown(prompt)}; name an earlier checkpoint with --step"
                )
        files = _write(aside, run.job.data.fps, wanted, clips)
        channels, frames, height, width = clips.shape[1:]
        made = Sampled(
            step=run.step,
            weights=run.weights,
            shape=(channels, frames, height, width),
            guidance=question.guidance,
            files=tuple(files),
            verdict=_judged(clips, wanted) if wanted.judged else None,
        )
        (aside / "samples.json").write_text(_record(run.job, wanted, made), encoding="utf-8")
    return made


def _check_judged(run: StoredRun, wanted: SamplingRequest, shape: tuple[int, ...]) -> None:
    """Refuses clips whose pixels nothing is known about. Args: shape: channels, frames, height and width."""
    source = run.job.data.source
    if not is_easy(Path(source)):
        raise ConfigError(
            f"sample: --judge knows the pixels of the easy level of moving shapes alone, and data.source = {source!r} "
            "of this run is no such folder (`mmtrain data shapes OUT --level easy`); leave it out"
        )
    for prompt in wanted.prompts:
        if prompt not in PROMPTS:
            raise ConfigError(
                f"sample: --judge with --prompt {_shown(prompt)}, which is no caption of the data, such as "
                f"{PROMPTS[0]!r}; leave --prompt out, for all {len(PROMPTS)} of them"
            )
    if shape[1:] != EASY_BUCKET:
        raise ConfigError(
            f"sample: --judge with clips of {_sides(shape[1:])}, but those of the data are {_sides(EASY_BUCKET)}; name "
            "this size with --frames, --height and --width"
        )


def _sides(bucket: Sequence[int]) -> str:
    frames, height, width = bucket
    return f"{frames} frames of {width} x {height}"


def _judged(clips_NCFHW: Tensor, wanted: SamplingRequest) -> ClipVerdict:
    pixels = [to_pixels(clip) for clip in clips_NCFHW]
    return judge([clip for clip in pixels if clip is not None], _of_clips(wanted))


# ------------------------------------------------------------------------------------------ question


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """The request in the form of the model."""

    prompts: tuple[Tensor, ...]
    """Token ids, [T] each."""
    others: tuple[Tensor, ...] | None
    """Negative prompt of each prompt; None: no guidance."""
    guidance: float
    shape: tuple[int, int, int, int]
    """Channels, frames, height and width."""


def _resolved(run: StoredRun, wanted: SamplingRequest) -> _Question:
    job = run.job
    if job.model.dit is None:
        raise ConfigError(
            f"{run.folder}: only a text-to-video model makes clips, and this run has no [model.dit]; name another run"
        )
    check_video(job)
    _check_num_steps(job.diffusion.prediction, wanted.num_steps)
    geometry = video_geometry(job.model.dit, job.data, job.model.vae)
    shape = (geometry.channels, *geometry.latents(*_bucket(job, geometry, wanted)))
    guidance = wanted.guidance
    if guidance is None:
        guidance = GUIDANCE if job.diffusion.caption_dropout or wanted.negative is not None else 1.0
    tokenizer = job_tokenizer(job)

    def ids(text: str, option: str) -> Tensor:
        tokens = tokenizer(text, verbose=False)["input_ids"] if text.strip() else []
        if not tokens:
            advice = (
                "describe what the clip shows" if option == "--prompt" else "leave it out to lead away from no caption"
            )
            raise ConfigError(f"sample: {option} {_shown(text)} has no token; {advice}")
        if len(tokens) > job.training.seq_len:
            raise ConfigError(
                f"sample: {option} {_shown(text)} has {len(tokens)} tokens, but the job trained with captions of at "
                f"most training.seq_len = {job.training.seq_len}; shorten it"
            )
        return torch.tensor(tokens, dtype=torch.int64)

    prompts = tuple(ids(prompt, "--prompt") for prompt in wanted.prompts)
    others = None
    if guidance != 1 and wanted.negative is not None:
        others = (ids(wanted.negative, "--negative"),) * len(prompts)
    elif guidance != 1:
        others = tuple(torch.full_like(prompt, null_token(tokenizer)) for prompt in prompts)
    return _Question(prompts=prompts, others=others, guidance=guidance, shape=shape)


def _check_num_steps(prediction: str, num_steps: int) -> None:
    """Checks that the scheduler of epsilon and v begins at noise: it goes by whole steps of 1000 // num_steps, from
    which its first timestep follows."""
    first = NUM_TIMESTEPS // num_steps * (num_steps - 1)
    if prediction != "flow" and not 0.9 * NUM_TIMESTEPS <= first < NUM_TIMESTEPS - 1:
        raise ConfigError(
            f'sample: --num-steps {num_steps} with diffusion.prediction = "{prediction}" would begin at timestep '
            f"{first}, but clips are noise from {0.9 * NUM_TIMESTEPS:g} to {NUM_TIMESTEPS - 2} of {NUM_TIMESTEPS}; "
            "choose 10 to 100, 200, 250 or 500"
        )


def _bucket(job: Config, geometry: VideoGeometry, wanted: SamplingRequest) -> tuple[int, int, int]:
    """Frames, height and width; with a VAE in pixels."""
    if geometry.channels != 3 and geometry.vae is None and (wanted.height is None or wanted.width is None):
        raise ConfigError(
            f"sample: the model's latents have {geometry.channels} channels, so they are no pixels, and the job does "
            "not say their size; name it with --height and --width, in rows and columns of latents"
        )
    most = dit_shape(job.model).max_positions
    asked = (wanted.frames, wanted.height, wanted.width)
    sides = [value or default for value, default in zip(asked, default_bucket(geometry), strict=True)]
    if geometry.vae is not None:
        return _pixel_bucket(geometry, sides, most)
    for name, side, patch in zip(("frames", "height", "width"), sides, geometry.patch, strict=True):
        if side % patch or side > patch * most:
            raise ConfigError(
                f"sample: --{name} {side}; it is a multiple of the {patch} of one patch (patch_size = "
                f"{list(geometry.patch)} of model.dit) and at most {patch * most} (rope_max_seq_len = {most}), such as "
                f"{min(most, max(1, round(side / patch))) * patch}"
            )
    frames, height, width = sides
    return frames, height, width


def _pixel_bucket(geometry: VideoGeometry, sides: Sequence[int], most: int) -> tuple[int, int, int]:
    """Frames, height and width of pixels that a VAE decodes from whole patches of latents."""
    frames, height, width = sides
    scale = geometry.vae
    assert scale is not None
    latents = geometry.latents(frames, height, width)
    for name, side, latent, patch in zip(("frames", "height", "width"), sides, latents, geometry.patch, strict=True):
        fits = side == (scale.frames_of(latent) if name == "frames" else latent * scale.side)
        if not fits or latent < 1 or latent % patch or latent > patch * most:
            whole = min(most, max(1, round(latent / patch))) * patch
            such = scale.frames_of(whole) if name == "frames" else whole * scale.side
            raise ConfigError(
                f"sample: --{name} {side}; the VAE makes it of whole patches of latents (patch_size = "
                f"{list(geometry.patch)} of model.dit), at most {most} of them (rope_max_seq_len), such as {such}"
            )
    return frames, height, width


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


# ------------------------------------------------------------------------------------------ sampling


def _latents(
    run: StoredRun, wanted: SamplingRequest, question: _Question, device: torch.device, progress: Progress | None
) -> Tensor:
    """[N, C, F, H, W] on the CPU, ordered by prompt.

    Sample k begins with the same noise for every prompt, so that only the prompt makes a difference.
    """
    texts = [ids.to(device) for ids in (*question.prompts, *(question.others or ()))]
    states = [state for state in _states(run, texts, device) for _ in range(wanted.num_samples)]
    noise = torch.stack([start_noise(question.shape, wanted.seed, k) for k in range(wanted.num_samples)])
    noise = noise.repeat(len(wanted.prompts), 1, 1, 1, 1).to(device)
    dit = load_module(run, "dit", device).eval()
    assert isinstance(dit, DitChunk)
    return denoise(
        predictor(dit, states),
        make_scheduler(run.job.diffusion),
        noise,
        guidance=question.guidance if question.others else None,
        num_steps=wanted.num_steps,
        progress=progress,
    ).cpu()


def _decoded(run: StoredRun, latents_NCFHW: Tensor, device: torch.device) -> Tensor:
    """[N, 3, frames, height, width] on the CPU; the latents themselves where there is no VAE."""
    section = run.job.model.vae
    if section is None or not latents_NCFHW.isfinite().all():
        return latents_NCFHW
    if not section.pretrained or section.weights == "random":
        logger.warning("[model.vae] has random weights, so its decoder shows nothing that the model learned")
    decoder = load_decoder(run, device).eval()
    return torch.stack([decoder(clip.to(device)).cpu() for clip in latents_NCFHW])


def _states(run: StoredRun, texts: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The outputs of the text encoder, which is freed before the DiT is loaded."""
    chunk = load_module(run, "language", device).eval()
    assert isinstance(chunk, LanguageChunk)
    states: list[Tensor] = encode_prompts(chunk, texts)
    return states


# ------------------------------------------------------------------------------------------- writing


def _of_clips(wanted: SamplingRequest) -> list[str]:
    """The prompt of each clip."""
    return [prompt for prompt in wanted.prompts for _ in range(wanted.num_samples)]


def _names(wanted: SamplingRequest) -> list[str]:
    """File name of each clip without ending: number and first words of its prompt, and the sample's number."""
    names = []
    for number, prompt in enumerate(wanted.prompts, 1):
        slug = re.sub(r"[^a-z0-9]+", "-", prompt.lower())[:48].strip("-")
        for k in range(1, wanted.num_samples + 1):
            parts = [f"{number:02}", slug, str(k) if wanted.num_samples > 1 else ""]
            names.append("-".join(part for part in parts if part))
    return names


def _write(folder: Path, fps: float, wanted: SamplingRequest, clips_NCFHW: Tensor) -> list[str]:
    """The names of the files, those of the clips first.

    A long clip shows evenly spaced frames on the sheet, with the first and the last one.
    """
    files, rows = [], []
    for name, prompt, clip in zip(_names(wanted), _of_clips(wanted), clips_NCFHW, strict=True):
        pixels = to_pixels(clip)
        if pixels is None:
            files.append(f"{name}.npy")
            np.save(folder / files[-1], clip.numpy())
            continue
        files.append(f"{name}.gif")
        images = shown_frames(pixels)
        save_gif(folder / files[-1], images, fps)
        rows.append((prompt, some_of(images)))
    if rows:
        files.append("sheet.png")
        sheet(rows).save(folder / files[-1])
    return files


def _record(job: Config, wanted: SamplingRequest, made: Sampled) -> str:
    clips = zip(_of_clips(wanted), made.files, strict=False)  # the sheet shows them all
    table: dict[str, Any] = {
        "step": made.step,
        "weights": made.weights,
        "seed": wanted.seed,
        "num_steps": wanted.num_steps,
        "guidance": made.guidance,
        "negative": wanted.negative,
        "shape": made.shape,
        "fps": job.data.fps,
        "clips": [{"prompt": prompt, "file": file} for prompt, file in clips],
    }
    if made.verdict is not None:
        table["verdict"] = asdict(made.verdict)
    return json.dumps(table, indent=1, ensure_ascii=False) + "\n"
