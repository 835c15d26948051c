"""This rank's stages: chunks built, filled with weights, sharded."""

from collections.abc import Collection, Mapping, Sequence
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
from mmtrain.parallel.compile import compile_blocks
from mmtrain.parallel.fill import LocalPart, fill_chunk
from mmtrain.parallel.fsdp import DTYPES, apply_fsdp
from mmtrain.parallel.layer_sums import LayerSums
from mmtrain.parallel.mesh import Mesh
from mmtrain.parallel.offload import Offloader
from mmtrain.parallel.stage import ModalityStage
from mmtrain.parallel.tensor import apply_tensor_parallel
from mmtrain.parallel.torch_private import prepare_fsdp
from mmtrain.planner.partition.partition import Partition
from mmtrain.spec.spec import ModelSpec, ModuleSpec, VocabularyRows


@dataclass(frozen=True, kw_only=True)
class LocalModel:
    """The part of the model on this rank."""

    chunks: tuple[Chunk, ...]
    """The chunks in the order of `Partition.of_rank`; one of several stages once."""
    stages: tuple[ModalityStage, ...]
    tied: tuple[nn.Parameter, ...]
    """Copies of the tied embedding that must stay equal to a copy in another chunk."""
    aliases: dict[str, str]
    """Name of the tied head -> name of the embedding, under which a checkpoint stores both."""
    sums: LayerSums
    """The sums of its gradients over the pipelines, and over copies of a tied matrix."""

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
    compiled: bool = False,
    local: LocalPart | None = None,
) -> LocalModel:
    """Builds this rank's chunks, in a fixed order: meta -> memory -> random or stored weights -> TP -> compiled blocks
    -> the switch of their activations -> FSDP2. Collective over the job.

    Values depend only on the seed and the parameter's name, not on the layout.

    Args:
        regathered: modules of the config whose parameters are gathered at each use, not once a step.
        recompute: how blocks treat their activations if the program does not say; None: they keep them.
        compiled: whether blocks are compiled.
        local: what this rank has of the model's state: chunks stay on meta until they are sharded, then take it over,
            and all other parameters have undefined values; None: random or stored weights.
    """
    aliases = dict(TIED_NAMES) if spec.tied_embeddings else {}
    chunks, stages = list[Chunk](), list[ModalityStage]()
    switch = recompute or ActivationCheckpointConfig()
    offloader = Offloader(mesh.device)
    output_dtypes = {
        stage.index: DTYPES[name]
        for stage in partition.stages
        if (name := spec.module(stage.module).layers[stage.layers[1] - 1].output_dtype)
    }
    tied: dict[VocabularyRows | None, Chunk] = {}  # rows of one matrix are one chunk, of two stages
    for assigned in partition.of_rank(mesh.pp_rank):
        module = spec.module(assigned.module)
        rows = module.vocabulary if spec.tied_embeddings else None
        reused = tied.get(rows)
        if reused is None:
            on = mesh.device if local is None else "meta"
            chunk = build_chunk(model, spec, assigned.module, assigned.layers, device=on)
            if local is None:
                _begin(chunk, model, seed)
            _drop_masters(chunk, training)
            _divide(chunk, module, mesh)
            if compiled:
                compile_blocks(chunk)
            memory = ActivationMemory(chunk.blocks(), switch, offloader)
            _shard(chunk, module, mesh, training, reshard=module.section in regathered, local=local, aliases=aliases)
            tied |= {rows: chunk} if rows is not None else {}
        else:
            chunk, memory = reused, ActivationMemory((), switch, offloader)
        stage = ModalityStage(
            chunk,
            assigned.index,
            len(partition.stages),
            mesh.device,
            mesh.pp_group,
            mesh.channels,
            dtype=DTYPES[training.param_dtype],
            memory=memory,
            divided=_is_divided(module, mesh),
            output_dtypes=output_dtypes,
            reduces=reused is None,
            compiled=chunk.blocks() if compiled else (),
        )
        chunks.append(chunk)
        stages.append(stage)
    by_index = dict(zip((stage.stage_index for stage in stages), chunks, strict=True))
    sums = LayerSums.of(by_index, aliases, mesh, DTYPES[training.mixed_precision_reduce])
    return LocalModel(
        chunks=tuple(dict.fromkeys(chunks)),
        stages=tuple(stages),
        tied=_tied_copies(chunks),
        aliases=aliases,
        sums=sums,
    )


def _begin(chunk: Chunk, model: ModelConfig, seed: int) -> None:
    """Fills a chunk with random or stored weights."""
    init_weights(chunk, seed)
    load_pretrained(chunk, model)
    load_adapters(chunk, model)


def _drop_masters(chunk: Chunk, training: TrainingConfig) -> None:
    """Gives the parameters of a chunk that have no float32 masters the dtype of compute; a shared one stays shared."""
    if training.master_weights == "all":
        return
    done: dict[nn.Parameter, nn.Parameter] = {}
    for module in chunk.modules():
        for name, parameter in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
            if parameter.requires_grad and training.master_weights == "trained":
                continue
            if parameter not in done:
                rounded = parameter.detach().to(DTYPES[training.param_dtype])
                done[parameter] = nn.Parameter(rounded, requires_grad=parameter.requires_grad)
            module.register_parameter(name, done[parameter])


def _is_divided(module: ModuleSpec, mesh: Mesh) -> bool:
    """Whether tensor-parallel ranks divide a module's layers."""
    whole = module.is_whole or (module.shares_units and mesh.data_encoder)
    return mesh.layout.tp > 1 and module.num_params > 0 and not whole


def _divide(chunk: Chunk, module: ModuleSpec, mesh: Mesh) -> None:
    """Divides a chunk over tensor-parallel ranks."""
    if _is_divided(module, mesh):
        apply_tensor_parallel(chunk, mesh.tp, whole_rows=mesh.whole_rows)


def _shard(
    chunk: Chunk,
    module: ModuleSpec,
    mesh: Mesh,
    training: TrainingConfig,
    *,
    reshard: bool,
    local: LocalPart | None,
    aliases: Mapping[str, str],
) -> None:
    """Lets FSDP2 shard a chunk, and fills it with what this rank has; arguments as of `build_local_model`."""
    if module.num_params and uses_fsdp(mesh.layout, training, data_encoder=mesh.data_encoder):
        over_tp = module.shares_units and mesh.data_encoder
        apply_fsdp(chunk, chunk.blocks(), mesh.fsdp(over_tp=over_tp), training, reshard=reshard)
    if local is not None:
        of_parameters = torch.device("cpu") if training.enable_cpu_offload else mesh.device
        fill_chunk(chunk, local, aliases, device=of_parameters, buffers=mesh.device)
        prepare_fsdp(chunk, reshard=reshard)


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
