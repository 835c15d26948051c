"""Typical iterations of a job, drawn from its config alone, and their simulated seconds on a partition. Pure.

Every rank, and every resumed run, draws the same iterations, before any data are read.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from mmtrain.config.config import Config
from mmtrain.config.planner import PlannerConfig
from mmtrain.costs.cost_model import CostModel, equal_layers
from mmtrain.errors import PlanError
from mmtrain.modality.metadata import IterationMeta, MicrobatchMeta
from mmtrain.modality.submesh import Submesh
from mmtrain.modality.typical import TypicalSizes
from mmtrain.planner.batching import Batching, SubMicrobatch, make_batching
from mmtrain.planner.job_schedule import job_schedule
from mmtrain.planner.make_plan import JobMethod, make_plan
from mmtrain.planner.make_problem import make_problem
from mmtrain.planner.memory.limit import MemoryRule
from mmtrain.planner.memory.options import MemoryChoices
from mmtrain.planner.partition.partition import Partition
from mmtrain.planner.result import PlanResult
from mmtrain.planner.search.search import shortest_s
from mmtrain.planner.search.search_options import SearchOptions
from mmtrain.planner.search_settings import search_options
from mmtrain.schedule.library.catalogue import Schedule
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.timeline import Timeline
from mmtrain.simulator.workloads import PAIRS, VIDEO_CAPTIONS, draw
from mmtrain.spec.recomputation import Recomputation
from mmtrain.spec.spec import ModelSpec, ModuleSpec
from mmtrain.spec.work_size import WorkSize

WORKLOAD = "mix"
"""The workload of a job with images, or with text alone; a key of `workloads.WORKLOADS`."""
MOST_MICROBATCHES = 32
"""Largest number of microbatches of all drawn iterations together."""
MOST_ITERATIONS = 4

SHORT_S = 5.0
"""The seconds of compute of a rank in an iteration below which list schedules stand for the plans of the planner's
search, whose kernels take 10 to 20 s to compile on a machine that never ran them."""

EVALUATIONS = 50
"""Plans that the planner's search tries for a drawn iteration, at most. 300 choose the same cuts of five models."""

SEARCHED_NODE_S, CHOOSING_NODE_S, LISTED_NODE_S = 6e-5, 2.4e-4, 1e-4
"""Seconds that a core takes to judge one stage of one work: by the planner's search, by one that also chooses memory
options, by one plan of a schedule in Python. Constants, so that all ranks give the same effort to a search."""


