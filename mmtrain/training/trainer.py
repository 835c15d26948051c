"""The training job of one rank: set-up, the training loop, steps, validation, checkpoints.

All ranks of a replica get the metadata of each batch; every rank then plans the iteration by itself and gets the same
program. With the planner on, the data of a step are read before the step before runs, so that its plan is searched
meanwhile.

What is trained (`TrainState` and the tensors by name) and where (`Placement`) are two values, so a job can go on at
another layout in the same processes.
"""

import dataclasses
import logging
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from mmtrain.checkpoint.checkpoint import Checkpointer
from mmtrain.checkpoint.move import HeldShards, move
from mmtrain.checkpoint.shared_folder import check_shared
from mmtrain.checkpoint.state import random_state, seed_everything, set_random_state
from mmtrain.config import config as config_module
from mmtrain.config.config import Config, each_pipeline
from mmtrain.config.sections import ParallelismConfig
from mmtrain.config.toml_sections import shown
from mmtrain.data.packing import LoaderState
from mmtrain.errors import ConfigError, MMTrainError, TrainingError
from mmtrain.launch.launched import Launched, local_world_size
from mmtrain.launch.processes import check_temporary_folder
from mmtrain.launch.stop_signals import StopSignals
from mmtrain.modality.buckets import check_video
from mmtrain.observe.host_memory import keep_freed_memory
from mmtrain.observe.log_file import setup_logging
from mmtrain.observe.observer import Observer
from mmtrain.observe.own_metric import check_metric
from mmtrain.observe.run_record import RunRecord, log_end, log_nothing_left, owned_by_rank_zero
from mmtrain.observe.step_memory import DeviceMemory
from mmtrain.observe.validation import Validator
from mmtrain.parallel.activation_memory import saved_ops
from mmtrain.parallel.job_group import JobGroup
from mmtrain.parallel.mesh import on_own_device, pick_device
from mmtrain.parallel.planning import PendingPlan
from mmtrain.parallel.replica_data import Item
from mmtrain.parallel.torch_private import set_default_timeout
from mmtrain.planner.job import Job
from mmtrain.planner.make_plan import Search, make_plan
from mmtrain.simulator.make_job import make_job
from mmtrain.training.progress import MOST_STEPS, why_before_its_end, why_ended
from mmtrain.training.steps import Steps

logger = logging.getLogger("mmtrain")


