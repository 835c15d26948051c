"""What the user sees of a run: its first log lines, its description, the metrics of its steps, files of timelines.

Rank 0 logs and writes; every rank makes the same calls, as counts and times are gathered from all of them.
"""

import errno
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch
import torch.distributed as dist

from mmtrain.config import config as config_module
from mmtrain.config.config import Config
from mmtrain.config.toml_sections import RUN_FILE, to_dict
from mmtrain.data.chat_templates import prompt_notes
from mmtrain.data.tokenizer import job_tokenizer
from mmtrain.errors import ConfigError, MMTrainError
from mmtrain.launch.device_allocator import allocator_setting
from mmtrain.launch.folder_owner import Ownership, owned
from mmtrain.launch.launched import local_world_size
from mmtrain.models.attention.backend import capability_of
from mmtrain.observe.answers import write_answers
from mmtrain.observe.batch_metrics import record_batch, record_plan
from mmtrain.observe.environment import write_environment
from mmtrain.observe.job_summary import few_clips, high_rate, start_lines
from mmtrain.observe.log_file import LogFile
from mmtrain.observe.membership_event import MembershipEvent
from mmtrain.observe.observer import FinishedStep, Observer
from mmtrain.observe.reporter import Reporter, peak_flops
from mmtrain.observe.step_files import StepFiles
from mmtrain.observe.step_timing import StepTiming
from mmtrain.observe.validation import Validation
from mmtrain.parallel.collectives import on_rank_zero
from mmtrain.parallel.mesh import Mesh
from mmtrain.parallel.planning import num_cores
from mmtrain.planner.job import Job
from mmtrain.planner.search_settings import search_threads

logger = logging.getLogger("mmtrain")


class RunRecord(Observer):
    """The metrics, files and log lines of one run. All methods are collective over the job."""

    def __init__(
        self,
        config: Config,
        job: Job,
        mesh: Mesh,
        start: int,
        *,
        generation: int | None = None,
        written: Config | None = None,
    ) -> None:
        """Begins the record, or goes on with it.

        Args:
            start: the run goes on after this step.
            generation: of an elastic job, of which there is a record in each generation; None: of another job.
            written: goes to config.toml, that of an elastic job, whose layouts have others; None: that of the layout.
        Raises: ConfigError: its folder cannot be written.
        """
        self._start, self._generation, self._written = start, generation, written
        self._event: MembershipEvent | None = None
        self.layout_begins(config, job, mesh, start)
        self._peak_flops = peak_flops(config.metrics, mesh.device)
        self._log = LogFile(self._folder, mesh.rank)
        self._reporter: Reporter | None = None
        if mesh.rank == 0:
            self._reporter = Reporter(
                config.metrics,
                self._folder,
                steps=config.training.steps or None,
                start=start,
                config=to_dict(written or config),
                generation=generation,
            )
            if generation in (None, 1):
                log_prompts(config)

    def layout_begins(self, config: Config, job: Job, mesh: Mesh, step: int) -> None:
        """Writes the config, the environment and the schedule's file of the steps after `step`, whose layout this is.

        Raises: ConfigError: the folder cannot be written.
        """
        self._config, self._job, self._mesh = config, job, mesh
        self._folder = Path(config.job.dump_folder)

        def write() -> None:
            (self._folder / RUN_FILE).write_text(config_module.dump(self._written or config))
            write_environment(self._folder / "environment.json", mesh, step)
            if job.schedule.text:
                copy = self._folder / f"schedule{job.schedule.suffix}"
                copy.write_bytes(job.schedule.text.encode())
                copy.with_suffix(".sha256").write_text(f"{job.schedule.digest}  {copy.name}\n")

        try:
            on_rank_zero(write)
        except OSError as error:
            raise ConfigError(
                f"job.dump_folder = {str(self._folder)!r} cannot be written: {error.strerror}; name another folder"
            ) from None

    def layout_ends(self) -> None:
        """See `Observer`."""
        del self._mesh, self._job

    def after_step(self, step: FinishedStep) -> None:
        """Reports one training step, and writes its files where they are due."""
        plan, metrics, shape = step.plan, step.metrics, self._mesh.layout
        timing = StepTiming.gathered(self._mesh, plan.result.plan, step.outcome)
        flops = self._job.flops(plan.batching)
        metrics.record("step", step.step)
        metrics.record("ranks", shape.world_size)
        metrics.record("flops", sum(of.total for of in flops.values()))
        metrics.record("peak_flops", self._peak_flops)
        metrics.record("replica_spread_s", timing.makespan_s)
        metrics.record("planned_replica_spread_s", plan.result.timeline.makespan_s)
        record_batch(metrics, step.meta, plan)
        if step.planned is not None:
            record_plan(metrics, step.planned)
        metrics.reduce()
        metrics.reduce_max()
        if self._reporter is None:
            return
        if self._event is not None:
            metrics.record("nodes", self._event.nodes)
            metrics.record("pipelines", len(self._event.pipelines))
            metrics.record("time_in_steps", self._reporter.time_in_steps(metrics["step_time_s"]))
        timing.record(metrics, flops, self._peak_flops * shape.cp * shape.tp, plan.result.timeline)
        section = self._config.metrics
        values = metrics.finished()
        if self._start + 1 == step.step and values["samples"] < self._config.assignment.stable_samples:
            logger.warning(
                "step %d has %d samples, fewer than assignment.stable_samples = %d: the ratio of the modules' work "
                "will differ from the one for which they got their ranks; raise training.global_batch_size or "
                "assignment.samples_per_step",
                step.step, values["samples"], self._config.assignment.stable_samples,
            )  # fmt: skip
        self._reporter.step(values, quiet=step.step % section.log_freq != 0 and step.step != 1 and not step.last)
        files = StepFiles(step=step.step, job=self._job, plan=plan, timing=timing)
        if section.trace_freq and step.step % section.trace_freq == 0:
            files.write_trace(self._folder / "traces" / f"step-{step.step}.json")
        if section.timeline_freq and (step.step % section.timeline_freq == 0 or step.last):
            files.write_timeline(self._folder / "timelines" / f"step-{step.step}")
            self._reporter.image(step.step, "timeline", files.image)

    def membership_changed(self, event: MembershipEvent) -> None:
        """Reports a change of the nodes of an elastic job, with which this record begins. Not collective."""
        self._event = event
        if self._reporter is not None:
            self._reporter.membership(event)

    def note(self, values: Mapping[str, float]) -> None:
        """Writes the metrics of an earlier step, unless they are there: a failure kept them from being written. Not
        collective. Args: values: `step` and others by key."""
        if self._reporter is not None:
            self._reporter.note(values)

    def validated(self, step: int, result: Validation) -> None:
        """Reports one validation. Args: step: the last one before it."""
        if self._reporter is not None:
            self._reporter.validation(step, result)
            if result.samples is not None:
                result.samples.write(self._folder / "validation_samples" / f"step-{step}.json", step)
        if result.answers:
            write_answers(self._folder / "answers" / f"step-{step}.json", step, result.answers)

    def failed(self, error: MMTrainError) -> None:
        """Notes in rank 0's log file why the run ends; the screen has it last."""
        if self._reporter is not None:
            self._log.write(f"error: {error}")

    def close(self) -> None:
        """Flushes and closes the files."""
        if self._reporter is not None:
            self._reporter.close()
        self._log.close()


