"""A small job with the layout of a user's job, which checks that layout in seconds. Pure.

Kept: families, activation functions, biases, ratios of heads, tied and trainable flags, masks, what a DiT predicts and
in which patches, how modules are cut and divided, dtypes, data and tokenizer. Made smaller: depth, widths, images,
clips, sequence, batch, degrees.
"""

from dataclasses import dataclass, replace
from typing import Any

from mmtrain.config import config as config_module
from mmtrain.config.config import Config, each_pipeline
from mmtrain.config.model import ModelConfig
from mmtrain.config.planner import PlannerConfig
from mmtrain.config.sections import CheckpointConfig, MetricsConfig, ParallelismConfig, ValidationConfig
from mmtrain.modality.catalogue import division_of
from mmtrain.modality.small_data import most_image_tokens, small_data
from mmtrain.modality.submesh import Submesh
from mmtrain.planner.job import Job
from mmtrain.planner.partition.partition import Partition
from mmtrain.simulator.make_job import make_job
from mmtrain.spec.small import narrow_model

MOST_RANKS = 8
"""Processes above which degrees are lowered to 2."""

SEQ_LEN = 512
"""Tokens of a microbatch, unless two images need more."""

_LOWERED_FIRST = (
    "data_parallel_shard_degree",
    "data_parallel_replicate_degree",
    "context_parallel_degree",
    "pipeline_parallel_degree",
    "tensor_parallel_degree",
)


@dataclass(frozen=True, kw_only=True)
class Shrunk:
    """A small job, and the changes of the layout that it needed."""

    config: Config
    notes: tuple[str, ...]


def shrink(config: Config, *, seq_len: int = SEQ_LEN) -> Shrunk:
    """A job with the layout of `config` and a tiny model with random weights, on the same data.

    Args: seq_len: tokens of a microbatch, unless the config has fewer, or two images need more.
    Raises: ConfigError: the model's configs cannot be read, or the real model cannot be cut or divided so.
    """
    parallelism, notes = _fewer_ranks(config.parallelism)
    jobs = each_pipeline(config, make_job)  # it also refuses degrees that do not divide the real model
    job = max(jobs, key=lambda one: one.partition.num_ranks)
    small_layout = replace(config, parallelism=parallelism)
    model = _model(small_layout, job)
    dp = parallelism.layout.dp
    per_replica = config.training.global_batch_size // config.parallelism.layout.dp
    training = replace(
        config.training,
        seq_len=min(config.training.seq_len, max(seq_len, 2 * most_image_tokens(model) + seq_len // 2)),
        global_batch_size=dp * min(per_replica, max(2, 2 * parallelism.layout.pp)),
        attention_backend="auto",  # it runs on CPUs, which have one backend
    )
    small = replace(
        config,
        model=model,
        data=small_data(config.data, model),
        training=training,
        parallelism=replace(
            parallelism,
            context_parallel_block_size=min(parallelism.context_parallel_block_size, 32),
            vocabulary_parallel="pipeline" if job.spec.divides_vocabulary else "tensor",  # also if it was searched
        ),
        planner=_planner(config.planner, job.partition),
        assignment=replace(config.assignment, samples_per_step=0),  # as many as fit into the small microbatches
        validation=ValidationConfig(),
        checkpoint=CheckpointConfig(enable=False),
        metrics=MetricsConfig(enable_tensorboard=False, progress_bar=False, peak_flops=1.0),
    )
    config_module.check(small)
    return Shrunk(config=small, notes=notes)


def _fewer_ranks(section: ParallelismConfig) -> tuple[ParallelismConfig, tuple[str, ...]]:
    notes = []
    for name in _LOWERED_FIRST:
        degree, world = getattr(section, name), section.layout.world_size
        if world > MOST_RANKS and degree > 2:
            lowered: dict[str, Any] = {name: 2}
            section = replace(section, **lowered)
            notes.append(f"parallelism.{name} {degree} -> 2: the job has {world} ranks, more than {MOST_RANKS}")
    depths, world = section.pipelines, section.layout.world_size
    if depths and world > MOST_RANKS:
        fewer = [min(depth, most) for depth, most in zip(sorted({min(depths), max(depths)}), (1, 2), strict=False)]
        section = replace(section, pipelines=fewer)
        notes.append(f"parallelism.pipelines {depths} -> {fewer}: the job has {world} ranks, more than {MOST_RANKS}")
    return section, tuple(notes)


def _model(config: Config, job: Job) -> ModelConfig:
    """Args: config: the real model on the small job's ranks. job: the real one of its deepest pipeline."""
    partition, modules, submesh = job.partition, job.spec.modules, Submesh.of(config)
    num_ranks = config.parallelism.layout.pp
    if partition.passes:  # of a chain of all modules the language model's K counts passes
        segments = {**dict.fromkeys((m.name for m in modules), 0), partition.text: partition.passes}
        stages = {module.name: partition.passes * num_ranks for module in modules}
    else:
        held = {m.name: [stage.pp_rank for stage in partition.of_module(m.name)] for m in modules}
        segments = {
            name: len(ranks) // (len(set(ranks)) if partition.placed else partition.num_ranks)
            for name, ranks in held.items()
        }
        stages = {name: count * num_ranks for name, count in segments.items()}
    tp = {module.name: division_of(submesh, module).tp for module in modules}
    model = narrow_model(config.model, tp=tp, stages=stages, segments=segments)
    if num_ranks != partition.num_ranks:  # the ranks that sections name are those of the real job
        model = model.with_modules({name: replace(x, ranks=0) for name, x in model.cut_modules.items()})
    return model


def _planner(section: PlannerConfig, partition: Partition) -> PlannerConfig:
    # A chain that the search chose is one again; the other numbers are in the model's sections.
    how = "mixed-latency" if partition.passes and section.partition == "search" else section.partition
    # The real model's memory limit does not apply to the small one.
    return replace(section, partition=how, placement=partition.placed or "spread", memory_limit="").with_search(
        activation_memory_gib=0.0
    )
