"""`mmtrain simulate`: simulated iterations of a drawn workload under several schedules on any hardware.

Pure: nothing is trained or loaded, and torch is not imported.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mmtrain.config.config import Config, check
from mmtrain.config.topology import AXES
from mmtrain.costs.machine import Machine
from mmtrain.errors import ConfigError, PlanError
from mmtrain.modality.metadata import IterationMeta
from mmtrain.modality.typical import Bins
from mmtrain.planner.assignment.step_assigner import StepAssigner
from mmtrain.planner.memory.limit import MemoryBudget, MemoryRule
from mmtrain.planner.search_settings import PLANNED
from mmtrain.schedule.library.names import check_name
from mmtrain.schedule.recipe.files import schedule_of
from mmtrain.schedule.timeline import Timeline
from mmtrain.simulator.breakdown import Breakdown, label
from mmtrain.simulator.typical_iterations import usual_workload
from mmtrain.simulator.whole_iteration import IterationSimulator, SimulatedIteration
from mmtrain.simulator.workloads import draw

PLANNED_LIMIT = "90%"
"""Fraction of a device's memory that a simulated search may use, if the hardware is known and the job has no limit."""

_GIB = 2.0**30
_COLUMNS = ("schedule", "iteration s", "min", "max", "MFU", "bubble", "gather s", "reduce s", "step s", "peak GiB")


@dataclass(frozen=True, kw_only=True)
class Question:
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
    """Largest number of data-parallel replicas to simulate; each reads its own batches."""
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
        """The units of a microbatch: clips or images, or items of several encoders."""
        return "clips" if self.config.model.reads_clips else "items" if self.config.model.modules else "images"

    @property
    def simulated_replicas(self) -> int:
        """Number of simulated replicas."""
        return min(self.num_replicas, self.config.parallelism.mesh_shape.dp)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The simulated iterations of one schedule, or the reason why there are none."""

    schedule: str
    iterations: tuple[SimulatedIteration, ...] = ()
    first: Timeline | None = None
    """The pipeline of the first iteration's slowest replica."""
    budget: MemoryBudget | None = None
    """The memory of the ranks; None: there is no limit."""
    problem: str = ""
    """Why there are no iterations; empty if there are some."""
    notes: tuple[str, ...] = ()
    """Assumptions behind the numbers, for the reader."""

    def mean(self, field: str) -> float:
        """The mean over the iterations. Args: field: name of a number in `SimulatedIteration`."""
        return statistics.fmean(getattr(step, field) for step in self.iterations)

    def mfu(self, ranks: int, peak_flops: float) -> float:
        """Model FLOPs over the peak FLOPs of one replica in the time of all iterations (a fraction).

        Args: ranks: of one replica. peak_flops: FLOP/s of one rank.
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
        """The pipeline rank with the highest peak memory in any iteration, and its bytes."""
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

    question: Question
    machine: Machine
    answers: tuple[Answer, ...]
    images: tuple[float, ...]
    """[iteration] -> mean number of images (or clips, or items of several encoders) in a microbatch."""

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes of the job and of all schedules."""
        return (*_notes(self.question, self.machine), *(note for answer in self.answers for note in answer.notes))


def simulate_job(question: Question, progress: Callable[[str, int], None] = lambda schedule, done: None) -> Report:
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
    bins = Bins.of(config, question.image_side or 0)
    batches = [
        [
            draw(question.drawn_workload, bins, seed=question.seed, iteration=iteration, replica=replica)
            for replica in range(question.simulated_replicas)
        ]
        for iteration in range(question.num_iterations)
    ]
    results = []
    for schedule in question.schedules:
        job, notes = with_schedule(config, schedule, question.evaluations)
        results.append(_answer(question, job, schedule, machine, batches, notes, progress))
    images = tuple(_mean_images(step) for step in batches)
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
    keeps_limits = schedule_of(schedule, config.parallelism.pipeline_parallel_degree).keeps_memory_limits
    if planner.activation_memory_gib and not keeps_limits:
        planner = replace(planner, activation_memory_gib=0.0)
        notes = (f"{schedule} bounds activations by its own rule; planner.activation_memory_gib is left out",)
    if planner.memory_limit and not keeps_limits:
        planner = replace(planner, memory_limit="")
        notes = (f"{schedule} bounds memory by its own rule; planner.memory_limit is left out",)
    parallelism = replace(config.parallelism, pipeline_parallel_schedule=schedule)
    job = replace(config, parallelism=parallelism, planner=planner)
    check(job)
    return job, notes