class Trainer(Steps):
    """One rank of a training job."""

    def __init__(
        self,
        config: Config,
        *,
        search: Search = make_plan,
        observers: Iterable[Observer] = (),
        jobs: Sequence[Job] | None = None,
    ) -> None:
        """Checks the config, and prepares all that needs no process group.

        Args:
            search: finds the plans of iterations (`planner.enable`).
            observers: watch the job, in addition to the record of the run.
            jobs: [pipeline] -> its job; None: they are made.
        Raises: ConfigError.
        """
        config = on_own_device(config)
        check_temporary_folder(config.data.num_workers)
        check_video(config)
        saved_ops(config.activation_checkpoint)
        check_metric(config.validation.metric)
        made, cut_s = _jobs_in_time(config) if jobs is None else (jobs, 0.0)
        super().__init__(config, made, search=search, cut_s=cut_s)
        self.folder = Path(config.job.dump_folder)
        self.observers = list(observers)
        self.checkpointer: Checkpointer | None = None

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
            with group.joined(self.job.schedule, self._position), owned_by_rank_zero(self.folder):
                if self.config.checkpoint.enable:
                    check_shared(self.folder)
                self.set_up(device, resumes=True)
                if why := why_ended(self.config, self.state):
                    log_nothing_left(why)
                else:
                    self._train(group, layouts or {})
        except MMTrainError as error:
            for observer in self.observers:
                observer.failed(error)
            raise
        finally:
            self.tear_down(lost_rank=group.lost_rank)
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
            self._loop(MOST_STEPS)
            self.log_end()
        except TrainingError:  # on every rank: a checkpoint that is being written is still good
            if self.checkpointer:
                self.checkpointer.finish()
            raise

    def _position(self, function: str) -> str:
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
        prepare_process(config, device)
        self.device_memory = DeviceMemory.agreed(device, local_world_size(config.parallelism.layout.world_size))
        if resumes:
            self.open_checkpoints()
        self.build(device)
        self.load()
        self.resume_state()

    def open_checkpoints(self, *, went_back_to: int = -1, generation: int | None = None) -> None:
        """Reads and writes checkpoints from now on, if the job has any. Collective over the job.

        Args: went_back_to, generation: see `Checkpointer`.
        """
        if self.config.checkpoint.enable:
            folder = self.folder / self.config.checkpoint.folder
            self.checkpointer = Checkpointer(
                self.config.checkpoint, folder, went_back_to=went_back_to, generation=generation
            )

    def load(self) -> None:
        """Takes the state of the newest checkpoint, if there is one. Collective over the job."""
        if self.checkpointer and (saved := self.checkpointer.load(self.named())):
            self.state = saved.resumed(self.state.settings)

    def resume_state(self) -> None:
        """Continues from the state: its margins of memory and its position in the data."""
        self._memory.resume(self.state.memory)
        self._resume_costs()
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
        device, held, random = self.mesh.device, HeldShards.of(self.named()), random_state()
        for observer in self.observers:
            observer.layout_ends()
        self.placement.close()
        self.drop_placement()
        self.config, self.jobs, self._cut_s = config, jobs, cut_s
        self.build(device, held.lend())
        move(held, self.named(), dist.group.WORLD)
        set_random_state(random)
        self.resume_state()
        for observer in self.observers:
            observer.layout_begins(config, self.job, self.mesh, self.state.step)

    def adopt(self, config: Config, jobs: Sequence[Job], memory: DeviceMemory, stops: StopSignals) -> None:
        """Adopts the layout that `build` makes next, of a job whose process groups are not this object's.

        Args: jobs: [pipeline] -> its job. memory: that all ranks agreed on. stops: of the process.
        """
        self.config, self.jobs, self._cut_s = config, tuple(jobs), 0.0
        self.device_memory, self._stops = memory, stops

    def stop_placement(self) -> None:
        """Ends all that a placement does in the background, whatever other ranks do."""
        if self.checkpointer is not None:
            self.checkpointer.abandon()
        if self._placement is not None:
            self._placement.stop()

    def tear_down(self, *, lost_rank: bool = False) -> None:
        """Args: lost_rank: a rank does not answer."""
        self._stops.release()
        for observer in self.observers:
            observer.close()
        if self._placement is not None:
            self._placement.stop(lost=lost_rank)

    # ----------------------------------------------------------------------------------------- loop

    def _loop(self, until: int) -> bool:
        """Trains up to a step, or until it is asked to stop; whether there are steps left to train."""
        until = min(until, self.config.training.steps or MOST_STEPS)
        stopped = False
        self.first_validation()
        batches = self.batches(until)
        while self.state.step < until and not stopped and not why_ended(self.config, self.state):
            stopped = self.next_step(batches)
            self.end_step(stopped=stopped)
            if stopped:
                reason = signal.Signals(self._stops.number).name if self._stops.number else "a signal to another rank"
                saved = ", saved" if self.checkpointer else ""
                logger.info("%s: stopped after step %d%s", reason, self.state.step, saved)
        if self.checkpointer:
            self.checkpointer.finish()
        return not stopped and not why_ended(self.config, self.state)

    def log_end(self) -> None:
        """Logs what the run leaves."""
        state, is_last = self.state, bool(why_ended(self.config, self.state))
        if why := why_before_its_end(self.config, state):
            logger.info("%s", why)
        log_end(
            self.config, state.step, state.skipped, state.clips, is_last=is_last, best_step=state.validated.best_step
        )

    def first_validation(self) -> None:
        """Validates the initial weights; or those of the checkpoint, after which a stop left no time for it."""
        if self.state.step == 0 or self.state.reaches(self.config.validation.every):
            self.validate()

    def next_step(self, batches: Iterator[tuple[Item, PendingPlan | None]]) -> bool:
        """Trains one step and reports it; whether a rank was asked to stop. Collective over the job."""
        finished, stopped = self.run_step(batches)
        for observer in self.observers:
            observer.after_step(finished)
        return stopped

    def end_step(self, *, stopped: bool = False) -> None:
        """Saves and validates, where that is due after the newest step. Collective over the job.

        Args: stopped: the job ends now.
        """
        config = self.config
        if self.checkpointer:
            self.checkpointer.poll()
        due = self.state.reaches(config.validation.every) or why_ended(config, self.state)
        if due and not stopped:  # a stop leaves little time
            self.validate()
        if self.checkpointer:
            best = config.checkpoint.keep_best and self.state.validated.best_step == self.state.step
            due = self.state.reaches(config.checkpoint.every) or why_ended(config, self.state)
            if due or best or stopped:
                self.checkpointer.save(self.state, self.named())

    # ------------------------------------------------------------------------------------ validation

    def validate(self) -> None:
        """Loss and answers on held-out data, through the pipeline, unless those of the newest step are there; the state
        then has what follows for the best checkpoint and an early end. Collective over the job.

        Raises: ConfigError: no validation has the figure of checkpoint.keep_best.
        """
        section, state = self.config.checkpoint, self.state
        if not self.config.validation.enable or state.validated.step >= state.step:
            return
        compares = bool(section.keep_best or self.config.validation.patience)
        plan = partial(self.plan, step=state.step + 1, forward_only=True)
        validator = Validator(section=self.config.validation, sources=self._sources, runner=self._runner, plan=plan)
        result = validator.validate()
        if compares and section.figure.name not in result.figures:
            raise ConfigError(
                f"checkpoint.keep_best = {shown(section.keep_best)}, but the validations have "
                f"{', '.join(result.figures)}; name one of these"
            )
        so_far = dataclasses.replace(state.validated, step=state.step)
        if compares and state.step:  # the weights before the first step have no checkpoint
            so_far = state.validated.after(state.step, section.figure, result.figures[section.figure.name])
        self.state = dataclasses.replace(state, validated=so_far)
        result = dataclasses.replace(result, so_far=so_far)
        for observer in self.observers:
            observer.validated(state.step, result)


def _jobs_in_time(config: Config) -> tuple[tuple[Job, ...], float]:
    """[pipeline] -> its job, and the seconds that all of them took to make."""
    start = time.perf_counter()
    jobs = each_pipeline(config, make_job)
    return jobs, time.perf_counter() - start


def prepare_process(config: Config, device: torch.device) -> None:
    """Sets what a process of a job has once: random state, memory, patience of new process groups."""
    seed_everything(config.debug.seed, config.debug.deterministic)
    if device.type == "cpu":
        keep_freed_memory()
    elif config.training.param_dtype == "bfloat16":  # nor do products that stay in float32 need all digits
        torch.set_float32_matmul_precision("high")
    set_default_timeout(timedelta(seconds=config.comm.timeout_seconds))
