"""What a job fixes once, for all of its iterations. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mmtrain.config.planner import PlannerConfig
from mmtrain.costs.cost_model import CostModel
from mmtrain.modality.submesh import Submesh
from mmtrain.planner.batching import Batching, SubMicrobatch
from mmtrain.planner.layout import IterationLayout
from mmtrain.planner.memory.options import MemoryChoices
from mmtrain.planner.partition.partition import Partition
from mmtrain.schedule.library.catalogue import Schedule
from mmtrain.schedule.passes.lower import Program, lower
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.timeline import Timeline
from mmtrain.spec.layer import Flops
from mmtrain.spec.spec import ModelSpec
from mmtrain.spec.work_size import WorkSize


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model, its partition and costs, and how its iterations are planned; equal on every rank."""

    spec: ModelSpec
    partition: Partition
    section: PlannerConfig
    costs: CostModel
    """The costs of layers and transfers."""
    schedule: Schedule
    """The schedule, named or from a file."""
    sub_microbatch_size: SubMicrobatch
    """Images in one vision work; 0: all of a microbatch."""
    sharded: bool
    """Whether programs reduce gradients (FSDP2)."""
    regathered: frozenset[str] = frozenset()
    """Modules of the config that FSDP2 gathers at each use; programs unshard the others first and reshard them last."""
    memory: MemoryChoices = field(default_factory=MemoryChoices)
    """The memory strategies that blocks may use."""
    submesh: Submesh = field(default_factory=Submesh)
    """The cp and tp ranks of a stage, which divide each work."""
    activation_limits: tuple[float | None, ...] | None = None
    """[pp_rank] -> bytes that activations may take, as far as the config alone tells; None: as
    planner.search.activation_memory_gib says."""
    check_plans: bool = False
    """Whether every program is also proven free of deadlock under each transport model."""
    partition_summary: str = ""
    """How the partition was chosen, for the log; empty if the config determines it."""

    def lower(
        self,
        plan: Plan,
        problem: PlanningProblem,
        *,
        forward_only: bool = False,
        timeline: Timeline | None = None,
    ) -> Program:
        """The program of a plan, as the runtime executes it. Args: timeline: of this plan; None: it is simulated."""
        stages = self.partition.stages
        regathered = {s.index for s in stages if self.spec.module(s.module).section in self.regathered}
        return lower(
            plan, problem, sharded=self.sharded, regathered=regathered, reduce=not forward_only, timeline=timeline
        )

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