def _with_search(config: Config, evaluations: int) -> tuple[Config, tuple[str, ...]]:
    """The result of `with_schedule` for plans that the job's planner searches."""
    if config.planner.placement == "replicated":
        raise ConfigError(
            f'simulate: schedule "{PLANNED}" with planner.placement = "replicated": the baseline has the order of a '
            "named schedule; name one"
        )
    planner = replace(config.planner, enable=True, budget_evaluations=evaluations, budget_s=0.0)
    notes = [f"{PLANNED}: the planner tries {evaluations} plans for each iteration (--evaluations)"]
    if planner.hardware and not planner.memory_limit and not planner.activation_memory_gib:
        planner = replace(planner, memory_limit=PLANNED_LIMIT)
        notes.append(
            f'{PLANNED}: planner.memory_limit = "{PLANNED_LIMIT}", as the job sets none; without a limit a searched '
            "plan may hold more than a device has"
        )
    job = replace(config, planner=planner)
    check(job)
    return job, tuple(notes)


def _answer(
    question: Question,
    job: Config,
    schedule: str,
    machine: Machine,
    batches: Sequence[Sequence[IterationMeta]],
    notes: tuple[str, ...],
    progress: Callable[[str, int], None],
) -> Answer:
    searches = schedule == PLANNED
    simulator = IterationSimulator.of(job, machine.network, searches=searches, peak_flops=machine.peak_flops)
    budget = MemoryRule.of(job).budget(simulator.job.spec, simulator.job.partition)
    limited = budget if budget.limited else None
    steps: list[SimulatedIteration] = []
    first: Timeline | None = None
    as_simulated = replace(job, planner=replace(job.planner, enable=searches))
    assigner = StepAssigner.of(as_simulated, simulator.job) if job.assignment.policy != "none" else None
    for metas in batches:
        metas = metas if assigner is None else assigner.reassigned(metas)
        try:
            step, timeline = simulator.simulate(metas, seed=question.seed, step=len(steps))
        except PlanError as error:
            fault = f"iteration {len(steps)}: {error}"
            return Answer(schedule=schedule, problem=fault, budget=limited, notes=notes)
        first = first or timeline
        steps.append(step)
        progress(schedule, len(steps))
    return Answer(schedule=schedule, iterations=tuple(steps), first=first, budget=limited, notes=notes)


