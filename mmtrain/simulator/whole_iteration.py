"""Simulation of a whole training iteration: the replicas' pipelines, gathers, reductions and the optimizer. Pure.

In an iteration, parameters are gathered (hidden by the pipeline's start if they arrive in time), every replica runs its
own plan, each pipeline rank reduces its gradients as soon as all of its replicas have ended, and after the last
reduction the optimizer steps. Loading, planning and logging are not simulated: they run ahead or on the host.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from statistics import fmean, pstdev

from mmtrain.config.config import Config
from mmtrain.costs.cost_model import CostModel
from mmtrain.costs.machine import Network
from mmtrain.errors import ConfigError, PlanError
from mmtrain.modality.metadata import IterationMeta, without_deferral
from mmtrain.planner.batching import Batching
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.planner.job import Job
from mmtrain.planner.memory.limit import too_tight
from mmtrain.planner.memory.options import MemoryChoices
from mmtrain.planner.memory.rank_state import RankState, Sharding
from mmtrain.planner.plan import JobMethod, make_plan
from mmtrain.planner.search_settings import search_seed
from mmtrain.schedule.action import Kind
from mmtrain.schedule.library.catalogue import Schedule
from mmtrain.schedule.plan import Plan, entry_costs
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.simulate import makespan_without_transfers_s
from mmtrain.schedule.timeline import Timeline
from mmtrain.simulator.breakdown import Breakdown, Part, Parts, computing
from mmtrain.simulator.job import make_job
from mmtrain.simulator.partition_choice import choose_partition
from mmtrain.simulator.replicated import held_partition, replicated_choice, rerun


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
    """[pp_rank] -> peak bytes of activations, the largest over the replicas; recomputation included."""
    peak_bytes: tuple[float, ...]
    """[pp_rank] -> peak bytes in total."""
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
class IterationSimulator:
    """Simulates iterations of one job under one schedule."""

    job: Job
    states: tuple[RankState, ...]
    """[pp_rank]"""
    gather_s: tuple[tuple[float, ...], ...]
    """[pp_rank][i] -> seconds of the UNSHARD of its i-th stage; they run one after the other."""
    reduce_s: tuple[float, ...]
    """[pp_rank] -> seconds of all its REDUCE."""
    replicated: bool = False
    """Whether every rank of the language model runs all encoders again."""
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
        network: Network,
        *,
        searches: bool = False,
        peak_flops: float | None = None,
        tells_apart: bool = True,
    ) -> "IterationSimulator":
        """The simulator of a job. Raises: ConfigError: a model that cannot be built, cut or divided."""
        replicated, sharding = config.planner.placement == "replicated", Sharding.of(config)
        job = make_job(config, replicated_choice if replicated else choose_partition)
        spec, parts = job.spec, job.partition
        ranks = range(parts.num_ranks)
        held = [held_partition(parts, rank) if replicated else parts for rank in ranks]
        states = tuple(sharding.rank_state(spec, held[rank], rank) for rank in ranks)
        return cls(
            job=job,
            replicated=replicated,
            states=states,
            gather_s=tuple(tuple(sharding.gather_s(network, s, rank) for s in states[rank].stages) for rank in ranks),
            reduce_s=tuple(sum(sharding.reduce_s(network, s, rank) for s in states[rank].stages) for rank in ranks),
            searches=searches,
            peak_flops=peak_flops,
            tells_apart=tells_apart,
        )

    def simulate(
        self, metas: Sequence[IterationMeta], *, seed: int = 0, step: int = 0
    ) -> tuple[SimulatedIteration, Timeline]:
        """One iteration in which each replica reads one of the batches, and the slowest replica's pipeline.

        Args:
            metas: [replica] -> its batch.
            seed, step: determine the seeds of searches, if plans are searched.
        Raises:
            DataError: an image or token of a batch would be lost or used twice.
            PlanError: no plan fits into the memory limit.
            ConfigError: layers take less time than their FLOPs at the peak rate.
        """
        job, timelines, flops, activations = self.job, [], [], [0.0] * len(self.states)
        parts: list[dict[Parts, float]] = []
        num_deferred = 0
        for replica, meta in enumerate(metas):
            batching, problem = self._problem(job, meta)
            result = make_plan(problem, self._method(search_seed(seed, step, replica)))
            if not result.has_plan:
                raise PlanError(too_tight(problem, job.section) or result.message)
            num_deferred += without_deferral(meta, batching.not_deferred).num_deferred
            timelines.append(result.timeline)
            flops.append(sum(module_flops.total for module_flops in job.flops(batching).values()))
            activations = [max(of_rank) for of_rank in zip(activations, result.timeline.peak_bytes, strict=True)]
            parts.append(self._parts(meta, problem, result.plan, result.timeline, flops[-1]))
        slowest = max(timelines, key=lambda timeline: timeline.makespan_s)
        gather = max(self._gather_delay_s(timeline) for timeline in timelines)
        ends = [max(of_replicas) for of_replicas in zip(*map(_ends_s, timelines), strict=True)]
        reduced = max(end + reduce for end, reduce in zip(ends, self.reduce_s, strict=True))
        optimizer = max(job.costs.step_s(round(state.updated_params)) for state in self.states)
        iteration_s, ranks = gather + reduced + optimizer, len(self.states)
        seconds = {key: sum(of_replica[key] for of_replica in parts) / len(parts) for key in parts[0]}
        seconds[(Part.BUBBLE,) if self.tells_apart else (Part.BUBBLE, Part.TRANSFERS)] = (
            ranks * slowest.makespan_s - sum(seconds.values())
        )
        seconds[Part.REDUCTIONS,] = ranks * (gather + reduced - slowest.makespan_s)
        seconds[Part.OPTIMIZER,] = ranks * optimizer
        iteration = SimulatedIteration(
            iteration_s=iteration_s,
            gather_s=gather,
            pipeline_s=slowest.makespan_s,
            reduce_s=reduced - slowest.makespan_s,
            optimizer_s=optimizer,
            replicas_s=tuple(timeline.makespan_s for timeline in timelines),
            bubble=sum(timeline.bubble for timeline in timelines) / len(timelines),
            flops=sum(flops) / len(flops),
            activation_bytes=tuple(activations),
            peak_bytes=tuple(s.peak_bytes(a) for s, a in zip(self.states, activations, strict=True)),
            num_images=sum(meta.num_images for meta in metas),
            num_microbatches=sum(len(meta.microbatches) for meta in metas),
            breakdown=Breakdown.of(ranks * iteration_s, seconds),
            spread_s={name: fmean(timeline.spread_s[name] for timeline in timelines) for name in timelines[0].spread_s},
            num_deferred=num_deferred,
        )
        return iteration, slowest

    def _parts(
        self, meta: IterationMeta, problem: PlanningProblem, plan: Plan, timeline: Timeline, flops: float
    ) -> dict[Parts, float]:
        """Rank-seconds of one replica's actions, and of waiting for its messages. Args: flops: of the replica."""
        if not self.tells_apart:
            return computing(sum(timeline.busy_s), {})
        kept_s = self._compute_s(meta, self.job.costs)
        free = self._costs_without_exchanges
        free_s = None if free is None else self._compute_s(meta, free)
        entries = [entry for rank in entry_costs(plan, problem) for entry in rank]
        exposed_s = sum(entry.exposed_s for entry in entries)
        copying_s = sum(entry.copying_s for entry in entries)
        peak = self.peak_flops
        known = {
            Part.MODEL_FLOPS: None if peak is None else flops / (peak * self.job.submesh.size),
            Part.RECOMPUTATION: _compute_s(problem, plan.options) - kept_s + copying_s,
            Part.EXCHANGES: None if free_s is None else kept_s - free_s + exposed_s,
        }
        parts = computing(sum(timeline.busy_s), known)
        if peak is not None and min(parts.values()) < -1e-9 * kept_s:
            raise ConfigError(
                f"simulate: layers take less time than their FLOPs at the peak of {peak:.3g} FLOP/s a device; raise "
                "metrics.peak_flops, or lower planner.flops_per_s"
            )
        parts[Part.TRANSFERS,] = problem.graph.num_ranks * (
            timeline.makespan_s - makespan_without_transfers_s(problem, plan)
        )
        return parts

    @cached_property
    def _costs_without_exchanges(self) -> CostModel | None:
        return self.job.costs.without_exchanges()

    def _compute_s(self, meta: IterationMeta, costs: CostModel) -> float:
        """Rank-seconds of all actions if no block recomputed or offloaded anything."""
        job = replace(self.job, costs=costs, memory=MemoryChoices())
        return _compute_s(self._problem(job, meta)[1], {})

    def _method(self, seed: int) -> Schedule | JobMethod:
        """How an iteration is planned. Args: seed: of a search."""
        job = self.job
        if not self.searches:
            return job.schedule
        return JobMethod.searching(job.schedule, job.section, seed=seed, noise=job.costs.noise)

    def _problem(self, job: Job, meta: IterationMeta) -> tuple[Batching, PlanningProblem]:
        """The works of an iteration, and their planning problem."""
        batching, problem = IterationPlanner(job).problem(meta, searched=self.searches)
        return batching, rerun(problem) if self.replicated else problem

    def _gather_delay_s(self, timeline: Timeline) -> float:
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
