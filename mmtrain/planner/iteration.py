"""Planning of one iteration: from its metadata to the program that every pipeline rank runs. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mmtrain.costs.learned import Floats, corrected
from mmtrain.errors import ConfigError, PlanError
from mmtrain.modality.metadata import IterationMeta, without_deferral
from mmtrain.planner.batching import Batching, check_conservation, make_batching
from mmtrain.planner.deferral import oversize_pairs
from mmtrain.planner.grouping import Grouping, Indices, grouped
from mmtrain.planner.job import Job
from mmtrain.planner.layout import IterationLayout
from mmtrain.planner.make_plan import JobMethod, make_plan
from mmtrain.planner.make_problem import make_problem
from mmtrain.planner.memory.limit import too_tight
from mmtrain.planner.result import PlanResult
from mmtrain.schedule.passes.lower import Program
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.transport import check_transport


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """One iteration on one model replica, before a plan is chosen for it."""

    meta: IterationMeta
    """The batch, as it was given."""
    grouping: Grouping | None = None
    """The batch's samples are grouped in this way; None: as they were given."""

    @property
    def microbatches(self) -> Indices:
        """The samples of each microbatch, as of `Grouping`."""
        return self.grouping.microbatches if self.grouping else ()

    @property
    def grouped_meta(self) -> IterationMeta:
        """The batch as its works process it."""
        return grouped(self.meta, self.microbatches)

    batching: Batching
    layout: IterationLayout
    problem: PlanningProblem
    forward_only: bool
    first: PlanResult
    """The plan of the job's schedule, or why there is none; equal on every rank."""


@dataclass(frozen=True, kw_only=True)
class IterationPlan(Iteration):
    """The plan of one iteration on one model replica, with the values from which it was made."""

    result: PlanResult
    program: Program

    @property
    def deferred_bytes(self) -> float:
        """Activations of encoder works whose output the microbatch after theirs reads, on all pipeline ranks."""
        plan, items = self.result.plan, self.batching.items
        if not any(item.deferred for item in items):
            return 0.0
        early = [(stage, work) for stage, work in self.problem.graph.nodes() if items[work].deferred]
        return sum(plan.option(self.problem, stage, work).activation_bytes for stage, work in early)


@dataclass(frozen=True)
class IterationPlanner:
    """Plans iterations of a job within memory limits; equal metadata gives equal programs on every rank."""

    job: Job
    activation_limits: Sequence[float | None] | None = None
    """[pp_rank] -> bytes that activations may take; None: those of the job."""
    widest_limits: Sequence[float | None] | None = None
    """[pp_rank] -> bytes before any margin has grown, for batches that exceed `activation_limits`; None: no others."""
    factors: Floats | None = None
    """[module, pp_rank, part] of the seconds of the job's costs, as of `LearnedCosts`; None: they are as modelled."""

    def problem(
        self, meta: IterationMeta, *, forward_only: bool = False, searched: bool = False
    ) -> tuple[Batching, PlanningProblem]:
        """The works of an iteration, and their planning problem.

        Where images that are encoded with the microbatch before make a pair of microbatches that does not fit into the
        memory limits, they are encoded with their own microbatch (`Batching.not_deferred`).

        Args: searched: the planner may choose the orders and memory options, and may split backwards even if the
            schedule does not.
        Raises:
            DataError: an image or token of the batch would be lost or used twice.
            ConfigError: planner.memory_limit is a part of a device whose memory is not known.
            PlanError: the tensors that one backward restores or makes exceed the memory limit by themselves.
        """
        job, limits = self.job, self.activation_limits or self.job.activation_limits
        if job.section.memory_limit and limits is None:
            raise ConfigError(
                f'planner.memory_limit = "{job.section.memory_limit}" is a part of a device whose memory is not known '
                'here; name the device in planner.hardware (--cluster), or write an amount, as in "72GiB"'
            )
        not_deferred: tuple[int, ...] = ()
        while True:
            batching = make_batching(meta, job.spec, job.sub_microbatch_size, job.submesh.attention_mask)
            check_conservation(meta, batching)
            problem = make_problem(
                job.spec,
                job.partition,
                batching,
                job.costs,
                job.section,
                memory=job.memory if searched else job.memory.fixed,
                submesh=job.submesh,
                forward_only=forward_only,
                limits=limits,
            )
            if self.factors is not None:
                problem = corrected(problem, self.factors)
            problem = job.schedule.with_instructions(problem)
            oversize = oversize_pairs(problem)
            if not oversize:
                return replace(batching, not_deferred=not_deferred), problem
            not_deferred = tuple(sorted((*not_deferred, *oversize)))
            meta = without_deferral(meta, oversize)

    def prepare(self, meta: IterationMeta, *, forward_only: bool = False, searched: bool = False) -> Iteration:
        """An iteration with its works, layout, planning problem and first plan. Arguments and errors: see `problem`.

        A batch that does not fit into `activation_limits` is planned within `widest_limits`, so that a grown margin
        never ends a job.
        """
        try:
            iteration = self._within(meta, forward_only, searched)
        except PlanError:
            if self.widest_limits is None:
                raise
        else:
            if iteration.first.has_plan or self.widest_limits is None:
                return iteration
        widest = replace(self, activation_limits=self.widest_limits, widest_limits=None)
        return widest._within(meta, forward_only, searched)

    def _within(self, meta: IterationMeta, forward_only: bool, searched: bool) -> Iteration:
        """An iteration within `activation_limits`."""
        batching, problem = self.problem(meta, forward_only=forward_only, searched=searched)
        layout, first = IterationLayout(self.job.submesh, batching, meta), self._first(problem)
        return Iteration(
            meta=meta, batching=batching, layout=layout, problem=problem, forward_only=forward_only, first=first
        )

    def regrouped(self, iteration: Iteration, grouping: Grouping) -> Iteration:
        """An iteration whose samples are grouped in another way. The first plan stays that of the given grouping.

        Raises: see `problem`.
        """
        job = replace(self.job, sub_microbatch_size=grouping.sub_microbatch_size)
        meta = grouped(iteration.meta, grouping.microbatches)
        batching, problem = replace(self, job=job).problem(meta, searched=True)
        layout = IterationLayout(job.submesh, batching, meta)
        return replace(iteration, grouping=grouping, batching=batching, layout=layout, problem=problem)

    def _first(self, problem: PlanningProblem) -> PlanResult:
        """The plan of the schedule, or a result that says why there is none; raises nothing."""
        result = make_plan(problem, JobMethod(self.job.schedule, self.job.section))
        if result.has_plan:
            return result
        return replace(result, message=too_tight(problem, self.job.section, self.job.spec) or result.message)

    def finish(self, iteration: Iteration, result: PlanResult) -> IterationPlan:
        """The iteration with its lowered program, from a plan that has been checked.

        Raises: PlanError: the result has no plan; or a program could deadlock (`debug.check_plans`).
        """
        program = self.job.lower(
            result.plan, iteration.problem, forward_only=iteration.forward_only, timeline=result.timeline
        )
        if self.job.check_plans:
            check_transport(program)
        return IterationPlan(**vars(iteration), result=result, program=program)

    def plan(self, meta: IterationMeta, *, forward_only: bool = False) -> IterationPlan:
        """The checked plan and the program of one iteration, in the order of the schedule.

        Raises:
            DataError: an image or token of the batch would be lost or used twice.
            PlanError: no plan fits, with the rank and the bytes.
        """
        iteration = self.prepare(meta, forward_only=forward_only)
        return self.finish(iteration, iteration.first)
