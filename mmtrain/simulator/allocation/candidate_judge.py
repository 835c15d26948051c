"""What candidates take: simulated seconds of iterations, and memory of the most loaded rank, on the same steps. Pure.

A step waits for the slowest of all its replicas. Where not all are simulated, those with most work are, and what is
left out of the heaviest one takes what its work takes in a full pipeline.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean
from typing import Any

from mmtrain.config.config import Config
from mmtrain.costs.machine import Machine
from mmtrain.errors import ConfigError, DataError, MemoryLimitError, PlanError, one_line
from mmtrain.modality.metadata import IterationMeta, MicrobatchMeta
from mmtrain.planner.assignment.sample_costs import SamplePricer
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.planner.search_settings import PLANNED
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.timeline import Timeline
from mmtrain.simulator.allocation.candidate import Candidate
from mmtrain.simulator.drawn_steps import StepMicrobatches
from mmtrain.simulator.study import ScheduledJob
from mmtrain.simulator.whole_iteration import SimulatedIteration

GIB = 2.0**30
MOST_MICROBATCHES = 256
"""The most microbatches of a step that are simulated."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How closely candidates are looked at."""

    evaluations: int
    """Plans that a search tries for each iteration, if the job searches; 0: none."""
    num_steps: int = 1
    num_microbatches: int = MOST_MICROBATCHES
    """The microbatches of a step that are simulated."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A candidate with what was simulated, or the reason why it does not run."""

    candidate: Candidate
    seconds: tuple[float, ...] = ()
    """[step] -> of the iteration; empty: it does not run."""
    peak_bytes: float = 0.0
    """The peak bytes of the most loaded rank; 0: unknown."""
    peak_rank: int = 0
    """The most loaded pipeline rank."""
    bubble: float = 0.0
    """Idle fraction of the pipeline ranks, mean over the steps."""
    mfu: float | None = None
    """Model FLOPs utilisation; None: the peak rate of a device is unknown."""
    problem: str = ""
    """Why it does not run."""
    missing_bytes: float = math.inf
    """What `peak_rank` needs more than it may take, if that is why it does not run."""

    @property
    def mean_s(self) -> float:
        """Mean seconds of an iteration; infinite: it does not run."""
        return fmean(self.seconds) if self.seconds else math.inf


