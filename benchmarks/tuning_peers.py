"""Whole iterations of the peers of `benchmarks/tuning.py`, on any degrees of parallelism.

torch's schedules and Megatron-LM are the chains of `peers_setups.py`: a microbatch is one work, parts have equal
parameters or equal seconds, and a rank recomputes one part of its blocks' bytes, the least with which all batches of
all replicas fit, in hindsight. What a step takes besides the pipeline (gathers, sums, optimizer) is counted as for
ours.

FlexPipe's tuner has pp, dp and the types of schedules of `flexpipe_types`, for jobs with one copy of the model; it
ranks by bubble. Tensor parallelism is the config's, or none; parts have equal seconds; what its space lacks is given to
it as to torch: recomputation in hindsight. Left out: other sizes of a microbatch, which is packed here, and placements
in both directions, which need two copies of the model with tied weights.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from peers_setups import CHAINS, CLUSTERS, SEED, Question, chain_job, chain_planner, chain_problems, static_plans

from mmtrain.config.config import Config
from mmtrain.config.topology import JobLayout
from mmtrain.costs.machine import Machine
from mmtrain.errors import ConfigError, PlanError
from mmtrain.modality.metadata import IterationMeta
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.planner.memory.rank_bytes import RankBytes, Sharding
from mmtrain.schedule.library.catalogue import CATALOGUE, Schedule
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.recipe.flexpipe_types import flexpipe_types
from mmtrain.schedule.recipe.grid import RecipeGrid
from mmtrain.schedule.recipe.policy import plan_of
from mmtrain.schedule.simulate import simulate
from mmtrain.schedule.timeline import Timeline
from mmtrain.simulator.allocation.degrees import meshes, values_of
from mmtrain.simulator.drawn_steps import StepMicrobatches, divided, drawn_steps
from mmtrain.simulator.pipeline_sums import PipelineSums
from mmtrain.simulator.typical_iterations import usual_workload

MOST_CP = 2
"""Context parallelism of peers, and of the exhaustive grid."""
TORCH = ("torch 1F1B", "torch Interleaved1F1B", "torch ZBVZeroBubble")
MEGATRON = "Megatron-like"
CHOICES = tuple(dict.fromkeys(choice for peer in (*TORCH, MEGATRON) for choice in CHAINS[peer]))
"""(cut, schedule, chunks of the chain on a rank)"""
MEGATRON_CHOICES = tuple(CHAINS[MEGATRON])
MOST_TYPES = 8
"""FlexPipe's types of each degrees that are tried until one fits, the least bubble first."""
_GIB = 2.0**30


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is tuned, and how closely it is judged."""

    model: str
    num_steps: int = 3
    evaluations: int = 200
    microbatches: int = 64

    @property
    def num_gpus(self) -> int:
        """GPUs of the model's cluster."""
        return int(CLUSTERS[self.model].rpartition("x")[2])

    @property
    def question(self) -> Question:
        """The job, as the other benchmarks of peers ask for it."""
        return Question(
            model=self.model,
            evaluations=self.evaluations,
            overrides=(f"training.global_batch_size={self.microbatches}",),
        )

    def steps(self, config: Config) -> Sequence[StepMicrobatches]:
        """The steps that all candidates read."""
        return _steps(self, usual_workload(config))


@lru_cache(maxsize=4)
def _steps(setup: Setup, workload: str) -> tuple[StepMicrobatches, ...]:
    return tuple(drawn_steps(chain_job(setup.question), workload, setup.num_steps, seed=SEED))


@dataclass(frozen=True, kw_only=True)
class Row:
    """What came out, of ours or of a peer."""

    degrees: JobLayout
    setting: str
    seconds: tuple[float, ...] = ()
    """Of each step; empty: it does not fit."""
    bubble: float = 0.0
    peak_gib: float = 0.0
    cpu_s: float = 0.0
    """Of all that was tried for it."""
    choice: tuple[str, str, int] = ("", "", 0)
    """Of `CHOICES`."""

    @property
    def mean_s(self) -> float:
        """Mean seconds of a step; infinite: it does not fit."""
        return statistics.fmean(self.seconds) if self.seconds else math.inf


def tried_degrees(setup: Setup) -> list[JobLayout]:
    """All degrees that use all GPUs, with no more context parallelism than is tried."""
    every = meshes(chain_job(setup.question), setup.num_gpus)
    return [degrees for degrees in every if degrees.cp <= MOST_CP and setup.microbatches % degrees.dp == 0]


def chain_rows(
    setup: Setup, degrees: JobLayout, choices: Sequence[tuple[str, str, int]] = CHOICES, num_steps: int = 1
) -> list[Row]:
    """The choices on these degrees. Args: num_steps: on how many steps they are judged."""
    rows = []
    for cut, name, passes in choices:
        if degrees.pp == 1 and (name, cut) != ("1F1B", "time"):
            continue  # one rank runs all of them alike
        start_s, row = time.process_time(), Row(degrees=degrees, setting=f"{name}, equal {cut}, v = {passes}")
        chain = _chain(setup, degrees, cut, CATALOGUE[name], passes, num_steps)
        if chain is not None:
            row = chain.row(CATALOGUE[name].make, row.setting)
        rows.append(replace(row, choice=(cut, name, passes), cpu_s=time.process_time() - start_s))
    return rows


