"""The loader: the steps of a replica in order, made in the background, resumable from a few integers.

Only the leader rank of a model replica runs one. With W workers, worker w makes the steps w, w + W, ...; all of them
plan all steps, so the sequence does not depend on the number of workers.
"""

import logging
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from mmtrain import errors
from mmtrain.config.config import Config
from mmtrain.data.packing import LoaderState
from mmtrain.data.step_maker import StepMaker
from mmtrain.errors import ConfigError, DataError, MMTrainError
from mmtrain.launch.processes import STOPS, stops_held
from mmtrain.modality.metadata import IterationMeta
from mmtrain.models.batch import Batch, ClipMicrobatch, Microbatch
from mmtrain.planner.assignment.dealing import Dealer
from mmtrain.planner.assignment.step_assigner import StepAssigner

logger = logging.getLogger("mmtrain")

IMPORTED = ("mmtrain.data.loader", "datasets", "transformers.models.auto.tokenization_auto")
"""The modules that the process from which workers are forked imports. Most samples need all of them: 1.5 of the 1.9 CPU
seconds of a worker's first batch, which a layout that begins in a running job waits for."""

LoadedStep = tuple[Batch, IterationMeta, LoaderState]
"""A replica's tensors, their metadata, and the loader state after them."""


class Loader:
    """An iterator over the steps of one replica, and a context manager that ends its workers.

    Each item is (batch, meta, state). A loader that starts from that state continues exactly, with any number of
    replicas and workers. `iter` starts again from the first state.

    Args:
        split: of `data.source`; None: `data.split`.
        dp_rank, dp_degree: index and number of replicas.
        state: where to start; None: the beginning, in the order drawn from debug.seed.
        shuffle: None: `data.shuffle` on the training split, false on others.
        num_steps: steps after which the iterator ends; None: never. The epochs of a source follow each other.
        epochs: after which the iterator ends, see `StepMaker`; None: never.
        num_workers: background processes; None: `data.num_workers`; 0: steps are made when they are requested.
        assigner, dealer, may_be_short: see `StepMaker`.
    Raises: ConfigError: anything that cannot be opened; with workers, the first step raises it.
    """

    def __init__(
        self,
        config: Config,
        *,
        split: str | None = None,
        dp_rank: int = 0,
        dp_degree: int = 1,
        state: LoaderState | None = None,
        shuffle: bool | None = None,
        num_steps: int | None = None,
        epochs: Fraction | None = None,
        num_workers: int | None = None,
        assigner: StepAssigner | None = None,
        dealer: Dealer | None = None,
        may_be_short: bool = False,
    ) -> None:
        bins = config.training.global_batch_size
        if not 0 <= dp_rank < dp_degree <= bins:
            raise ConfigError(
                f"loader: replica {dp_rank} of {dp_degree} with training.global_batch_size = {bins}; each replica "
                "needs a microbatch, so raise it or lower the degree"
            )
        split = split or config.data.split
        if shuffle is None:
            shuffle = config.data.shuffle and split == config.data.split
        self._first = state or LoaderState(seed=config.debug.seed)
        self._num_workers = config.data.num_workers if num_workers is None else num_workers
        self._prefetch = config.data.prefetch
        self._logs, self._logged = dp_rank == 0 and split == config.data.split, set[str]()
        self._steps = _Steps(
            config,
            {
                "split": split,
                "shuffle": shuffle,
                "dp_rank": dp_rank,
                "dp_degree": dp_degree,
                "assigner": assigner,
                "dealer": dealer,
                "may_be_short": may_be_short,
                "epochs": epochs,
            },
            self._first,
            num_steps,
            as_wire=self._num_workers > 0,
        )
        if not self._num_workers:
            self._steps.open()
        self._running: Iterator[Any] | None = None
        self.state = self._first
        """The state after the last step that was returned."""

    def __iter__(self) -> "Loader":
        self.close()
        self.state = self._first
        self._running = iter(self._steps) if not self._num_workers else self._start_workers()
        return self

    def __next__(self) -> LoadedStep:
        if self._running is None:
            iter(self)
        assert self._running is not None
        try:
            item = next(self._running)
        except StopIteration:
            self.close()
            self._running = iter(())  # an exhausted iterator stays exhausted
            raise
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            self.close()
            reason = " ".join(str(error).split())
            raise DataError(f"a data worker died (killed, or out of memory?): {reason}") from None
        if isinstance(item, _Failure):
            self.close()
            raise item.error()
        self._log(item.notes)
        batch, meta, self.state = item.step.unpack() if isinstance(item.step, _Wire) else item.step
        return batch, meta, self.state

    def _log(self, notes: list[str]) -> None:
        """Logs what is new about the samples, which each worker of each replica finds by itself."""
        # A command without a log of its own shows warnings alone.
        level = logging.INFO if logger.handlers else logging.WARNING
        for note in notes:
            if self._logs and note not in self._logged:
                self._logged.add(note)
                logger.log(level, "%s", note)

    def close(self) -> None:
        """Ends the workers and waits for them; the loader can be iterated again."""
        running, self._running = self._running, None
        shut_down = getattr(running, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start_workers(self) -> Iterator[Any]:
        # Workers are forked from a clean server process: a fork of this one would copy the threads and locks of its
        # process groups, planner and GPU. The tokenizers library warns about forks unless told otherwise.
        context = _worker_context()
        loader = DataLoader(
            self._steps,
            batch_size=None,
            num_workers=self._num_workers,
            prefetch_factor=self._prefetch,
            multiprocessing_context=context,
            generator=torch.Generator(),  # the default would draw a number from the global random state
        )
        with stops_held():
            return iter(loader)


def warm_workers(config: Config) -> None:
    """Starts what workers are forked from, if there will be any, in the background: their imports take seconds."""
    if config.data.num_workers:
        _worker_context()
        with stops_held():
            multiprocessing.forkserver.ensure_running()


def _worker_context() -> Any:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    return context


class _Steps(IterableDataset[Any]):  # type: ignore[misc] # torch is not followed by the type checker
    """The steps of a replica, or of one of its workers; pickled to the workers before anything is opened."""

    def __init__(
        self,
        config: Config,
        what: dict[str, Any],
        first: LoaderState,
        num_steps: int | None,
        *,
        as_wire: bool,
    ) -> None:
        self._config, self._what, self._first, self._num_steps = config, what, first, num_steps
        self._as_wire = as_wire
        self._maker: StepMaker | None = None

    def open(self) -> StepMaker:
        """Makes the steps; opened at the first call."""
        if self._maker is None:
            self._maker = StepMaker(self._config, **self._what)
        return self._maker

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        if worker:
            _end_with_parent()
        try:
            yield from self._make(worker.id if worker else 0, worker.num_workers if worker else 1)
        except MMTrainError as error:
            # torch would wrap the message in a traceback of the worker.
            yield _Failure(type(error).__name__, str(error))

    def _make(self, worker: int, num_workers: int) -> Iterator[Any]:
        maker, state = self.open(), self._first
        step = 0
        while (self._num_steps is None or step < self._num_steps) and not maker.has_ended(state):
            plan = maker.plan(state)
            state = plan.state
            if step % num_workers == worker:
                batch, meta = maker.build(plan)
                yield _Made(_Wire.pack(batch, meta, state) if self._as_wire else (batch, meta, state), maker.notes())
            step += 1


def _end_with_parent() -> None:
    """Ends this worker when the process that reads from it has ended, even if it was killed.

    torch's own watchdog checks the id of the parent, which for a forked worker of a server is the server's.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    os.setsid()  # else signals to the job's process group end this process too early
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)

    def wait() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=wait, name="end-with-parent", daemon=True).start()


@dataclass(frozen=True)
class _Failure:
    """An mmtrain error, as a worker passes it on."""

    kind: str
    message: str

    def error(self) -> MMTrainError:
        kind: type[MMTrainError] = getattr(errors, self.kind)
        return kind(self.message)


class _Made(NamedTuple):
    """A step, and what is new to say about its samples."""

    step: "_Wire | LoadedStep"
    notes: list[str]


@dataclass
class _Wire:
    """A step in two tensors: each tensor that is sent to another process costs a file descriptor."""

    integers: Tensor
    pixels: Tensor
    layout: list[tuple[int, int, list[tuple[int, ...]], list[tuple[int, ...]]]]
    """The layout of each microbatch: tokens, image tokens, shapes of its images, their names."""
    clip_layout: list[tuple[int, list[tuple[int, ...]], list[tuple[int, int]]]]
    """The layout of each microbatch of clips: tokens of its captions, shapes of its latents, names of its clips."""
    meta: IterationMeta
    state: LoaderState

    @classmethod
    def pack(cls, batch: Batch, meta: IterationMeta, state: LoaderState) -> "_Wire":
        integers, pixels, layout, clip_layout = [], [], [], []
        for m in batch.microbatches:
            integers += [m.input_ids, m.labels, m.image_slots]
            pixels += [p.reshape(-1) for p in m.pixel_values]
            shapes = [tuple(p.shape) for p in m.pixel_values]
            layout.append((len(m.input_ids), len(m.image_slots), shapes, m.image_names))
        for clips in batch.clips:
            integers.append(clips.text_ids)
            pixels += [latents.reshape(-1) for latents in clips.latents]
            shapes = [tuple(latents.shape) for latents in clips.latents]
            clip_layout.append((len(clips.text_ids), shapes, clips.clip_names))
        floats = torch.cat(pixels) if pixels else torch.empty(0)
        return cls(torch.cat(integers), floats, layout, clip_layout, meta, state)

    def unpack(self) -> LoadedStep:
        microbatches = []
        sizes = [n for tokens, slots, _, _ in self.layout for n in (tokens, tokens, slots)]
        sizes += [tokens for tokens, _, _ in self.clip_layout]
        integers = iter(self.integers.split(sizes))
        shapes = [shape for _, _, found, _ in self.layout for shape in found]
        shapes += [shape for _, found, _ in self.clip_layout for shape in found]
        pixels = iter(self.pixels.split([torch.Size(s).numel() for s in shapes]))
        for _, _, own_shapes, names in self.layout:
            ids, labels, slots = (next(integers) for _ in range(3))
            images = [next(pixels).reshape(shape) for shape in own_shapes]
            microbatches.append(
                Microbatch(
                    input_ids=ids,
                    labels=labels,
                    image_slots=slots,
                    pixel_values=images,
                    image_names=names,
                )
            )
        clips = [
            ClipMicrobatch(
                text_ids=next(integers),
                latents=[next(pixels).reshape(shape) for shape in own_shapes],
                clip_names=names,
            )
            for _, own_shapes, names in self.clip_layout
        ]
        return Batch(microbatches=microbatches, clips=clips), self.meta, self.state
