"""This rank's stages: chunks built, filled with weights, sharded."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn

from mmtrain.config import ModelConfig, TrainingConfig
from mmtrain.errors import PlanError
from mmtrain.models.chunk import Chunk, build_chunk, fsdp_units
from mmtrain.models.initialise import init_weights
from mmtrain.models.pretrained import load_pretrained
from mmtrain.models.spec import ModelSpec
from mmtrain.parallel.fsdp import DTYPES, apply_fsdp
from mmtrain.parallel.mesh import Mesh
from mmtrain.parallel.stage import ModalityStage
from mmtrain.planner.partition import Partition


@dataclass(frozen=True, kw_only=True)
class LocalModel:
    """The part of the model that lives on this rank."""

    chunks: tuple[Chunk, ...]
    """In the order of `Partition.of_rank`."""
    stages: tuple[ModalityStage, ...]
    tied: tuple[nn.Parameter, ...]
    """Copies of the tied embedding that must stay equal to a copy in another chunk."""
    aliases: dict[str, str]
    """Name of the tied head -> name of the embedding, under which a checkpoint stores both."""

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
) -> LocalModel:
    """Builds this rank's chunks, in a fixed order: meta -> memory -> random or stored weights -> FSDP2.

    Values depend on the seed and the parameter's name alone, never on the layout.
    """
    chunks: list[Chunk] = []
    stages: list[ModalityStage] = []
    for place in partition.of_rank(mesh.pp_rank):
        chunk = build_chunk(model, spec, place.module, place.layers, device=mesh.device)
        init_weights(chunk, seed)
        load_pretrained(chunk, model)
        apply_fsdp(chunk, fsdp_units(chunk), mesh, training)
        stage = ModalityStage(
            chunk,
            place.index,
            len(partition.stages),
            mesh.device,
            mesh.pp_group,
            mesh.channels,
            dtype=DTYPES[training.mixed_precision_param],
        )
        chunks.append(chunk)
        stages.append(stage)
    aliases = {"language.lm_head.weight": "language.model.embed_tokens.weight"} if spec.tied_embeddings else {}
    return LocalModel(chunks=tuple(chunks), stages=tuple(stages), tied=_tied_copies(chunks), aliases=aliases)


def _tied_copies(chunks: Sequence[Chunk]) -> tuple[nn.Parameter, ...]:
    found = (chunk.tied_weight() for chunk in chunks)  # after sharding: FSDP2 replaces parameters
    return tuple(weight for weight in found if weight is not None)


def check_same_program(program_hash: int, mesh: Mesh) -> None:
    """Refuses a step in which the pipeline ranks of a replica hold different programs. Collective over pp.

    Raises: PlanError: naming the ranks that differ from pp_rank 0.
    """
    if mesh.shape.pp == 1:
        return
    mine = torch.tensor([program_hash], dtype=torch.int64)
    found = [torch.empty_like(mine) for _ in range(mesh.shape.pp)]
    dist.all_gather(found, mine, group=mesh.pp_group)
    hashes = [int(h) for h in found]
    others = [rank for rank, value in enumerate(hashes) if value != hashes[0]]
    if others:
        raise PlanError(
            f"pp_ranks {others} hold another program than pp_rank 0; every rank of a replica must plan from equal "
            "metadata with one version of mmtrain"
        )
