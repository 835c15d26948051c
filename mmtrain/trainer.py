"""Puts the parts together: set-up, the training loop, validation, checkpoints, what the user sees.

All ranks of a replica get the metadata of each batch; every rank then plans the iteration by itself and gets the same
program. With the planner on, the data of a step are read before the step before runs, so that its plan is searched
meanwhile.
"""

import dataclasses
import errno
import logging
import os
import random
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mmtrain.checkpoint.checkpoint import Checkpointer, TrainState
from mmtrain.config import config as config_module
from mmtrain.config.config import Config
from mmtrain.data.packing import LoaderState
from mmtrain.data.tokenizer import job_tokenizer
from mmtrain.errors import ConfigError, MMTrainError, TrainingError
from mmtrain.launch.folder_owner import owned
from mmtrain.launch.processes import STOPS, check_temporary_folder
from mmtrain.modality.buckets import check_video
from mmtrain.modality.metadata import IterationMeta
from mmtrain.models.batch import Batch, check_batch, with_other_captions
from mmtrain.models.diffusion import ClipNoise, null_token
from mmtrain.observe.environment import write_environment
from mmtrain.observe.host_memory import keep_freed_memory
from mmtrain.observe.job_summary import few_clips, start_lines
from mmtrain.observe.metrics import PlannerMetrics, Reporter, StepMetrics, Validation, peak_flops, setup_logging
from mmtrain.observe.out_of_memory import Scene, explained, is_out_of_memory
from mmtrain.observe.step_files import StepFiles
from mmtrain.observe.step_memory import JobMemory, MemoryUse
from mmtrain.observe.step_timing import StepTiming
from mmtrain.observe.validation import count_answers, whole_predictions
from mmtrain.parallel.activation_memory import saved_ops
from mmtrain.parallel.build import build_local_model, check_same_program
from mmtrain.parallel.collectives import on_rank_zero
from mmtrain.parallel.feed import StepFeed
from mmtrain.parallel.feeds.inputs import StepInputs
from mmtrain.parallel.grads import clip, fill_missing_grads, sync_tied, total_norm
from mmtrain.parallel.mesh import Mesh, build_mesh, init_process_group, pick_device
from mmtrain.parallel.optim import build_optimizers, lr_factor, set_lr
from mmtrain.parallel.planning import Fate, PlanAhead, Planned, Ticket, num_cores, ranks_here
from mmtrain.parallel.replica_data import Item, ReplicaData
from mmtrain.parallel.roll_call import RollCall, common_reason, is_communication
from mmtrain.parallel.runtime import PipelineScheduleRuntime, StepOutcome
from mmtrain.parallel.tensor import finish_gradients
from mmtrain.parallel.torch_private import default_store, set_default_timeout
from mmtrain.planner.iteration import IterationPlan, IterationPlanner
from mmtrain.planner.plan_choice import Search, search_threads
from mmtrain.planner.search import search as searching
from mmtrain.spec.shapes import DitShape, dit_shape
from mmtrain.spec.vae_shapes import latent_scale

