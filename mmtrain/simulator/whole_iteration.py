"""Simulation of a whole training iteration: the replicas' pipelines, gathers, reductions and the optimizer. Pure.

In an iteration, parameters are gathered (hidden by the pipeline's start if they arrive in time), every replica runs its
own plan, each pipeline rank reduces its gradients as soon as all of its replicas have ended, and adds them to those of
other pipelines (`pipeline_sums`). After the last sum the optimizer steps. Loading, planning and logging are not
simulated: they run ahead or on the host.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain
from statistics import fmean, pstdev
from typing import NamedTuple

from mmtrain.config.config import Config, each_pipeline
from mmtrain.config.topology import JobLayout
from mmtrain.costs.cost_model import CostModel
from mmtrain.costs.machine import RankNetwork
from mmtrain.errors import ConfigError, PlanError
from mmtrain.modality.metadata import IterationMeta, without_deferral
from mmtrain.planner.batching import Batching
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.planner.job import Job
from mmtrain.planner.joint import search_iteration
from mmtrain.planner.make_plan import JobMethod, make_plan
from mmtrain.planner.memory.limit import too_tight
from mmtrain.planner.memory.options import MemoryChoices
from mmtrain.planner.memory.rank_bytes import RankBytes, Sharding
from mmtrain.planner.result import PlanResult
from mmtrain.planner.search.search import search
from mmtrain.planner.search_settings import search_options, search_seed
from mmtrain.schedule.action import Kind
from mmtrain.schedule.library.catalogue import Schedule
from mmtrain.schedule.plan import Plan, entry_costs
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.simulate import makespan_without_transfers_s
from mmtrain.schedule.timeline import Timeline
from mmtrain.simulator.breakdown import Breakdown, Parts, TimePart, computing
from mmtrain.simulator.make_job import make_job
from mmtrain.simulator.pipeline_sums import PipelineSums


@dataclass(frozen=True, kw_only=True)
class SimulatedIteration:
    """Times and memory of one simulated iteration."""

    iteration_s: float
    gather_s: float
    """Waiting for gathered parameters before the pipeline runs."""
    pipeline_s: float
    """Time of the slowest replica's pipeline."""
    reduce_s: float
    """Time from the end of the slowest pipeline to the end of all gradient reductions."""
    optimizer_s: float
    replicas_s: tuple[float, ...]
    """[replica] -> time of its pipeline."""
    bubble: float
    """Idle fraction of the pipeline ranks while their pipeline runs, mean over the replicas."""
    flops: float
    """Mean model FLOPs of a replica, without weight gradients of frozen parts and without recomputation."""
    activation_bytes: tuple[float, ...]
    """[pp_rank] -> peak bytes of activations, the largest over the replicas; recomputation included. Of pipelines of
    unequal depth the ranks of all, one pipeline after the other."""
    peak_bytes: tuple[float, ...]
    """Peak bytes in total, of the same ranks."""
    num_images: int
    """Images of all simulated replicas."""
    num_microbatches: int
    """Microbatches of all simulated replicas."""
    breakdown: Breakdown
    """The rank-seconds of the replicas, mean over them."""
    spread_s: Mapping[str, float]
    """Module -> standard deviation of its seconds for one microbatch, mean over the replicas."""
    num_deferred: int
    """Documents of all simulated replicas whose images are encoded with the microbatch before."""

    @property
    def replica_spread_s(self) -> float:
        """Standard deviation of the pipelines of the replicas."""
        return pstdev(self.replicas_s)


