"""How many GPUs each module gets: Entrain's search for degrees of parallelism, judged by the simulator. Pure.

Source: Entrain (Jang, Efficient Multimodal Model Training at Scale, dissertation, University of Michigan, 2026,
algorithm 3). Its equation 4.2 only shortens the list; simulated iterations decide. All modules of a job have the same
tp and cp here, and may also share all pipeline ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from mmtrain.config.config import Config
from mmtrain.errors import ConfigError
from mmtrain.planner.assignment.sample_costs import PricedSample, SampleCosts, SamplePricer
from mmtrain.simulator.allocation.candidate import toml_of
from mmtrain.simulator.allocation.candidate_judge import GIB, Effort, Judge, Judged
from mmtrain.simulator.allocation.degrees import Estimate, estimates, per_microbatch
from mmtrain.simulator.allocation.stable_batch import LARGEST, Floats, StableBatch, stable_batch
from mmtrain.simulator.drawn_steps import packed_step

FINALISTS = 6
"""Candidates that are simulated by default, half of them with modules on ranks of their own if enough of those run."""
ITERATIONS = 1
"""Simulated iterations of each, by default."""
HEADER = (
    "seconds by equation 4.2, simulated seconds of the slowest of all replicas, GiB of the most loaded rank, pipeline "
    "ranks of each module:"
)
"""What the columns of `described` are."""


@dataclass(frozen=True)
class Ranked:
    """A simulated candidate."""

    estimate: Estimate
    judged: Judged


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
    """The stable batch for the pipeline ranks of the fastest candidate with modules on ranks of their own; None: there
    is none."""
    stable_for: Estimate | None
    """The candidate of `stability`."""
    samples_per_step: float
    """Samples of a step, on average."""

    @property
    def best(self) -> Estimate:
        """The fastest candidate."""
        return self.ranked[0].estimate

    @property
    def toml(self) -> str:
        """What to put into the job's TOML file for the fastest candidate, as sections."""
        return toml_of(dict(self.best.candidate.values))


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
    candidates = estimates(config, costs, num_gpus)
    if not candidates:
        raise ConfigError(
            f"allocate: no degrees of parallelism use {num_gpus} GPUs (--gpus) with training.global_batch_size = "
            f"{config.training.global_batch_size} and this model; change one of them"
        )
    searching = replace(config, planner=config.planner.with_evaluations(evaluations))
    steps = [packed_step(config, costs, (seed, i)) for i in range(iterations)]
    judge = Judge(config=searching, steps=lambda job: steps)
    effort = Effort(num_steps=iterations, evaluations=evaluations)
    ranked = _ranked(candidates, lambda one: judge.judge(one.candidate, effort), finalists, progress)
    own = next((one.estimate for one in ranked if one.estimate.ranks and one.judged.seconds), None)
    stable = partial(stable_batch, alpha=alpha, p_error=p_error, seed=seed, largest=largest, is_whole=costs.is_whole)
    job = own and own.candidate.job(config)
    return Allocation(
        config=config,
        num_gpus=num_gpus,
        num_candidates=len(candidates),
        ranked=tuple(ranked),
        stability=stable(_work(job, costs.samples), own.mesh.pp, _most(job)) if own and job else None,
        stable_for=own,
        samples_per_step=config.training.global_batch_size * per_microbatch(costs),
    )


def described(config: Config, one: Ranked) -> str:
    """A candidate in one line: degrees, ranks, seconds and GiB."""
    estimate, judged, of = one.estimate, one.judged, one.estimate.mesh
    names = config.model.cut_modules
    ranks = ", ".join(f"{name} {n}" for name, n in zip(names, estimate.ranks, strict=False)) or "all modules on all"
    seconds = f"{judged.mean_s:9.3f}" if judged.seconds else f"{'-':>9}"
    peak = f"{judged.peak_bytes / GIB:6.1f}" if judged.peak_bytes else f"{'-':>6}"
    degrees = f"dp {of.dp:3d}  tp {of.tp:2d}  cp {of.cp:2d}  pp {of.pp:3d}"
    return f"{degrees}  {estimate.seconds:9.3f} {seconds} {peak}  {ranks}" + (
        f"  ({_short(judged.problem)})" if judged.problem else ""
    )


def _most(job: Config) -> list[int]:
    spec = SamplePricer.of(job).spec
    return [len(spec.module(name).layers) for name in job.model.cut_modules]


def _work(job: Config, samples: Sequence[PricedSample]) -> Floats:
    """[sample, module] -> nanoseconds at the job's tp and cp."""
    pricer, names = SamplePricer.of(job), list(job.model.cut_modules)
    rows = []
    for sample in samples:
        passes = pricer.ns(sample.meta)
        rows.append([passes[name].total if name in passes else 0 for name in names])
    return np.array(rows, float)


def _ranked(
    candidates: Sequence[Estimate],
    judge: Callable[[Estimate], Judged],
    finalists: int,
    progress: Callable[[], None],
) -> list[Ranked]:
    """Candidates that were simulated until enough run, the fastest first; half of them with modules on ranks of their
    own. Raises: ConfigError: none runs."""
    ranked: list[Ranked] = []
    wanted = (finalists + 1) // 2
    for placed in (True, False):
        for one in [one for one in candidates if bool(one.ranks) == placed][: 4 * wanted]:
            ranked.append(Ranked(one, judge(one)))
            if ranked[-1].judged.seconds:
                progress()
                wanted -= 1
            if not wanted:
                break
        wanted += finalists // 2
    ranked.sort(key=lambda one: (one.judged.mean_s, one.estimate.key))
    if not ranked[0].judged.seconds:
        raise ConfigError(f"allocate: none of {len(ranked)} candidates runs; the first: {ranked[0].judged.problem}")
    return ranked


def _short(problem: str) -> str:
    """The problem without the advice what to change."""
    return problem.partition(";")[0].partition(" (GiB")[0]
