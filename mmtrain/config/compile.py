"""[compile], and its rules with other sections."""

from dataclasses import dataclass

from mmtrain.config.elastic import ElasticConfig
from mmtrain.config.model import ModelConfig
from mmtrain.config.planner import PlannerConfig
from mmtrain.config.sections import ActivationCheckpointConfig, ParallelismConfig
from mmtrain.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileConfig:
    """[compile]: torch.compile."""

    enable: bool = False
    """Compile the blocks of encoders and the language model, one by one, for any number of rows: the first steps take
    some seconds longer for each kind of block, later ones compile nothing (docs/models.md). Costs of planning are those
    of blocks that are not compiled."""


def check_compile(
    section: CompileConfig,
    model: ModelConfig,
    planner: PlannerConfig,
    parallelism: ParallelismConfig,
    checkpointing: ActivationCheckpointConfig,
    elastic: ElasticConfig,
) -> None:
    """Refuses what compiled blocks cannot do; changes nothing. Raises: ConfigError: the first rule that is broken."""
    if not section.enable:
        return
    limited = (
        bool(planner.memory_limit or planner.search.activation_memory_gib) and planner.search.memory and planner.enable
    )
    degree = parallelism.tensor_parallel_degree
    keeps = "a compiled block runs as a whole, so that no operation of it can be kept"
    refused = {
        f"parallelism.tensor_parallel_degree = {degree}": (
            degree > 1,
            "layers that exchange rows cannot be compiled; set it to 1",
        ),
        "planner.search.split_backward = true": (
            planner.enable and planner.search.split_backward,
            "a compiled block makes all its gradients at once; set it to false",
        ),
        "parallelism.separate_gradients = true": (
            parallelism.separate_gradients,
            "a compiled block makes all its gradients at once; set it to false",
        ),
        f'activation_checkpoint.mode = "{checkpointing.mode}"': (
            checkpointing.mode in ("selective", "ops"),
            f'{keeps}; set "full", "offload" or "none"',
        ),
        f"planner.search.memory_strategies = {planner.search.memory_strategies}": (
            limited and checkpointing.mode == "none" and "selective" in planner.search.memory_strategies,
            f'{keeps}; remove "selective" from the list',
        ),
        f"model.lora.dropout = {model.lora.dropout}": (
            model.lora.dropout > 0,
            "masks are drawn from keys of each work, which would compile again; set it to 0.0",
        ),
        "[model.dit]": (model.dit is not None, "blocks of diffusers run clip by clip; remove one of the two"),
        "elastic.enable = true": (
            elastic.enable,
            "a node that compiles would keep all others waiting; drop one",
        ),
    }
    for key, (broken, why) in refused.items():
        if broken:
            raise ConfigError(f"compile.enable = true with {key}: {why}")
