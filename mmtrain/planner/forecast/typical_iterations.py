"""Typical iterations of a job, drawn from its config alone, and their simulated seconds on a partition. Pure.

Every rank, and every resumed run, draws the same iterations, before any data are read.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from mmtrain.config.config import Config
from mmtrain.config.sections import PlannerConfig
from mmtrain.errors import PlanError
from mmtrain.modality.metadata import IterationMeta
from mmtrain.modality.submesh import Submesh
from mmtrain.modality.typical import Bins
from mmtrain.planner.batching import Batching, make_batching
from mmtrain.planner.costs.cost_model import CostModel, equal_layers
from mmtrain.planner.first_plan import first_plan
from mmtrain.planner.forecast.workloads import VIDEO_CAPTIONS, draw
from mmtrain.planner.job_schedule import job_schedule
from mmtrain.planner.memory.limit import MemoryRule
from mmtrain.planner.memory.options import MemoryChoices
from mmtrain.planner.partition.partition import Partition
from mmtrain.planner.plan import PlanResult
from mmtrain.planner.problem import make_problem
from mmtrain.planner.search.search import SearchOptions, search
from mmtrain.schedule.library.catalogue import Schedule
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.spec.recomputation import Recomputation
from mmtrain.spec.spec import ModelSpec, ModuleSpec, WorkSize

WORKLOAD = "mix"
"""The workload of a job with images, or with text alone; a key of `workloads.WORKLOADS`."""
MOST_MICROBATCHES = 32
"""Largest number of microbatches of one drawn iteration; of all drawn iterations together, if they are several."""
MOST_ITERATIONS = 4

SHORT_S = 1.0
"""If a rank computes for less than this in an iteration, orders of `interleave` replace those of the planner's search:
loading the search's kernels, or compiling them on a new machine, would take longer than many such iterations."""

_EVALUATIONS = 16
"""Plans that the planner's search tries for each drawn iteration."""


def usual_workload(config: Config) -> str:
    """Name of the workload that represents a job's data, if nothing is known about them."""
    return VIDEO_CAPTIONS if config.model.reads_clips else WORKLOAD


