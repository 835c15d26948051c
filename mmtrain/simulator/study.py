"""`mmtrain simulate`: simulated iterations of a drawn workload under several schedules on any hardware.

Pure: nothing is trained or loaded, and torch is not imported.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mmtrain.config.config import Config, check
from mmtrain.costs.machine import Machine
from mmtrain.errors import ConfigError, PlanError
from mmtrain.modality.metadata import IterationMeta
from mmtrain.planner.assignment.dealing import Dealer
from mmtrain.planner.assignment.step_assigner import StepAssigner
from mmtrain.planner.memory.limit import MemoryBudget, MemoryRule
from mmtrain.planner.search_settings import PLANNED
from mmtrain.schedule.library.names import check_name
from mmtrain.schedule.recipe.schedule_files import schedule_of
from mmtrain.schedule.timeline import Timeline
from mmtrain.simulator.breakdown import Breakdown
from mmtrain.simulator.drawn_steps import StepMicrobatches, divided, drawn_steps
from mmtrain.simulator.typical_iterations import usual_workload
from mmtrain.simulator.whole_iteration import IterationSimulator, SimulatedIteration

PLANNED_LIMIT = "90%"
"""Fraction of a device's memory that a simulated search may use, if the hardware is known and the job has no limit."""


@dataclass(frozen=True, kw_only=True)
class SimulationQuestion:
    """The job, schedules and workload to simulate."""

    config: Config
    """The job; its [planner] names the hardware."""
    schedules: tuple[str, ...]
    """Names of schedules; `PLANNED`: the plans that the job's planner searches, regardless of planner.enable."""
    evaluations: int = 100
    """Plans that a search tries for each iteration and replica."""
    workload: str = ""
    """Name of a workload; empty: see `usual_workload`."""
    num_iterations: int = 40
    num_replicas: int = 2
    """Largest number of data-parallel replicas to simulate; each reads its own part of a step. Of pipelines of unequal
    depth all are."""
    seed: int = 0
    """Seed of the workload."""
    image_side: int | None = None
    """Pixels along a side of every image or clip; None: see `Bins.of`."""

    def __post_init__(self) -> None:
        for name in ("num_iterations", "num_replicas", "image_side", "evaluations"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"simulate: {name} = {value}; it is at least 1")
        if self.seed < 0:
            raise ConfigError(f"simulate: seed = {self.seed}; it is at least 0")
        for index, schedule in enumerate(self.schedules):
            check_name(schedule, (PLANNED,))
            if schedule in self.schedules[:index]:
                raise ConfigError(f"simulate: schedule {schedule!r} is named twice; name it once")

    @property
    def drawn_workload(self) -> str:
        """The workload from which batches are drawn."""
        return self.workload or usual_workload(self.config)

    @property
    def counted(self) -> str:
        """The units of a microbatch: clips, pairs or images, or items of several encoders."""
        model = self.config.model
        return (
            "clips" if model.reads_clips else "pairs" if model.reads_pairs else "items" if model.modules else "images"
        )

    @property
    def simulated_replicas(self) -> int:
        """Number of simulated replicas."""
        layout = self.config.parallelism.layout
        return min(self.num_replicas, layout.dp) if layout.is_even else layout.dp


@dataclass(frozen=True, kw_only=True)
class ScheduleForecast:
    """The simulated iterations of one schedule, or the reason why there are none."""

    schedule: str
    iterations: tuple[SimulatedIteration, ...] = ()
    first: Timeline | None = None
    """The pipeline of the first iteration's slowest replica."""
    budgets: tuple[MemoryBudget, ...] = ()
    """The memory of the ranks of each depth; empty: there is no limit."""
    problem: str = ""
    """Why there are no iterations; empty if there are some."""
    notes: tuple[str, ...] = ()
    """Assumptions behind the numbers, for the reader."""

    def mean(self, field: str) -> float:
        """The mean over the iterations. Args: field: name of a number in `SimulatedIteration`."""
        return statistics.fmean(getattr(step, field) for step in self.iterations)

    def mfu(self, ranks: float, peak_flops: float) -> float:
        """Model FLOPs over the peak FLOPs of one replica in the time of all iterations (a fraction).

        Args: ranks: of one replica, mean over them. peak_flops: FLOP/s of one rank.
        """
        seconds = sum(step.iteration_s for step in self.iterations)
        return sum(step.flops for step in self.iterations) / (seconds * ranks * peak_flops)

    @property
    def breakdown(self) -> Breakdown:
        """The rank-seconds of all iterations together."""
        steps = self.iterations
        return Breakdown.mean([step.breakdown for step in steps], [step.iteration_s for step in steps])

    @property
    def most_loaded(self) -> tuple[int, float]:
        """The pipeline rank with the highest peak memory in any iteration, and its bytes.

        Of pipelines of unequal depth, its index among the ranks of all.
        """
        peaks = [max(step.peak_bytes[rank] for step in self.iterations) for rank in range(self.num_ranks)]
        rank = max(range(self.num_ranks), key=peaks.__getitem__)
        return rank, peaks[rank]

    @property
    def num_ranks(self) -> int:
        """Number of pipeline ranks."""
        return len(self.iterations[0].peak_bytes)