@dataclass(frozen=True, kw_only=True)
class SimulatedPipeline:
    """What the replicas of one pipeline share."""

    job: Job
    states: tuple[RankBytes, ...]
    """The state of each pipeline rank."""
    gather_s: tuple[tuple[float, ...], ...]
    """[pp_rank][i] -> seconds of the UNSHARD of its i-th stage; they run one after the other."""
    reduce_s: tuple[float, ...]
    """[pp_rank] -> seconds of all its REDUCE."""

    @classmethod
    def of(cls, job: Job, index: int, sharding: Sharding, network: RankNetwork) -> "SimulatedPipeline":
        """One of a job's pipelines."""
        parts, ranks = job.partition, range(job.partition.num_ranks)
        states = tuple(sharding.rank_state(job.spec, parts, rank) for rank in ranks)
        seconds = [
            [
                (sharding.gather_s(network, s, rank, index), sharding.reduce_s(network, s, rank, index))
                for s in state.stages
            ]
            for rank, state in enumerate(states)
        ]
        return cls(
            job=job,
            states=states,
            gather_s=tuple(tuple(gather for gather, _ in of_rank) for of_rank in seconds),
            reduce_s=tuple(sum(reduce for _, reduce in of_rank) for of_rank in seconds),
        )

    @cached_property
    def costs_without_exchanges(self) -> CostModel | None:
        """The costs of the job without exchanges; None: they are not known apart."""
        return self.job.costs.without_exchanges()

    @property
    def optimizer_s(self) -> float:
        """Seconds of the optimizer's step on the slowest rank."""
        return max(self.job.costs.step_s(round(state.updated_params)) for state in self.states)

    def gather_delay_s(self, timeline: Timeline) -> float:
        """Seconds by which gathering the parameters, stage by stage, delays a pipeline.

        An upper bound: it shifts the whole timeline by the largest delay of a stage.
        """
        firsts: dict[int, float] = {}
        for row in timeline.rows:  # by rank and start: the first row of a stage is its earliest
            firsts.setdefault(row.action.stage, row.start_s - timeline.start_s)
        delay = 0.0
        for state, gathers in zip(self.states, self.gather_s, strict=True):
            for stage, arrived in zip(state.stages, accumulate(gathers), strict=True):
                if stage.stage in firsts:
                    delay = max(delay, arrived - firsts[stage.stage])
        return delay

    def stage_reduced_s(self, timelines: Sequence[Timeline]) -> list[float]:
        """[stage] -> when the REDUCE of all stages of its rank have ended. Args: timelines: of its replicas; a pipeline
        without any does not wait for them."""
        ends = [max(of_replicas) for of_replicas in zip(*map(_ends_s, timelines), strict=True)]
        reduced = [end + reduce for end, reduce in zip(ends or [0.0] * len(self.states), self.reduce_s, strict=True)]
        return [reduced[rank] for rank in self.job.partition.stage_rank]


class _Run(NamedTuple):
    """A replica's part in an iteration."""

    pipeline: int
    timeline: Timeline
    flops: float
    parts: dict[Parts, float]
    num_deferred: int


