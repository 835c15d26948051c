"""The training job of one rank: set-up, the training loop, steps, validation, checkpoints.

All ranks of a replica get the metadata of each batch; every rank then plans the iteration by itself and gets the same
program. With the planner on, the data of a step are read before the step before runs, so that its plan is searched
meanwhile.

What is trained (`TrainState` and the tensors by name) and where (`Placement`) are two values, so a job can go on at
another layout in the same processes.
"""

import dataclasses
import gc
import logging
import math
import signal
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from mmtrain.checkpoint.checkpoint import Checkpointer
from mmtrain.checkpoint.held import HeldTensors
from mmtrain.checkpoint.shared_folder import check_shared
from mmtrain.checkpoint.state import NamedTensors, TrainState, seed_everything
from mmtrain.config import config as config_module
from mmtrain.config.config import Config
from mmtrain.config.sections import ParallelismConfig
from mmtrain.data.packing import LoaderState
from mmtrain.data.tokenizer import job_tokenizer
from mmtrain.errors import MMTrainError, TrainingError
from mmtrain.launch.launched import Launched, local_world_size
from mmtrain.launch.processes import check_temporary_folder
from mmtrain.launch.stop_signals import StopSignals
from mmtrain.modality.buckets import check_video
from mmtrain.modality.metadata import IterationMeta
from mmtrain.models.attention.context import AttentionChoices
from mmtrain.models.batch import Batch, check_batch
from mmtrain.models.diffusion import ClipNoise, Denoising, null_token
from mmtrain.models.loss import loss_of
from mmtrain.observe.by_source import record_sources, source_sums
from mmtrain.observe.host_memory import keep_freed_memory
from mmtrain.observe.log_file import setup_logging
from mmtrain.observe.observer import FinishedStep, Observer, RunningStep
from mmtrain.observe.out_of_memory import explained
from mmtrain.observe.run_record import RunRecord, log_end, log_start, owned_by_rank_zero
from mmtrain.observe.step_memory import DeviceMemory, JobMemory
from mmtrain.observe.step_metrics import Metrics
from mmtrain.observe.validation import ForwardPass, Validator
from mmtrain.parallel.activation_memory import saved_ops
from mmtrain.parallel.alike import check_alike
from mmtrain.parallel.build import LocalModel, check_same_assignment, check_same_program
from mmtrain.parallel.collectives import errors_on_all, sum_over
from mmtrain.parallel.feed import StepFeed
from mmtrain.parallel.feeds.inputs import StepInputs
from mmtrain.parallel.grads import clip, fill_missing_grads, nonfinite_ranks, sync_tied, total_norm
from mmtrain.parallel.job_inputs import job_inputs
from mmtrain.parallel.meeting import Patience, meet
from mmtrain.parallel.mesh import Mesh, init_process_group, pick_device
from mmtrain.parallel.optim import lr_factor, set_lr
from mmtrain.parallel.placement import Placement
from mmtrain.parallel.planning import PendingPlan, PlanAhead, Planned
from mmtrain.parallel.replica_data import Item
from mmtrain.parallel.roll_call import RollCall, common_reason, is_communication
from mmtrain.parallel.runtime import StepOutcome
from mmtrain.parallel.tensor import finish_gradients
from mmtrain.parallel.torch_private import default_store, set_default_timeout, set_timeout
from mmtrain.planner.iteration import IterationPlan, IterationPlanner
from mmtrain.planner.partition.partition import Partition
from mmtrain.planner.plan_choice import Search
from mmtrain.planner.search import search as searching
from mmtrain.simulator.job import job_planner

logger = logging.getLogger("mmtrain")