def flexpipe_row(setup: Setup, degrees: JobLayout) -> Row:
    """The type with the least bubble on these degrees, of those that fit, on all steps."""
    start_s = time.process_time()
    ranked: list[tuple[float, str, _Chain, Callable[[PlanningProblem], Plan]]] = []
    chains: dict[tuple[int, str], _Chain | None] = {}
    grids: dict[tuple[int, str], RecipeGrid] = {}
    for name, recipe in flexpipe_types(degrees.pp):
        placement = recipe.placement_of("")
        if len(recipe.placements) > 1:
            continue  # two copies of the model
        key = placement.passes, placement.shape
        if key not in chains:
            schedule = CATALOGUE["ZBV" if placement.shape == "v" else "1F1B"]  # for its placement alone
            chains[key] = _chain(setup, degrees, "time", schedule, placement.passes, setup.num_steps)
        chain = chains[key]
        if chain is None:
            continue
        if key not in grids:
            grids[key] = RecipeGrid(chain.problems[0])
        score = grids[key].score(recipe)
        if not score.stuck:
            ranked.append((score.bubble, name, chain, partial(plan_of, recipe, compiled=True)))
    found = Row(degrees=degrees, setting="none fits")
    for _, name, chain, make in sorted(ranked, key=lambda one: one[:2])[:MOST_TYPES]:
        if not found.seconds:
            found = chain.row(make, name)
    return replace(found, cpu_s=time.process_time() - start_s)


@dataclass(frozen=True, kw_only=True)
class _Chain:
    """All modules as one chain on some degrees, with the batches of all replicas."""

    job: Config
    planner: IterationPlanner
    chunks: Sequence[int]
    """[stage] -> place in the chain."""
    problems: Sequence[PlanningProblem]
    """[step x replica]"""

    def row(self, make: Callable[[PlanningProblem], Plan], setting: str) -> Row:
        """The steps under a schedule. Args: make: a plan of it."""
        empty = Row(degrees=self.job.parallelism.layout, setting=setting)
        try:
            levels, plans = static_plans(self.problems, make)
        except PlanError:  # the schedule does not take as few microbatches
            return empty
        timelines = [simulate(p, plan) for p, plan in zip(self.problems, plans, strict=True) if plan is not None]
        if len(timelines) < len(plans):
            return empty
        parts, sharding = self.planner.job.partition, Sharding.of(self.job)
        states = [sharding.rank_state(self.planner.job.spec, parts, rank) for rank in range(parts.num_ranks)]
        dp = self.job.parallelism.layout.dp
        steps = [timelines[first : first + dp] for first in range(0, len(timelines), dp)]
        return Row(
            degrees=empty.degrees,
            setting=f"{setting}, recompute {' '.join(map(str, levels))}",
            seconds=tuple(self._step_s(step, states, sharding) for step in steps),
            bubble=statistics.fmean(timeline.bubble for timeline in timelines),
            peak_gib=max(
                state.peak_bytes(peak)
                for timeline in timelines
                for state, peak in zip(states, timeline.peak_bytes, strict=True)
            )
            / _GIB,
        )

    def _step_s(self, timelines: Sequence[Timeline], states: Sequence[RankBytes], sharding: Sharding) -> float:
        """Seconds of a step, as `IterationSimulator.simulate` counts them. Args: timelines: of its replicas."""
        network, delay_s = Machine.of(self.job).network, 0.0
        parts, reduced_s = self.planner.job.partition, list[float]()
        for rank, state in enumerate(states):
            arrived_s = itertools.accumulate(sharding.gather_s(network, stage, rank) for stage in state.stages)
            arrivals = {self.chunks[stage.stage]: s for stage, s in zip(state.stages, arrived_s, strict=True)}
            rows = [row for timeline in timelines for row in timeline.of_rank(rank)]
            for chunk, arrival_s in arrivals.items():  # of the last stage in it
                first_s = min((row.start_s for row in rows if row.action.stage == chunk), default=math.inf)
                delay_s = max(delay_s, arrival_s - first_s)
            end_s = max((row.end_s for row in rows), default=0.0)
            reduced_s.append(end_s + sum(sharding.reduce_s(network, stage, rank) for stage in state.stages))
        pipelines = self.job.parallelism.layout.dp_replicate
        sums = PipelineSums.of([parts] * pipelines, self.planner.job.spec, sharding, network)
        added_s = sums.end_s([[reduced_s[rank] for rank in parts.stage_rank]] * pipelines)
        return delay_s + added_s + max(self.planner.job.costs.step_s(round(s.updated_params)) for s in states)


def _chain(
    setup: Setup, degrees: JobLayout, cut: str, schedule: Schedule, passes: int, num_steps: int
) -> _Chain | None:
    """The first steps on a chain; None: it cannot be cut so, or its parameters do not fit."""
    try:
        words = [f"{key}={value}" for key, value in values_of(degrees).items()]
        job = chain_job(setup.question, *words)
        metas: list[IterationMeta] = []
        for step in setup.steps(job)[:num_steps]:
            metas += divided(step, job.parallelism.layout.dp)
        planner, chunks = chain_planner(job, metas, cut, schedule, passes)
        problems = chain_problems(job, planner, chunks, metas)
    except (ConfigError, PlanError):
        return None
    return _Chain(job=job, planner=planner, chunks=chunks, problems=problems)
