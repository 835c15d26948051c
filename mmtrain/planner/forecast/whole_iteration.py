"""Simulation of a whole training iteration: the replicas' pipelines, gathers, reductions and the optimizer. Pure.

In an iteration, parameters are gathered (hidden by the pipeline's start if they arrive in time), every replica runs its
own plan, each pipeline rank reduces its gradients as soon as all of its replicas have ended, and after the last
reduction the optimizer steps. Loading, planning and logging are not simulated: they run ahead or on the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from mmtrain.config.config import Config
from mmtrain.errors import PlanError
from mmtrain.modality.metadata import IterationMeta
from mmtrain.planner.forecast.machine import Network
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.planner.memory.rank_state import RankState, Sharding
from mmtrain.planner.plan import make_plan
from mmtrain.planner.plan_choice import search_seed, searched_plan
from mmtrain.schedule.timeline import Timeline


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


@dataclass(frozen=True, kw_only=True)
class IterationSimulator:
    """Simulates iterations of one job under one schedule."""

    planner: IterationPlanner
    states: tuple[RankState, ...]
    """[pp_rank]"""
    gather_s: tuple[tuple[float, ...], ...]
    """[pp_rank][i] -> seconds of the UNSHARD of its i-th stage; they run one after the other."""
    reduce_s: tuple[float, ...]
    """[pp_rank] -> seconds of all its REDUCE."""
    searches: bool = False
    """Whether plans are searched as configured in `[planner]`; otherwise they have the order of the job's schedule."""

    @classmethod
    def of(cls, config: Config, network: Network, *, searches: bool = False) -> "IterationSimulator":
        """The simulator of a job. Raises: ConfigError: a model that cannot be built, cut or divided."""
        planner, sharding = IterationPlanner.of(config), Sharding.of(config)
        ranks = range(planner.partition.num_ranks)
        states = tuple(sharding.rank_state(planner.spec, planner.partition, rank) for rank in ranks)
        return cls(
            planner=planner,
            states=states,
            gather_s=tuple(tuple(sharding.gather_s(network, s, rank) for s in states[rank].stages) for rank in ranks),
            reduce_s=tuple(sum(sharding.reduce_s(network, s, rank) for s in states[rank].stages) for rank in ranks),
            searches=searches,
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
        """
        timelines, flops, activations = [], [], [0.0] * len(self.states)
        for replica, meta in enumerate(metas):
            batching, problem = self.planner.problem(meta, searched=self.searches)
            if self.searches:
                chosen = search_seed(seed, step, replica)
                planner = self.planner
                noise = planner.costs.noise
                result = searched_plan(problem, planner.schedule, planner.section, seed=chosen, noise=noise)
            else:
                result = make_plan(problem, self.planner.schedule)
            if result.timeline is None:
                raise PlanError(self.planner.too_tight(problem) or result.message)
            timelines.append(result.timeline)
            flops.append(sum(module_flops.total for module_flops in self.planner.flops(batching).values()))
            activations = [max(of_rank) for of_rank in zip(activations, result.timeline.peak_bytes, strict=True)]
        slowest = max(timelines, key=lambda timeline: timeline.makespan_s)
        gather = max(self._gather_delay_s(timeline) for timeline in timelines)
        ends = [max(of_replicas) for of_replicas in zip(*map(_ends_s, timelines), strict=True)]
        reduced = max(end + reduce for end, reduce in zip(ends, self.reduce_s, strict=True))
        optimizer = max(self.planner.costs.step_s(round(state.updated_params)) for state in self.states)
        iteration = SimulatedIteration(
            iteration_s=gather + reduced + optimizer,
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
        )
        return iteration, slowest

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


def _ends_s(timeline: Timeline) -> list[float]:
    """[pp_rank] -> seconds from the start of the pipeline to the end of the rank's last action; 0 if it has none."""
    ends = [0.0] * timeline.num_ranks
    for row in timeline.rows:
        ends[row.rank] = max(ends[row.rank], row.end_s - timeline.start_s)
    return ends
