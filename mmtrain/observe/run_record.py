"""What the user sees of a run: its first log lines, its description, the metrics of its steps, files of timelines.

Rank 0 logs and writes; every rank makes the same calls, as counts and times are gathered from all of them.
"""

import errno
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from mmtrain.config import config as config_module
from mmtrain.config.config import Config
from mmtrain.config.toml_sections import to_dict
from mmtrain.data.chat_templates import prompt_notes
from mmtrain.data.tokenizer import job_tokenizer
from mmtrain.errors import ConfigError, MMTrainError
from mmtrain.launch.folder_owner import owned
from mmtrain.launch.launched import local_world_size
from mmtrain.modality.metadata import IterationMeta
from mmtrain.observe.answers import write_answers
from mmtrain.observe.by_source import SourceTotals
from mmtrain.observe.environment import write_environment
from mmtrain.observe.job_counts import JobCounts, StepCounts
from mmtrain.observe.job_summary import start_lines
from mmtrain.observe.log_file import LogFile
from mmtrain.observe.metrics import Reporter, peak_flops
from mmtrain.observe.step_files import StepFiles
from mmtrain.observe.step_memory import MemoryUse
from mmtrain.observe.step_metrics import StepMetrics, Validation
from mmtrain.observe.step_timing import StepTiming
from mmtrain.parallel.collectives import on_rank_zero
from mmtrain.parallel.mesh import Mesh
from mmtrain.parallel.optim import lr_factor
from mmtrain.parallel.planning import Planned, num_cores
from mmtrain.parallel.runtime import StepOutcome
from mmtrain.planner.iteration import IterationPlan
from mmtrain.planner.job import Job
from mmtrain.planner.search_settings import search_threads
from mmtrain.spec.spec import Flops

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
    sources: Mapping[str, SourceTotals]
    """Of several sources; empty of one."""

    @property
    def is_finite(self) -> bool:
        """Whether the step may change the weights."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass(frozen=True, kw_only=True)
class FinishedStep:
    """One training step as a rank knows it when it has ended."""

    step: int
    result: StepResult
    outcome: StepOutcome
    """Of this rank."""
    meta: IterationMeta
    plan: IterationPlan
    planned: Planned | None
    """None: the planner is off."""
    memory: MemoryUse
    data_time_s: float
    """Seconds waited for the data."""
    plan_time_s: float
    """Seconds waited for the plan."""
    step_time_s: float
    """Seconds of the whole step, with both waits."""


class RunRecord:
    """The metrics, files and log lines of one run. All methods are collective over the job."""

    def __init__(self, config: Config, job: Job, mesh: Mesh, start: int) -> None:
        """Args: start: the run goes on after this step. Raises: ConfigError: its folder cannot be written."""
        self._counts, self._start = JobCounts(), start
        self.describe(config, job, mesh, start)
        self._peak_flops = peak_flops(config.metrics, mesh.device)
        self._is_first, self._log = mesh.rank == 0, LogFile(self._folder, mesh.rank)
        self._reporter = Reporter(
            config.metrics,
            self._folder,
            enabled=mesh.rank == 0,
            steps=config.training.steps,
            start=start,
            config=to_dict(config),
        )

    def describe(self, config: Config, job: Job, mesh: Mesh, step: int) -> None:
        """Writes the config, the environment and the schedule's file of the steps after `step`, whose layout this is.

        Raises: ConfigError: the folder cannot be written.
        """
        self._config, self._job, self._mesh = config, job, mesh
        self._folder = Path(config.job.dump_folder)

        def write() -> None:
            (self._folder / "config.toml").write_text(config_module.dump(config))
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

    def forget_layout(self) -> None:
        """Releases the layout, which ends: its groups have threads as long as anything refers to them."""
        del self._mesh, self._job

    def step(self, step: FinishedStep) -> None:
        """Reports one training step, and writes its files where they are due."""
        plan = step.plan
        timing = StepTiming.gathered(self._mesh, plan.result.plan, step.outcome)
        flops = self._job.flops(plan.batching)
        total = sum(f.total for f in flops.values())
        counts = StepCounts.of(step.meta, plan, total, step.planned, timing.makespan_s).summed(self._mesh)
        self._counts.add(counts)
        if self._mesh.rank != 0:
            return
        if self._start + 1 == step.step and counts.samples < self._config.assignment.stable_samples:
            logger.warning(
                "step %d has %d samples, fewer than assignment.stable_samples = %d: the ratio of the modules' work "
                "will differ from the one for which they got their ranks; raise training.global_batch_size or "
                "assignment.samples_per_step",
                step.step, counts.samples, self._config.assignment.stable_samples,
            )  # fmt: skip
        section, steps = self._config.metrics, self._config.training.steps
        quiet = step.step % section.log_freq != 0 and step.step not in (1, steps)
        self._reporter.step(self._metrics(step, counts, timing, flops), quiet=quiet)
        files = StepFiles(step=step.step, job=self._job, plan=plan, timing=timing)
        if section.trace_freq and step.step % section.trace_freq == 0:
            files.write_trace(self._folder / "traces" / f"step-{step.step}.json")
        if section.timeline_freq and (step.step % section.timeline_freq == 0 or step.step == steps):
            files.write_timeline(self._folder / "timelines" / f"step-{step.step}")
            self._reporter.image(step.step, "timeline", files.image)

    def _metrics(
        self, step: FinishedStep, counts: StepCounts, timing: StepTiming, flops: Mapping[str, Flops]
    ) -> StepMetrics:
        """Args: counts: over all replicas. flops: module -> of the step on this replica."""
        shape, result, memory = self._mesh.shape, step.result, step.memory
        config, plan = self._config, step.plan
        spread_s, planned_spread_s = counts.replica_spreads_s(shape.dp)
        return StepMetrics(
            step=step.step,
            loss=result.loss,
            max_loss=result.max_loss,
            grad_norm=result.grad_norm,
            lr=config.optimizer.lr * lr_factor(config.lr_scheduler, step.step, config.training.steps),
            step_time_s=step.step_time_s,
            data_time_s=step.data_time_s,
            plan_time_s=step.plan_time_s,
            tokens=result.tokens,
            images=counts.images,
            patches=counts.patches,
            image_tokens=counts.image_tokens,
            sounds=counts.sounds,
            sound_s=counts.sound_s,
            sound_tokens=counts.sound_tokens,
            clips=counts.clips,
            frames=counts.frames,
            video_tokens=counts.video_tokens,
            skipped_samples=self._counts.skipped_samples,
            deferred_images=counts.deferred_images,
            not_deferred=counts.not_deferred,
            bubble=timing.bubble,
            flops=counts.flops / shape.world_size,
            peak_flops=self._peak_flops,
            memory_gib=memory.reserved_gib,
            memory_percent=memory.reserved_percent,
            memory_predicted_gib=memory.predicted_gib,
            memory_measured_gib=memory.measured_gib,
            memory_limit_gib=memory.limit_gib,
            world_size=shape.world_size,
            measured_s=timing.makespan_s,
            planned_s=plan.result.timeline.makespan_s,
            replica_spread_s=spread_s,
            planned_replica_spread_s=planned_spread_s,
            deferred_samples=counts.deferred,
            deferred_gib=plan.deferred_bytes / 2**30,
            assignment_s=step.meta.assignment.seconds if step.meta.assignment else 0.0,
            unassigned=self._counts.unassigned,
            program_s=max(timing.spans_s),
            peak_s=sum(f.total for f in flops.values()) / (self._peak_flops * shape.cp * shape.tp * shape.pp),
            modules=timing.modules(flops, self._peak_flops * shape.cp * shape.tp, plan.result.timeline.spread_s),
            sources=result.sources,
            planner=self._counts.planner(step.planned) if step.planned else None,
        )

    def validation(self, step: int, result: Validation) -> None:
        """Reports one validation. Args: step: the last one before it."""
        self._reporter.validation(step, result)
        if result.answers:
            write_answers(self._folder / "answers" / f"step-{step}.json", step, result.answers)

    def failed(self, error: MMTrainError) -> None:
        """Notes in rank 0's log file why the run ends; the screen has it last."""
        if self._is_first:
            self._log.write(f"error: {error}")

    def close(self) -> None:
        """Flushes and closes the files."""
        self._reporter.close()
        self._log.close()


