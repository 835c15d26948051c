"""Sharded checkpoints (torch DCP) that are complete or not there at all.

A checkpoint is written into `step-N.tmp`, flushed, and renamed to `step-N` only when every rank's
part and the manifest are on disk; a reader looks at `step-N` alone, and takes an older one if it is
damaged. What one rank finds wrong, all ranks raise. Keys are parameter names, so any pipeline or
data-parallel degree can load what another one saved. The tied head is stored once, as the embedding.
"""

import contextlib
import itertools
import json
import logging
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from mmtrain.checkpoint.files import (
    STATE,
    FileRecord,
    RecordingWriter,
    StoredCheckpoint,
    complete_steps,
    first_failure,
    write_manifest,
)
from mmtrain.config.config import CheckpointConfig
from mmtrain.errors import CheckpointError, ConfigError, MMTrainError
from mmtrain.parallel.collectives import on_rank_zero
from mmtrain.parallel.grads import local_part
from mmtrain.parallel.titan import FrozenAwareOptimizers

logger = logging.getLogger("mmtrain")

_Value = TypeVar("_Value")


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
    clips: int | None = None
    """Clips seen by all replicas; None: not known, of a checkpoint from before they were counted."""

    @classmethod
    def read(cls, stored: StoredCheckpoint) -> "TrainState":
        """That of a checkpoint. Raises: CheckpointError: it has no such state."""
        raw = stored.state
        for name, kind in (("step", int), ("loader", dict), ("tokens", int), ("clips", int | None)):
            if not isinstance(raw.get(name), kind):
                raise stored.damaged(f"{STATE} does not say the {name}")
        optional = {name: raw[name] for name in ("data", "memory", "clips") if name in raw}
        return cls(step=raw["step"], loader=raw["loader"], tokens=raw["tokens"], **optional)

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {
            "step": self.step,
            "loader": dict(self.loader),
            "tokens": self.tokens,
            "data": dict(self.data),
            "memory": dict(self.memory),
            "clips": self.clips,
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
        self._running: tuple[Future[Any], RecordingWriter, TrainState] | None = None
        self._went_back_to = -1
        _on_rank_zero(self._remove_leftovers)

    def _remove_leftovers(self) -> None:
        for stale in self._folder.glob("step-*.tmp"):  # a save that was killed
            shutil.rmtree(stale)

    # --------------------------------------------------------------------------------------- saving

    def save(self, state: TrainState) -> None:
        """Writes a checkpoint of the state after `state.step` steps; in the background if asked for.

        Raises: MMTrainError: the file system refuses, which `poll` and `finish` may notice later; nothing is left of
            this checkpoint.
        """
        self.finish()
        aside = self._aside(state)
        table = state.to_dict() | {"went_back_to": self._went_back_to}

        def begin() -> None:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            (aside / STATE).write_text(json.dumps(table, indent=1) + "\n")

        with self._saving(state):
            on_rank_zero(begin)
            tensors, writer = self._tensors(), RecordingWriter(aside)
            if self._section.async_mode == "async":
                future = dcp.async_save(tensors, storage_writer=writer, process_group=self._group)
                self._running = (future, writer, state)  # type: ignore[assignment]
            else:
                dcp.save(tensors, storage_writer=writer)
                self._publish(state, writer)

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
            future, writer, state = self._running
            self._running = None
            with self._saving(state):
                future.result()
                self._publish(state, writer)

    @contextmanager
    def _saving(self, state: TrainState) -> Iterator[None]:
        """Every rank leaves with what stopped one of them, and what was written is removed."""
        aside = self._aside(state)
        try:
            yield
        except (CheckpointException, OSError) as error:
            on_rank_zero(partial(shutil.rmtree, aside, ignore_errors=True))
            cause = first_failure(error) if isinstance(error, CheckpointException) else error
            if isinstance(cause, OSError):
                raise MMTrainError(f"checkpoint: {aside} cannot be written: {cause}; older ones are unharmed") from None
            raise cause from error

    def _publish(self, state: TrainState, writer: RecordingWriter) -> None:
        parts: list[dict[str, FileRecord]] = [{}] * dist.get_world_size()
        dist.all_gather_object(parts, writer.files)
        aside = self._aside(state)

        def publish() -> None:
            write_manifest(aside, {name: file for part in parts for name, file in part.items()})
            _flush(aside)
            os.replace(aside, aside.with_name(f"step-{state.step}"))
            _flush_folder(self._folder)
            self._purge()

        on_rank_zero(publish)

    def _aside(self, state: TrainState) -> Path:
        return self._folder / f"step-{state.step}.tmp"

    def _purge(self) -> None:
        keep = self._section.keep_latest_k
        for step in complete_steps(self._folder)[:-keep] if keep else []:
            doomed = self._folder / f"step-{step}"
            aside = doomed.with_name(doomed.name + ".tmp")
            os.replace(doomed, aside)  # a kill halfway through the removal leaves no half checkpoint
            shutil.rmtree(aside)

    def _set_aside_later(self, step: int, damaged: Mapping[int, CheckpointError]) -> None:
        """Renames the checkpoints after the one that was loaded: damaged ones, and those of a run that is given up."""
        for later in [s for s in complete_steps(self._folder) if s > step]:
            old = self._folder / f"step-{later}"
            word, reason = ("damaged", f"{damaged[later]}; ") if later in damaged else ("abandoned", "")
            names = (old.with_name(f"{word}-{number}-{old.name}") for number in itertools.count())
            new = next(name for name in names if not name.exists())
            os.replace(old, new)
            logger.warning("%swent back to step %d: %s is now %s", reason, step, old.name, new.name)

    # -------------------------------------------------------------------------------------- loading

    def load(self) -> TrainState | None:
        """The state to continue from, with parameters, optimizer and random state in place; None: start anew.

        Raises:
            ConfigError: checkpoint.load_step names a checkpoint that is not there, or one of another model.
            CheckpointError: the checkpoint of checkpoint.load_step is damaged, or all are.
        """
        steps = _on_rank_zero(lambda: complete_steps(self._folder))
        wanted = self._section.load_step
        if wanted >= 0 and wanted not in steps:
            raise ConfigError(
                f"checkpoint.load_step = {wanted}, but {self._folder} has "
                f"{', '.join(f'step-{s}' for s in steps) or 'no complete checkpoint'}; name one of these, or -1 for "
                "the newest"
            )
        damaged: dict[int, CheckpointError] = {}
        state = self._load_newest([step for step in steps if step >= wanted], damaged)
        if state is None and wanted in damaged:
            raise CheckpointError(f"checkpoint.load_step = {wanted}: {damaged[wanted]}; name another step")
        if state is None and damaged:
            others = f", and no older one is whole ({len(damaged) - 1} tried)" if len(damaged) > 1 else ""
            raise CheckpointError(
                f"{damaged[steps[-1]]}{others}; bring back a copy, or name another job.dump_folder to start anew"
            )
        return state

    def _load_newest(self, candidates: list[int], damaged: dict[int, CheckpointError]) -> TrainState | None:
        """That of the newest checkpoint that is whole. Args: damaged: gets the others."""
        wanted = self._section.load_step
        for step in reversed(candidates):
            try:
                stored = self._open(step)
                went_back_to = stored.state.get("went_back_to", -1)
                if step > wanted >= 0 and went_back_to != wanted:  # the job goes back, for the first time
                    return self._load_newest([wanted], damaged)
                state = self._load(stored)
            except CheckpointError as error:
                damaged[step] = error
                continue
            self._went_back_to = wanted if wanted >= 0 else went_back_to
            _on_rank_zero(partial(self._set_aside_later, step, damaged))
            return state
        return None

    def _open(self, step: int) -> StoredCheckpoint:
        with _together(alike=True):
            return StoredCheckpoint.open(self._folder / f"step-{step}", self._section.verify)

    def _load(self, stored: StoredCheckpoint) -> TrainState:
        """Raises: CheckpointError: it is damaged; a later `_load` overwrites whatever this one has set."""
        tensors = self._tensors()
        known = stored.metadata.state_dict_metadata
        rng_key = f"rng.{dist.get_rank()}"
        if rng_key not in known:  # saved by another number of ranks
            del tensors[rng_key]
        self._check_fits(stored.folder, tensors, known)
        stored.load(tensors)
        with _together(), stored.reading():
            state = TrainState.read(stored)
            self._restore(tensors)
            if rng_key in tensors:
                _set_rng(tensors[rng_key])
        if stored.warning and _is_rank_zero():
            logger.warning("%s", stored.warning)
        return state

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


def _is_rank_zero() -> bool:
    return bool(dist.get_rank() == 0)


def _on_rank_zero(act: Callable[[], _Value]) -> _Value:
    """What rank 0 gets, on every rank, so that all act on one view of the folder. Collective over the job."""
    try:
        return on_rank_zero(act)
    except OSError as error:
        raise MMTrainError(f"checkpoint: {error}") from None


@contextmanager
def _together(*, alike: bool = False) -> Iterator[None]:
    """Raises on every rank what one rank raises inside of it. Collective over the job.

    Args: alike: all ranks read the same, so what rank 0 can read is not damaged: others may not see it yet.
    """
    error: MMTrainError | None = None
    try:
        yield
    except MMTrainError as raised:
        error = raised
    errors: list[MMTrainError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    for rank, first in enumerate(errors):
        if first and rank and alike:
            raise MMTrainError(f"checkpoint: rank {rank} says: {first}; rank 0 reads it: do all mount one file system?")
        if first:
            raise first


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