MOST_SKIPPED = 10
"""Steps in a row that training.on_nonfinite = "skip" skips."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What the weights of a step depend on, over all replicas."""

    loss: float
    grad_norm: float
    stop: bool
    """Whether some rank was asked to stop."""

    @property
    def is_finite(self) -> bool:
        """Whether the step may change the weights."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


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

    def __init__(
        self, config: Config, *, search: Search = searching.search, observers: Iterable[Observer] = ()
    ) -> None:
        """Checks the config, and prepares all that needs no process group.

        Args:
            search: finds the plans of iterations (`planner.enable`).
            observers: watch the job, in addition to the record of the run.
        Raises: ConfigError.
        """
        self.config = config
        self._search = search
        check_temporary_folder(config.data.num_workers)
        check_video(config)
        self.folder = Path(config.job.dump_folder)
        saved_ops(config.activation_checkpoint)
        self.planner, self._cut_s = _planner_in_time(config)
        self._loss = loss_of(config.model)
        self._denoising: Denoising | None = None
        if config.model.reads_clips:
            self._denoising = Denoising.of(config, null_token(job_tokenizer(config)))
        self.metrics = Metrics()
        self.observers = list(observers)
        self.checkpointer: Checkpointer | None = None
        self._placement: Placement | None = None
        self.state = TrainState.first(config)
        self._sources = tuple(source.label for source in config.data.sources)
        self._stops = StopSignals()
        self._patience = Patience.at_start(config.comm)

    @property
    def placement(self) -> Placement:
        """Where the job is trained now."""
        assert self._placement is not None
        return self._placement

    @property
    def mesh(self) -> Mesh:
        """The one of the placement."""
        return self.placement.mesh

    @property
    def model(self) -> LocalModel:
        """The one of the placement."""
        return self.placement.model

    @property
    def partition(self) -> Partition:
        """The one of the planner."""
        return self.planner.partition

    def run(self, layouts: Mapping[int, ParallelismConfig] | None = None) -> None:
        """Trains to the last step, or until SIGTERM or SIGINT. Joins the job's process group unless the caller has.

        A run without steps left writes no files.

        Args: layouts: step -> `[parallelism]` of the steps after it; for as many ranks as the job has.
        Raises:
            MMTrainError: the same on all ranks.
            RankLostError: a rank does not answer. This process can only end: its process groups are of no use any more.
        """
        launched, comm = Launched.from_environment(), self.config.comm
        setup_logging(launched.rank)
        device = pick_device(comm)
        owns_group, lost = not dist.is_initialized(), False
        store = meet(comm) if owns_group else default_store()
        roll_call = RollCall(store, launched.rank, launched.world_size)
        try:
            with common_reason(roll_call, lambda: self._patience, self._locate):
                if owns_group:
                    check_alike(store, launched, job_inputs(self.config, self.planner.schedule, device, launched))
                    init_process_group(comm, device, store)
                with owned_by_rank_zero(self.folder):
                    if self.config.checkpoint.enable:
                        check_shared(self.folder)
                    self._set_up(device, resumes=True)
                    self._train(layouts or {})
        except MMTrainError as error:
            lost = is_communication(error.__cause__)
            for observer in self.observers:
                observer.failed(error)
            raise
        finally:
            self._tear_down(lost=lost)
            if owns_group and not lost and dist.is_initialized():  # it would wait for the lost rank
                dist.destroy_process_group()

    def _train(self, layouts: Mapping[int, ParallelismConfig]) -> None:
        steps = self.config.training.steps
        if self.state.step >= steps:
            # No warning, which each rank would show.
            text = "no step is left: step %d of training.steps = %d is done; raise it, or name another job.dump_folder"
            logger.info(text, self.state.step, steps)
            return
        for observer in self.observers:
            observer.layout_begins(self.config, self.planner, self.mesh, self.state.step)
        self.observers.append(RunRecord(self.config, self.planner, self.mesh, self.state.step))
        end = "saves and ends" if self.checkpointer else "ends"
        self._patience = Patience.later(self.config.comm)
        set_timeout(timedelta(seconds=self._patience.seconds))
        notice = f"Ctrl-C: the job {end} after this step; once more ends it at once\n"
        self._stops.catch(notice if dist.get_rank() == 0 else "")
        try:
            for step, parallelism in sorted(layouts.items()):
                if not self._loop(step):
                    return
                self.change_layout(parallelism)
            self._loop(steps)
            log_end(self.config, self.state.step, self.state.skipped, self.state.clips)
        except TrainingError:  # on every rank: a checkpoint that is being written is still good
            if self.checkpointer:
                self.checkpointer.finish()
            raise

    def _locate(self, function: str) -> str:
        """The position of this rank in the job, for a message. Args: function: that it runs."""
        if self._placement is not None and self._placement.runtime.doing:
            return f"at step {self.state.step + 1}, {self._placement.runtime.doing}"
        return f"after step {self.state.step}, {function}" if self.state.step else f"before the first step, {function}"

    # --------------------------------------------------------------------------------------- set-up

    def _set_up(self, device: torch.device, *, resumes: bool = False) -> None:
        """Sets up the process, and the first layout.

        Args: resumes: with the state of the newest checkpoint, and the job saves its own; else with initial weights.
        """
        config = self.config
        seed_everything(config.debug.seed, config.debug.deterministic)
        if device.type == "cpu":
            keep_freed_memory()
        set_default_timeout(timedelta(seconds=config.comm.timeout_seconds))
        self._device_memory = DeviceMemory.agreed(device, local_world_size(config.parallelism.mesh_shape.world_size))
        if config.checkpoint.enable and resumes:
            self.checkpointer = Checkpointer(config.checkpoint, self.folder / config.checkpoint.folder)
        self._build(device)
        if self.checkpointer and (saved := self.checkpointer.load(self._named())):
            self.state = saved.resumed(self.state.settings)
        self._take_up()

    def _build(self, device: torch.device) -> None:
        """Places the job as its config says, with initial weights. Collective over the job."""
        log_start(self.config, self.planner, device, self._cut_s)
        self._memory = JobMemory.budgeted(self.config, self.planner, device, self._device_memory)
        self._placement = Placement.build(self.config, self.planner, device, self._search)

    def _named(self) -> NamedTensors:
        """The tensors of the placement."""
        model = self.model
        return NamedTensors(model.chunks, self.placement.optimizers, model.aliases)

    def _take_up(self) -> None:
        """Continues from the state: its margins of memory and its position in the data."""
        self._memory.resume(self.state.memory)
        self._items = self.placement.data.training(LoaderState.from_dict(self.state.loader))

    def change_layout(self, parallelism: ParallelismConfig) -> None:
        """Continues at other degrees of parallelism, in the same processes, as a resumed job does. Collective.

        Raises: ConfigError: the job does not fit them.
        """
        config = dataclasses.replace(self.config, parallelism=parallelism)
        config_module.check(config)
        parallelism.mesh_shape.check_world_size(dist.get_world_size())
        planner, cut_s = _planner_in_time(config)
        logger.info("after step %d the layout changes", self.state.step)
        device, tensors = self.mesh.device, HeldTensors.of(self._named())
        for observer in self.observers:
            observer.layout_ends()
        self.placement.close()
        self._placement, self._items = None, iter(())
        gc.collect()  # hooks refer to modules: their memory is needed now
        self.config, self.planner, self._cut_s = config, planner, cut_s
        self._build(device)
        tensors.restore(self._named())
        self._take_up()
        for observer in self.observers:
            observer.layout_begins(config, planner, self.mesh, self.state.step)

    def _tear_down(self, *, lost: bool = False) -> None:
        """Args: lost: a rank does not answer."""
        self._stops.release()
        for observer in self.observers:
            observer.close()
        if self._placement is not None:
            self._placement.stop(lost=lost)

    # ----------------------------------------------------------------------------------------- loop

    def _loop(self, until: int) -> bool:
        """Trains up to a step, or until it is asked to stop; whether there are steps left to train."""
        config = self.config
        steps, until = config.training.steps, min(until, config.training.steps)
        stopped = False
        if config.validation.enable and self.state.step == 0:
            self.validate(0)
        batches = self._batches(self.state.step + 1, until)
        while self.state.step < until and not stopped:
            finished, stopped = self._next_step(batches)
            step = finished.step
            for observer in self.observers:
                observer.after_step(finished)
            if self.checkpointer:
                self.checkpointer.poll()
                if step % config.checkpoint.interval == 0 or step == steps or stopped:
                    self.checkpointer.save(self.state, self._named())
            due = step % config.validation.freq == 0 or step == steps
            if config.validation.enable and due and not stopped:  # a stop leaves little time
                self.validate(step)
            if stopped:
                reason = signal.Signals(self._stops.number).name if self._stops.number else "a signal to another rank"
                logger.info("%s: stopped after step %d%s", reason, step, ", saved" if self.checkpointer else "")
        if self.checkpointer:
            self.checkpointer.finish()
        return not stopped and self.state.step < steps

    def _next_step(self, batches: Iterator[tuple[Item, PendingPlan | None]]) -> tuple[FinishedStep, bool]:
        """Trains one step, after which the state is the one to go on from; whether a rank was asked to stop.

        Collective over the job.
        """
        self.metrics.start_step()
        start = time.perf_counter()
        item, pending = next(batches)
        loaded = time.perf_counter()
        step = self.state.step + 1
        planned = self._take(pending) if pending else None
        plan = planned.plan if planned else self._plan(item.meta, step=step)
        ready = time.perf_counter()
        running = RunningStep(step=step, meta=item.meta, plan=plan, planned=planned)
        for observer in self.observers:
            observer.before_step(running)
        self._memory.start_step()
        with explained(self.config, self.mesh, self._memory, running):
            result, outcome = self.train_step(step, item, plan)
        self.metrics.record("data_time_s", loaded - start)
        self.metrics.record("plan_time_s", ready - loaded)
        self.metrics.record("step_time_s", time.perf_counter() - start)
        self._memory.end_step(step, plan, self.metrics)
        self.state = self.state.after(
            loader=item.state.to_dict(),
            tokens=int(self.metrics["tokens"]),
            clips=int(self.metrics["clips"]),
            memory=self._memory.to_dict(),
            skipped=not result.is_finite,
        )
        return FinishedStep(**vars(running), outcome=outcome, metrics=self.metrics), result.stop

    def train_step(self, step: int, item: Item, plan: IterationPlan) -> tuple[StepResult, StepOutcome]:
        """Forward, backward and optimizer step of one batch. Collective over the job.

        Raises: TrainingError: loss or gradient is not finite (training.on_nonfinite = "stop"); nothing is changed.
        """
        result, outcome = self.backward(step, item, plan)
        factor = lr_factor(self.config.lr_scheduler, step, self.config.training.steps)
        self.metrics.record("lr", self.config.optimizer.lr * factor)
        if result.is_finite:
            clip(self.model.parameters, result.grad_norm, self.config.training.max_norm)
            set_lr(self.placement.optimizers, factor)
            self.placement.optimizers.step()
        else:
            self._handle_nonfinite(step, result.loss, result.grad_norm, self._loss_sum(outcome))
        self.placement.optimizers.zero_grad()
        return result, outcome

    def backward(self, step: int, item: Item, plan: IterationPlan) -> tuple[StepResult, StepOutcome]:
        """Forward and backward of one batch; its gradients are in `self.model`, complete. Collective over the job.

        Raises: TrainingError: the batch has nothing to predict.
        """
        check_same_assignment(item.meta, self.mesh)
        num_targets = sum_over(self.mesh.batch_group, self._loss.num_values(item.meta))
        if num_targets == 0:
            raise TrainingError(f"step {step}: the batch has {self._loss.lack}")
        outcome = self._run(plan, item, noise=self._noise(step, hides=True), loss_grad=1.0 / num_targets)
        parameters = self.model.parameters
        fill_missing_grads(parameters)
        finish_gradients(parameters)
        sync_tied(self.model.tied, self.mesh)
        norm = total_norm(parameters, self.mesh, skip=self._tied_copy_to_skip())
        loss_sum = self._loss_sum(outcome)
        by_source = source_sums(self._sources, plan, item.meta, item.labels, outcome.position_losses, self.mesh)
        metrics = self.metrics
        metrics.is_leader = self.mesh.is_leader
        metrics.record("tokens", item.meta.num_all_tokens)
        metrics.record("clips", item.meta.num_clips)
        totals = metrics.reduce(loss=loss_sum, stop=self._stops.number, sources=by_source)
        result = StepResult(loss=float(totals["loss"]) / num_targets, grad_norm=float(norm), stop=bool(totals["stop"]))
        metrics.record("loss", result.loss)
        metrics.record("grad_norm", result.grad_norm)
        record_sources(metrics, self._sources, totals["sources"])
        replica_loss = torch.tensor(loss_sum / max(1, self._loss.num_values(item.meta)), dtype=torch.float64)
        if self.mesh.replica_group is not None:
            dist.all_reduce(replica_loss, group=self.mesh.replica_group)
        metrics.record("max_loss", float(replica_loss))
        metrics.reduce_max()
        return result, outcome

    def gradients(
        self, device: torch.device, num_steps: int, batches: Iterator[tuple[Batch, IterationMeta]] | None = None
    ) -> Iterator[tuple[Item, StepResult]]:
        """The first batches with their loss; while one is held, its gradients are in `self.model`.

        Weights stay as they were built. Sets the job up and ends it; the process group must exist. Collective.

        Args: batches: instead of the job's data, equal on all ranks of a replica; first asked when the mesh exists.
        """
        try:
            self._set_up(device)
            items = self._items if batches is None else (self.placement.data.item(*batch) for batch in batches)
            for step in range(1, num_steps + 1):
                item = next(items)
                yield item, self.backward(step, item, self._plan(item.meta, step=step))[0]
                self.placement.optimizers.zero_grad()
        finally:
            self._tear_down()

    def timed_steps(
        self,
        device: torch.device,
        batches: Iterable[tuple[Batch, IterationMeta]],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> Generator[TimedStep]:
        """Trains on given batches instead of the job's data, and says when each step ran.

        The ranks start each step together; a step is planned before its clock starts, however long that takes. All
        ranks of a replica give equal batches. Sets the job up and ends it; the process group must exist. Collective.

        Args: clock: of steps and, on a CPU, actions. `time.thread_time` counts neither other processes nor waits.
        """
        try:
            self._set_up(device)
            self.placement.runtime.use_clock(clock)
            for step, (batch, meta) in enumerate(batches, 1):
                item = self.placement.data.item(batch, meta)
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
        ranks = nonfinite_ranks(self.model.parameters, local_loss, self.mesh)
        message = f"step {step}: loss {loss}, gradient norm {norm}; not finite on ranks {ranks}"
        if self.config.training.on_nonfinite == "skip":
            if self.state.skipped + 1 < MOST_SKIPPED:
                logger.warning("%s; the step is skipped", message)
                return
            raise TrainingError(
                f"{message}. It is the {MOST_SKIPPED}th skipped step in a row: other batches do not help, since the "
                f"weights are those after step {step - MOST_SKIPPED}; lower optimizer.lr, set training.max_norm, or go "
                "back with checkpoint.load_step"
            )
        raise TrainingError(
            f"{message}. Nothing was changed by this step; lower optimizer.lr, check the data, or set "
            'training.on_nonfinite = "skip"'
        )

    def _plan(self, meta: IterationMeta, *, step: int = 0, forward_only: bool = False) -> IterationPlan:
        """The plan of an iteration, waited for. Collective over the job.

        Args: step: names the search's seed and the memory limits.
        """
        planner = self._memory.limited(self.planner, step)
        with errors_on_all(self.mesh.batch_group):
            ahead = self.placement.ahead
            if ahead and not forward_only:
                return ahead.now(step, meta, planner).plan
            plan = ahead.forward(meta, planner) if ahead else planner.plan(meta, forward_only=forward_only)
            check_same_program(plan.program.hash, self.mesh)
            return plan

    def _take(self, pending: PendingPlan) -> Planned:
        """The plan that was made while the step before ran, or the first one. Collective over the job."""
        ahead = self.placement.ahead
        assert ahead is not None
        with errors_on_all(self.mesh.batch_group):
            return ahead.take(pending, self.config.planner.patience_s)

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
            check_batch(item.batch, item.meta, self._denoising.scale if self._denoising else None)
        coordinates = self.mesh.place
        inputs = StepInputs(
            layout=plan.layout,
            meta=item.meta,
            mesh=self.mesh,
            batch=item.batch,
            labels=item.labels,
            noise=noise,
            attention=AttentionChoices(
                backend=self.config.training.attention_backend,
                part_blocks=self.config.training.attention_part_blocks,
            ),
            want_predictions=want_predictions,
            want_losses=bool(self._sources),
        )
        self.placement.runtime.load(
            plan.program,
            lambda stage, work: self.planner.output_shape(plan.layout, stage, work, coordinates.cp, coordinates.tp),
        )
        return self.placement.runtime.step(StepFeed(self.partition, inputs), loss_grad=loss_grad)

    def _noise(self, step: int, *, hides: bool) -> ClipNoise | None:
        """The random choices of a step of a text-to-video job. Args: hides: captions may be hidden."""
        return self._denoising.noise(step, hides=hides) if self._denoising else None

    def _tied_copy_to_skip(self) -> torch.nn.Parameter | None:
        """The tied head is counted in the norm where the embedding is."""
        if not self.model.tied or self.partition.tie_ranks[1] != self.mesh.pp_rank:
            return None
        return self.model.tied[-1]

    # --------------------------------------------------------------------------------- data of a step

    def _batches(self, first: int, last: int) -> Iterator[tuple[Item, PendingPlan | None]]:
        """The items of the steps first .. last; with the planner on, each after the next one is being planned.

        An error in the data of a step is raised when that step comes, and not when it was read.
        """
        ahead = self.placement.ahead
        if ahead is None:
            for _ in range(first, last + 1):
                yield next(self._items), None
            return
        waiting: deque[tuple[Item, PendingPlan] | Exception] = deque()
        for step in range(first, last + 1):
            while len(waiting) < 2 and step + len(waiting) <= last:
                waiting.append(self._fetch(step + len(waiting), ahead))
            fetched = waiting.popleft()
            if isinstance(fetched, Exception):
                raise fetched
            yield fetched

    def _fetch(self, step: int, ahead: PlanAhead) -> tuple[Item, PendingPlan] | Exception:
        """The item of a step, whose plan is searched from now on; or the error of its data."""
        try:
            item = next(self._items)
        except Exception as error:
            return error
        return item, ahead.submit(step, item.meta, self._memory.limited(self.planner, step))

    # ------------------------------------------------------------------------------------ validation

    def validate(self, step: int) -> None:
        """Loss and answers on held-out data, through the pipeline. Collective over the job."""
        validator = Validator(
            section=self.config.validation,
            data=self.placement.data,
            mesh=self.mesh,
            sources=self._sources,
            forward=lambda item, number: self._forward(step, item, number),
        )
        result = validator.validate()
        for observer in self.observers:
            observer.validated(step, result)

    def _forward(self, step: int, item: Item, number: int) -> ForwardPass:
        """A pass without gradients. Args: step: the last one before it. number: of the batch, which seeds its noise."""
        plan = self._plan(item.meta, step=step + 1, forward_only=True)
        outcome = self._run(plan, item, noise=self._noise(-1 - number, hides=False), want_predictions=True)
        loss_sum, num_targets = self._loss_sum(outcome), self._loss.num_values(item.meta)
        return ForwardPass(plan=plan, outcome=outcome, loss_sum=loss_sum, num_targets=num_targets)


def _planner_in_time(config: Config) -> tuple[IterationPlanner, float]:
    """The planner of a job, and the seconds that it took to make."""
    start = time.perf_counter()
    planner = job_planner(config)
    return planner, time.perf_counter() - start