@dataclass(frozen=True, kw_only=True)
class IterationSimulator:
    """Simulates iterations of one job under one schedule."""

    layout: JobLayout
    pipelines: tuple[SimulatedPipeline, ...]
    sums: PipelineSums
    searches: bool = False
    """Whether plans are searched as configured in `[planner]`; otherwise they have the order of the job's schedule."""
    peak_flops: float | None = None
    """FLOP/s of one device that MFU is measured against; None: unknown."""
    tells_apart: bool = True
    """Whether breakdowns tell recomputation, exchanges and transfers apart, for which each replica's problem is made
    twice more; else they are joined with what they are part of."""

    @classmethod
    def of(
        cls,
        config: Config,
        network: RankNetwork,
        *,
        searches: bool = False,
        peak_flops: float | None = None,
        tells_apart: bool = True,
    ) -> "IterationSimulator":
        """The simulator of a job. Raises: ConfigError: a model that cannot be built, cut or divided."""
        sharding = Sharding.of(config)
        jobs = each_pipeline(config, make_job)
        return cls(
            layout=config.parallelism.layout,
            pipelines=tuple(SimulatedPipeline.of(job, index, sharding, network) for index, job in enumerate(jobs)),
            sums=PipelineSums.of([job.partition for job in jobs], jobs[0].spec, sharding, network),
            searches=searches,
            peak_flops=peak_flops,
            tells_apart=tells_apart,
        )

    @property
    def jobs(self) -> tuple[Job, ...]:
        """The job of each pipeline."""
        return tuple(pipeline.job for pipeline in self.pipelines)

    def with_jobs(self, change: Callable[[Job], Job]) -> "IterationSimulator":
        """The simulator with another job in each pipeline, of the same partition."""
        return replace(self, pipelines=tuple(replace(one, job=change(one.job)) for one in self.pipelines))

    def simulate(
        self, metas: Sequence[IterationMeta], *, seed: int = 0, step: int = 0, replicas: Sequence[int] = ()
    ) -> tuple[SimulatedIteration, Timeline]:
        """One iteration in which each replica reads one of the batches, and the slowest replica's pipeline.

        Args:
            metas: [replica] -> its batch.
            seed, step: determine the seeds of searches, if plans are searched.
            replicas: the numbers of these replicas; empty: they are the first ones.
        Raises:
            DataError: an image or token of a batch would be lost or used twice.
            PlanError: no plan fits into the memory limit.
            ConfigError: layers take less time than their FLOPs at the peak rate.
        """
        numbers = replicas or range(len(metas))
        runs = [
            self._run(self.layout.pipeline_of(number), meta, search_seed(seed, step, place))
            for place, (number, meta) in enumerate(zip(numbers, metas, strict=True))
        ]
        timelines = [run.timeline for run in runs]
        slowest = max(timelines, key=lambda timeline: timeline.makespan_s)
        gather = max(self.pipelines[run.pipeline].gather_delay_s(run.timeline) for run in runs)
        of_pipelines = [[run.timeline for run in runs if run.pipeline == index] for index in range(len(self.pipelines))]
        reduced = self.sums.end_s(
            [pipeline.stage_reduced_s(own) for pipeline, own in zip(self.pipelines, of_pipelines, strict=True)]
        )
        optimizer = max(pipeline.optimizer_s for pipeline in self.pipelines)
        iteration_s, ranks = gather + reduced + optimizer, fmean(timeline.num_ranks for timeline in timelines)
        seconds = {key: fmean(run.parts[key] for run in runs) for key in runs[0].parts}
        seconds[(TimePart.BUBBLE,) if self.tells_apart else (TimePart.BUBBLE, TimePart.TRANSFERS)] = (
            ranks * slowest.makespan_s - sum(seconds.values())
        )
        seconds[TimePart.REDUCTIONS,] = ranks * (gather + reduced - slowest.makespan_s)
        seconds[TimePart.OPTIMIZER,] = ranks * optimizer
        activations, peaks = self._bytes(of_pipelines)
        iteration = SimulatedIteration(
            iteration_s=iteration_s,
            gather_s=gather,
            pipeline_s=slowest.makespan_s,
            reduce_s=reduced - slowest.makespan_s,
            optimizer_s=optimizer,
            replicas_s=tuple(timeline.makespan_s for timeline in timelines),
            bubble=fmean(timeline.bubble for timeline in timelines),
            flops=fmean(run.flops for run in runs),
            activation_bytes=activations,
            peak_bytes=peaks,
            num_images=sum(meta.num_images for meta in metas),
            num_microbatches=sum(len(meta.microbatches) for meta in metas),
            breakdown=Breakdown.of(ranks * iteration_s, seconds),
            spread_s={name: fmean(timeline.spread_s[name] for timeline in timelines) for name in timelines[0].spread_s},
            num_deferred=sum(run.num_deferred for run in runs),
        )
        return iteration, slowest

    def _run(self, index: int, meta: IterationMeta, seed: int) -> _Run:
        """What one replica of a pipeline does with its batch. Args: seed: of a search."""
        pipeline = self.pipelines[index]
        job = pipeline.job
        if self.searches and job.section.search.regroup:
            job, meta, batching, result = _regrouped(job, meta, seed)
            problem = result.problem
        else:
            batching, problem = self._problem(job, meta)
            result = make_plan(problem, self._method(job, seed))
        if not result.has_plan:
            raise PlanError(too_tight(problem, job.section, job.spec) or result.message)
        flops = sum(module_flops.total for module_flops in job.flops(batching).values())
        parts = self._parts(replace(pipeline, job=job), meta, problem, result.plan, result.timeline, flops)
        num_deferred = without_deferral(meta, batching.not_deferred).num_deferred
        return _Run(index, result.timeline, flops, parts, num_deferred)

    def _bytes(self, timelines: Sequence[Sequence[Timeline]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The peak bytes of activations, and of all; of which ranks: see `SimulatedIteration`.

        Args: timelines: [pipeline] -> those of its replicas.
        """
        activations, peaks = list[list[float]](), list[list[float]]()
        for pipeline, own in zip(self.pipelines, timelines, strict=True):
            peaks_of = [timeline.peak_bytes for timeline in own] or [(0.0,) * len(pipeline.states)]
            activations.append([max(of_rank) for of_rank in zip(*peaks_of, strict=True)])
            peaks.append([s.peak_bytes(a) for s, a in zip(pipeline.states, activations[-1], strict=True)])
        if self.layout.is_even:
            return tuple(map(max, *activations, activations[0])), tuple(map(max, *peaks, peaks[0]))
        return tuple(chain(*activations)), tuple(chain(*peaks))

    def _parts(
        self,
        pipeline: SimulatedPipeline,
        meta: IterationMeta,
        problem: PlanningProblem,
        plan: Plan,
        timeline: Timeline,
        flops: float,
    ) -> dict[Parts, float]:
        """Rank-seconds of one replica's actions, and of waiting for its messages. Args: flops: of the replica."""
        if not self.tells_apart:
            return computing(sum(timeline.busy_s), {})
        job, free = pipeline.job, pipeline.costs_without_exchanges
        kept_s = self._compute_s(job, meta, job.costs)
        free_s = None if free is None else self._compute_s(job, meta, free)
        entries = [entry for rank in entry_costs(plan, problem) for entry in rank]
        exposed_s = sum(entry.exposed_s for entry in entries)
        copying_s = sum(entry.copying_s for entry in entries)
        peak = self.peak_flops
        known = {
            TimePart.MODEL_FLOPS: None if peak is None else flops / (peak * job.submesh.size),
            TimePart.RECOMPUTATION: _compute_s(problem, plan.options) - kept_s + copying_s,
            TimePart.EXCHANGES: None if free_s is None else kept_s - free_s + exposed_s,
        }
        parts = computing(sum(timeline.busy_s), known)
        if peak is not None and min(parts.values()) < -1e-9 * kept_s:
            raise ConfigError(
                f"simulate: layers take less time than their FLOPs at the peak of {peak:.3g} FLOP/s a device; raise "
                "metrics.peak_flops, or lower planner.device.flops_per_s"
            )
        parts[TimePart.TRANSFERS,] = problem.graph.num_ranks * (
            timeline.makespan_s - makespan_without_transfers_s(problem, plan)
        )
        return parts

    def _compute_s(self, job: Job, meta: IterationMeta, costs: CostModel) -> float:
        """Rank-seconds of all actions if no block recomputed or offloaded anything."""
        return _compute_s(self._problem(replace(job, costs=costs, memory=MemoryChoices()), meta)[1], {})

    def _method(self, job: Job, seed: int) -> Schedule | JobMethod:
        """How an iteration is planned. Args: seed: of a search."""
        if not self.searches:
            return job.schedule
        return JobMethod.searching(job.schedule, job.section, seed=seed, noise=job.costs.noise)

    def _problem(self, job: Job, meta: IterationMeta) -> tuple[Batching, PlanningProblem]:
        """The works of an iteration, and their planning problem."""
        return IterationPlanner(job).problem(meta, searched=self.searches)


def _regrouped(job: Job, meta: IterationMeta, seed: int) -> tuple[Job, IterationMeta, Batching, PlanResult]:
    """The job with its sizes of works, the batch, its works and its plan, all as the search groups the samples."""
    planner, options = IterationPlanner(job), search_options(job.section, seed=seed, threads=1, noise=job.costs.noise)
    found, result = search_iteration(planner, planner.prepare(meta, searched=True), options, search)
    if found.grouping is not None:
        job = replace(job, sub_microbatch_size=found.grouping.sub_microbatch_size)
    return job, found.grouped_meta, found.batching, result


def _compute_s(problem: PlanningProblem, options: Mapping[tuple[int, int], int]) -> float:
    """Rank-seconds of all actions of a plan without exchanges of tensor parallelism, which other compute may hide.

    Args: options: (stage, work) -> its option; absent: the first.
    """
    total = 0.0
    for work, lists in enumerate(problem.cost_index):
        for stage, index in zip(problem.graph.stages(work), lists, strict=True):
            option = problem.costs[index][options.get((stage, work), 0)]
            total += option.load(Kind.F).compute_s + option.load(Kind.B).compute_s
    return total


def _ends_s(timeline: Timeline) -> list[float]:
    """[pp_rank] -> seconds from the start of the pipeline to the end of the rank's last action; 0 if it has none."""
    ends = [0.0] * timeline.num_ranks
    for row in timeline.rows:
        ends[row.rank] = max(ends[row.rank], row.end_s - timeline.start_s)
    return ends