@dataclass(kw_only=True)
class Judge:
    """Judges candidates of one job."""

    config: Config
    steps: Callable[[Config], Sequence[StepMicrobatches]]
    """[step] of a job; the same ones for all jobs of equal microbatches."""
    seed: int = 0
    """The seed of searches."""
    _jobs: dict[Candidate, tuple[ScheduledJob, Machine] | Judged] = field(default_factory=dict, repr=False)
    """Candidate -> its job, or why it has none."""
    _seconds: dict[MicrobatchMeta, float] = field(default_factory=dict, repr=False)
    """Microbatch -> seconds of its work on the degrees of the config, by which replicas are compared."""

    def judge(self, candidate: Candidate, effort: Effort) -> Judged:
        """The candidate on the first steps; raises nothing: what does not run has a problem."""
        made = self._job(candidate)
        if isinstance(made, Judged):
            return made
        job, machine = made
        searched = _with_effort(job, effort)
        try:
            parts = [self._step(searched, index, effort) for index in range(effort.num_steps)]
        except (ConfigError, DataError, PlanError) as error:
            return Judged(candidate=candidate, problem=one_line(error))
        peaks = [max(step.peak_bytes[rank] for step, _ in parts) for rank in range(len(parts[0][0].peak_bytes))]
        rank = max(range(len(peaks)), key=peaks.__getitem__)
        of_memory: dict[str, Any] = {"candidate": candidate, "peak_bytes": peaks[rank], "peak_rank": rank}
        if machine.memory_bytes is not None and peaks[rank] > machine.memory_bytes:
            has = f"a device has {machine.memory_bytes / GIB:.1f} GiB"
            of_memory["missing_bytes"] = peaks[rank] - machine.memory_bytes
            return Judged(**of_memory, problem=f"out of memory: {has}; use more, or shorter sequences")
        seconds = tuple(seconds for _, seconds in parts)
        ranks, mfu = job.config.parallelism.layout, None
        if machine.peak_flops is not None and effort.num_microbatches >= job.config.training.global_batch_size:
            flops = fmean(step.flops for step, _ in parts)
            mfu = flops / (fmean(seconds) * ranks.world_size / ranks.dp * machine.peak_flops)
        return Judged(**of_memory, seconds=seconds, bubble=fmean(step.bubble for step, _ in parts), mfu=mfu)

    def scheduled(self, candidate: Candidate) -> ScheduledJob | None:
        """The candidate as a job that can be simulated; None: it has none."""
        made = self._job(candidate)
        return None if isinstance(made, Judged) else made[0]

    def problem(self, candidate: Candidate, effort: Effort) -> PlanningProblem | None:
        """The planning problem of the first replica's first microbatches; None: the candidate does not run."""
        made = self._job(candidate)
        if isinstance(made, Judged):
            return None
        first = made[0].divided(self.steps(made[0].config)[0])[0]
        meta = IterationMeta(microbatches=first.microbatches[: effort.num_microbatches])
        try:
            return IterationPlanner(made[0].simulator.jobs[0]).problem(meta, searched=True)[1]
        except PlanError:
            return None

    def _job(self, candidate: Candidate) -> tuple[ScheduledJob, Machine] | Judged:
        if candidate not in self._jobs:
            try:
                job = candidate.job(self.config)
                machine = Machine.of(job)
                schedule = PLANNED if job.planner.enable else job.parallelism.pipeline_parallel_schedule
                evaluations = job.planner.search.budget_evaluations or 1
                made = ScheduledJob.of(job, schedule, evaluations, machine, tells_apart=False)
                self._jobs[candidate] = made, machine
            except MemoryLimitError as error:
                self._jobs[candidate] = Judged(
                    candidate=candidate,
                    peak_rank=error.pp_rank,
                    problem=one_line(error),
                    missing_bytes=error.missing_bytes,
                )
            except (ConfigError, PlanError) as error:
                self._jobs[candidate] = Judged(candidate=candidate, problem=one_line(error))
        return self._jobs[candidate]

    def _step(self, job: ScheduledJob, index: int, effort: Effort) -> tuple[SimulatedIteration, float]:
        """A simulated iteration and the seconds of the whole one."""
        layout, step = job.config.parallelism.layout, self.steps(job.config)[index]
        dp = layout.dp
        replicas = job.divided(step)
        if effort.num_microbatches >= len(step):
            iteration, _ = job.simulate(replicas, seed=self.seed, step=index)
            return iteration, iteration.iteration_s
        count = len(step) // dp
        shown = min(count, effort.num_microbatches)
        work = [self._work(replica) for replica in replicas]
        heaviest = sorted(range(dp), key=lambda replica: (-work[replica], replica))
        if not layout.is_even:
            return self._unequal_step(job, index, replicas, heaviest, effort.num_microbatches / len(step))
        chosen = heaviest[: max(1, effort.num_microbatches // count)]
        metas = [IterationMeta(microbatches=replicas[replica].microbatches[:shown]) for replica in chosen]
        iteration, slowest = job.simulate(metas, seed=self.seed, step=index)
        rest = work[heaviest[0]] / self._work(metas[0]) - 1
        return iteration, iteration.iteration_s + rest * _steady_s(iteration, slowest, shown)

    def _unequal_step(
        self, job: ScheduledJob, index: int, replicas: Sequence[IterationMeta], heaviest: Sequence[int], part: float
    ) -> tuple[SimulatedIteration, float]:
        """The result of `_step` for pipelines of unequal depth: of each, the replica with most work is simulated.

        Args: heaviest: replicas, those with most work first. part: of the microbatches, that is simulated.
        """
        layout = job.config.parallelism.layout
        chosen = list({layout.pipeline_of(replica): replica for replica in reversed(heaviest)}.values())
        metas = [
            IterationMeta(microbatches=own[: max(1, int(part * len(own)))])
            for own in (replicas[replica].microbatches for replica in chosen)
        ]
        iteration, slowest = job.simulate(metas, seed=self.seed, step=index, replicas=chosen)
        last = max(range(len(chosen)), key=iteration.replicas_s.__getitem__)
        rest = self._work(replicas[chosen[last]]) / self._work(metas[last]) - 1
        return iteration, iteration.iteration_s + rest * _steady_s(iteration, slowest, len(metas[last].microbatches))

    def _work(self, replica: IterationMeta) -> float:
        """Seconds of the work of all its microbatches, in any unit."""
        for microbatch in replica.microbatches:
            if microbatch not in self._seconds:
                self._seconds[microbatch] = self._pricer.microbatch_s(microbatch)
        return sum(self._seconds[microbatch] for microbatch in replica.microbatches)

    @cached_property
    def _pricer(self) -> SamplePricer:
        return SamplePricer.of(self.config)


def _steady_s(iteration: SimulatedIteration, slowest: Timeline, num_microbatches: int) -> float:
    """Seconds that as many microbatches take once the pipeline is full: those of its busiest rank, or those without one
    filling and draining, if that is more."""
    num_ranks = len(slowest.busy_s)
    return max(*slowest.busy_s, iteration.pipeline_s * num_microbatches / (num_microbatches + num_ranks - 1))


def _with_effort(job: ScheduledJob, effort: Effort) -> ScheduledJob:
    """The job whose searches try as many plans; its partition stays."""
    changed = job.simulator.jobs[0].section.with_evaluations(effort.evaluations or 1)
    if not effort.evaluations:
        changed = changed.with_search(strategy="first")
    return replace(job, simulator=job.simulator.with_jobs(lambda own: replace(own, section=changed)))