def _notes(question: Question, machine: Machine) -> list[str]:
    """Differences between the simulation and the job."""
    config, notes = question.config, []
    dp = config.parallelism.mesh_shape.dp
    if question.simulated_replicas < dp:
        notes.append(
            f"{question.simulated_replicas} of {dp} data-parallel replicas are simulated (--replicas); the slowest of "
            "all is slower than the slowest of these"
        )
    if machine.peak_flops is None:
        notes.append(
            f"no --cluster and no planner.hardware: links take planner.p2p_latency_s and p2p_bytes_per_s = "
            f"{config.planner.p2p_bytes_per_s:.3g}; MFU and the device's memory are unknown"
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


# --------------------------------------------------------------------------------------------- as text


def table(report: Report) -> str:
    """The report as text: the job, one line for each schedule, schedules that do not fit, and notes."""
    question, machine = report.question, report.machine
    config, shape = question.config, question.config.parallelism.mesh_shape
    degrees = ", ".join(f"{axis} {degree}" for axis, degree in zip(AXES, shape.degrees, strict=True))
    lines = [
        config.job.description or "a job",
        f"{shape.world_size} ranks of {machine.name} ({degrees}); costs: {machine.costs}",
        f"workload {question.drawn_workload}, seed {question.seed}: {question.num_iterations} iterations of "
        f"{config.training.global_batch_size} microbatches{_most_tokens(config)}, "
        f"{_span(report.images)} {question.counted} a microbatch",
        "",
    ]
    answers = [answer for answer in report.answers if not answer.problem]
    lines += _aligned([_COLUMNS, *(_row(answer, machine, shape.world_size // shape.dp) for answer in answers)])
    if answers:
        lines += ["", "% of ranks x seconds, 100 in all:", *_aligned(breakdown_rows(answers))]
        lines += ["", "standard deviation in seconds, of the microbatches of a module and of the replicas:"]
        lines += _aligned(_spread_rows(answers))
    lines += _budgets(report)
    lines += [""] * any((report.notes, _faults(report)))
    lines += _faults(report)
    lines += [f"note: {note}" for note in report.notes]
    return "\n".join(lines).rstrip() + "\n"


def breakdown_rows(answers: Sequence[Answer]) -> list[tuple[str, ...]]:
    """The names of the parts, and a row of percentages for each schedule. Args: answers: without problems."""
    shares = {answer.schedule: answer.breakdown.shares for answer in answers}
    labels = [label(parts) for parts in next(iter(shares.values()))]
    rows = [(name, *(f"{100 * share:.1f}" for share in parts.values())) for name, parts in shares.items()]
    return [("schedule", *labels), *rows]


def _spread_rows(answers: Sequence[Answer]) -> list[tuple[str, ...]]:
    """What is uneven under each schedule, and how many documents of a step are deferred."""
    modules = list(answers[0].iterations[0].spread_s)
    rows = [("schedule", *modules, "replicas", "deferred")]
    for answer in answers:
        spreads = [statistics.fmean(step.spread_s.get(name, 0.0) for step in answer.iterations) for name in modules]
        numbers = [*spreads, answer.mean("replica_spread_s")]
        rows.append((answer.schedule, *(f"{number:.4f}" for number in numbers), f"{answer.mean('num_deferred'):.1f}"))
    return rows


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """A line for each row, with columns of one width: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]).rstrip()
        for row in rows
    ]


def _most_tokens(config: Config) -> str:
    return "" if config.model.reads_clips else f" of up to {config.training.seq_len} tokens"


def _row(answer: Answer, machine: Machine, ranks: int) -> tuple[str, ...]:
    times = [step.iteration_s for step in answer.iterations]
    rank, peak = answer.most_loaded
    mfu = "-" if machine.peak_flops is None else f"{100 * answer.mfu(ranks, machine.peak_flops):.1f} %"
    return (
        answer.schedule,
        f"{sum(times) / len(times):.3f}",
        f"{min(times):.3f}",
        f"{max(times):.3f}",
        mfu,
        f"{100 * answer.mean('bubble'):.1f} %",
        f"{answer.mean('gather_s'):.3f}",
        f"{answer.mean('reduce_s'):.3f}",
        f"{answer.mean('optimizer_s'):.3f}",
        f"{peak / _GIB:.3g} (pp_rank {rank})",
    )


def _budgets(report: Report) -> list[str]:
    """The memory budgets under a limit, once for all schedules with equal budgets."""
    schedules: dict[str, list[str]] = {}
    for answer in report.answers:
        if answer.budget:
            schedules.setdefault(answer.budget.table(), []).append(answer.schedule)
    return [line for text, names in schedules.items() for line in ("", f"{', '.join(names)}: {text}")]


def _faults(report: Report) -> list[str]:
    """One line for each schedule that has no plan or does not fit into the device's memory."""
    faults = []
    for answer in report.answers:
        if answer.problem:
            faults.append(f"{answer.schedule}: NO PLAN: {answer.problem}")
            continue
        rank, peak = answer.most_loaded
        limit = report.machine.memory_bytes
        if limit is not None and peak > limit:
            fixed = peak - max(step.activation_bytes[rank] for step in answer.iterations)
            faults.append(
                f"{answer.schedule}: OUT OF MEMORY: pp_rank {rank} needs {peak / _GIB:.3g} GiB ({fixed / _GIB:.3g} of "
                "them parameters, gradients and optimizer state), but a device of "
                f"{report.machine.name} has {limit / _GIB:.3g}; recompute more (activation_checkpoint.mode), raise a "
                "degree, or set planner.memory_limit"
            )
    return faults


def _span(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.1f}" if round(low, 1) == round(high, 1) else f"{low:.1f} to {high:.1f}"


# --------------------------------------------------------------------------------------------- as JSON


def to_json(report: Report) -> dict[str, Any]:
    """The report as values for JSON, in seconds and bytes, with every iteration."""
    question, machine = report.question, report.machine
    shape = question.config.parallelism.mesh_shape
    return {
        "description": question.config.job.description,
        "ranks": shape.world_size,
        "hardware": machine.name,
        "costs": machine.costs,
        "workload": question.drawn_workload,
        "seed": question.seed,
        "replicas": question.simulated_replicas,
        "notes": list(report.notes),
        f"{question.counted}_per_microbatch": list(report.images),
        "schedules": [_answer_json(answer, machine, shape.world_size // shape.dp) for answer in report.answers],
    }


def _answer_json(answer: Answer, machine: Machine, ranks: int) -> dict[str, Any]:
    if answer.problem:
        return {"schedule": answer.schedule, "problem": answer.problem}
    rank, peak = answer.most_loaded
    return {
        "schedule": answer.schedule,
        "iteration_s": answer.mean("iteration_s"),
        "mfu": None if machine.peak_flops is None else answer.mfu(ranks, machine.peak_flops),
        "bubble": answer.mean("bubble"),
        "breakdown": answer.breakdown.by_label,
        "spread_s": {
            name: statistics.fmean(s.spread_s[name] for s in answer.iterations)
            for name in answer.iterations[0].spread_s
        },
        "replica_spread_s": answer.mean("replica_spread_s"),
        "deferred": answer.mean("num_deferred"),
        "peak_bytes": peak,
        "peak_pp_rank": rank,
        "fits": None if machine.memory_bytes is None else peak <= machine.memory_bytes,
        "iterations": [asdict(step) | {"breakdown": step.breakdown.by_label} for step in answer.iterations],
    }
