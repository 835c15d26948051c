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
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from mmtrain.checkpoint.checkpoint import Checkpointer
from mmtrain.checkpoint.held import HeldTensors
from mmtrain.checkpoint.shared_folder import check_shared
from mmtrain.checkpoint.state import NamedTensors, TrainState, seed_everything
from mmtrain.config import config as config_module
from mmtrain.config.config import Config, each_pipeline
from mmtrain.config.sections import ParallelismConfig
from mmtrain.data.packing import LoaderState
from mmtrain.errors import MMTrainError, TrainingError
from mmtrain.launch.launched import Launched, local_world_size
from mmtrain.launch.processes import check_temporary_folder
from mmtrain.launch.stop_signals import StopSignals
from mmtrain.modality.buckets import check_video
from mmtrain.modality.metadata import IterationMeta
from mmtrain.models.loss import loss_of
from mmtrain.observe.by_source import record_sources, source_sums
from mmtrain.observe.host_memory import keep_freed_memory
from mmtrain.observe.log_file import setup_logging
from mmtrain.observe.metrics import Metrics
from mmtrain.observe.observer import FinishedStep, Observer, RunningStep
from mmtrain.observe.out_of_memory import explained
from mmtrain.observe.run_record import RunRecord, log_end, log_nothing_left, log_start, owned_by_rank_zero
from mmtrain.observe.step_memory import DeviceMemory, JobMemory
from mmtrain.observe.validation import Validator
from mmtrain.parallel.activation_memory import saved_ops
from mmtrain.parallel.batch_runner import BatchRunner, StepResult, job_denoising, planned_ahead, skip_nonfinite
from mmtrain.parallel.build import LocalModel, check_same_program
from mmtrain.parallel.collectives import errors_on_all
from mmtrain.parallel.grads import clip, nonfinite_ranks
from mmtrain.parallel.job_group import JobGroup
from mmtrain.parallel.mesh import Mesh, pick_device
from mmtrain.parallel.optim import lr_factor, set_lr
from mmtrain.parallel.pipelines import check_same_assignment, sum_over_replicas
from mmtrain.parallel.placement import Placement
from mmtrain.parallel.planning import PendingPlan, Planned
from mmtrain.parallel.replica_data import Item
from mmtrain.parallel.runtime import StepOutcome
from mmtrain.parallel.torch_private import set_default_timeout
from mmtrain.planner.iteration import IterationPlan
from mmtrain.planner.job import Job
from mmtrain.planner.plan import Search, make_plan
from mmtrain.simulator.job import make_job

logger = logging.getLogger("mmtrain")


