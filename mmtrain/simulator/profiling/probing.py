"""The jobs that `mmtrain profile` runs: a job's layers as separate stages. Pure."""

from dataclasses import dataclass, replace
from typing import Literal

from mmtrain.config.compile import CompileConfig
from mmtrain.config.config import Config
from mmtrain.config.optimizer import LRSchedulerConfig
from mmtrain.config.planner import PlannerConfig, SearchConfig
from mmtrain.config.sections import ActivationCheckpointConfig, CheckpointConfig, MetricsConfig, ValidationConfig
from mmtrain.spec.builders import model_spec
from mmtrain.spec.small import fewer_blocks, one_block, with_segments


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeCut:
    """How the layers of a job are divided into stages while they are measured."""

    stages: Literal["layers", "modules"]
    """A stage for each layer, or for each module."""
    splits: bool
    """Whether backwards are split into I and W."""
    mode: Literal["", "selective", "full"] = ""
    """`activation_checkpoint.mode`; empty: that of the job."""


REPEATS = {
    "selective": ProbeCut(stages="layers", splits=False, mode="selective"),
    "recompute": ProbeCut(stages="layers", splits=False, mode="full"),
}
"""Memory strategy -> the cut that measures the time that it adds to the plain cut."""

CUTS = tuple(ProbeCut(stages=stages, splits=splits) for stages in ("layers", "modules") for splits in (False, True))  # type: ignore[arg-type]


def probing_job(config: Config, *, num_blocks: int, cut: ProbeCut, num_ranks: int = 1, folder: str) -> Config:
    """A job with the same layers and random weights on one pipeline rank, with at most `num_blocks` blocks of a kind.

    Widths, dtype, attention, recomputation, frozen parts and the tensor- and context-parallel degrees are unchanged.

    Args:
        cut: how layers are divided into stages.
        num_ranks: pipeline ranks; more than 1 only with one segment for each module.
        folder: where the job writes its files.
    """
    model = fewer_blocks(config.model, num_blocks)
    counts = {module.name: len(module.layers) for module in model_spec(model).modules}
    segments = counts if cut.stages == "layers" else dict.fromkeys(counts, 1)
    model = with_segments(model, segments)
    if model.contrast is not None:  # a loss of each batch
        model = replace(model, contrast=replace(model.contrast, microbatches=1))
    return replace(
        config,
        job=replace(config.job, dump_folder=folder),
        model=model,
        training=replace(config.training, global_batch_size=1, on_nonfinite="skip"),
        lr_scheduler=LRSchedulerConfig(warmup_steps=0),
        activation_checkpoint=(ActivationCheckpointConfig(mode=cut.mode) if cut.mode else config.activation_checkpoint),
        parallelism=replace(
            config.parallelism,
            pipeline_parallel_degree=num_ranks,
            data_parallel_shard_degree=1,
            data_parallel_replicate_degree=1,
            pipeline_parallel_schedule="ZB-H1" if cut.splits else "1F1B",
        ),
        compile=CompileConfig(),  # layers are measured as planning counts them, and in halves of a backward
        planner=PlannerConfig(
            search=SearchConfig(sub_microbatch=False)
        ),  # each microbatch is one work of a size of its own
        validation=ValidationConfig(),
        checkpoint=CheckpointConfig(enable=False),
        metrics=MetricsConfig(enable_tensorboard=False, progress_bar=False, peak_flops=1.0),
    )


def small_job(config: Config, *, folder: str) -> Config:
    """A job with fewer parameters to update, see `one_block`. Args: folder: where the job writes its files."""
    config = probing_job(config, num_blocks=1, cut=ProbeCut(stages="modules", splits=False), folder=folder)
    model, parallelism = one_block(config.model, config.parallelism.tensor_parallel_degree), config.parallelism
    if len(model.sections) == 1:
        parallelism = replace(parallelism, encoder_tensor_parallel="shard", encoder_context_parallel="images")
    return replace(config, model=model, parallelism=parallelism)