@dataclass(frozen=True, kw_only=True)
class Report:
    """The answers for all schedules of a question; all read the same batches."""

    question: SimulationQuestion
    machine: Machine
    answers: tuple[ScheduleForecast, ...]
    images: tuple[float, ...]
    """[iteration] -> mean number of images (or clips, or items of several encoders) in a microbatch."""

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes of the job and of all schedules."""
        return (*_notes(self.question, self.machine), *(note for answer in self.answers for note in answer.notes))


def simulate_job(
    question: SimulationQuestion, progress: Callable[[str, int], None] = lambda schedule, done: None
) -> Report:
    """The simulated iterations of a job under each schedule.

    For a schedule without a plan, the answer says why.

    Args: progress: called after each iteration with the schedule and the number of its simulated iterations.
    Raises:
        ConfigError: model, degrees, hardware, workload or schedule do not fit together.
        DataError: the model cannot read a batch.
    """
    config = question.config
    if _limit_is_unknown(config):
        config = replace(config, planner=replace(config.planner, memory_limit=""))
    machine = Machine.of(config)
    steps = drawn_steps(
        config,
        question.drawn_workload,
        question.num_iterations,
        seed=question.seed,
        image_side=question.image_side or 0,
    )
    results, images = [], tuple[float, ...]()
    for schedule in question.schedules:
        job = ScheduledJob.of(config, schedule, question.evaluations, machine)
        batches = [job.divided(step)[: question.simulated_replicas] for step in steps]
        results.append(_answer(question, job, schedule, batches, progress))
        images = images or tuple(_mean_images(step) for step in batches)
    return Report(question=question, machine=machine, answers=tuple(results), images=images)


def _limit_is_unknown(config: Config) -> bool:
    """Whether planner.memory_limit is a part of a device that the config does not name."""
    return bool(config.planner.memory_limit) and MemoryRule.of(config).limit_bytes is None


def _mean_images(step: Sequence[IterationMeta]) -> float:
    """Mean number of images or clips in a microbatch."""
    return sum(b.num_images + b.num_clips for b in step) / sum(len(b.microbatches) for b in step)


def with_schedule(config: Config, schedule: str, evaluations: int = 1) -> tuple[Config, tuple[str, ...]]:
    """The job under another schedule, and notes on the other settings that were changed for it.

    Args: schedule: a name in the catalogue, or `PLANNED`. evaluations: plans that a search tries for an iteration.
    Raises: ConfigError: the job does not fit the schedule.
    """
    notes: tuple[str, ...] = ()
    planner = config.planner
    if schedule == PLANNED:
        return _with_search(config, evaluations)
    keeps_limits = schedule_of(schedule, config.parallelism.layout.pp).keeps_memory_limits
    if planner.search.activation_memory_gib and not keeps_limits:
        planner = planner.with_search(activation_memory_gib=0.0)
        notes = (f"{schedule} bounds activations by its own rule; planner.search.activation_memory_gib is left out",)
    if planner.memory_limit and not keeps_limits:
        planner = replace(planner, memory_limit="")
        notes = (f"{schedule} bounds memory by its own rule; planner.memory_limit is left out",)
    parallelism = replace(config.parallelism, pipeline_parallel_schedule=schedule)
    job = replace(config, parallelism=parallelism, planner=planner)
    check(job)
    return job, notes


def _with_search(config: Config, evaluations: int) -> tuple[Config, tuple[str, ...]]:
    """The result of `with_schedule` for plans that the job's planner searches."""
    planner = replace(config.planner, enable=True).with_evaluations(evaluations)
    notes = [f"{PLANNED}: the planner tries {evaluations} plans for each iteration (--evaluations)"]
    if config.planner.search.regroup and not planner.search.regroup:
        notes.append(f"{PLANNED}: samples keep their groups, since {evaluations} plans are too few to judge others")
    if planner.hardware and not planner.memory_limit and not planner.search.activation_memory_gib:
        planner = replace(planner, memory_limit=PLANNED_LIMIT)
        notes.append(
            f'{PLANNED}: planner.memory_limit = "{PLANNED_LIMIT}", as the job sets none; without a limit a searched '
            "plan may hold more than a device has"
        )
    job = replace(config, planner=planner)
    check(job)
    return job, tuple(notes)


