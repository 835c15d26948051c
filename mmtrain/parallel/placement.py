"""Where a job is trained: how its model, its data and its planning are divided over the ranks.

All parts of a placement can be built again. Weights and moments are loaded into its chunks and optimizer by the names
of parameters, from a checkpoint or from the former placement.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mmtrain.config.config import Config
from mmtrain.models.attention.backend import check_backend
from mmtrain.parallel.fill import LocalPart, first_rows
from mmtrain.parallel.local_model import LocalModel, build_local_model
from mmtrain.parallel.mesh import Mesh, build_mesh
from mmtrain.parallel.optim import LocalOptimizers, build_optimizers, check_groups
from mmtrain.parallel.planning import PlanAhead
from mmtrain.parallel.replica_data import ReplicaData
from mmtrain.parallel.runtime import PipelineScheduleRuntime
from mmtrain.parallel.torch_private import end_groups, process_groups
from mmtrain.planner.assignment.dealing import Dealer
from mmtrain.planner.assignment.step_assigner import StepAssigner
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.planner.job import Job
from mmtrain.planner.make_plan import Search
from mmtrain.planner.search import search as searching


@dataclass(frozen=True, kw_only=True)
class JobPlacement:
    """One layout of a job on this rank."""

    mesh: Mesh
    data: ReplicaData
    ahead: PlanAhead | None
    """Searches plans (`planner.enable`), with a thread of its own."""
    model: LocalModel
    optimizers: LocalOptimizers
    runtime: PipelineScheduleRuntime
    groups: tuple[dist.ProcessGroup, ...]
    """All that were made for it."""

    @classmethod
    def build(
        cls,
        config: Config,
        jobs: Sequence[Job],
        device: torch.device,
        search: Search,
        local: LocalPart | None = None,
    ) -> "JobPlacement":
        """The layout that a config and its jobs describe, with initial weights. Collective over the job.

        Args:
            jobs: [pipeline] -> its job.
            search: finds the plans of iterations.
            local: what this rank has of the state of a running job, to be taken over; other weights and moments have
                undefined values. None on all ranks: initial weights.
        Raises: ConfigError.
        """
        check_backend(config, device)
        seed, groups_before = config.debug.seed, process_groups()
        mesh = build_mesh(
            config.parallelism.layout,
            device,
            data_encoder=config.data_encoder,
            whole_rows=config.parallelism.tensor_parallel_rows == "whole",
            share_device=config.comm.share_device,
            hops=[job.partition.hops(job.spec) for job in jobs],
        )
        job = jobs[mesh.place.pipeline]
        partition = job.partition
        assigner, dealer = StepAssigner.of(config, jobs), Dealer.of(config, jobs)
        data, ahead = ReplicaData(config, mesh, job.spec, partition, assigner, dealer), None
        with ExitStack() as undo:
            if config.planner.enable:
                ahead = PlanAhead(IterationPlanner(job), mesh, seed=seed, search=search, warm=searching.warm)
                undo.callback(ahead.close)
            model = build_local_model(
                config.model,
                job.spec,
                partition,
                mesh,
                config.training,
                seed=seed,
                regathered=config.regathered,
                recompute=config.activation_checkpoint,
                compiled=config.compile.enable,
                local=local,
            )
            check_groups(config.optimizer, model.chunks, model.aliases)
            optimizers = build_optimizers(config.optimizer, model.chunks, model.tied, model.aliases)
            if local is not None:
                optimizers.fill(local, model.aliases, first_rows(model.chunks))
            runtime = PipelineScheduleRuntime(model.stages, reduced=model.sums.stage_reduced)
            undo.pop_all()
        groups = tuple(group for group in process_groups() if group not in groups_before)
        return cls(
            mesh=mesh, data=data, ahead=ahead, model=model, optimizers=optimizers, runtime=runtime, groups=groups
        )

    def stop(self, *, lost: bool = False) -> None:
        """Ends all but this process' main thread: its planning thread and the processes that read data.

        Args: lost: a rank does not answer, and the planning thread may wait for it: it is left behind.
        """
        if self.ahead is not None and not lost:
            self.ahead.close()
        self.data.close()

    def close(self) -> None:
        """Ends the layout, and its process groups. Collective over the job, none of whose ranks uses it any more."""
        self.stop()
        dist.barrier()  # a rank that ends its connections while another one reads from them would break these
        end_groups(self.groups)
