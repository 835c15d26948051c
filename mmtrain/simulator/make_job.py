"""A job from its config: its model, costs and schedule, and the partition that is chosen for them. Pure."""

from collections.abc import Callable

from mmtrain.config.config import Config, uses_fsdp
from mmtrain.config.planner import check_memory_limit
from mmtrain.costs.cost_model import CostModel
from mmtrain.costs.job_costs import cost_model
from mmtrain.costs.operators.cluster import Cluster
from mmtrain.errors import ConfigError, RecipeError
from mmtrain.modality.submesh import Submesh
from mmtrain.planner.batching import SubMicrobatch
from mmtrain.planner.job import Job
from mmtrain.planner.job_schedule import job_schedule
from mmtrain.planner.memory.limit import MemoryRule
from mmtrain.planner.memory.options import MemoryChoices
from mmtrain.schedule.recipe.instructions import functions_of
from mmtrain.simulator.partition_choice import Choice, choose_partition
from mmtrain.simulator.sub_microbatch_size import sub_microbatch_size
from mmtrain.spec.builders import DTYPE_BYTES, model_spec
from mmtrain.spec.model_shapes import check_window
from mmtrain.spec.spec import ModelSpec
from mmtrain.spec.tensor_degree import check_tensor_degree
from mmtrain.spec.vision_shapes import check_patches_split
from mmtrain.spec.vocabulary import divided_vocabulary, with_loss_chunks

Choose = Callable[[Config, ModelSpec, CostModel, SubMicrobatch], Choice]
"""How a job's partition is chosen; arguments as of `choose_partition`."""


def make_job(config: Config, choose: Choose = choose_partition) -> Job:
    """The job of a config.

    With planner.memory_limit and a device of known memory, activations may take what the limit leaves for them.
    The memory that a process takes in addition to tensors is not known yet and counts as 0 bytes.

    Args: config: of pipelines of one depth (`of_pipeline`). choose: the partition.
    Raises: ConfigError: a model that cannot be built or cut, or a limit that leaves nothing for activations; an elastic
        job, which has another layout for each number of nodes.
    """
    if config.elastic.enable:
        raise ConfigError(
            "elastic.enable = true: the pipelines of this job follow from its nodes; to look at one layout, set it to "
            "false and name the layout by parallelism.pipelines"
        )
    assert not config.parallelism.pipelines, "each pipeline has a job of its own"
    spec = job_spec(config)
    schedule = job_schedule(config)
    check_memory_limit(
        config.planner, config.parallelism, config.activation_checkpoint, keeps_limits=schedule.keeps_memory_limits
    )
    costs = cost_model(config, spec)
    sub_microbatch = sub_microbatch_size(config, spec, costs)
    choice = choose(config, spec, costs, sub_microbatch)
    if choice.spec is not spec:
        spec, costs = choice.spec, cost_model(config, choice.spec)
    try:
        functions_of(schedule.instructions, choice.partition.modules)
    except RecipeError as error:
        raise ConfigError(f"{schedule.name}: {error}") from error
    budget = MemoryRule.of(config).budget(spec, choice.partition)
    budget.check()
    return Job(
        spec=spec,
        partition=choice.partition,
        section=config.planner,
        costs=costs,
        schedule=schedule,
        sub_microbatch_size=sub_microbatch,
        sharded=uses_fsdp(config.parallelism.layout, config.training, data_encoder=config.data_encoder),
        regathered=config.regathered,
        memory=MemoryChoices.planned(config.activation_checkpoint, config.planner),
        submesh=Submesh.of(config),
        activation_limits=budget.activation_limits,
        check_plans=config.debug.check_plans,
        partition_summary=choice.summary,
    )


def check_nodes(config: Config) -> None:
    """Checks that a stage of unequal pipelines lies inside of one node of the job's hardware. Raises: ConfigError."""
    if config.planner.hardware:
        layout = config.parallelism.layout
        layout.check_nodes(Cluster.of(config.planner.hardware, layout.world_size).hardware.gpus_per_node)


def job_spec(config: Config) -> ModelSpec:
    """The model of a job, which its degrees of parallelism divide. The job's schedule is not read.

    Where the partition search decides about the vocabulary, it is the model before that, see `Job.spec`.

    Raises: ConfigError: it cannot be built or divided.
    """
    check_degrees(config)
    check_window(config.model, config.training.seq_len)
    spec = model_spec(config.model, dtype_bytes=DTYPE_BYTES[config.training.param_dtype])
    section = config.parallelism
    if section.vocabulary_parallel == "pipeline" and section.pipeline_parallel_degree > 1:
        spec = divided_vocabulary(spec, section.pipeline_parallel_degree, section.tensor_parallel_degree)
    return with_loss_chunks(spec, config)


def check_degrees(config: Config) -> None:
    """Checks that the degrees of parallelism divide the model.

    Raises: ConfigError: they do not; names the numbers and the degrees that fit.
    """
    tp = config.parallelism.tensor_parallel_degree
    if tp > 1:
        check_tensor_degree(config.model, tp, whole_encoder=config.data_encoder)
    if config.parallelism.encoder_context_parallel == "patches":
        check_patches_split(config.model)