@dataclass(frozen=True, kw_only=True)
class ScheduledJob:
    """A job under one schedule, ready to be simulated."""

    config: Config
    simulator: IterationSimulator
    assigner: StepAssigner | None
    """Divides the samples of a step among replicas and microbatches; None: they stay where they are."""
    notes: tuple[str, ...] = ()
    """Notes on settings that were changed for the schedule."""

    @classmethod
    def of(
        cls, config: Config, schedule: str, evaluations: int, machine: Machine, *, tells_apart: bool = True
    ) -> "ScheduledJob":
        """The job under a schedule. Arguments: see `with_schedule` and `IterationSimulator`.

        Raises: ConfigError: the job does not fit the schedule, or cannot be built, cut or divided.
        """
        job, notes = with_schedule(config, schedule, evaluations)
        searches = schedule == PLANNED
        simulator = IterationSimulator.of(
            job, machine.network, searches=searches, peak_flops=machine.peak_flops, tells_apart=tells_apart
        )
        as_simulated = replace(job, planner=replace(job.planner, enable=searches))
        assigner = StepAssigner.of(as_simulated, simulator.jobs) if job.assignment.policy != "none" else None
        return cls(config=job, simulator=simulator, assigner=assigner, notes=notes)

    def divided(self, step: StepMicrobatches) -> list[IterationMeta]:
        """[replica] -> its part of a step."""
        return divided(step, self.config.parallelism.layout.dp, Dealer.of(self.config, self.simulator.jobs))

    def simulate(
        self, metas: Sequence[IterationMeta], *, seed: int, step: int, replicas: Sequence[int] = ()
    ) -> tuple[SimulatedIteration, Timeline]:
        """One iteration. Arguments and errors: see `IterationSimulator.simulate`."""
        given = metas if self.assigner is None else self.assigner.reassigned(metas)
        return self.simulator.simulate(given, seed=seed, step=step, replicas=replicas)

    @property
    def budgets(self) -> tuple[MemoryBudget, ...]:
        """The memory of the ranks of each depth of pipelines; empty: there is no limit."""
        rule = MemoryRule.of(self.config)
        jobs = {job.partition.num_ranks: job for job in self.simulator.jobs}.values()
        budgets = (rule.budget(job.spec, job.partition) for job in jobs)
        return tuple(budget for budget in budgets if budget.limited)


def _answer(
    question: SimulationQuestion,
    job: ScheduledJob,
    schedule: str,
    batches: Sequence[Sequence[IterationMeta]],
    progress: Callable[[str, int], None],
) -> ScheduleForecast:
    steps: list[SimulatedIteration] = []
    first: Timeline | None = None
    for metas in batches:
        try:
            step, timeline = job.simulate(metas, seed=question.seed, step=len(steps))
        except PlanError as error:
            fault = f"iteration {len(steps)}: {error}"
            return ScheduleForecast(schedule=schedule, problem=fault, budgets=job.budgets, notes=job.notes)
        first = first or timeline
        steps.append(step)
        progress(schedule, len(steps))
    return ScheduleForecast(
        schedule=schedule, iterations=tuple(steps), first=first, budgets=job.budgets, notes=job.notes
    )


def _notes(question: SimulationQuestion, machine: Machine) -> list[str]:
    """Differences between the simulation and the job."""
    config, notes = question.config, []
    dp = config.parallelism.layout.dp
    if question.simulated_replicas < dp:
        notes.append(
            f"{question.simulated_replicas} of {dp} data-parallel replicas are simulated (--replicas); the slowest of "
            "all is slower than the slowest of these"
        )
    if machine.peak_flops is None:
        notes.append(
            f"no --cluster and no planner.hardware: links take planner.device.p2p_latency_s and p2p_bytes_per_s = "
            f"{config.planner.device.p2p_bytes_per_s:.3g}; MFU and the device's memory are unknown"
        )
    if _limit_is_unknown(config):
        notes.append(
            f'planner.memory_limit = "{config.planner.memory_limit}" is left out: it is a part of a device, which '
            "--cluster names"
        )
    if config.model.modules:
        notes.append(f"where the workload has an image, each encoder has an item: {', '.join(config.model.encoders)}")
    if config.model.reads_clips and not config.model.encodes_clips:
        notes.append("latents count as given: no VAE runs here")
    if config.assignment.samples_per_step:
        notes.append("assignment.samples_per_step is left out: drawn steps have full microbatches")
    if config.planner.enable and PLANNED not in question.schedules:
        notes.append(
            f"planner.enable is left out: the orders are those of the schedules named here (--schedule {PLANNED} has "
            "the planner's)"
        )
    if config.regathered:
        notes.append('the gathers of parallelism.fsdp_reshard_after_forward = "always" count as hidden behind compute')
    if config.training.enable_cpu_offload:
        notes.append("the copies of training.enable_cpu_offload between host and device take no time here")
    return notes