def log_start(config: Config, jobs: Sequence[Job], device: torch.device, cut_s: float, *, again: bool = False) -> None:
    """Logs what is trained, and how.

    Args:
        jobs: [pipeline] -> its job.
        cut_s: seconds that the partitions took.
        again: a running job goes on at another layout: the mesh alone.
    """
    num_ranks = local_world_size(config.parallelism.layout.world_size)
    threads = search_threads(config.planner.search.threads, num_cores(), num_ranks)
    lines = start_lines(
        config,
        jobs,
        device=device.type,
        capability=capability_of(device),
        allocator=allocator_setting(),
        threads=threads,
        cut_s=cut_s,
    )
    for line in lines:
        if not again or line.startswith("mesh: "):
            logger.info("%s", line)
    if not again and dist.get_rank() == 0 and (warning := high_rate(config)):
        logger.warning("%s", warning)


def log_nothing_left(why: str) -> None:
    """Logs that all steps are done. Args: why: none is left."""
    logger.info("no step is left: %s; raise it, or name another job.dump_folder", why)  # each rank would show a warning


def log_end(config: Config, step: int, skipped: int, clips: int | None, *, is_last: bool, best_step: int = 0) -> None:
    """Logs what a run leaves.

    Args:
        step: the last one.
        is_last: whether no step is left.
        best_step: of the best validation; 0: there is none, or it is not kept.
        skipped: steps in a row up to it that changed no weight.
        clips: seen since the start; None: not known.
    """
    folder = Path(config.job.dump_folder) / config.checkpoint.folder
    if config.checkpoint.enable and is_last:
        logger.info("the model of step %d is in %s", step, folder)
    if config.checkpoint.keep_best and best_step:
        logger.info("the best one by %s is that of step %d (--step best)", config.checkpoint.figure.text, best_step)
    if skipped:
        logger.info("steps %d to %d were skipped: the weights are those of the step before", step + 1 - skipped, step)
    if few := few_clips(config, clips):
        logger.info("%s", few)


def log_prompts(config: Config) -> None:
    """Logs what is amiss with the prompts of a job that reads conversations."""
    if config.model.dit is not None:
        return
    with suppress(MMTrainError):  # which the loader raises, on all ranks
        for line in prompt_notes(job_tokenizer(config)):
            logger.info("%s", line)


@contextmanager
def owned_by_rank_zero(folder: Path, job: str = "") -> Iterator[Ownership]:
    """A context in which rank 0 owns the run folder, and a full file system is reported. Collective over the job.

    Args: job: see `owned`.
    Raises:
        ConfigError: on all ranks: the folder cannot be owned.
        MMTrainError: in place of the error of a full file system.
    """
    with ExitStack() as stack:
        try:
            ownership = Ownership()
            on_rank_zero(lambda: stack.enter_context(owned(folder, job=job, ownership=ownership)) and None)
            yield ownership
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise MMTrainError(
                f"{folder}: {error.strerror}; make room and start the job again, which goes on from its checkpoint"
            ) from None
