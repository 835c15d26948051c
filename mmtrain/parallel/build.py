"""This rank's stages: chunks built, filled with weights, sharded."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn

from mmtrain.config.config import uses_fsdp
from mmtrain.config.model import ModelConfig
from mmtrain.config.sections import ActivationCheckpointConfig, TrainingConfig
from mmtrain.errors import PlanError
from mmtrain.models.adapter_weights import load_adapters
from mmtrain.models.build import build_chunk
from mmtrain.models.chunk import TIED_NAMES, Chunk
from mmtrain.models.initialise import init_weights
from mmtrain.models.pretrained import load_pretrained
from mmtrain.parallel.activation_memory import ActivationMemory
from mmtrain.parallel.fsdp import DTYPES, apply_fsdp
from mmtrain.parallel.layer_sums import LayerSums
from mmtrain.parallel.mesh import Mesh
from mmtrain.parallel.offload import Offloader
from mmtrain.parallel.stage import ModalityStage
from mmtrain.parallel.tensor import apply_tensor_parallel
from mmtrain.planner.partition.partition import Partition
from mmtrain.spec.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class LocalModel:
    """The part of the model on this rank."""

    chunks: tuple[Chunk, ...]
    """In the order of `Partition.of_rank`."""
    stages: tuple[ModalityStage, ...]
    tied: tuple[nn.Parameter, ...]
    """Copies of the tied embedding that must stay equal to a copy in another chunk."""
    aliases: dict[str, str]
    """Name of the tied head -> name of the embedding, under which a checkpoint stores both."""
    sums: LayerSums
    """Of its gradients over the pipelines, and over copies of a tied matrix."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters of this rank; one shared inside of a chunk counts once."""
        return [parameter for chunk in self.chunks for parameter in chunk.parameters()]


def build_local_model(
    model: ModelConfig,
    spec: ModelSpec,
    partition: Partition,
    mesh: Mesh,
    training: TrainingConfig,
    *,
    seed: int,
    regathered: Collection[str] = (),
    recompute: ActivationCheckpointConfig | None = None,
) -> LocalModel:
    """Builds this rank's chunks, in a fixed order: meta -> memory -> random or stored weights -> TP -> the switch
    of the activations of blocks -> FSDP2. Collective over the job.

    Values depend only on the seed and the parameter's name, not on the layout.

    Args:
        regathered: modules whose parameters are gathered at each use, not once a step.
        recompute: how blocks treat their activations if the program does not say; None: they keep them.
    """
    chunks: list[Chunk] = []
    stages: list[ModalityStage] = []
    sharded = uses_fsdp(mesh.layout, training, data_encoder=mesh.data_encoder)
    offloader = Offloader(mesh.device)
    for assigned in partition.of_rank(mesh.pp_rank):
        chunk = build_chunk(model, spec, assigned.module, assigned.layers, device=mesh.device)
        init_weights(chunk, seed)
        load_pretrained(chunk, model)
        load_adapters(chunk, model)
        module = spec.module(assigned.module)
        shares_units = module.shares_units and mesh.data_encoder
        divided = mesh.layout.tp > 1 and not (module.is_whole or shares_units)
        if divided:
            apply_tensor_parallel(chunk, mesh.tp, whole_rows=mesh.whole_rows)
        memory = ActivationMemory(chunk.blocks(), recompute or ActivationCheckpointConfig(), offloader)
        if sharded:
            reshard = assigned.module in regathered
            apply_fsdp(chunk, chunk.blocks(), mesh.fsdp(over_tp=shares_units), training, reshard=reshard)
        stage = ModalityStage(
            chunk,
            assigned.index,
            len(partition.stages),
            mesh.device,
            mesh.pp_group,
            mesh.channels,
            dtype=DTYPES[training.mixed_precision_param],
            memory=memory,
            divided=divided,
        )
        chunks.append(chunk)
        stages.append(stage)
    aliases = dict(TIED_NAMES) if spec.tied_embeddings else {}
    by_index = {stage.stage_index: chunk for stage, chunk in zip(stages, chunks, strict=True)}
    sums = LayerSums.of(by_index, aliases, mesh, DTYPES[training.mixed_precision_reduce])
    return LocalModel(chunks=tuple(chunks), stages=tuple(stages), tied=_tied_copies(chunks), aliases=aliases, sums=sums)


def _tied_copies(chunks: Sequence[Chunk]) -> tuple[nn.Parameter, ...]:
    weights = (chunk.tied_weight() for chunk in chunks)  # after sharding: FSDP2 replaces parameters
    return tuple(weight for weight in weights if weight is not None)


def check_same_program(program_hash: int, mesh: Mesh) -> None:
    """Refuses a step in which the ranks of a replica hold different programs. Collective over the replica.

    Raises: PlanError: naming the ranks that differ from the leader.
    """
    if mesh.replica_group is None:
        return
    own_hash = torch.tensor([program_hash], dtype=torch.int64)
    hashes = [torch.empty_like(own_hash) for _ in mesh.replica_ranks]
    dist.all_gather(hashes, own_hash, group=mesh.replica_group)
    differing = [rank for rank, other in zip(mesh.replica_ranks, hashes, strict=True) if int(other) != int(hashes[0])]
    if differing:
        raise PlanError(
            f"ranks {differing} hold another program than rank {mesh.replica_ranks[0]}; every rank of a replica must "
            "plan from equal metadata with one version of mmtrain"
        )
