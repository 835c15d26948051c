"""The state that a rank holds and exchanges under FSDP2: parameters, gradients and optimizer state. Pure.

As in the runtime, a step gathers the parameters of all stages first, keeps gradients whole and unreduced until the
REDUCE at its end, and updates float32 shards (ZeRO-2 inside of a step, ZeRO-3 between steps).
"""

from dataclasses import dataclass, replace

from mmtrain.config.config import Config, uses_fsdp
from mmtrain.config.optimizer import OptimizerConfig
from mmtrain.config.topology import Coordinates, JobLayout
from mmtrain.costs.machine import RankNetwork
from mmtrain.costs.operators.operator_graph import OpKind
from mmtrain.planner.partition.partition import Partition, StageSpec
from mmtrain.spec.builders import DTYPE_BYTES
from mmtrain.spec.spec import ModelSpec

_MASTER = 4
"""Bytes of an element of a float32 master, and of its reduced gradient."""
_BFLOAT16 = 2
"""The same of a parameter without a master."""
_GATHERED_LAYERS = 2
"""Layers that are gathered at the same time if FSDP2 gathers before each use: the one in use and the next."""


def param_state_bytes(section: OptimizerConfig) -> int:
    """Bytes of the optimizer for one trainable parameter: Adam's two moments, and the average of weights."""
    return 2 * DTYPE_BYTES[section.moments_dtype] + (_MASTER if section.ema_decay else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageState:
    """The parameters of one stage on one rank of its submesh, before FSDP2 shards them."""

    stage: int
    num_params: float
    num_trainable: float
    gathered_params: float
    """Largest number of parameters that are gathered at the same time."""
    shards: int
    """Ranks that FSDP2 shards the stage over."""
    whole: bool
    """Tensor-parallel ranks do not divide the stage."""
    gathered_once: bool
    """Gathered at the start of a step; otherwise before each use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBytes:
    """All stages of a pipeline rank, and the bytes that they take during a step."""

    stages: tuple[StageState, ...]
    param_bytes: float
    """Shards, and gathered parameters in the dtype of compute."""
    grad_bytes: float
    """Accumulated gradients, not sharded."""
    reduced_bytes: float
    """Shards of the reduced gradients, held at the end of a step, when activations have been freed."""
    optimizer_bytes: float
    """Two moments, and perhaps the average, of each trainable parameter, sharded."""
    updated_params: float
    """Trainable parameters of this rank's shards."""

    def peak_bytes(self, activation_bytes: float) -> float:
        """Peak bytes of a step. Args: activation_bytes: the peak of activations.

        Not counted: the communication library, fragmentation of the allocator, temporary tensors of an operator.
        """
        fixed = self.param_bytes + self.grad_bytes + self.optimizer_bytes
        return fixed + max(activation_bytes, self.reduced_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """The degrees and dtypes that decide how a job's ranks shard parameters."""

    shape: JobLayout
    enabled: bool
    """Whether FSDP2 shards at all."""
    units_shared: bool
    """Tensor-parallel ranks do not divide modules that can share their units; FSDP2 shards these over tp too."""
    regathered: frozenset[str]
    """Modules of the config that are gathered before each use."""
    param_dtype_bytes: int
    """Bytes of an element of gathered parameters."""
    reduce_dtype_bytes: int
    """Bytes of an element of gradients before and in their reduction."""
    param_state_bytes: int
    """The optimizer's bytes for one trainable parameter, see `param_state_bytes`."""
    frozen_bytes: int
    """Bytes of an element of a shard of parameters that do not train."""
    trained_bytes: int
    """The same of those that train, and of their reduced gradients."""
    offload: bool
    """Shards, reduced gradients and optimizer state are in host memory."""

    @classmethod
    def of(cls, config: Config) -> "Sharding":
        """The sharding of a job."""
        shape, training = config.parallelism.layout, config.training
        return cls(
            shape=shape,
            enabled=uses_fsdp(shape, training, data_encoder=config.data_encoder),
            units_shared=config.data_encoder,
            regathered=config.regathered,
            param_dtype_bytes=DTYPE_BYTES[training.param_dtype],
            reduce_dtype_bytes=DTYPE_BYTES[training.mixed_precision_reduce],
            param_state_bytes=param_state_bytes(config.optimizer),
            frozen_bytes=_MASTER if training.master_weights == "all" else _BFLOAT16,
            trained_bytes=_BFLOAT16 if training.master_weights == "none" else _MASTER,
            offload=training.enable_cpu_offload,
        )

    def stage_state(self, spec: ModelSpec, stage: StageSpec) -> StageState:
        """The parameters of a stage on one rank. Norms and biases, which tp ranks hold whole, count as divided."""
        module = spec.module(stage.module)
        layers = module.layers[slice(*stage.layers)]
        is_whole = self.units_shared and module.shares_units
        divided = 1 if is_whole or module.is_whole else self.shape.tp
        once = module.section not in self.regathered
        # A part of a tied matrix is one parameter of its rank, which counts in the part of the embedding.
        is_copy = module.vocabulary is not None and any(layer.num_shared_params for layer in layers)
        if is_copy:
            layers = tuple(replace(layer, num_params=0, num_shared_params=0) for layer in layers)
        params = [layer.num_params / divided for layer in layers]
        return StageState(
            stage=stage.index,
            num_params=sum(params),
            num_trainable=sum(layer.num_trainable_params for layer in layers) / divided,
            gathered_params=sum(params) if once else min(sum(params), _GATHERED_LAYERS * max(params)),
            shards=self.shape.dp_shard * self.shape.cp * (self.shape.tp if is_whole else 1),
            whole=is_whole,
            gathered_once=once,
        )

    def rank_state(self, spec: ModelSpec, partition: Partition, pp_rank: int) -> RankBytes:
        """The state that one rank of a pipeline rank's submesh holds during a step."""
        stages = tuple(self.stage_state(spec, stage) for stage in partition.of_rank(pp_rank))
        if not self.enabled:
            params, trainable = (sum(getattr(s, name) for s in stages) for name in ("num_params", "num_trainable"))
            return RankBytes(
                stages=stages,
                param_bytes=_MASTER * params,
                grad_bytes=_MASTER * trainable,
                reduced_bytes=0.0,
                optimizer_bytes=self.param_state_bytes * trainable,
                updated_params=trainable,
            )
        updated = sum(s.num_trainable / s.shards for s in stages)
        on_device = 0.0 if self.offload else 1.0
        frozen = sum((s.num_params - s.num_trainable) / s.shards for s in stages)
        shard_bytes = self.frozen_bytes * frozen + self.trained_bytes * updated
        gathered = _most_gathered(stages)
        return RankBytes(
            stages=stages,
            param_bytes=shard_bytes * on_device + self.param_dtype_bytes * gathered,
            grad_bytes=self.reduce_dtype_bytes * sum(s.num_trainable for s in stages),
            reduced_bytes=self.trained_bytes * updated * on_device,
            optimizer_bytes=self.param_state_bytes * updated * on_device,
            updated_params=updated,
        )

    def gather_s(self, network: RankNetwork, stage: StageState, pp_rank: int, pipeline: int = 0) -> float:
        """Seconds of a stage's UNSHARD: an all-gather of its parameters in the dtype of compute."""
        if not self.enabled or not stage.gathered_once:
            return 0.0
        num_bytes = self.param_dtype_bytes * stage.num_params
        return network.collective_s(OpKind.ALL_GATHER, num_bytes, self._shard_ranks(stage, pp_rank, pipeline))

    def reduce_s(self, network: RankNetwork, stage: StageState, pp_rank: int, pipeline: int = 0) -> float:
        """Seconds of a stage's REDUCE: a reduce-scatter of its gradients over the shards."""
        if not self.enabled:
            return 0.0
        num_bytes = self.reduce_dtype_bytes * stage.num_trainable
        return network.collective_s(OpKind.REDUCE_SCATTER, num_bytes, self._shard_ranks(stage, pp_rank, pipeline))

    def _shard_ranks(self, stage: StageState, pp_rank: int, pipeline: int) -> list[int]:
        """The global ranks of one FSDP2 group."""
        shape = self.shape
        return [
            shape.rank(Coordinates(pipeline=pipeline, pp=pp_rank, dp_shard=d, cp=c, tp=t))
            for d in range(shape.dp_shard)
            for c in range(shape.cp)
            for t in range(shape.tp if stage.whole else 1)
        ]


def _most_gathered(stages: tuple[StageState, ...]) -> float:
    """Largest number of parameters gathered at the same time: all stages gathered once, and one of the others."""
    always_gathered = sum(s.gathered_params for s in stages if s.gathered_once)
    return always_gathered + max((s.gathered_params for s in stages if not s.gathered_once), default=0.0)
