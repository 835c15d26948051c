"""How many GPUs each module gets: Entrain's search for degrees of parallelism, judged by the simulator. Pure.

Source: Entrain (Jang, Efficient Multimodal Model Training at Scale, dissertation, University of Michigan, 2026,
algorithm 3). Its equation 4.2 only shortens the list; simulated iterations decide. All modules of a job have the same
tp and cp here, and may also share all pipeline ranks.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mmtrain.config.assignment import AssignmentConfig
from mmtrain.config.config import Config, check
from mmtrain.config.model import section_of
from mmtrain.costs.machine import Machine
from mmtrain.costs.operators.cluster import Cluster
from mmtrain.errors import ConfigError, DataError, PlanError, one_line
from mmtrain.modality.metadata import ClipMeta, DocumentMeta, IterationMeta, MicrobatchMeta
from mmtrain.modality.split import split_evenly
from mmtrain.planner.assignment.sample_costs import PricedSample, SampleCosts, SamplePricer, times
from mmtrain.planner.search_settings import PLANNED
from mmtrain.simulator.job import check_degrees
from mmtrain.simulator.stable_batch import LARGEST, Floats, StableBatch, proportional, stable_batch
from mmtrain.simulator.study import with_schedule
from mmtrain.simulator.whole_iteration import IterationSimulator
from mmtrain.spec.spec import ZERO_WORK, WorkSize

FINALISTS = 6
"""Candidates that are simulated by default, half of them with modules on ranks of their own if enough of those run."""
ITERATIONS = 1
"""Simulated iterations of each, by default."""
MOST_MICROBATCHES = 32
"""Microbatches of each replica in a simulated iteration; of longer ones the rest is in proportion."""
GIB = 2.0**30
HEADER = (
    "seconds by equation 4.2, simulated seconds of the slowest of all replicas, GiB of the most loaded rank, pipeline "
    "ranks of each module:"
)
"""What the columns of `described` are."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Degrees of parallelism, and the pipeline ranks of each module."""

    dp: int
    cp: int
    tp: int
    ranks: tuple[int, ...]
    """[module], of those that are cut; they add up to `num_ranks`. Empty: all ranks hold a part of each module."""
    num_ranks: int
    """Pipeline ranks."""
    estimate_s: float
    """Seconds of an iteration by equation 4.2."""

    @property
    def key(self) -> tuple[float, int, int, int, tuple[int, ...]]:
        """Sort key: the estimate, then the least tp, cp and dp."""
        return self.estimate_s, self.tp, self.cp, self.dp, self.ranks

    def job(self, config: Config) -> Config:
        """The job with these degrees. Raises: ConfigError: it does not fit them."""
        parallelism = replace(
            config.parallelism,
            data_parallel_replicate_degree=1,
            data_parallel_shard_degree=self.dp,
            context_parallel_degree=self.cp,
            tensor_parallel_degree=self.tp,
            pipeline_parallel_degree=self.num_ranks,
        )
        job = replace(config, parallelism=parallelism)
        modules = config.model.cut_modules.items()
        for (name, section), count in zip(modules, self.ranks or [0] * len(modules), strict=True):
            job = _with_ranks(job, name, count, 1 if self.ranks else section.num_segments)
        placement = replace(job.planner, placement="parallel" if self.ranks else "spread")
        job = replace(job, planner=replace(placement, partition="search") if self.ranks else placement)
        check(job)
        return job

    def toml(self, config: Config) -> str:
        """What to put into the job's TOML file, as sections."""
        lines = [
            "[parallelism]",
            "data_parallel_replicate_degree = 1",
            f"data_parallel_shard_degree = {self.dp}",
            f"context_parallel_degree = {self.cp}",
            f"tensor_parallel_degree = {self.tp}",
            f"pipeline_parallel_degree = {self.num_ranks}",
            "",
            "[planner]",
            f'placement = "{"parallel" if self.ranks else "spread"}"',
        ]
        if self.ranks and config.planner.partition != "search":
            lines.append('partition = "search"')
        for name, count in zip(config.model.cut_modules, self.ranks, strict=False):
            lines += ["", f"[{section_of(name)}]", "num_segments = 1", f"ranks = {count}"]
        if not self.ranks:
            given = [name for name, section in config.model.cut_modules.items() if section.ranks]
            lines += [line for name in given for line in ("", f"[{section_of(name)}]", "ranks = 0")]
        return "\n".join(lines) + "\n"


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """A simulated candidate."""

    candidate: Candidate
    seconds: float
    """Mean of an iteration; infinite: it has no plan, or does not fit."""
    peak_bytes: float
    """Of the most loaded rank; 0: unknown."""
    problem: str = ""
    """Why it does not run; empty if it does."""


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The answer of `allocate`."""

    config: Config
    num_gpus: int
    num_candidates: int
    """All that fit the model and the batch."""
    ranked: tuple[Ranked, ...]
    """The simulated ones, fastest first."""
    stability: StableBatch | None
    """Of the pipeline ranks of the fastest candidate with modules on ranks of their own; None: there is none."""
    stable_for: Candidate | None
    """That candidate."""
    samples_per_step: float
    """Samples of a step, on average."""

    @property
    def best(self) -> Candidate:
        """The fastest candidate."""
        return self.ranked[0].candidate


def allocate(
    config: Config,
    costs: SampleCosts,
    num_gpus: int,
    *,
    alpha: float = 0.05,
    p_error: float = 0.05,
    seed: int = 0,
    finalists: int = FINALISTS,
    iterations: int = ITERATIONS,
    evaluations: int = 20,
    largest: int = LARGEST,
    progress: Callable[[], None] = lambda: None,
) -> Allocation:
    """The degrees of parallelism of a job on some GPUs, fastest first.

    Args:
        config: the job; its [planner] names the hardware.
        costs: of samples of its source.
        num_gpus: all of them are used.
        alpha, p_error: see `stable_batch`.
        seed: of all draws.
        finalists: candidates to simulate.
        iterations: to simulate of each.
        evaluations: plans that a search tries for each iteration, with planner.enable.
        largest: samples of the largest batch that is tried.
        progress: called after each simulated candidate that runs.
    Raises: ConfigError: no candidate fits the model, the batch and the memory, or a probability is out of range.
    """
    candidates = _candidates(config, costs, num_gpus)
    if not candidates:
        raise ConfigError(
            f"allocate: no degrees of parallelism use {num_gpus} GPUs (--gpus) with training.global_batch_size = "
            f"{config.training.global_batch_size} and this model; change one of them"
        )
    steps = [_packed(config, costs, (seed, i)) for i in range(iterations)]
    ranked: list[Ranked] = []
    wanted = (finalists + 1) // 2
    for placed in (True, False):
        for candidate in [one for one in candidates if bool(one.ranks) == placed][: 4 * wanted]:
            ranked.append(_simulated(config, candidate, steps, evaluations))
            if ranked[-1].seconds < math.inf:
                progress()
                wanted -= 1
            if not wanted:
                break
        wanted += finalists // 2
    ranked.sort(key=lambda one: (one.seconds, one.candidate.key))
    if ranked[0].seconds == math.inf:
        raise ConfigError(f"allocate: none of {len(ranked)} candidates runs; the first: {ranked[0].problem}")
    own = next((one.candidate for one in ranked if one.candidate.ranks and one.seconds < math.inf), None)
    stability = None
    if own is not None:
        stability = stable_batch(
            _work(config, own, costs.samples),
            own.num_ranks,
            _most(config, own),
            alpha=alpha,
            p_error=p_error,
            seed=seed,
            largest=largest,
            is_whole=costs.is_whole,
        )
    return Allocation(
        config=config,
        num_gpus=num_gpus,
        num_candidates=len(candidates),
        ranked=tuple(ranked),
        stability=stability,
        stable_for=own,
        samples_per_step=config.training.global_batch_size * _per_microbatch(costs),
    )


def described(config: Config, one: Ranked) -> str:
    """A candidate in one line: degrees, ranks, seconds and GiB."""
    candidate = one.candidate
    names = config.model.cut_modules
    ranks = ", ".join(f"{name} {n}" for name, n in zip(names, candidate.ranks, strict=False)) or "all modules on all"
    seconds = f"{one.seconds:9.3f}" if one.seconds < math.inf else f"{'-':>9}"
    peak = f"{one.peak_bytes / GIB:6.1f}" if one.peak_bytes else f"{'-':>6}"
    degrees = f"dp {candidate.dp:3d}  tp {candidate.tp:2d}  cp {candidate.cp:2d}  pp {candidate.num_ranks:3d}"
    return f"{degrees}  {candidate.estimate_s:9.3f} {seconds} {peak}  {ranks}" + (
        f"  ({_short(one.problem)})" if one.problem else ""
    )


# ---------------------------------------------------------------------------------------------- candidates


def _candidates(config: Config, costs: SampleCosts, num_gpus: int) -> list[Candidate]:
    """All degrees that fit, the shortest estimate first."""
    hardware = config.planner.hardware
    per_node = Cluster.of(hardware, num_gpus).hardware.gpus_per_node if hardware else num_gpus
    made: list[Candidate] = []
    for tp in _divisors(num_gpus):
        for cp in _divisors(num_gpus // tp):
            if tp > per_node:
                continue
            priced = _priced(config, costs, num_gpus, tp, cp)
            if priced is None:
                continue
            for num_ranks in _divisors(num_gpus // (tp * cp)):
                made += _placements(config, priced, num_gpus // (tp * cp * num_ranks), cp, tp, num_ranks)
    return sorted(made, key=lambda candidate: candidate.key)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _priced(
    config: Config, costs: SampleCosts, num_gpus: int, tp: int, cp: int
) -> Mapping[str, Sequence[float]] | None:
    """Module -> [layer] -> seconds of forward and backward of a mean microbatch; None: the degrees do not fit."""
    parallelism = replace(
        config.parallelism,
        data_parallel_replicate_degree=1,
        data_parallel_shard_degree=num_gpus // (tp * cp),
        context_parallel_degree=cp,
        tensor_parallel_degree=tp,
        pipeline_parallel_degree=1,
    )
    batch = replace(config.training, global_batch_size=num_gpus)
    planner = replace(config.planner, placement="spread")
    job = replace(config, parallelism=parallelism, training=batch, planner=planner, assignment=AssignmentConfig())
    for name, section in config.model.cut_modules.items():
        job = _with_ranks(job, name, 0, section.num_segments)
    try:
        check(job)
        check_degrees(job)
        pricer = SamplePricer.of(job)
    except ConfigError:
        return None
    totals: dict[str, WorkSize] = {}
    for sample in costs.samples:
        for name, size in pricer.sizes(sample.meta).items():
            totals[name] = totals.get(name, ZERO_WORK) + size
    factor = _per_microbatch(costs) / len(costs.samples)
    return {
        name: [
            forward_s + backward_s
            for forward_s, backward_s in pricer.layer_seconds(name, times(size, factor), fed=len(totals) > 1)
        ]
        for name, size in totals.items()
    }


def _per_microbatch(costs: SampleCosts) -> float:
    """Mean number of samples of a full microbatch."""
    means = np.mean([sample.size for sample in costs.samples], axis=0)
    return float(min(most / mean for most, mean in zip(costs.limits, means, strict=True)))


def _placements(
    config: Config, priced: Mapping[str, Sequence[float]], dp: int, cp: int, tp: int, num_ranks: int
) -> list[Candidate]:
    """All modules on all ranks; and each on ranks of its own: in proportion to its work, or with one rank moved."""
    batch = config.training.global_batch_size
    if batch % dp:
        return []
    degrees = {"dp": dp, "cp": cp, "tp": tp, "num_ranks": num_ranks}
    total, count = sum(map(sum, priced.values())), batch // dp
    names = [name for name in config.model.cut_modules if name in priced]
    most = [len(priced[name]) for name in names]
    made = []
    if all(num_ranks <= layers for layers in most):
        made.append(Candidate(ranks=(), estimate_s=total + (count - 1) * total / num_ranks, **degrees))
    if len(names) < 2 or len(names) != len(config.model.cut_modules) or not len(names) <= num_ranks <= sum(most):
        return made
    work = np.array([[sum(priced[name]) for name in names]])
    first = proportional(work, num_ranks, most)[0].tolist()
    options = {tuple(first)}
    for source in range(len(names)):
        for target in range(len(names)):
            moved = list(first)
            moved[source] -= 1
            moved[target] += 1
            if all(1 <= n <= layers for n, layers in zip(moved, most, strict=True)):
                options.add(tuple(moved))
    for ranks in sorted(options):
        slowest = max(_slowest_s(priced[name], n) for name, n in zip(names, ranks, strict=True))
        made.append(Candidate(ranks=ranks, estimate_s=total + (count - 1) * slowest, **degrees))
    return made


def _slowest_s(layers: Sequence[float], num_ranks: int) -> float:
    """Equation 4.1: the slowest stage of the best cut."""
    return max(sum(layers[low:high]) for low, high in split_evenly(layers, num_ranks))


def _with_ranks(config: Config, name: str, count: int, num_segments: int) -> Config:
    """The job with other segments and ranks of a module."""
    model: Any = config.model
    section, key = model.cut_modules[name], section_of(name).removeprefix("model.")
    changed = replace(section, ranks=count, num_segments=num_segments)
    further = {"modules": {**model.modules, name: changed}} if key.startswith("modules.") else {key: changed}
    return replace(config, model=replace(model, **further))


def _most(config: Config, candidate: Candidate) -> list[int]:
    spec = SamplePricer.of(candidate.job(config)).spec
    return [len(spec.module(name).layers) for name in config.model.cut_modules]


def _work(config: Config, candidate: Candidate, samples: Sequence[PricedSample]) -> Floats:
    """[sample, module] -> nanoseconds at the candidate's tp and cp."""
    pricer, names = SamplePricer.of(candidate.job(config)), list(config.model.cut_modules)
    rows = []
    for sample in samples:
        passes = pricer.ns(sample.meta)
        rows.append([passes[name].total if name in passes else 0 for name in names])
    return np.array(rows, float)