class Trainer:
    """One rank of a training job."""

    def __init__(self, config: Config, *, search: Search = make_plan, observers: Iterable[Observer] = ()) -> None:
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
        self.jobs, self._cut_s = _jobs_in_time(config)
        self._denoising = job_denoising(config)
        self.metrics = Metrics()
        self.observers = list(observers)
        self.checkpointer: Checkpointer | None = None
        self._placement: Placement | None = None
        self.state = TrainState.first(config)
        self._sources = tuple(source.label for source in config.data.sources)
        self._stops = StopSignals()

    @property
    def job(self) -> Job:
        """That of this rank's pipeline."""
        rank = dist.get_rank() if dist.is_initialized() else Launched.from_environment().rank
        return self.jobs[self.config.parallelism.layout.coordinates(rank).pipeline]

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

    def run(self, layouts: Mapping[int, ParallelismConfig] | None = None) -> None:
        """Trains to the last step, or until SIGTERM or SIGINT. Joins the job's process group unless the caller has.

        A run without steps left writes no files.

        Args: layouts: step -> `[parallelism]` of the steps after it; for as many ranks as the job has.
        Raises:
            MMTrainError: the same on all ranks.
            RankLostError: a rank does not answer. This process can only end: its process groups are of no use any more.
        """
        setup_logging(Launched.from_environment().rank)
        device = pick_device(self.config.comm)
        group = JobGroup(self.config, device)
        try:
            with group.joined(self.job.schedule, self._locate), owned_by_rank_zero(self.folder):
                if self.config.checkpoint.enable:
                    check_shared(self.folder)
                self.set_up(device, resumes=True)
                if self.state.step < self.config.training.steps:
                    self._train(group, layouts or {})
                else:
                    log_nothing_left(self.config, self.state.step)
        except MMTrainError as error:
            for observer in self.observers:
                observer.failed(error)
            raise
        finally:
            self.tear_down(lost=group.lost)
            group.leave()

    def _train(self, group: JobGroup, layouts: Mapping[int, ParallelismConfig]) -> None:
        for observer in self.observers:
            observer.layout_begins(self.config, self.job, self.mesh, self.state.step)
        self.observers.append(RunRecord(self.config, self.job, self.mesh, self.state.step))
        end = "saves and ends" if self.checkpointer else "ends"
        group.steps_begin()
        notice = f"Ctrl-C: the job {end} after this step; once more ends it at once\n"
        self._stops.catch(notice if dist.get_rank() == 0 else "")
        try:
            for step, parallelism in sorted(layouts.items()):
                if not self._loop(step):
                    return
                self.change_layout(parallelism)
            self._loop(self.config.training.steps)
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

    def set_up(self, device: torch.device, *, resumes: bool = False) -> None:
        """Sets up the process, and the first layout.

        Args: resumes: with the state of the newest checkpoint, and the job saves its own; else with initial weights.
        """
        config = self.config
        seed_everything(config.debug.seed, config.debug.deterministic)
        if device.type == "cpu":
            keep_freed_memory()
        set_default_timeout(timedelta(seconds=config.comm.timeout_seconds))
        self._device_memory = DeviceMemory.agreed(device, local_world_size(config.parallelism.layout.world_size))
        if config.checkpoint.enable and resumes:
            self.checkpointer = Checkpointer(config.checkpoint, self.folder / config.checkpoint.folder)
        self._build(device)
        if self.checkpointer and (saved := self.checkpointer.load(self._named())):
            self.state = saved.resumed(self.state.settings)
        self._take_up()

    def _build(self, device: torch.device) -> None:
        """Places the job as its config says, with initial weights. Collective over the job."""
        log_start(self.config, self.jobs, device, self._cut_s)
        self._memory = JobMemory.budgeted(self.config, self.jobs, device, self._device_memory)
        self._placement = Placement.build(self.config, self.jobs, device, self._search)
        self._runner = BatchRunner(
            training=self.config.training,
            job=self.job,
            placement=self._placement,
            loss=loss_of(self.config.model),
            want_losses=bool(self._sources),
            denoising=self._denoising,
        )

    def _named(self) -> NamedTensors:
        """The tensors of the placement."""
        return NamedTensors(self.model.chunks, self.placement.optimizers, self.model.aliases)

    def _take_up(self) -> None:
        """Continues from the state: its margins of memory and its position in the data."""
        self._memory.resume(self.state.memory)
        self.items = self.placement.data.training(LoaderState.from_dict(self.state.loader))

    def change_layout(self, parallelism: ParallelismConfig) -> None:
        """Continues at other degrees of parallelism, in the same processes, as a resumed job does. Collective.

        Raises: ConfigError: the job does not fit them.
        """
        config = dataclasses.replace(self.config, parallelism=parallelism)
        config_module.check(config)
        parallelism.layout.check_world_size(dist.get_world_size())
        jobs, cut_s = _jobs_in_time(config)
        logger.info("after step %d the layout changes", self.state.step)
        device, tensors = self.mesh.device, HeldTensors.of(self._named())
        for observer in self.observers:
            observer.layout_ends()
        self.placement.close()
        self._placement, self.items = None, iter(())
        del self._runner
        gc.collect()  # hooks refer to modules: their memory is needed now
        self.config, self.jobs, self._cut_s = config, jobs, cut_s
        self._build(device)
        tensors.restore(self._named())
        self._take_up()
        for observer in self.observers:
            observer.layout_begins(config, self.job, self.mesh, self.state.step)

    def tear_down(self, *, lost: bool = False) -> None:
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
        batches = planned_ahead(self.items, self.state.step + 1, until, self._submit if self.placement.ahead else None)
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
        plan = planned.plan if planned else self.plan(item.meta, step=step)
        ready = time.perf_counter()
        running = RunningStep(step=step, meta=item.meta, plan=plan, planned=planned)
        for observer in self.observers:
            observer.before_step(running)
        self._memory.meter.start()
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
            ranks = nonfinite_ranks(self.model.parameters, self._runner.loss_sum(outcome), self.mesh)
            skip_nonfinite(self.config.training, result, step, ranks, skipped=self.state.skipped)
        self.placement.optimizers.zero_grad()
        return result, outcome

    def backward(self, step: int, item: Item, plan: IterationPlan) -> tuple[StepResult, StepOutcome]:
        """Forward and backward of one batch; its gradients are in `self.model`, complete. Collective over the job.

        Raises: TrainingError: the batch has nothing to predict.
        """
        check_same_assignment(item.meta, self.mesh)
        num_targets = sum_over_replicas(self.mesh, self._runner.loss.num_values(item.meta))
        if num_targets == 0:
            raise TrainingError(f"step {step}: the batch has {self._runner.loss.lack}")
        outcome = self._runner.run(plan, item, noise=self._runner.noise(step, hides=True), loss_grad=1.0 / num_targets)
        norm = self._runner.finish_gradients()
        loss_sum = self._runner.loss_sum(outcome)
        by_source = source_sums(self._sources, plan, item.meta, item.labels, outcome.position_losses, self.mesh)
        metrics = self.metrics
        metrics.is_leader = self.mesh.is_leader
        metrics.record("tokens", item.meta.num_all_tokens)
        metrics.record("clips", item.meta.num_clips)
        totals = metrics.reduce(loss=loss_sum, stop=self._stops.number, sources=by_source)
        result = StepResult(loss=float(totals["loss"]) / num_targets, grad_norm=norm, stop=bool(totals["stop"]))
        metrics.record("loss", result.loss)
        metrics.record("grad_norm", result.grad_norm)
        record_sources(metrics, self._sources, totals["sources"])
        metrics.record("max_loss", self._runner.replica_loss(loss_sum, item.meta))
        metrics.reduce_max()
        return result, outcome

    def plan(self, meta: IterationMeta, *, step: int = 0, forward_only: bool = False) -> IterationPlan:
        """The plan of an iteration, waited for. Collective over the job.

        Args: step: names the search's seed and the memory limits.
        """
        planner = self._memory.limited(self.job, step)
        with errors_on_all(self.mesh.replicas_group):
            ahead = self.placement.ahead
            if ahead and not forward_only:
                return ahead.take(ahead.submit(step, meta, planner)).plan
            plan = planner.plan(meta, forward_only=forward_only)
            check_same_program(plan.program.hash, self.mesh)
            return plan

    def _submit(self, step: int, item: Item) -> PendingPlan:
        """Begins to search the plan of a step."""
        assert self.placement.ahead is not None
        return self.placement.ahead.submit(step, item.meta, self._memory.limited(self.job, step))

    def _take(self, pending: PendingPlan) -> Planned:
        """The plan that was made while the step before ran, or the first one. Collective over the job."""
        ahead = self.placement.ahead
        assert ahead is not None
        with errors_on_all(self.mesh.replicas_group):
            return ahead.take(pending, self.config.planner.patience_s)

    # ------------------------------------------------------------------------------------ validation

    def validate(self, step: int) -> None:
        """Loss and answers on held-out data, through the pipeline. Collective over the job."""
        plan = partial(self.plan, step=step + 1, forward_only=True)
        validator = Validator(section=self.config.validation, sources=self._sources, runner=self._runner, plan=plan)
        result = validator.validate()
        for observer in self.observers:
            observer.validated(step, result)


def _jobs_in_time(config: Config) -> tuple[tuple[Job, ...], float]:
    """[pipeline] -> its job, and the seconds that all of them took to make."""
    start = time.perf_counter()
    jobs = each_pipeline(config, make_job)
    return jobs, time.perf_counter() - start