@dataclass(frozen=True, kw_only=True)
class TypicalIterations:
    """Some iterations of a job, and the values that planning them needs."""

    spec: ModelSpec
    costs: CostModel
    section: PlannerConfig
    schedule: Schedule
    num_ranks: int
    """Pipeline ranks."""
    shortened: float
    """Microbatches of one of the job's iterations over those of a drawn one."""
    memory: MemoryChoices
    submesh: Submesh
    """The ranks of a stage."""
    batchings: tuple[Batching, ...]
    """The works of each iteration."""
    memory_rule: MemoryRule | None = None
    """Gives the bytes that activations may take on a partition; None: those of planner.activation_memory_gib."""

    @classmethod
    def draw(
        cls,
        config: Config,
        spec: ModelSpec,
        costs: CostModel,
        sub_microbatch_size: int,
        *,
        most_microbatches: int = MOST_MICROBATCHES,
        most_iterations: int = MOST_ITERATIONS,
    ) -> "TypicalIterations":
        """Iterations of one replica of a job with images or clips of typical size; the larger, the fewer.

        Args:
            sub_microbatch_size: images or clips in one work; 0: all of a microbatch.
            most_microbatches: largest number of microbatches of each; a job may have more.
            most_iterations: largest number of iterations.
        Raises: ConfigError: the encoder does not read images.
        """
        all_bins = Bins.typical(config)
        bins = replace(all_bins, num_microbatches=min(all_bins.num_microbatches, most_microbatches))
        submesh = Submesh.of(config)
        number = max(1, min(most_iterations, MOST_MICROBATCHES // bins.num_microbatches))
        name = usual_workload(config)
        metas: list[IterationMeta] = [draw(name, bins, seed=0, iteration=i) for i in range(number)]
        return cls(
            spec=spec,
            costs=costs,
            section=config.planner,
            schedule=job_schedule(config),
            num_ranks=config.parallelism.pipeline_parallel_degree,
            shortened=all_bins.num_microbatches / bins.num_microbatches,
            memory=MemoryChoices.planned(config.activation_checkpoint, config.planner),
            submesh=submesh,
            memory_rule=MemoryRule.of(config),
            batchings=tuple(make_batching(m, spec, sub_microbatch_size, submesh.attention_mask) for m in metas),
        )

    def seconds(self, partition: Partition, *, within: MemoryRule | None = None) -> float:
        """The mean simulated makespan in seconds on a partition, planned as in the job; infinite if one has no plan.

        Args: within: a rule for memory, even if the job has no limit; if a plan exceeds it, the result is infinite. The
            planner's search gets it as its limit; a named schedule does not.
        """
        return sum(self._makespan_s(partition, batching, within) for batching in self.batchings) / len(self.batchings)

    def layer_seconds(self) -> dict[str, list[float]]:
        """Module -> [layer] -> seconds of forward and backward of all works of all iterations."""
        static = Recomputation.of(self.memory.section)
        totals = {module.name: [0.0] * len(module.layers) for module in self.spec.modules}
        for batching in self.batchings:
            for work, size in zip(batching.works, batching.sizes, strict=True):
                name = batching.modules[work.module]
                module = self.spec.module(name)
                enters = bool(work.after) and self.spec.grad_enters(name)
                added = layer_seconds(module, size, self.costs, static, input_grad=enters)
                totals[name] = [total + seconds for total, seconds in zip(totals[name], added, strict=True)]
        return totals

    @property
    def _searches(self) -> bool:
        return self.section.enable and self.section.interleave

    @cached_property
    def is_short(self) -> bool:
        """Whether an iteration of the job has less than `SHORT_S` seconds of compute for each pipeline rank."""
        drawn_s = sum(map(sum, self.layer_seconds().values())) / len(self.batchings)
        return self.shortened * drawn_s < SHORT_S * self.num_ranks

    def _makespan_s(self, partition: Partition, batching: Batching, within: MemoryRule | None) -> float:
        rule = within if within and self._searches else self.memory_rule
        budget = rule.budget(self.spec, partition) if rule else None
        if budget and not budget.is_enough:
            return math.inf  # parameters and gradients do not fit
        try:
            problem = make_problem(
                self.spec,
                partition,
                batching,
                self.costs,
                self.section,
                memory=self.memory,
                submesh=self.submesh,
                limits=budget.activation_limits if budget else None,
            )
            result = self._plan(problem)
        except PlanError:  # over a memory limit
            return math.inf
        timeline = result.timeline
        if timeline is None or (within and not within.budget(self.spec, partition).holds(timeline.peak_bytes)):
            return math.inf
        return timeline.makespan_s

    def _plan(self, problem: PlanningProblem) -> PlanResult:
        section = self.section
        if not self._searches or self.is_short:
            return first_plan(problem, "interleave" if self._searches else self.schedule, section)
        options = SearchOptions(
            budget_evaluations=_EVALUATIONS,
            strategy=section.strategy,
            reorder=section.reorder,
            split=section.split_backward,
            memory=section.memory,
        )
        return search(problem, options)


def layer_seconds(
    module: ModuleSpec, size: WorkSize, costs: CostModel, recomputation: Recomputation, *, input_grad: bool
) -> Sequence[float]:
    """[layer] -> seconds of forward and backward for one work, recomputation included.

    Args: input_grad: whether a gradient has to leave the module's first layer.
    """
    seconds: list[float] = []
    priced: dict[tuple[int, bool], float] = {}
    for index, kind in enumerate(equal_layers(module)):
        if (kind, input_grad) not in priced:
            times = costs.layer(module, index, size, input_grad=input_grad)
            total = times.forward_s + times.backward_input_s + times.backward_weight_s
            if input_grad or module.layers[index].trainable:
                total += costs.repeated_s(module, index, size, recomputation)
            priced[kind, input_grad] = total
        seconds.append(priced[kind, input_grad])
        input_grad = input_grad or module.layers[index].trainable
    return seconds
