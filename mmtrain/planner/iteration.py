"""One iteration planned: from metadata to the program that every pipeline rank runs. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from mmtrain.config import Config, PlannerConfig, uses_fsdp
from mmtrain.data.metadata import IterationMeta
from mmtrain.errors import PlanError
from mmtrain.models.spec import Flops, ModelSpec, WorkSize
from mmtrain.models.spec_builders import model_spec
from mmtrain.planner.batching import Batching, check_conservation, make_batching
from mmtrain.planner.costs import make_problem
from mmtrain.planner.partition import Partition, partition
from mmtrain.planner.plan import PlanResult, make_plan
from mmtrain.schedule.lower import Program, lower
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.transport import check_transport


@dataclass(frozen=True, kw_only=True)
class IterationPlan:
    """Everything that was decided about one iteration on one model replica."""

    batching: Batching
    problem: PlanningProblem
    result: PlanResult
    program: Program


@dataclass(frozen=True, kw_only=True)
class IterationPlanner:
    """Plans iterations of one model on one partition; equal metadata gives equal programs on every rank."""

    spec: ModelSpec
    partition: Partition
    section: PlannerConfig
    schedule: str
    """Name in the catalogue of schedules."""
    sub_microbatch_size: int
    """Pictures in one vision work; 0: all of a microbatch."""
    sharded: bool
    """Whether programs unshard, reduce and reshard (FSDP2)."""
    check_plans: bool = False
    """Also prove every program free of deadlock under each transport model."""

    @classmethod
    def of(cls, config: Config) -> "IterationPlanner":
        """The planner of a job. Raises: ConfigError: a model that cannot be built or cut."""
        dtype_bytes = 2 if config.training.mixed_precision_param == "bfloat16" else 4
        spec = model_spec(config.model, dtype_bytes=dtype_bytes)
        return cls(
            spec=spec,
            partition=partition_of(config, spec),
            section=config.planner,
            schedule=config.parallelism.pipeline_parallel_schedule,
            sub_microbatch_size=config.model.encoder.sub_microbatch_size if config.model.encoder else 0,
            sharded=uses_fsdp(config.parallelism.mesh_shape, config.training),
            check_plans=config.debug.check_plans,
        )

    def problem(self, meta: IterationMeta, *, forward_only: bool = False) -> tuple[Batching, PlanningProblem]:
        """The works of an iteration and what they cost.

        Raises: DataError: a picture or token of the batch would be lost or used twice.
        """
        batching = make_batching(meta, self.spec, self.sub_microbatch_size)
        check_conservation(meta, batching)
        costs = make_problem(self.spec, self.partition, batching, self.section, forward_only=forward_only)
        return batching, costs

    def plan(self, meta: IterationMeta, *, forward_only: bool = False) -> IterationPlan:
        """The checked plan and the program of one iteration.

        Raises:
            DataError: a picture or token of the batch would be lost or used twice.
            PlanError: no plan fits, with the rank and the bytes.
        """
        batching, problem = self.problem(meta, forward_only=forward_only)
        result = make_plan(problem, self.schedule)
        if result.plan is None:
            raise PlanError(result.message)
        program = lower(result.plan, problem, sharded=self.sharded, reduce=not forward_only)
        if self.check_plans:
            check_transport(program)
        return IterationPlan(batching=batching, problem=problem, result=result, program=program)

    def output_shape(self, batching: Batching, stage: int, work: int) -> tuple[int, ...]:
        """Shape of the activation that a stage sends on for a work."""
        place = self.partition.stages[stage]
        return self.spec.module(place.module).output_shape(place.layers[1] - 1, batching.size_of[work])

    def flops(self, batching: Batching) -> Mapping[str, Flops]:
        """Model FLOPs of one iteration on one replica, by module: frozen parts have no weight gradients."""
        total: dict[str, WorkSize] = {}
        for work, size in zip(batching.works, batching.size_of, strict=True):
            name = batching.modules[work.module]
            total[name] = total[name] + size if name in total else size
        return {name: self.spec.flops(name, size) for name, size in total.items()}


def partition_of(config: Config, spec: ModelSpec) -> Partition:
    """The partition that a job's config asks for. Raises: ConfigError: fewer layers than chunks."""
    segments = {"language": config.model.language.num_segments}
    if config.model.encoder:
        segments["vision"] = config.model.encoder.num_segments
    sizes = reference_sizes(spec, config.training.seq_len)
    return partition(spec, config.parallelism.pipeline_parallel_degree, segments, sizes)


def reference_sizes(spec: ModelSpec, seq_len: int) -> dict[str, WorkSize]:
    """A typical work of each module, which the partition is balanced for: half of the tokens are pictures'.

    Four documents a microbatch, a quarter of the tokens labelled, pictures of 16 x 16 patches.
    """
    sizes = {"language": WorkSize(rows=seq_len, pairs=max(1, seq_len * seq_len // 8), outputs=max(1, seq_len // 4))}
    if any(module.name == "vision" for module in spec.modules):
        merge = spec.module("vision").merge
        outputs = max(1, seq_len // 2)
        rows = outputs * merge * merge
        sizes["vision"] = WorkSize(rows=rows, pairs=rows * min(rows, 256), outputs=outputs)
    return sizes
