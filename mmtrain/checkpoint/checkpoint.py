"""Sharded checkpoints (torch DCP) that are either complete or absent.

A checkpoint is written into `step-N.tmp`, flushed, and renamed to `step-N` once every rank's part and the manifest are
on disk. A reader opens only `step-N`, and an older one if it is damaged. An error on one rank is raised on all. Keys
are parameter names, so any pipeline or data-parallel degree can load the checkpoint of another one. A tied head is
stored once, as the embedding.
"""

import contextlib
import itertools
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from mmtrain.checkpoint.files import (
    STATE,
    FileRecord,
    RecordingWriter,
    StoredCheckpoint,
    complete_steps,
    first_failure,
    step_of,
    write_manifest,
)
from mmtrain.checkpoint.state import NamedTensors, TrainState, is_average, random_state_name
from mmtrain.config.sections import CheckpointConfig
from mmtrain.errors import CheckpointError, ConfigError, MMTrainError
from mmtrain.parallel.collectives import on_rank_zero

logger = logging.getLogger("mmtrain")

_Value = TypeVar("_Value")


class Checkpointer:
    """Saves and loads this rank's part of a checkpoint, of whatever layout; every method is collective over the job."""

    def __init__(
        self, section: CheckpointConfig, folder: Path, *, went_back_to: int = -1, generation: int | None = None
    ) -> None:
        """Args:
        went_back_to: `checkpoint.load_step` to which the job went back before; -1: it did not.
        generation: of an elastic job: a rank that others left behind may still write what they write anew.
        """
        self._section = section
        self._suffix = ".tmp" if generation is None else f".{generation}.tmp"
        self.folder = folder
        """Holds the folder of each checkpoint."""
        self._group = dist.new_group(backend="gloo") if section.async_mode == "async" else None
        self._running: tuple[Future[Any], RecordingWriter, TrainState] | None = None
        self.went_back_to = went_back_to
        _on_rank_zero(self._remove_leftovers)

    def _remove_leftovers(self) -> None:
        for stale in self.folder.glob("step-*.tmp"):  # of a save that was killed
            if step_of(stale.name.partition(".")[0]) is not None:
                _remove(stale, stale)

    # --------------------------------------------------------------------------------------- saving

    def save(self, state: TrainState, named: NamedTensors) -> None:
        """Writes a checkpoint of the state after `state.step` steps, unless it is there; in the background if asked.

        Raises: MMTrainError: a write fails, which `poll` and `finish` may notice later; the incomplete checkpoint is
            removed.
        """
        self.finish()
        aside = self._aside(state)
        table = state.to_dict() | {"went_back_to": self.went_back_to}

        def begin() -> bool:
            if state.step in complete_steps(self.folder):  # its writers were lost, or left behind, since
                return False
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True, exist_ok=True)  # what could not be removed is not in the manifest
            (aside / STATE).write_text(json.dumps(table, indent=1) + "\n")
            return True

        with self._saving(state):
            if not on_rank_zero(begin):
                return
            tensors, writer = named.table(), RecordingWriter(aside)
            if self._section.async_mode == "async":
                future = dcp.async_save(tensors, storage_writer=writer, process_group=self._group)
                self._running = (future, writer, state)  # type: ignore[assignment]
            else:
                dcp.save(tensors, storage_writer=writer)
                self._publish(state, writer)

    def poll(self) -> None:
        """Publishes a background save once all ranks have written their parts."""
        if self._running is not None:
            done = torch.tensor(int(self._running[0].done()))
            dist.all_reduce(done, op=dist.ReduceOp.MIN)  # not over the writer's group, which is in use
            if done:
                self.finish()

    def finish(self) -> None:
        """Waits for a background save and publishes it."""
        if self._running is not None:
            future, writer, state = self._running
            self._running = None
            with self._saving(state):
                future.result()
                self._publish(state, writer)

    def abandon(self) -> None:
        """Gives up a background save, whose other ranks may be gone. Not collective."""
        self._running = None

    @contextmanager
    def _saving(self, state: TrainState) -> Iterator[None]:
        """Raises on every rank the error of any rank, and removes the incomplete checkpoint."""
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
            if state.step in complete_steps(self.folder):  # as in `save`
                return _remove(aside, aside)
            write_manifest(aside, {name: file for part in parts for name, file in part.items()})
            _flush(aside)
            os.replace(aside, self.folder / f"step-{state.step}")
            _flush_folder(self.folder)
            self._purge(state)

        on_rank_zero(publish)

    def _aside(self, state: TrainState) -> Path:
        return self.folder / f"step-{state.step}{self._suffix}"

    def _purge(self, state: TrainState) -> None:
        keep = self._section.keep_latest_k
        best = state.validated.best_step if self._section.keep_best else 0
        for step in complete_steps(self.folder)[:-keep] if keep else []:
            if step == best:
                continue
            doomed = self.folder / f"step-{step}"
            _remove(doomed, doomed.with_name(doomed.name + ".tmp"))

    def _set_aside_later(self, step: int, damaged: Mapping[int, CheckpointError]) -> None:
        """Renames the checkpoints after the loaded one: damaged ones, and those of an abandoned run."""
        for later in [s for s in complete_steps(self.folder) if s > step]:
            old = self.folder / f"step-{later}"
            word, reason = ("damaged", f"{damaged[later]}; ") if later in damaged else ("abandoned", "")
            names = (old.with_name(f"{word}-{number}-{old.name}") for number in itertools.count())
            new = next(name for name in names if not name.exists())
            os.replace(old, new)
            logger.warning("%swent back to step %d: %s is now %s", reason, step, old.name, new.name)

    # -------------------------------------------------------------------------------------- loading

    def load(self, named: NamedTensors) -> TrainState | None:
        """The state to continue from, with parameters, optimizer and random state in place; None: start anew.

        Raises:
            ConfigError: checkpoint.load_step names an absent checkpoint, or one of another model.
            CheckpointError: the checkpoint of checkpoint.load_step is damaged, or all are.
        """
        steps = _on_rank_zero(lambda: complete_steps(self.folder))
        wanted = self._section.load_step
        if wanted >= 0 and wanted not in steps:
            raise ConfigError(
                f"checkpoint.load_step = {wanted}, but {self.folder} has "
                f"{', '.join(f'step-{s}' for s in steps) or 'no complete checkpoint'}; name one of these, or -1 for "
                "the newest"
            )
        damaged: dict[int, CheckpointError] = {}
        state = self._load_newest([step for step in steps if step >= wanted], damaged, named)
        if state is None and wanted in damaged:
            raise CheckpointError(f"checkpoint.load_step = {wanted}: {damaged[wanted]}; name another step")
        if state is None and damaged:
            others = f", and no older one is whole ({len(damaged) - 1} tried)" if len(damaged) > 1 else ""
            raise CheckpointError(
                f"{damaged[steps[-1]]}{others}; bring back a copy, or name another job.dump_folder to start anew"
            )
        return state

    def _load_newest(
        self, candidates: list[int], damaged: dict[int, CheckpointError], named: NamedTensors
    ) -> TrainState | None:
        """The train state of the newest checkpoint that is whole. Args: damaged: gets the others."""
        wanted = self._section.load_step
        for step in reversed(candidates):
            try:
                stored = self._open(step)
                went_back_to = stored.state.get("went_back_to", -1)
                if step > wanted >= 0 and went_back_to != wanted:  # the job goes back, for the first time
                    return self._load_newest([wanted], damaged, named)
                state = self._load(stored, named)
            except CheckpointError as error:
                damaged[step] = error
                continue
            self.went_back_to = wanted if wanted >= 0 else went_back_to
            _on_rank_zero(partial(self._set_aside_later, step, damaged))
            return state
        return None

    def _open(self, step: int) -> StoredCheckpoint:
        with _together(alike=True):
            return StoredCheckpoint.open(self.folder / f"step-{step}", self._section.verify)

    def _load(self, stored: StoredCheckpoint, named: NamedTensors) -> TrainState:
        """Raises: CheckpointError: it is damaged; a later `_load` overwrites whatever this one has set."""
        tensors = named.table()
        known = stored.metadata.state_dict_metadata
        if random_state_name() not in known:  # saved by another number of ranks
            del tensors[random_state_name()]
        begins = named.averages and not any(map(is_average, known))
        if begins:  # saved without averages
            tensors = {key: value for key, value in tensors.items() if not is_average(key)}
        self._check_fits(stored.folder, tensors, known)
        stored.load(tensors)
        with _together(), stored.reading():
            state = TrainState.read(stored)
            named.restore(tensors)
        if begins:
            logger.info("%s has no averages of weights: they begin at its weights", stored.folder)
        if stored.warning and dist.get_rank() == 0:
            logger.warning("%s", stored.warning)
        return state

    def _check_fits(self, source: Path, tensors: dict[str, Any], stored: dict[str, Any]) -> None:
        """Checks on all ranks that names and shapes of the checkpoint are those of this model."""
        problem = ""
        missing = [key for key in tensors if key not in stored]
        if missing:
            problem = f"was saved by another model: it has no {missing[0]} ({len(missing)} names are missing)"
        for key, tensor in tensors.items():
            size = getattr(stored.get(key), "size", None)
            if isinstance(tensor, Tensor) and size is not None and tuple(size) != tuple(tensor.shape) and not problem:
                here = tuple(tensor.shape)
                problem = f"does not fit this model: {key} has shape {tuple(size)} there and {here} here"
        reports: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(reports, (problem, [key for key in tensors if key.startswith("model.")]))
        known = {key for _, keys in reports for key in keys}
        extra = [key for key in stored if key.startswith("model.") and key not in known]
        if extra:
            reports.append((f"was saved by another model: this one has no {min(extra)} ({len(extra)} too many)", []))
        for text, _ in reports:
            if text:
                raise ConfigError(f"{source} {text}; use the config it was saved with, or another job.dump_folder")