logger = logging.getLogger("mmtrain")


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one training step did, with losses over all replicas."""

    loss: float
    max_loss: float
    grad_norm: float
    tokens: int
    clips: int
    stop: bool
    """Whether some rank was asked to stop."""


@dataclass(frozen=True, kw_only=True)
class TimedStep:
    """When one training step ran on one rank, seconds on a clock of the host."""

    plan: IterationPlan
    outcome: StepOutcome
    start_s: float
    """All ranks were there."""
    end_s: float
    """Weights are updated; on an accelerator all its work is done."""


class Trainer:
    """One rank of a training job."""

    def __init__(self, config: Config, *, search: Search = searching.search) -> None:
        """Checks and prepares what needs no process group.

        Args: search: finds the plans of iterations (`planner.enable`).
        Raises: ConfigError.
        """
        self.config = config
        self._search = search
        check_temporary_folder(config.data.num_workers)
        check_video(config)
        self.folder = Path(config.job.dump_folder)
        saved_ops(config.activation_checkpoint)
        start = time.perf_counter()
        self.planner = IterationPlanner.of(config)
        self._cut_s = time.perf_counter() - start
        self.spec, self.partition = self.planner.spec, self.planner.partition
        self._dit: DitShape | None = None
        self._null_token = 0
        self._vae = latent_scale(config.model.vae) if config.model.vae else None
        if config.model.dit is not None:
            self._dit = dit_shape(config.model)
            self._null_token = null_token(job_tokenizer(config))
        self.reporter: Reporter | None = None
        self.checkpointer: Checkpointer | None = None
        self._ahead: PlanAhead | None = None
        self._stop_signal = 0
        self._old_handlers: dict[int, Any] = {}

    def run(self) -> None:
        """Trains to the last step, or until SIGTERM or SIGINT. Joins the job's process group unless the caller has.

        A run that has no step to do writes nothing.

        Raises:
            MMTrainError: the same on all ranks.
            RankLostError: a rank does not answer. This process can only end: its process groups are of no use any more.
        """
        setup_logging(int(os.environ.get("RANK", "0")))
        device = pick_device(self.config.comm)
        owns_group = not dist.is_initialized()
        if owns_group:
            init_process_group(self.config.comm, device)
        roll_call = RollCall(default_store(), dist.get_rank(), dist.get_world_size())
        try:
            timeout_s = self.config.comm.timeout_seconds
            with common_reason(roll_call, timeout_s, self._place), self._owning_folder(), self._needing_room():
                self._set_up(device)
                self._train()
        except MMTrainError as error:
            if is_communication(error.__cause__):
                self._ahead, owns_group = None, False  # they would wait for the lost rank
            raise
        finally:
            self._tear_down()
            if owns_group:
                dist.destroy_process_group()

    def _train(self) -> None:
        steps = self.config.training.steps
        if self.state.step >= steps:
            words = "already at step %d of training.steps = %d: nothing to do; raise it, or use another job.dump_folder"
            logger.warning(words, self.state.step, steps)
            return
        self._open_record()
        try:
            self._loop()
            if few := few_clips(self.config, self.state.clips):
                logger.info("%s", few)
        except TrainingError:  # on every rank: a checkpoint that is being written is still good
            if self.checkpointer:
                self.checkpointer.finish()
            raise

    @contextmanager
    def _owning_folder(self) -> Iterator[None]:
        """Inside, rank 0 owns the run folder. Collective over the job. Raises: ConfigError: on all ranks."""
        with ExitStack() as stack:
            refusal: list[ConfigError | None] = [None]
            if dist.get_rank() == 0:
                try:
                    stack.enter_context(owned(self.folder))
                except ConfigError as error:
                    refusal = [error]
            dist.broadcast_object_list(refusal, src=0, device=torch.device("cpu"))
            if refusal[0]:
                raise refusal[0]
            yield

    @contextmanager
    def _needing_room(self) -> Iterator[None]:
        """Says what to do where a file system is full. Raises: MMTrainError: in the place of that error."""
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise MMTrainError(
                f"{self.folder}: {error.strerror}; make room and start the job again, which goes on from its checkpoint"
            ) from None

    def _place(self, function: str) -> str:
        """Where this rank is in the job, for a message. Args: function: that it is in."""
        if not hasattr(self, "runtime") or not hasattr(self, "state"):
            return f"before the first step, {function}"
        if self.runtime.doing:
            return f"at step {self.state.step + 1}, {self.runtime.doing}"
        return f"after step {self.state.step}, {function}"

    # --------------------------------------------------------------------------------------- set-up

    def _set_up(self, device: torch.device) -> None:
        config = self.config
        _seed_everything(config.debug.seed, config.debug.deterministic)
        if device.type == "cpu":
            keep_freed_memory()
        set_default_timeout(timedelta(seconds=config.comm.timeout_seconds))
        self.mesh: Mesh = build_mesh(
            config.parallelism.mesh_shape,
            device,
            data_encoder=config.data_encoder,
            tie_ranks=self.partition.tie_ranks,
            share_device=config.comm.share_device,
        )
        self.data = ReplicaData(config, self.mesh, self.partition)
        self._log_start()
        self._memory = JobMemory.measured(config, self.spec, self.partition, self.mesh)
        if config.planner.enable:
            self._ahead = PlanAhead(
                self.planner, self.mesh, seed=config.debug.seed, search=self._search, warm=searching.warm
            )
        if config.training.attention_backend == "flex" and device.type != "cuda":
            raise ConfigError(
                f'training.attention_backend = "flex" trains on CUDA alone, but the device is {device.type}; set "auto"'
            )
        self.model = build_local_model(
            config.model,
            self.spec,
            self.partition,
            self.mesh,
            config.training,
            seed=config.debug.seed,
            regathered=config.regathered,
            recompute=config.activation_checkpoint,
        )
        self.optimizers = build_optimizers(config.optimizer, self.model.chunks, self.model.tied)
        self.runtime = PipelineScheduleRuntime(self.model.stages)
        settings = {
            "data.source": config.data.source,
            "training.seq_len": config.training.seq_len,
            "training.global_batch_size": config.training.global_batch_size,
            "debug.seed": config.debug.seed,
        }
        self.state = TrainState(step=0, loader=LoaderState(seed=config.debug.seed).to_dict(), data=settings, clips=0)
        if config.checkpoint.enable:
            folder = self.folder / config.checkpoint.folder
            self.checkpointer = Checkpointer(
                config.checkpoint, folder, self.model.chunks, self.optimizers, self.model.aliases
            )
            self.state = self.checkpointer.load() or self.state
            if self.state.step:
                logger.info("resumed from step %d", self.state.step)
            for name, old in self.state.data.items():
                if settings[name] != old:
                    logger.warning(
                        "%s was %r when step %d was saved and is %r now: the data do not go on where they stopped",
                        name,
                        old,
                        self.state.step,
                        settings[name],
                    )
            self.state = dataclasses.replace(self.state, data=settings)
            self._memory.resume(self.state.memory)
        self._items = self.data.training(LoaderState.from_dict(self.state.loader))
        self._skipped = 0

    def _open_record(self) -> None:
        """Begins what the run leaves in its folder, and takes signals from now on."""
        config = self.config
        self._is_reporter = self.mesh.rank == 0
        self._on_folder(self._write_description)
        self.reporter = Reporter(
            config.metrics,
            self.folder,
            enabled=self._is_reporter,
            steps=config.training.steps,
            start=self.state.step,
        )
        self.peak_flops = peak_flops(config.metrics, self.mesh.device)
        self._old_handlers = {number: signal.signal(number, self._on_stop) for number in STOPS}

    def _on_folder(self, write: Callable[[], None]) -> None:
        """Writes to the run's folder, on rank 0. Collective over the job. Raises: ConfigError: it cannot be done."""
        try:
            on_rank_zero(write)
        except OSError as error:
            raise ConfigError(
                f"job.dump_folder = {str(self.folder)!r} cannot be written: {error.strerror}; name another folder"
            ) from None

    def _write_description(self) -> None:
        (self.folder / "config.toml").write_text(config_module.dump(self.config))
        write_environment(self.folder / "environment.json", self.mesh, self.state.step)

    def _log_start(self) -> None:
        threads = search_threads(self.config.planner.threads, num_cores(), ranks_here(self.mesh.shape.world_size))
        for line in start_lines(
            self.config, self.planner, device=self.mesh.device.type, threads=threads, cut_s=self._cut_s
        ):
            logger.info("%s", line)

    def _tear_down(self) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        for part in (getattr(self, name, None) for name in ("_ahead", "reporter", "data")):
            if part is not None:
                part.close()

    def _on_stop(self, number: int, frame: Any) -> None:
        again = number == self._stop_signal == signal.SIGINT
        if not self._stop_signal and self._is_reporter and number == signal.SIGINT:
            saves = "saves and " if self.checkpointer else ""
            # Not through the log, which this signal may have interrupted.
            os.write(2, f"Ctrl-C: the job {saves}ends after this step; once more ends it at once\n".encode())
        self._stop_signal = number
        before = self._old_handlers.get(number)
        if again and callable(before):  # else a launcher ends this process
            before(number, frame)

    # ----------------------------------------------------------------------------------------- loop

    def _loop(self) -> None:
        config = self.config
        steps = config.training.steps
        if config.validation.enable and self.state.step == 0:
            self.validate(0)
        batches = self._batches(self.state.step + 1, steps)
        while self.state.step < steps:
            start = time.perf_counter()
            item, ticket = next(batches)
            loaded = time.perf_counter()
            step = self.state.step + 1
            planned = self._take(ticket) if ticket else None
            plan = planned.plan if planned else self._plan(item.meta, step=step)
            ready = time.perf_counter()
            self._memory.start_step()
            try:
                result, outcome = self.train_step(step, item, plan)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                raise explained(error, self._scene(step, item, plan)) from error
            seconds = time.perf_counter() - start
            self.state = dataclasses.replace(
                self.state,
                step=step,
                loader=item.state.to_dict(),
                tokens=self.state.tokens + result.tokens,
                clips=None if self.state.clips is None else self.state.clips + result.clips,
            )
            memory = self._memory.end_step(step, plan)
            if saved := self._memory.to_dict():
                self.state = dataclasses.replace(self.state, memory=saved)
            quiet = step % config.metrics.log_freq != 0 and step not in (1, steps)
            waits = (loaded - start, ready - loaded)
            assert plan.result.plan is not None
            timing = StepTiming.gathered(self.mesh, plan.result.plan, outcome)
            self._report(result, item, plan, timing, seconds, waits, memory, planned, quiet=quiet)
            self._write_files(step, plan, timing)
            if self.checkpointer:
                self.checkpointer.poll()
                if step % config.checkpoint.interval == 0 or step == steps or result.stop:
                    self.checkpointer.save(self.state)
            due = step % config.validation.freq == 0 or step == steps
            if config.validation.enable and due and not result.stop:  # a stop leaves little time
                self.validate(step)
            if result.stop:
                reason = signal.Signals(self._stop_signal).name if self._stop_signal else "a signal to another rank"
                logger.info("%s: stopped after step %d%s", reason, step, ", saved" if self.checkpointer else "")
                break
        if self.checkpointer:
            self.checkpointer.finish()

    def train_step(self, step: int, item: Item, plan: IterationPlan) -> tuple[StepResult, StepOutcome]:
        """Forward, backward and optimizer step of one batch. Collective over the job.

        Raises: TrainingError: loss or gradient is not finite (training.on_nonfinite = "stop"); nothing is changed.
        """
        result, outcome = self.backward(step, item, plan)
        if np.isfinite(result.loss) and np.isfinite(result.grad_norm):
            clip(self.model.parameters, result.grad_norm, self.config.training.max_norm)
            section = self.config.optimizer
            factor = lr_factor(self.config.lr_scheduler, step, self.config.training.steps)
            set_lr(self.optimizers, section.lr * factor)
            self.optimizers.step()
        else:
            self._handle_nonfinite(step, result.loss, result.grad_norm, self._loss_sum(outcome))
        self.optimizers.zero_grad()
        return result, outcome

    def backward(self, step: int, item: Item, plan: IterationPlan) -> tuple[StepResult, StepOutcome]:
        """Forward and backward of one batch; its gradients are in `self.model`, complete. Collective over the job.

        Raises: TrainingError: the batch has nothing to predict.
        """
        num_targets = self._sum_over_replicas(self._num_targets(item.meta))
        if num_targets == 0:
            what = (
                "no token to predict; check the records' answers" if self._dit is None else "no clip that can be read"
            )
            raise TrainingError(f"step {step}: the batch has {what}")
        outcome = self._run(plan, item, noise=self._noise(step, hides=True), loss_grad=1.0 / num_targets)
        parameters = self.model.parameters
        fill_missing_grads(parameters)
        finish_gradients(parameters)
        sync_tied(self.model.tied, self.mesh)
        norm = total_norm(parameters, self.mesh, skip=self._tied_copy_to_skip())
        loss_sum = self._loss_sum(outcome)
        counts = (item.meta.num_all_tokens, item.meta.num_clips) if self.mesh.is_leader else (0, 0)
        totals = torch.tensor([loss_sum, *counts, self._stop_signal], dtype=torch.float64)
        dist.all_reduce(totals)
        largest = torch.tensor(loss_sum / max(1, self._num_targets(item.meta)), dtype=torch.float64)
        if self.mesh.replica_group is not None:
            dist.all_reduce(largest, group=self.mesh.replica_group)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        result = StepResult(
            loss=float(totals[0]) / num_targets,
            max_loss=float(largest),
            grad_norm=float(norm),
            tokens=int(totals[1]),
            clips=int(totals[2]),
            stop=bool(totals[3]),
        )
        return result, outcome

    def _scene(self, step: int, item: Item, plan: IterationPlan) -> Scene:
        """Where this rank ran out of memory."""
        return Scene(
            config=self.config,
            step=step,
            rank=self.mesh.rank,
            pp_rank=self.mesh.pp_rank,
            device=self.mesh.device,
            meta=item.meta,
            plan=plan,
            budget=self._memory.budget(step),
            measured_bytes=self._memory.peak_bytes(),
        )

    def gradients(self, device: torch.device, num_steps: int) -> Iterator[tuple[Item, StepResult]]:
        """The first batches with their loss; while one is held, its gradients are in `self.model`.

        Weights stay as they were built. Sets the job up and ends it; the process group must exist. Collective.
        """
        try:
            self._set_up(device)
            for step in range(1, num_steps + 1):
                item = next(self._items)
                yield item, self.backward(step, item, self._plan(item.meta, step=step))[0]
                self.optimizers.zero_grad()
        finally:
            self._tear_down()

    def timed_steps(
        self,
        device: torch.device,
        batches: Iterable[tuple[Batch, IterationMeta]],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> Iterator[TimedStep]:
        """Trains on given batches instead of the job's data, and says when each step ran.

        The ranks start each step together; a step is planned before its clock starts, however long that takes. All
        ranks of a replica give equal batches. Sets the job up and ends it; the process group must exist. Collective.

        Args: clock: of steps and, on a CPU, actions. `time.thread_time` leaves out what else a machine does, and waits.
        """
        try:
            self._set_up(device)
            self.runtime.use_clock(clock)
            for step, (batch, meta) in enumerate(batches, 1):
                item = self.data.item(batch, meta)
                plan = self._plan(meta, step=step)
                dist.barrier()
                start = clock()
                _, outcome = self.train_step(step, item, plan)
                if device.type != "cpu":
                    torch.accelerator.synchronize(device)
                yield TimedStep(plan=plan, outcome=outcome, start_s=start, end_s=clock())
        finally:
            self._tear_down()

    def _loss_sum(self, outcome: StepOutcome) -> float:
        """This rank's share of its replica's loss: tp ranks hold equal losses, cp ranks those of their own tokens."""
        if self.mesh.place.tp:
            return 0.0
        return sum((float(loss) for loss in outcome.losses.values()), 0.0)

    def _handle_nonfinite(self, step: int, loss: float, norm: float, local_loss: float) -> None:
        bad = [not np.isfinite(local_loss)]
        for parameter in self.model.parameters:
            grad = parameter.grad
            if grad is not None:
                local = grad.to_local() if hasattr(grad, "to_local") else grad
                bad.append(not bool(torch.isfinite(local).all()))
        flags: list[Any] = [None] * self.mesh.shape.world_size
        dist.all_gather_object(flags, any(bad))
        ranks = [rank for rank, flag in enumerate(flags) if flag]
        message = f"step {step}: loss {loss}, gradient norm {norm}; not finite on ranks {ranks}"
        if self.config.training.on_nonfinite == "skip":
            logger.warning("%s; the step is skipped", message)
            return
        raise TrainingError(
            f"{message}. Nothing was changed by this step; lower optimizer.lr, check the data, or set "
            'training.on_nonfinite = "skip"'
        )

    def _plan(self, meta: IterationMeta, *, step: int = 0, forward_only: bool = False) -> IterationPlan:
        """The plan of an iteration, waited for. Collective over the job.

        Args: step: names the search's seed and the memory limits.
        """
        planner = self._memory.limited(self.planner, step)
        with self._on_all_replicas():
            if self._ahead and not forward_only:
                return self._ahead.now(step, meta, planner).plan
            plan = self._ahead.forward(meta, planner) if self._ahead else planner.plan(meta, forward_only=forward_only)
            check_same_program(plan.program.hash, self.mesh)
            return plan

    def _take(self, ticket: Ticket) -> Planned:
        """The plan that was made while the step before ran, or the first one. Collective over the job."""
        assert self._ahead is not None
        with self._on_all_replicas():
            return self._ahead.take(ticket, self.config.planner.patience_s)

    @contextmanager
    def _on_all_replicas(self) -> Iterator[None]:
        """What ends one replica ends all of them, instead of leaving them to wait for it. Collective over the job."""
        error: MMTrainError | None = None
        try:
            yield
        except MMTrainError as found:
            error = found
        group = self.mesh.batch_group
        if group is not None:
            failed = torch.tensor(int(error is not None))
            dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=group)
            if failed:
                errors: list[MMTrainError | None] = [None] * dist.get_world_size(group)
                dist.all_gather_object(errors, error, group=group)
                error = error or next(other for other in errors if other)
        if error:
            raise error

    def _run(
        self,
        plan: IterationPlan,
        item: Item,
        *,
        noise: ClipNoise | None,
        loss_grad: float = 1.0,
        want_predictions: bool = False,
    ) -> StepOutcome:
        """Args: noise: of a text-to-video job. want_predictions: of a language model's tokens."""
        if item.batch is not None and self.mesh.pp_rank == 0:  # other ranks may have a part of it
            check_batch(item.batch, item.meta, self._vae)
        place = self.mesh.place
        inputs = StepInputs(
            layout=plan.layout,
            meta=item.meta,
            mesh=self.mesh,
            batch=item.batch,
            labels=item.labels,
            noise=noise,
            backend=self.config.training.attention_backend,
            want_predictions=want_predictions,
        )
        self.runtime.load(
            plan.program,
            lambda stage, work: self.planner.output_shape(plan.layout, stage, work, place.cp, place.tp),
        )
        return self.runtime.step(StepFeed(self.partition, inputs), loss_grad=loss_grad)

    def _noise(self, step: int, *, hides: bool) -> ClipNoise | None:
        """The random choices of a step of a text-to-video job. Args: hides: captions may be hidden."""
        if self._dit is None:
            return None
        token = self._null_token if hides else None
        return ClipNoise(self.config.diffusion, self.config.debug.seed, step, null_token=token)

    def _num_targets(self, meta: IterationMeta) -> int:
        """Numbers that have a loss: labelled tokens, or all that is predicted of the latents."""
        return meta.num_targets * (self._dit.output_dim if self._dit is not None else 1)

    def _tied_copy_to_skip(self) -> torch.nn.Parameter | None:
        """The tied head is counted in the norm where the embedding is."""
        if not self.model.tied or self.partition.of_module("language")[-1].pp_rank != self.mesh.pp_rank:
            return None
        return self.model.tied[-1]

    # --------------------------------------------------------------------------------- data of a step

    def _batches(self, first: int, last: int) -> Iterator[tuple[Item, Ticket | None]]:
        """The items of the steps first .. last; with the planner on, each after the next one is being planned.

        An error in the data of a step is raised when that step comes, and not when it was read.
        """
        if self._ahead is None:
            for _ in range(first, last + 1):
                yield next(self._items), None
            return
        waiting: deque[tuple[Item, Ticket] | Exception] = deque()
        for step in range(first, last + 1):
            while len(waiting) < 2 and step + len(waiting) <= last:
                waiting.append(self._fetch(step + len(waiting), self._ahead))
            found = waiting.popleft()
            if isinstance(found, Exception):
                raise found
            yield found

    def _fetch(self, step: int, ahead: PlanAhead) -> tuple[Item, Ticket] | Exception:
        """The item of a step, which is being planned from now on; or why there is none."""
        try:
            item = next(self._items)
        except Exception as error:
            return error
        return item, ahead.submit(step, item.meta, self._memory.limited(self.planner, step))

    def _sum_over_replicas(self, count: int) -> int:
        if self.mesh.batch_group is None:
            return count
        total = torch.tensor(count)
        dist.all_reduce(total, group=self.mesh.batch_group)
        return int(total)

    # ------------------------------------------------------------------------------------ validation

    def validate(self, step: int) -> Validation:
        """Loss and answers on held-out data, through the pipeline.

        An answer is right if every one of its tokens is the most likely one after the right prefix, which
        is when greedy decoding would write it.
        """
        found = self._validated(step, self.data.validation(self.config.validation.steps))
        if self.config.validation.shuffled_captions:
            items = self.data.validation(self.config.validation.steps, with_other_captions)
            found = dataclasses.replace(found, shuffled_loss=self._validated(step, items).loss)
        assert self.reporter is not None
        self.reporter.validation(step, found)
        return found

    def _validated(self, step: int, items: Iterator[Item]) -> Validation:
        mesh = self.mesh
        loss_sum, num_targets = 0.0, 0
        accuracy: dict[str, tuple[int, int]] = {}
        for number, item in enumerate(items):
            plan = self._plan(item.meta, step=step + 1, forward_only=True)
            noise = self._noise(-1 - number, hides=False)
            outcome = self._run(plan, item, noise=noise, want_predictions=True)
            loss_sum += self._loss_sum(outcome)
            predictions = whole_predictions(plan, item.labels, outcome.predictions, mesh)
            if outcome.losses and mesh.place.cp == mesh.place.tp == 0:
                num_targets += self._num_targets(item.meta)
                count_answers(plan, item.meta, item.labels, predictions, accuracy)
        parts: list[Any] = [None] * mesh.shape.world_size
        dist.all_gather_object(parts, (loss_sum, num_targets, accuracy))
        merged: dict[str, tuple[int, int]] = {}
        for _, _, counts in parts:
            for grade, (right, count) in counts.items():
                before = merged.get(grade, (0, 0))
                merged[grade] = (before[0] + right, before[1] + count)
        loss = sum(p[0] for p in parts) / max(1, sum(p[1] for p in parts))
        return Validation(loss=loss, accuracy=merged)

    # ----------------------------------------------------------------------------------------- report

    def _report(
        self,
        result: StepResult,
        item: Item,
        plan: IterationPlan,
        timing: StepTiming,
        seconds: float,
        waits: tuple[float, float],
        memory: MemoryUse,
        planned: Planned | None,
        *,
        quiet: bool,
    ) -> None:
        """Args: waits: seconds for data and for the plan."""
        mesh = self.mesh
        module_flops = self.planner.flops(plan.batching)
        flops = sum(f.total for f in module_flops.values())
        meta = item.meta
        image_tokens = sum(image.num_tokens for m in meta.microbatches for image in m.images)
        video = [meta.num_clips, meta.num_frames, meta.num_video_tokens]
        fates = self._ahead.counts if self._ahead else {}
        counts = [meta.num_images, meta.num_patches, meta.num_skipped, flops, image_tokens]
        counts += [*video, *(fates.get(fate, 0) for fate in (Fate.LATE, Fate.FAILED, Fate.BROKEN, Fate.INVALID))]
        totals = torch.tensor(counts if mesh.is_leader else [0.0] * len(counts), dtype=torch.float64)
        dist.all_reduce(totals)
        self._skipped += int(totals[2])
        step = self.state.step
        clips, frames, video_tokens, late, failed, broken, invalid = map(int, totals[5:])
        planner = None
        if planned:
            planner = PlannerMetrics(
                evaluations=planned.evaluations,
                search_s=planned.search_s,
                makespan_s=planned.makespan_s,
                first_s=planned.first_s,
                bound_s=planned.bound_s,
                late=late,
                failed=failed + broken,
                invalid=invalid,
                age_s=planned.age_s,
            )
        if not self._is_reporter:
            return
        assert self.reporter is not None and plan.result.timeline is not None
        self.reporter.step(
            StepMetrics(
                step=step,
                loss=result.loss,
                max_loss=result.max_loss,
                grad_norm=result.grad_norm,
                lr=self.config.optimizer.lr * lr_factor(self.config.lr_scheduler, step, self.config.training.steps),
                step_time_s=seconds,
                data_time_s=waits[0],
                plan_time_s=waits[1],
                tokens=result.tokens,
                images=int(totals[0]),
                patches=int(totals[1]),
                image_tokens=int(totals[4]),
                clips=clips,
                frames=frames,
                video_tokens=video_tokens,
                skipped_samples=self._skipped,
                bubble=timing.bubble,
                flops=float(totals[3]) / mesh.shape.world_size,
                peak_flops=self.peak_flops,
                memory_gib=memory.reserved_gib,
                memory_percent=memory.reserved_percent,
                memory_predicted_gib=memory.predicted_gib,
                memory_measured_gib=memory.measured_gib,
                memory_limit_gib=memory.limit_gib,
                world_size=mesh.shape.world_size,
                measured_s=timing.makespan_s,
                planned_s=plan.result.timeline.makespan_s,
                modules=timing.modules(module_flops, self.peak_flops * mesh.shape.cp * mesh.shape.tp),
                planner=planner,
            ),
            quiet=quiet,
        )

    def _write_files(self, step: int, plan: IterationPlan, timing: StepTiming) -> None:
        """What was measured beside what was planned, for replica 0, where it is due."""
        section = self.config.metrics
        if not self._is_reporter:
            return
        assert self.reporter is not None
        files = StepFiles(step=step, planner=self.planner, plan=plan, timing=timing)
        if section.trace_freq and step % section.trace_freq == 0:
            files.write_trace(self.folder / "traces" / f"step-{step}.json")
        last = step == self.config.training.steps
        if section.timeline_freq and (step % section.timeline_freq == 0 or last):
            files.write_timeline(self.folder / "timelines" / f"step-{step}")
            self.reporter.image(step, "timeline", files.image)


def _seed_everything(seed: int, deterministic: bool) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
