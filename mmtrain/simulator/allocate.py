"""How many GPUs each module gets: Entrain's search for degrees of parallelism, judged by the simulator. Pure.

Source: Entrain (Jang, Efficient Multimodal Model Training at Scale, dissertation, University of Michigan, 2026,
algorithm 3). Its equation 4.2 only shortens the list; simulated iterations decide. All modules of a job have the same
tp and cp here, and may also share all pipeline ranks.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mmtrain.config.config import Config
from mmtrain.costs.machine import Machine
from mmtrain.errors import ConfigError, DataError, PlanError, one_line
from mmtrain.modality.metadata import ClipMeta, DocumentMeta, IterationMeta, MicrobatchMeta
from mmtrain.planner.assignment.sample_costs import PricedSample, SampleCosts, SamplePricer
from mmtrain.planner.search_settings import PLANNED
from mmtrain.simulator.candidates import Candidate, candidates_of, per_microbatch
from mmtrain.simulator.stable_batch import LARGEST, Floats, StableBatch, stable_batch
from mmtrain.simulator.study import with_schedule
from mmtrain.simulator.whole_iteration import IterationSimulator

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
    candidates = candidates_of(config, costs, num_gpus)
    if not candidates:
        raise ConfigError(
            f"allocate: no degrees of parallelism use {num_gpus} GPUs (--gpus) with training.global_batch_size = "
            f"{config.training.global_batch_size} and this model; change one of them"
        )
    steps = [_packed(config, costs, (seed, i)) for i in range(iterations)]
    ranked = _ranked(config, candidates, steps, finalists, evaluations, progress)
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
        samples_per_step=config.training.global_batch_size * per_microbatch(costs),
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


def _ranked(
    config: Config,
    candidates: Sequence[Candidate],
    steps: Sequence[Sequence[MicrobatchMeta]],
    finalists: int,
    evaluations: int,
    progress: Callable[[], None],
) -> list[Ranked]:
    """Candidates that were simulated until enough run, the fastest first; half of them with modules on ranks of their
    own. Raises: ConfigError: none runs."""
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
    return ranked


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