def _on_rank_zero(act: Callable[[], _Value]) -> _Value:
    """The result of rank 0 on every rank, so that all see one state of the folder. Collective over the job."""
    try:
        return on_rank_zero(act)
    except OSError as error:
        raise MMTrainError(f"checkpoint: {error}") from None


@contextmanager
def _together(*, alike: bool = False) -> Iterator[None]:
    """Raises on every rank the error of any rank. Collective over the job.

    Args: alike: all ranks read the same files; if only rank 0 can read them, they are not damaged but not visible to
        others.
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
            raise MMTrainError(f"checkpoint: rank {rank}: {first}; rank 0 can read it: do all mount one file system?")
        if first:
            raise first


def _remove(folder: Path, aside: Path) -> None:
    """Removes a folder that is not needed; of a link to one the link. A warning names what stays.

    Args: aside: its name meanwhile, so that a kill leaves no incomplete checkpoint.
    """
    try:
        os.replace(folder, aside)
        if aside.is_symlink():
            logger.warning("%s was a link and is removed; its files stay in %s", folder, os.path.realpath(aside))
            aside.unlink()
        else:
            shutil.rmtree(aside)
    except OSError as error:
        logger.warning("%s cannot be removed: %s; the job goes on, remove it by hand", folder, error)


def _flush(folder: Path) -> None:
    for file in folder.iterdir():
        with open(file, "rb") as handle:
            os.fsync(handle.fileno())
    _flush_folder(folder)


def _flush_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # not every file system can sync a folder
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
