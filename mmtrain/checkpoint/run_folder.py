"""Reads the folder of a run in one process without process groups: its config, and modules of a checkpoint as whole
chunks."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from mmtrain.checkpoint.files import StoredCheckpoint, complete_steps
from mmtrain.checkpoint.state import TrainState, average_name, is_average
from mmtrain.config import config
from mmtrain.config.config import Config
from mmtrain.config.model import projector_name
from mmtrain.config.toml_sections import RUN_FILE
from mmtrain.errors import CheckpointError, ConfigError
from mmtrain.models.build import build_chunk, materialise
from mmtrain.models.chunk import Chunk, LanguageChunk
from mmtrain.models.initialise import init_weights
from mmtrain.models.pretrained import load_pretrained
from mmtrain.models.vae import VaeDecoder
from mmtrain.spec.builders import model_spec

logger = logging.getLogger("mmtrain")


Weights = Literal["ema", "trained"]
"""Averages of the weights (`optimizer.ema_decay`), or the weights of the last step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """A run and one of its checkpoints."""

    folder: Path
    job: Config
    step: int
    """Step of the checkpoint."""
    checkpoint: StoredCheckpoint
    weights: Weights
    """The weights that are read of modules that train; others have only one kind."""


CheckpointStep = int | Literal["best"]
"""A checkpoint of a run: its step, or that of the best validation (checkpoint.keep_best)."""


def open_run(folder: Path, step: CheckpointStep | None = None, *, weights: Weights | None = "trained") -> StoredRun:
    """A run with its newest complete checkpoint, or that of a step.

    Args:
        folder: the dump folder of the job, with config.toml and checkpoints.
        step: None: the newest.
        weights: to load; None: averages, if there are any.
    Raises:
        ConfigError: it is no dump folder, or has no such checkpoint, or that has no averages.
        CheckpointError: the checkpoint is damaged, or refused; no other one is tried.
    """
    if not (folder / RUN_FILE).is_file():
        raise ConfigError(f"{folder} has no config.toml; name the job.dump_folder of a run")
    job = config.load(folder / RUN_FILE)
    checkpoints = folder / job.checkpoint.folder
    steps = complete_steps(checkpoints)
    if not steps:
        raise ConfigError(f"{checkpoints} has no complete checkpoint; train with checkpoint.enable = true")
    if step == "best":
        step = _best_step(checkpoints / f"step-{steps[-1]}", job)
    if step is not None and step not in steps:
        raise ConfigError(
            f"--step {step}: {checkpoints} has {', '.join(f'step-{s}' for s in steps)}; name one of these"
        )
    step = steps[-1] if step is None else step
    with _advised():
        stored = StoredCheckpoint.open(checkpoints / f"step-{step}", job.checkpoint.verify)
    if stored.warning:
        logger.warning("%s", stored.warning)
    averages = any(map(is_average, stored.metadata.state_dict_metadata))
    if weights == "ema" and not averages:
        raise ConfigError(
            f"--weights ema: {stored.folder} has no averages of weights; train with optimizer.ema_decay above 0, or "
            "leave --weights out"
        )
    chosen = weights or ("ema" if averages else "trained")
    return StoredRun(folder=folder, job=job, step=step, checkpoint=stored, weights=chosen)


def _best_step(newest: Path, job: Config) -> int:
    """The step of the best validation, which the newest checkpoint says. Raises: ConfigError: it says none."""
    with _advised():
        best = TrainState.read(StoredCheckpoint.open(newest, job.checkpoint.verify)).validated.best_step
    if not best or not job.checkpoint.keep_best:
        raise ConfigError(
            f"--step best: {newest.parent} keeps no best checkpoint; train with checkpoint.keep_best, or name a step"
        )
    return best


def load_module(run: StoredRun, module: str, device: torch.device | str = "cpu") -> Chunk:
    """All layers of a module as one chunk with the weights of the checkpoint; none is trainable.

    Raises:
        ConfigError: the checkpoint is of another model than config.toml.
        CheckpointError: it is damaged, or refused.
    """
    model, spec = run.job.model, model_spec(run.job.model)
    if module == "dit":  # here it reads latents of any source
        model = replace(model, vae=None)
    chunk = build_chunk(model, spec, module, (0, len(spec.module(module).layers)), device=device)
    chunk.requires_grad_(False)
    _load(chunk, module, run)
    return chunk


def load_decoder(run: StoredRun, device: torch.device | str = "cpu") -> VaeDecoder:
    """The decoder of the run's VAE with the weights of `model.vae.pretrained`, else with initial ones. A checkpoint has
    only the encoder.

    Raises: ConfigError: weights are missing or of another shape.
    """
    decoder = VaeDecoder(run.job.model)
    materialise(decoder, device, torch.float32)
    init_weights(decoder, run.job.debug.seed)
    load_pretrained(decoder, run.job.model)
    return decoder


@contextmanager
def _advised() -> Iterator[None]:
    """Adds advice to the error of a damaged or refused checkpoint."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{error}; name another checkpoint with --step") from None


def _load(chunk: Chunk, module: str, run: StoredRun) -> None:
    """Fills a whole module from a checkpoint, in place."""
    source = run.checkpoint
    tied = isinstance(chunk, LanguageChunk) and chunk.shape.tied
    # A tied head is the embedding, and is stored once.
    tensors = {
        f"model.{name}": tensor
        for name, tensor in chunk.state_dict().items()
        if not (tied and name == "language.lm_head.weight")
    }
    stored = source.metadata.state_dict_metadata
    prefixes = (f"model.{module}.", f"model.{projector_name(module)}.")
    problems = [f"it has no {name}" for name in tensors if name not in stored]
    problems += [f"this one has no {n}" for n in sorted(stored) if n.startswith(prefixes) and n not in tensors]
    for name, tensor in tensors.items():
        size = tuple(getattr(stored.get(name), "size", tensor.shape))
        if size != tuple(tensor.shape):
            problems.append(f"{name} has shape {size} there and {tuple(tensor.shape)} here")
    if problems:
        raise ConfigError(
            f"{source.folder} is not of the model in config.toml: {problems[0]}"
            + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else "")
            + "; restore the config.toml of the run that saved it"
        )
    if run.weights == "ema":  # what did not train has none
        names = {f"model.{name}": average_name(name) for name, _ in chunk.named_parameters()}
        tensors = {names[n] if names.get(n) in stored else n: tensor for n, tensor in tensors.items()}
    with warnings.catch_warnings(), _advised():
        warnings.filterwarnings("ignore", message="torch.distributed is")  # there is only one process
        source.load(tensors, no_dist=True)
