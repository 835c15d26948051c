"""Planning of one iteration: from its metadata to the program that every pipeline rank runs. Pure."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

from mmtrain.config.memory_amount import show_bytes
from mmtrain.config.sections import PlannerConfig
from mmtrain.costs.cost_model import CostModel
from mmtrain.errors import ConfigError, PlanError
from mmtrain.modality.metadata import IterationMeta, without_deferral
from mmtrain.modality.submesh import Submesh
from mmtrain.planner.batching import Batching, SubMicrobatch, check_conservation, make_batching
from mmtrain.planner.deferral import oversize_pairs
from mmtrain.planner.first_plan import first_plan
from mmtrain.planner.layout import IterationLayout
from mmtrain.planner.memory.limit import least_activation_bytes
from mmtrain.planner.memory.options import MemoryChoices
from mmtrain.planner.partition.partition import Partition
from mmtrain.planner.plan import PlanResult
from mmtrain.planner.problem import make_problem
from mmtrain.schedule.library.catalogue import Schedule
from mmtrain.schedule.passes.lower import Program, lower
from mmtrain.schedule.plan import Plan, check, exceeds
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.simulate import simulate
from mmtrain.schedule.timeline import Timeline
from mmtrain.schedule.transport import check_transport
from mmtrain.spec.spec import Flops, ModelSpec, WorkSize


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """One iteration on one model replica, before its orders are chosen."""

    batching: Batching
    layout: IterationLayout
    problem: PlanningProblem
    forward_only: bool


@dataclass(frozen=True, kw_only=True)
class IterationPlan:
    """The plan of one iteration on one model replica, with the values from which it was made."""

    batching: Batching
    layout: IterationLayout
    problem: PlanningProblem
    result: PlanResult
    program: Program

    @property
    def deferred_bytes(self) -> float:
        """Activations of encoder works whose output the microbatch after theirs reads, on all pipeline ranks."""
        plan, items = self.result.plan, self.batching.items
        assert plan is not None
        if not any(item.deferred for item in items):
            return 0.0
        early = [(stage, work) for stage, work in self.problem.graph.nodes() if items[work].deferred]
        return sum(plan.option(self.problem, stage, work).activation_bytes for stage, work in early)


@dataclass(frozen=True, kw_only=True)
class IterationPlanner:
    """Plans iterations of one model on one partition; equal metadata gives equal programs on every rank."""

    spec: ModelSpec
    partition: Partition
    section: PlannerConfig
    costs: CostModel
    """What layers and transfers take."""
    schedule: Schedule
    """Named, or from a file."""
    sub_microbatch_size: SubMicrobatch
    """Images in one vision work; 0: all of a microbatch."""
    sharded: bool
    """Whether programs reduce gradients (FSDP2)."""
    regathered: frozenset[str] = frozenset()
    """Modules that FSDP2 gathers at each use; programs unshard the others first and reshard them last."""
    memory: MemoryChoices = field(default_factory=MemoryChoices)
    """The memory strategies that blocks may use."""
    submesh: Submesh = field(default_factory=Submesh)
    """The cp and tp ranks of a stage, which divide each work."""
    activation_limits: tuple[float | None, ...] | None = None
    """[pp_rank] -> bytes that activations may take; None: as planner.activation_memory_gib says."""
    widest_limits: tuple[float | None, ...] | None = None
    """[pp_rank] -> bytes before any margin has grown, for batches that exceed `activation_limits`; None: no others."""
    check_plans: bool = False
    """Also prove every program free of deadlock under each transport model."""
    partition_summary: str = ""
    """How the partition was chosen, for the log; empty if the config determines it."""

    def with_limits(
        self,
        activation_limits: Sequence[float | None] | None,
        widest: Sequence[float | None] | None = None,
    ) -> "IterationPlanner":
        """The planner with other memory limits.

        Args:
            activation_limits: [pp_rank] -> bytes that activations may take; None: no limits.
            widest: [pp_rank] -> bytes, for batches that exceed `activation_limits`; None: there are no wider limits.
        """
        limits, widest_limits = (None if x is None else tuple(x) for x in (activation_limits, widest))
        return replace(self, activation_limits=limits, widest_limits=None if widest_limits == limits else widest_limits)

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
            PlanError: the tensors that the backward of one block restores exceed the memory limit by themselves.
        """
        if self.section.memory_limit and self.activation_limits is None:
            raise ConfigError(
                f'planner.memory_limit = "{self.section.memory_limit}" is a part of a device whose memory is not known '
                'here; name the device in planner.hardware (--cluster), or write an amount, as in "72GiB"'
            )
        not_deferred: tuple[int, ...] = ()
        while True:
            batching = make_batching(meta, self.spec, self.sub_microbatch_size, self.submesh.attention_mask)
            check_conservation(meta, batching)
            problem = make_problem(
                self.spec,
                self.partition,
                batching,
                self.costs,
                self.section,
                memory=self.memory if searched else self.memory.fixed,
                submesh=self.submesh,
                forward_only=forward_only,
                limits=self.activation_limits,
            )
            oversize = oversize_pairs(problem)
            if not oversize:
                return replace(batching, not_deferred=not_deferred), problem
            not_deferred = tuple(sorted((*not_deferred, *oversize)))
            meta = without_deferral(meta, oversize)

    def prepare(self, meta: IterationMeta, *, forward_only: bool = False, searched: bool = False) -> Iteration:
        """An iteration with its works, layout and planning problem. Arguments and errors: see `problem`."""
        batching, problem = self.problem(meta, forward_only=forward_only, searched=searched)
        layout = self.layout(batching, meta)
        return Iteration(batching=batching, layout=layout, problem=problem, forward_only=forward_only)

    def first(self, iteration: Iteration) -> PlanResult:
        """The plan of the schedule, or a result that says why there is none; equal on every rank, raises nothing."""
        result = first_plan(iteration.problem, self.schedule, self.section)
        return (
            result
            if result.plan is not None
            else replace(result, message=self.too_tight(iteration.problem) or result.message)
        )

    def prepared(
        self,
        meta: IterationMeta,
        *,
        forward_only: bool = False,
        searched: bool = False,
        pricing: AbstractContextManager[object] = nullcontext(),  # noqa: B008
    ) -> tuple[Iteration, PlanResult]:
        """An iteration with the result of `first`; equal on every rank.

        A batch that does not fit into `activation_limits` is planned within `widest_limits`, so that a grown margin
        never ends a job.

        Args: pricing: context that is entered while the cost model is used. Other arguments, errors: see `problem`.
        """
        try:
            with pricing:
                iteration = self.prepare(meta, forward_only=forward_only, searched=searched)
            result = self.first(iteration)
        except PlanError:
            if self.widest_limits is None:
                raise
        else:
            if result.plan is not None or self.widest_limits is None:
                return iteration, result
        wide = self.with_limits(self.widest_limits)
        return wide.prepared(meta, forward_only=forward_only, searched=searched, pricing=pricing)

    def too_tight(self, problem: PlanningProblem) -> str:
        """The error message of a memory limit that leaves a rank less than one microbatch takes; empty if none does."""
        needed = least_activation_bytes(problem)
        for rank, (least_bytes, limit) in enumerate(zip(needed, problem.memory_limit_bytes, strict=True)):
            if limit is not None and exceeds(least_bytes, limit):
                key, remedies = f'planner.memory_limit = "{self.section.memory_limit}"', ["lower planner.memory_margin"]
                if not self.section.memory_limit:
                    key, remedies = f"planner.activation_memory_gib = {self.section.activation_memory_gib:g}", []
                if all(len(options) == 1 for options in problem.costs):
                    remedies.append("recompute more (activation_checkpoint.mode)")
                advice = ", ".join(["raise it", *remedies])
                return (
                    "over the memory limit: the activations of one microbatch take at least "
                    f"{show_bytes(least_bytes)} on pp_rank {rank}, but {key} leaves them {show_bytes(limit)}; "
                    f"{advice}, or make microbatches smaller (training.seq_len, for clips data.max_total_seconds)"
                )
        return ""

    def finish(self, iteration: Iteration, result: PlanResult) -> IterationPlan:
        """The iteration with its lowered program, from a plan that has been checked and simulated.

        Raises: PlanError: the result has no plan; or a program could deadlock (`debug.check_plans`).
        """
        if result.plan is None:
            raise PlanError(result.message)
        program = self.lower(
            result.plan, iteration.problem, forward_only=iteration.forward_only, timeline=result.timeline
        )
        if self.check_plans:
            check_transport(program)
        return IterationPlan(
            batching=iteration.batching,
            layout=iteration.layout,
            problem=iteration.problem,
            result=result,
            program=program,
        )

    def adopt(self, iteration: Iteration, result: PlanResult) -> IterationPlan:
        """The iteration with a plan from elsewhere, which is checked, simulated and lowered.

        Raises: PlanError: the result has no plan, or the plan breaks a rule or belongs to another problem.
        """
        if result.plan is None:
            raise PlanError(result.message)
        check(result.plan, iteration.problem)
        return self.finish(iteration, replace(result, timeline=simulate(iteration.problem, result.plan)))

    def plan(self, meta: IterationMeta, *, forward_only: bool = False) -> IterationPlan:
        """The checked plan and the program of one iteration, in the order of the schedule.

        Raises:
            DataError: an image or token of the batch would be lost or used twice.
            PlanError: no plan fits, with the rank and the bytes.
        """
        return self.finish(*self.prepared(meta, forward_only=forward_only))

    def lower(
        self,
        plan: Plan,
        problem: PlanningProblem,
        *,
        forward_only: bool = False,
        timeline: Timeline | None = None,
    ) -> Program:
        """The program of a plan, as the runtime executes it. Args: timeline: of this plan; None: it is simulated."""
        regathered = {stage.index for stage in self.partition.stages if stage.module in self.regathered}
        return lower(
            plan, problem, sharded=self.sharded, regathered=regathered, reduce=not forward_only, timeline=timeline
        )

    def layout(self, batching: Batching, meta: IterationMeta) -> IterationLayout:
        """The division of an iteration's works over the ranks of a submesh."""
        return IterationLayout(self.submesh, batching, meta)

    def output_shape(
        self, layout: IterationLayout, stage: int, work: int, cp_rank: int = 0, tp_rank: int = 0
    ) -> tuple[int, ...]:
        """Shape of the activation that one rank of a stage's submesh sends to the next stage for a work."""
        stage_spec = self.partition.stages[stage]
        size = layout.local_size(work, cp_rank, tp_rank)
        return self.spec.module(stage_spec.module).output_shape(stage_spec.layers[1] - 1, size)

    def flops(self, batching: Batching) -> Mapping[str, Flops]:
        """Module -> model FLOPs of one iteration on one replica, without the weight gradients of frozen parts."""
        total: dict[str, WorkSize] = {}
        for work, size in enumerate(batching.sizes):
            name = batching.module_of(work)
            total[name] = total[name] + size if name in total else size
        return {name: self.spec.flops(name, size) for name, size in total.items()}