# ---------------------------------------------------------------------------------------------- simulation


def _packed(config: Config, costs: SampleCosts, seed: tuple[int, ...]) -> list[MicrobatchMeta]:
    """The microbatches of a step, full ones of samples drawn with replacement; all candidates divide the same ones."""
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed)))
    microbatches: list[MicrobatchMeta] = []
    own: list[DocumentMeta | ClipMeta] = []
    room, drawn = list(costs.limits), 0
    while len(microbatches) < config.training.global_batch_size:
        sample = costs.samples[int(rng.integers(len(costs.samples)))]
        if own and any(size > free for size, free in zip(sample.size, room, strict=True)):
            microbatches.append(MicrobatchMeta.of(own))
            own, room = [], list(costs.limits)
        own.append(sample.meta.numbered(drawn))  # it may be drawn twice
        room = [free - size for size, free in zip(sample.size, room, strict=True)]
        drawn += 1
    return microbatches


def _simulated(
    config: Config, candidate: Candidate, steps: Sequence[Sequence[MicrobatchMeta]], evaluations: int
) -> Ranked:
    """A candidate with its simulated seconds: of all its replicas, as a step waits for the slowest.

    Args: steps: [iteration] -> the microbatches of all replicas.
    """
    count = config.training.global_batch_size // candidate.dp
    shown = min(count, MOST_MICROBATCHES)
    try:
        job = candidate.job(config)
        schedule = PLANNED if job.planner.enable else job.parallelism.pipeline_parallel_schedule
        job, _ = with_schedule(job, schedule, evaluations)
        machine = Machine.of(job)
        simulator = IterationSimulator.of(
            job, machine.network, searches=schedule == PLANNED, peak_flops=machine.peak_flops
        )
        seconds, peak = [], 0.0
        for index, step in enumerate(steps):
            starts = range(0, count * candidate.dp, count)
            metas = [IterationMeta(microbatches=tuple(step[start : start + shown])) for start in starts]
            iteration, _ = simulator.simulate(metas, step=index)
            rest = (count - shown) / shown * _steady_s(iteration.pipeline_s, candidate.num_ranks, shown)
            seconds.append(iteration.iteration_s + rest)
            peak = max(peak, *iteration.peak_bytes)
    except (ConfigError, DataError, PlanError) as error:
        return Ranked(candidate=candidate, seconds=math.inf, peak_bytes=0.0, problem=one_line(error))
    if machine.memory_bytes is not None and peak > machine.memory_bytes:
        problem = f"out of memory: a device has {machine.memory_bytes / GIB:.1f} GiB; use more, or shorter sequences"
        return Ranked(candidate=candidate, seconds=math.inf, peak_bytes=peak, problem=problem)
    return Ranked(candidate=candidate, seconds=sum(seconds) / len(seconds), peak_bytes=peak)


def _steady_s(pipeline_s: float, num_ranks: int, count: int) -> float:
    """Seconds of `count` microbatches without filling and draining the pipeline."""
    return pipeline_s * count / (count + num_ranks - 1)


def _short(problem: str) -> str:
    """Without what to change."""
    return problem.partition(";")[0].partition(" (GiB")[0]