def log_start(config: Config, job: Job, device: torch.device, cut_s: float) -> None:
    """Logs what is trained, and how. Args: cut_s: seconds that the partition took."""
    num_ranks = local_world_size(config.parallelism.mesh_shape.world_size)
    threads = search_threads(config.planner.threads, num_cores(), num_ranks)
    for line in start_lines(config, job, device=device.type, threads=threads, cut_s=cut_s):
        logger.info("%s", line)


def log_prompts(config: Config) -> None:
    """Logs what is amiss with the prompts of a job that reads conversations."""
    if config.model.dit is not None:
        return
    with suppress(MMTrainError):  # which the loader raises, on all ranks
        for line in prompt_notes(job_tokenizer(config)):
            logger.info("%s", line)


@contextmanager
def owned_by_rank_zero(folder: Path) -> Iterator[None]:
    """A context in which rank 0 owns the run folder, and a full file system is reported. Collective over the job.

    Raises:
        ConfigError: on all ranks: the folder cannot be owned.
        MMTrainError: in place of the error of a full file system.
    """
    with ExitStack() as stack:
        try:
            on_rank_zero(lambda: stack.enter_context(owned(folder)))
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise MMTrainError(
                f"{folder}: {error.strerror}; make room and start the job again, which goes on from its checkpoint"
            ) from None