def usual_workload(config: Config) -> str:
    """Name of the workload that represents a job's data, if nothing is known about them."""
    return VIDEO_CAPTIONS if config.model.reads_clips else PAIRS if config.model.reads_pairs else WORKLOAD


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
    memory_rule: MemoryRule
    """Gives the bytes that activations may take on a partition, unless planner.search.activation_memory_gib does."""
    reordered: tuple[Batching, ...] = ()
    """Each with the microbatches of most image or clip tokens first; empty: only the order as drawn is tried."""
    is_quick: bool = False
    """Whether one list schedule is enough for a short job."""

    @classmethod
    def draw(
        cls,
        config: Config,
        spec: ModelSpec,
        costs: CostModel,
        sub_microbatch_size: SubMicrobatch,
        *,
        most_microbatches: int = MOST_MICROBATCHES,
        is_quick: bool = False,
    ) -> "TypicalIterations":
        """Iterations of one replica of a job with images or clips of typical size; the larger, the fewer.

        Args:
            sub_microbatch_size: images or clips in one work; 0: all of a microbatch.
            most_microbatches: largest number of microbatches of all iterations together. If one iteration of the job
                has more, one that is so much shorter is drawn.
            is_quick: see the field.
        Raises: ConfigError: the encoder does not read images.
        """
        all_bins = TypicalSizes.typical(config)
        bins = replace(all_bins, num_microbatches=min(all_bins.num_microbatches, most_microbatches))
        submesh = Submesh.of(config)
        number = max(1, min(MOST_ITERATIONS, most_microbatches // bins.num_microbatches))
        name = usual_workload(config)
        metas = [draw(name, bins, seed=0, iteration=i) for i in range(number)]

        reorders = config.planner.search.reorder and _has_search(config.planner)

        def batching(meta: IterationMeta) -> Batching:
            return make_batching(meta, spec, sub_microbatch_size, submesh.attention_mask)

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
            batchings=tuple(map(batching, metas)),
            reordered=tuple(batching(_falling(m)) for m in metas) if reorders and not is_quick else (),
            is_quick=is_quick,
        )

    def seconds(self, partition: Partition, *, within: MemoryRule | None = None) -> float:
        """The mean makespan in seconds on a partition, planned as in the job; infinite if an iteration has no plan.

        Args: within: a rule for memory, even if the job has no limit; if a plan exceeds it, the result is infinite. The
            planner's search gets it as its limit; a named schedule does not.
        """
        seconds = [self._makespan_s(partition, index, within) for index in range(len(self.batchings))]
        return sum(seconds) / len(seconds)

    def peak_bytes(self, partition: Partition) -> float:
        """The most bytes that a rank takes on a partition, planned as in the job; infinite if an iteration has no plan.

        They are those of parameters, gradients, optimizer and activations.
        """
        ranks, peak = self.memory_rule.budget(self.spec, partition).ranks, 0.0
        for index in range(len(self.batchings)):
            timeline = self._timeline(partition, index)
            held = timeline.peak_bytes if timeline else [math.inf] * len(ranks)
            peak = max(peak, *(rank.predicted_bytes(num_bytes) for rank, num_bytes in zip(ranks, held, strict=True)))
        return peak

    def judging_s(self, partition: Partition) -> float:
        """Seconds, at constant rates, that `seconds` takes on a partition for each drawn microbatch."""
        stages = {module.name: len(module.stages) for module in partition.modules}
        works = [batching.modules[work.module] for batching in self.batchings for work in batching.works]
        num_microbatches = sum(len({work.microbatch for work in batching.works}) for batching in self.batchings)
        return self._node_s * sum(stages[name] for name in works) / num_microbatches

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
        return self.section.enable and self.section.search.interleave

    @property
    def _node_s(self) -> float:
        if not self._searches:
            return LISTED_NODE_S
        if self.is_short:
            return LISTED_NODE_S if self.is_quick else 2 * LISTED_NODE_S
        chooses = self.memory.strategies and self.memory_rule.limit_bytes is not None
        return CHOOSING_NODE_S if chooses else SEARCHED_NODE_S

    @cached_property
    def rank_s(self) -> float:
        """Mean seconds of compute of a pipeline rank in an iteration of the job."""
        drawn_s = sum(map(sum, self.layer_seconds().values())) / len(self.batchings)
        return self.shortened * drawn_s / self.num_ranks

    @property
    def num_microbatches(self) -> int:
        """Microbatches of an iteration of the job."""
        drawn = len({work.microbatch for work in self.batchings[0].works})
        return round(self.shortened * drawn)

    @property
    def is_short(self) -> bool:
        """Whether ranks compute for less than `SHORT_S` in an iteration of the job."""
        return self.rank_s < SHORT_S

    def _makespan_s(self, partition: Partition, index: int, within: MemoryRule | None) -> float:
        if self._searches and not self.is_short:
            problem = self._problem(partition, self.batchings[index], within)
            return math.inf if problem is None else shortest_s(problem, self._options)
        timeline = self._timeline(partition, index, within if self._searches else None)
        if timeline is None or (within and not within.budget(self.spec, partition).holds(timeline.peak_bytes)):
            return math.inf
        return timeline.makespan_s

    def _timeline(self, partition: Partition, index: int, within: MemoryRule | None = None) -> Timeline | None:
        """The simulated plan of an iteration; None: there is none. Args: within: a limit in place of the job's."""
        problem = self._problem(partition, self.batchings[index], within)
        if problem is None:
            return None
        if not self._searches:
            result = make_plan(problem, JobMethod(self.schedule, self.section))
        elif not self.is_short:
            result = make_plan(problem, self._options)
        else:
            result, method = self._listed(problem)
            falling = self._problem(partition, self.reordered[index], within) if self.reordered else None
            if result.has_plan and falling:
                result = min(result, make_plan(falling, method), key=lambda made: made.makespan_s)
        return result.timeline if result.has_plan else None

    def _listed(self, problem: PlanningProblem) -> tuple[PlanResult, str | SearchOptions]:
        """The best plan of list schedules, and its method.

        `ZB-AutoSchedule` is close to what a search finds, unless memory is scarce: it then runs microbatches one after
        another, and `interleave` with options chosen is closer.
        """
        splits = self.section.search.split_backward and _has_search(self.section)
        limited = any(limit is not None for limit in problem.memory_limit_bytes)
        interleave = SearchOptions(strategy="first")  # with options chosen
        methods = ["ZB-AutoSchedule"] * splits + [interleave] * (not splits or limited)
        results = [(make_plan(problem, how), how) for how in (methods[-1:] if self.is_quick else methods)]
        return min(results, key=lambda made: made[0].makespan_s)

    def _problem(self, partition: Partition, batching: Batching, within: MemoryRule | None) -> PlanningProblem | None:
        """The planning problem of an iteration; None: parameters and gradients, or one block, exceed the limit."""
        budget = (within or self.memory_rule).budget(self.spec, partition)
        if not budget.is_enough:
            return None
        try:
            return make_problem(
                self.spec,
                partition,
                batching,
                self.costs,
                self.section,
                memory=self.memory,
                submesh=self.submesh,
                limits=budget.activation_limits,
            )
        except PlanError:
            return None

    @property
    def _options(self) -> SearchOptions:
        """The options of the job's own search, with fewer evaluations and no clock."""
        options = search_options(self.section, seed=0, threads=1, noise=self.costs.noise)
        evaluations = min(EVALUATIONS, options.budget_evaluations or EVALUATIONS)
        return replace(options, budget_evaluations=evaluations, budget_s=0.0)


def _has_search(section: PlannerConfig) -> bool:
    """Whether the planner's search is more than the plan of `interleave`."""
    return section.search.strategy != "first"


def _falling(meta: IterationMeta) -> IterationMeta:
    """The iteration with the microbatches of most image or clip tokens first."""

    def tokens(microbatch: MicrobatchMeta) -> int:
        return microbatch.num_video_tokens + sum(image.num_tokens for image in microbatch.images)

    return replace(meta, microbatches=tuple(sorted(meta.microbatches, key=tokens, reverse=True)))


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
