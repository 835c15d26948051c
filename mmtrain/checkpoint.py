"""Sharded checkpoints (torch DCP) that are complete or not there at all.

A checkpoint is written into `step-N.tmp`, flushed, and renamed to `step-N` only when every rank's
part is on disk; a reader looks at `step-N` alone. Keys are parameter names, so any pipeline or
data-parallel degree can load what another one saved. The tied head is stored once, as the embedding.
"""

import contextlib
import itertools
import json
import logging
import os
import random
import re
import shutil
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch import Tensor

from mmtrain.config import CheckpointConfig
from mmtrain.errors import ConfigError, MMTrainError
from mmtrain.parallel.grads import local_part
from mmtrain.titan import FrozenAwareOptimizers

logger = logging.getLogger("mmtrain")

_COMPLETE = re.compile(r"step-(\d+)")
_STATE_FILE = "train_state.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """The integers that, with the tensors, make a run continue exactly."""

    step: int
    """Steps done."""
    loader: dict[str, int]
    """State of the loader after those steps."""
    tokens: int = 0
    """Tokens seen by all replicas."""
    data: dict[str, Any] = field(default_factory=dict)
    """Settings that give the loader's position its meaning: a run continues exactly only under equal ones."""
    memory: dict[str, Any] = field(default_factory=dict)
    """What plans allow for beside tensors, and the margins that grew, as of `BudgetHistory.to_dict`."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {
            "step": self.step,
            "loader": dict(self.loader),
            "tokens": self.tokens,
            "data": dict(self.data),
            "memory": dict(self.memory),
        }


class Checkpointer:
    """Saves and loads this rank's part of a checkpoint; every method is collective over the job."""

    def __init__(
        self,
        section: CheckpointConfig,
        folder: Path,
        chunks: Sequence[nn.Module],
        optimizers: FrozenAwareOptimizers,
        aliases: dict[str, str],
    ) -> None:
        """Args: aliases: parameter name -> name that it is stored under (tied head -> embedding)."""
        self._section = section
        self._folder = folder
        self._chunks = chunks
        self._optimizers = optimizers
        self._aliases = aliases
        self._group = dist.new_group(backend="gloo") if section.async_mode == "async" else None
        self._running: tuple[Future[Any], TrainState] | None = None
        self._went_back_to = -1
        if _is_rank_zero() and folder.is_dir():
            for stale in folder.glob("step-*.tmp"):  # a save that was killed
                shutil.rmtree(stale)

    # --------------------------------------------------------------------------------------- saving

    def save(self, state: TrainState) -> None:
        """Writes a checkpoint of the state after `state.step` steps; in the background if asked for."""
        self.finish()
        target = self._folder / f"step-{state.step}"
        aside = target.with_name(target.name + ".tmp")
        if _is_rank_zero():
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            table = state.to_dict() | {"went_back_to": self._went_back_to}
            (aside / _STATE_FILE).write_text(json.dumps(table, indent=1) + "\n")
        dist.barrier()
        tensors = self._tensors()
        if self._section.async_mode == "async":
            future = dcp.async_save(tensors, checkpoint_id=aside, process_group=self._group)
            self._running = (future, state)  # type: ignore[assignment]
        else:
            dcp.save(tensors, checkpoint_id=aside)
            self._publish(state)

    def poll(self) -> None:
        """Makes a save in the background visible once all ranks have written their parts."""
        if self._running is not None:
            done = torch.tensor(int(self._running[0].done()))
            dist.all_reduce(done, op=dist.ReduceOp.MIN)  # not over the writer's group, which it is using now
            if done:
                self.finish()

    def finish(self) -> None:
        """Waits for a save in the background, and makes it visible."""
        if self._running is not None:
            future, state = self._running
            self._running = None
            future.result()
            self._publish(state)

    def _publish(self, state: TrainState) -> None:
        dist.barrier()
        if _is_rank_zero():
            target = self._folder / f"step-{state.step}"
            aside = target.with_name(target.name + ".tmp")
            _flush(aside)
            os.replace(aside, target)
            _flush_folder(self._folder)
            self._purge()
        dist.barrier()

    def _purge(self) -> None:
        keep = self._section.keep_latest_k
        for step in complete_steps(self._folder)[:-keep] if keep else []:
            doomed = self._folder / f"step-{step}"
            aside = doomed.with_name(doomed.name + ".tmp")
            os.replace(doomed, aside)  # a kill halfway through the removal leaves no half checkpoint
            shutil.rmtree(aside)

    def _set_aside_later(self, step: int) -> None:
        """Renames the checkpoints after the one that the user goes back to: their run is given up, not lost."""
        for later in [s for s in complete_steps(self._folder) if s > step]:
            old = self._folder / f"step-{later}"
            names = (old.with_name(f"abandoned-{number}-{old.name}") for number in itertools.count())
            new = next(name for name in names if not name.exists())
            os.replace(old, new)
            logger.warning("went back to step %d: %s is now %s", step, old, new.name)

    # -------------------------------------------------------------------------------------- loading

    def load(self) -> TrainState | None:
        """The state to continue from, with parameters, optimizer and random state in place; None: start anew.

        Raises: ConfigError: checkpoint.load_step names a checkpoint that is not there.
        """
        steps = _on_rank_zero(lambda: complete_steps(self._folder))
        wanted = self._section.load_step
        if wanted >= 0 and wanted not in steps:
            raise ConfigError(
                f"checkpoint.load_step = {wanted}, but {self._folder} has "
                f"{', '.join(f'step-{s}' for s in steps) or 'no complete checkpoint'}"
            )
        if not steps:
            return None
        chosen = wanted if wanted >= 0 else steps[-1]
        newest = _on_rank_zero(lambda: json.loads((self._folder / f"step-{steps[-1]}" / _STATE_FILE).read_text()))
        if wanted >= 0 and newest.get("went_back_to", -1) == wanted:
            chosen = steps[-1]  # this job has gone back already and was restarted since
        self._went_back_to = wanted if wanted >= 0 else newest.get("went_back_to", -1)
        source = self._folder / f"step-{chosen}"
        raw = _on_rank_zero(lambda: json.loads((source / _STATE_FILE).read_text()))
        tensors = self._tensors()
        stored = dcp.FileSystemReader(source).read_metadata().state_dict_metadata
        rng_key = f"rng.{dist.get_rank()}"
        if rng_key not in stored:  # saved by another number of ranks
            del tensors[rng_key]
        self._check_fits(source, tensors, stored)
        dcp.load(tensors, checkpoint_id=source)
        self._restore(tensors)
        if rng_key in tensors:
            _set_rng(tensors[rng_key])
        _on_rank_zero(lambda: self._set_aside_later(chosen))
        return TrainState(
            step=raw["step"],
            loader=raw["loader"],
            tokens=raw["tokens"],
            data=raw.get("data", {}),
            memory=raw.get("memory", {}),
        )

    def _check_fits(self, source: Path, tensors: dict[str, Any], stored: dict[str, Any]) -> None:
        """Refuses, on every rank, a checkpoint whose names or shapes are not this model's."""
        problem = ""
        missing = [key for key in tensors if key not in stored]
        if missing:
            problem = f"was saved by another model: it has no {missing[0]} ({len(missing)} names are missing)"
        for key, tensor in tensors.items():
            size = getattr(stored.get(key), "size", None)
            if isinstance(tensor, Tensor) and size is not None and tuple(size) != tuple(tensor.shape) and not problem:
                here = tuple(tensor.shape)
                problem = f"does not fit this model: {key} has shape {tuple(size)} there and {here} here"
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, (problem, [key for key in tensors if key.startswith("model.")]))
        known = {key for _, keys in found for key in keys}
        extra = [key for key in stored if key.startswith("model.") and key not in known]
        if extra:
            found.append((f"was saved by another model: this one has no {min(extra)} ({len(extra)} too many)", []))
        for text, _ in found:
            if text:
                raise ConfigError(f"{source} {text}; use the config it was saved with, or another job.dump_folder")

    # --------------------------------------------------------------------------------- tensor names

    def _named(self) -> list[tuple[str, Tensor]]:
        """(stored name, tensor) of every parameter and buffer in this rank's chunks, copies included."""
        found = []
        for chunk in self._chunks:
            for name, tensor in chunk.state_dict().items():
                found.append((self._aliases.get(name, name), tensor))
        return found

    def _tensors(self) -> dict[str, Any]:
        tensors: dict[str, Any] = {f"model.{name}": tensor for name, tensor in self._named()}
        for key, value in self._optimizers.state_dict().items():
            kind, _, rest = key.partition(".")
            for alias, name in self._aliases.items():
                if rest.startswith(alias + "."):
                    rest = name + rest[len(alias) :]
            tensors[f"optimizer.{kind}.{rest}"] = value
        tensors[f"rng.{dist.get_rank()}"] = _get_rng()
        return tensors

    def _restore(self, tensors: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, tensor in self._named():  # in place already, but for further copies of a tied matrix
                source = tensors[f"model.{name}"]
                if source is not tensor and local_part(source).data_ptr() != local_part(tensor).data_ptr():
                    local_part(tensor).copy_(local_part(source))
        flat = {}
        used: set[str] = set()
        for key in self._optimizers.state_dict():
            kind, _, rest = key.partition(".")
            stored = rest
            for alias, name in self._aliases.items():
                if rest.startswith(alias + "."):
                    stored = name + rest[len(alias) :]
            name = f"optimizer.{kind}.{stored}"
            value = tensors[name]
            # Two copies of a tied matrix on one rank: each has moments of its own.
            flat[key] = value.clone() if name in used and isinstance(value, Tensor) else value
            used.add(name)
        settings = self._settings()
        self._optimizers.load_state_dict(flat)
        for group, values in zip(self._groups(), settings, strict=True):
            group.update(values)  # moments come from the checkpoint, hyperparameters from the config

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def _settings(self) -> list[dict[str, Any]]:
        return [{key: value for key, value in group.items() if key != "params"} for group in self._groups()]


def complete_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in a folder, ascending."""
    if not folder.is_dir():
        return []
    found = []
    for entry in folder.iterdir():
        match = _COMPLETE.fullmatch(entry.name)
        if match and (entry / ".metadata").is_file() and (entry / _STATE_FILE).is_file():
            found.append(int(match[1]))
    return sorted(found)


def _is_rank_zero() -> bool:
    return bool(dist.get_rank() == 0)


def _on_rank_zero(read: Any) -> Any:
    """What rank 0 reads, on every rank, so that all act on one view of the folder."""
    box: list[Any] = [None]
    if _is_rank_zero():
        try:
            box[0] = read()
        except OSError as error:
            box[0] = error
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    if isinstance(box[0], OSError):
        raise MMTrainError(f"checkpoint: {box[0]}")
    return box[0]


def _flush(folder: Path) -> None:
    for file in folder.iterdir():
        with open(file, "rb") as handle:
            os.fsync(handle.fileno())
    _flush_folder(folder)


def _flush_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # not every file system lets a folder be synced
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _get_rng() -> str:
    """Random state of this process, as JSON: one plain entry of the checkpoint."""
    version, keys, gauss = random.getstate()
    kind, numpy_keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state = {
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "cuda": torch.cuda.get_rng_state().numpy().tobytes().hex() if torch.cuda.is_available() else "",
        "numpy": [kind, np.asarray(numpy_keys).tolist(), position, has_gauss, cached],
        "python": [version, list(keys), gauss],
    }
    return json.dumps(state)


def _set_rng(text: str) -> None:
    state = json.loads(text)
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch"]), dtype=torch.uint8))
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray.fromhex(state["cuda"]), dtype=torch.uint8))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
