"""The typed configuration of one job, and a strict TOML loader for it.

One frozen dataclass a TOML section; under each field its meaning and unit. Loading never changes a
value and never ignores one: an unknown key, a wrong type, a value outside of its choices or a
missing key is refused with its dotted path. Nothing here imports torch.

The sections are in `model.py`, `data.py`, `assignment.py`, `planner.py`, `elastic.py` and `sections.py`; the rules
among them are here, those between model and data in `content.py`, those of planner and elastic jobs with their
sections.
"""

import functools
import os
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from mmtrain.config.assignment import AssignmentConfig
from mmtrain.config.compile import CompileConfig, check_compile
from mmtrain.config.content import check_clips, check_content, check_pairs
from mmtrain.config.data import DataConfig, DiffusionConfig, TokenizerConfig
from mmtrain.config.elastic import ElasticConfig, check_elastic
from mmtrain.config.figures import LOWEST
from mmtrain.config.foreign_keys import explained
from mmtrain.config.model import LoRAConfig, ModelConfig, projector_name
from mmtrain.config.module_tables import short_form
from mmtrain.config.optimizer import LRSchedulerConfig, OptimizerConfig
from mmtrain.config.planner import PlannerConfig, check_planner
from mmtrain.config.sections import (
    ActivationCheckpointConfig,
    CheckpointConfig,
    CommConfig,
    DebugConfig,
    JobConfig,
    MetricsConfig,
    ParallelismConfig,
    TrainingConfig,
    ValidationConfig,
)
from mmtrain.config.toml_sections import (
    apply_override,
    at_home,
    build,
    dump_table,
    read_with_bases,
    shown,
    to_dict,
)
from mmtrain.config.topology import JobLayout
from mmtrain.config.whole_model import with_parts
from mmtrain.errors import ConfigError, nearest

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One job: every section of its TOML file."""

    model: ModelConfig
    data: DataConfig
    training: TrainingConfig
    assignment: AssignmentConfig = field(default_factory=AssignmentConfig)
    job: JobConfig = field(default_factory=JobConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    diffusion: DiffusionConfig = field(default_factory=DiffusionConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_scheduler: LRSchedulerConfig = field(default_factory=LRSchedulerConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    activation_checkpoint: ActivationCheckpointConfig = field(default_factory=ActivationCheckpointConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)

    @property
    def data_encoder(self) -> bool:
        """Whether tensor-parallel ranks hold whole encoders and divide the images."""
        section = self.parallelism
        divided = section.encoder_tensor_parallel == "data" and section.tensor_parallel_degree > 1
        return divided and bool(self.model.encoders)

    @property
    def regathered(self) -> frozenset[str]:
        """Modules of the config whose parameters FSDP2 gathers before each use, not once a step.

        Not an encoder whose ranks take different images: one that has none would not gather, and the others wait.
        """
        section = self.parallelism
        if section.fsdp_reshard_after_forward == "step":
            return frozenset()
        divided = section.context_parallel_degree > 1 and section.encoder_context_parallel == "images"
        return frozenset({"language"} if divided or self.data_encoder else {"language", *self.model.encoders})


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """The checked configuration with other values of some keys. Args: values: dotted key -> value, of the right type.

    Raises: ConfigError: they do not fit together.
    """
    changed: Config = _with_values(config, {tuple(key.split(".")): value for key, value in values.items()})
    check(changed)
    return changed


def value_of(config: Config, key: str) -> Any:
    """The value of a dotted key."""
    return functools.reduce(_entry, key.split("."), config)


def _entry(section: Any, name: str) -> Any:
    return section[name] if isinstance(section, dict) else getattr(section, name)


def _with_values(section: Any, values: Mapping[tuple[str, ...], Any]) -> Any:
    changed = {path[0]: value for path, value in values.items() if len(path) == 1}
    for name in dict.fromkeys(path[0] for path in values if len(path) > 1):
        inner = {path[1:]: value for path, value in values.items() if path[0] == name}
        changed[name] = _with_values(_entry(section, name), inner)
    return {**section, **changed} if isinstance(section, dict) else replace(section, **changed)


def of_pipeline(config: Config, index: int) -> Config:
    """The job in which all pipelines are as one of them; a job of equal ones itself.

    Each has its part of the microbatches, by its number of ranks.
    """
    parallelism, training = config.parallelism, config.training
    if not parallelism.pipelines:
        return config
    layout = parallelism.layout
    depth, dp = layout.depths[index], layout.dp
    count = max(1, training.global_batch_size * depth // (sum(layout.depths) * layout.dp_shard))
    batch_size = training.global_batch_size if layout.is_even else count * dp
    return replace(
        config,
        parallelism=replace(
            parallelism, pipelines=[], pipeline_parallel_degree=depth, data_parallel_replicate_degree=len(layout.depths)
        ),
        training=replace(training, global_batch_size=batch_size),
    )


def with_depths(config: Config, depths: typing.Sequence[int]) -> Config:
    """An elastic job on some pipelines, as an ordinary job that can be dumped and loaded by itself.

    The file of a run is that of the elastic job, not of this one.

    Args: depths: [pipeline] -> its pipeline ranks.
    Raises: ConfigError: the job cannot have such pipelines.
    """
    parallelism = replace(config.parallelism, pipelines=list(depths))
    changed = replace(config, elastic=ElasticConfig(), parallelism=parallelism)
    check(changed)
    return changed


def each_pipeline(config: Config, make: Callable[[Config], T]) -> tuple[T, ...]:
    """[pipeline] -> what is made of its job; those of equal depth have it in common.

    Raises: ConfigError: that of `make`, naming the pipeline if only some have it.
    """
    layout, made = config.parallelism.layout, dict[int, T]()
    failed: dict[int, ConfigError] = {}
    for depth in dict.fromkeys(layout.depths):
        try:
            made[depth] = make(of_pipeline(config, layout.depths.index(depth)))
        except ConfigError as error:
            failed[depth] = error
    if failed:
        depth, first = next(iter(failed.items()))
        if config.parallelism.pipelines:
            key = f"parallelism.pipelines[{layout.depths.index(depth)}]"
            message = re.sub(r"(parallelism\.)?pipeline_parallel_degree", key, str(first))
            of_all = not made and len(set(map(str, failed.values()))) == 1
            first.args = (message if of_all or key in message else f"{key} = {depth}: {message}", *first.args[1:])
        raise first
    return tuple(made[depth] for depth in layout.depths)


def uses_fsdp(shape: JobLayout, training: TrainingConfig, *, data_encoder: bool = False) -> bool:
    """Whether chunks are sharded by FSDP2: where ranks hold equal parameters and work on different data, or for the
    sake of its mixed precision or offload.

    Args: data_encoder: tensor-parallel ranks hold whole encoders and work on different images.
    """
    low_precision = "bfloat16" in (training.param_dtype, training.mixed_precision_reduce)
    spread = shape.dp * shape.cp * (shape.tp if data_encoder else 1) > 1
    return spread or low_precision or training.enable_cpu_offload


def _check_masters(config: Config) -> None:
    training = config.training
    if training.master_weights == "all":
        return
    if training.param_dtype != "bfloat16":
        raise ConfigError(
            f'training.master_weights = "{training.master_weights}" holds weights in bfloat16, but '
            f'training.mixed_precision_param = "{training.mixed_precision_param}" '
            f"{'may compute' if training.mixed_precision_param == 'auto' else 'computes'} in float32; set that to "
            '"bfloat16", or master_weights to "all"'
        )
    if training.master_weights == "none" and config.optimizer.ema_decay:
        raise ConfigError(
            f'training.master_weights = "none" with optimizer.ema_decay = {config.optimizer.ema_decay}: averages in '
            'bfloat16 would not move; set ema_decay = 0.0, or master_weights to "all" or "trained"'
        )


def check(config: Config) -> None:
    """Refuses sections that do not fit together; changes nothing.

    Raises: ConfigError: the first rule that is broken, with the values and what to change.
    """
    parallelism = config.parallelism
    dp = parallelism.layout.dp
    if config.training.global_batch_size < dp:
        raise ConfigError(
            f"training.global_batch_size = {config.training.global_batch_size} microbatches are fewer than the {dp} "
            f"data-parallel replicas, each of which needs one; make it at least {dp}"
        )
    _check_assignment(config)
    _check_masters(config)
    if config.training.seq_len < parallelism.context_parallel_degree:
        raise ConfigError(
            f"training.seq_len = {config.training.seq_len} tokens cannot be divided by "
            f"parallelism.context_parallel_degree = {parallelism.context_parallel_degree} ranks; lower the degree"
        )
    _check_epochs(config)
    _check_best(config)
    if config.checkpoint.load_step >= 0 and not config.checkpoint.enable:
        raise ConfigError(
            f"checkpoint.load_step = {config.checkpoint.load_step}, but checkpoint.enable = false; set it to true"
        )
    if config.validation.weights == "ema" and not config.optimizer.ema_decay:
        raise ConfigError(
            'validation.weights = "ema", but optimizer.ema_decay = 0.0, so there are no averages; set it, such as to '
            '0.999, or validation.weights to "trained"'
        )
    modules = list(config.model.cut_modules.values())
    trained = [module.trainable for module in (*modules, *map(config.model.projector_of, config.model.encoders))]
    if not any(trained):
        raise ConfigError("model: every module has trainable = false, so there is nothing to train; change one")
    if config.model.lora != LoRAConfig() and "lora" not in trained:
        raise ConfigError('[model.lora] is set, but no module has trainable = "lora"; set one, or remove the section')
    parts = [*config.model.sections, *map(projector_name, config.model.encoders)]
    for group in config.optimizer.groups:
        if group.module and group.module not in parts:
            raise ConfigError(
                f"optimizer.groups: {group.described}, but this model has {', '.join(parts)}; change or remove it"
            )
    if parallelism.fsdp_reshard_after_forward == "always" and parallelism.data_parallel_shard_degree > 1:
        raise ConfigError(
            'parallelism.fsdp_reshard_after_forward = "always" with data_parallel_shard_degree = '
            f"{parallelism.data_parallel_shard_degree}: these ranks share parameters but run different plans, so they "
            'would gather them in different orders and wait for each other forever; set "step", or a shard degree of '
            "1 (context parallelism still shards, and data_parallel_replicate_degree adds replicas)"
        )
    _check_encoder_parallelism(config)
    check_content(config.model, config.data, config.tokenizer)
    check_clips(
        config.model,
        config.diffusion,
        data=config.data,
        training=config.training,
        validation=config.validation,
        parallelism=parallelism,
    )
    check_pairs(
        config.model,
        training=config.training,
        parallelism=parallelism,
        assignment=config.assignment,
        elastic=config.elastic,
        validation=config.validation,
    )
    _check_vocabulary(config)
    check_elastic(
        config.elastic,
        model=config.model,
        training=config.training,
        parallelism=parallelism,
        checkpoint=config.checkpoint,
        comm=config.comm,
    )
    memory = config.activation_checkpoint
    check_compile(config.compile, config.model, config.planner, parallelism, memory, config.elastic)
    if config.planner.learn_costs and (config.elastic.enable or config.parallelism.pipelines):
        other = "elastic.enable = true" if config.elastic.enable else "parallelism.pipelines"
        raise ConfigError(
            f"planner.learn_costs = true with {other}: what is learned of a pipeline rank holds for pipelines of one "
            "depth; remove one of them"
        )
    each_pipeline(config, _check_planner)


def _check_epochs(config: Config) -> None:
    """Refuses a warm-up longer than the job, and epochs of data that have none."""
    steps, data = config.training.steps, config.data
    if 0 < steps < config.lr_scheduler.warmup_steps:
        raise ConfigError(
            f"lr_scheduler.warmup_steps = {config.lr_scheduler.warmup_steps} is more than "
            f"training.steps = {steps}; lower it"
        )
    validation, checkpoint = config.validation, config.checkpoint
    in_epochs = [f"training.epochs = {config.training.epochs:g}"] if config.training.epochs else []
    in_epochs += [f"validation.freq = {shown(validation.freq)}"] if validation.every.epochs else []
    in_epochs += [f"checkpoint.interval = {shown(checkpoint.interval)}"] if checkpoint.every.epochs else []
    if in_epochs and data.streaming:
        raise ConfigError(
            f"{in_epochs[0]} with data.streaming = true: the number of samples of a stream is not known, so it has no "
            "epochs; count in steps, or set streaming to false"
        )
    if in_epochs and data.sources:
        raise ConfigError(
            f"{in_epochs[0]} with data.sources: sources that are mixed by weight end at different times, so they have "
            "no epoch together; count in steps, or use one data.source"
        )
    for key, value in {"training.epochs": config.training.epochs, "validation.patience": validation.patience}.items():
        if value and config.elastic.enable:
            raise ConfigError(
                f"{key} = {value:g} with elastic.enable = true: nodes that wait for a place count steps to the end of "
                "the job, which must be known; set training.steps alone"
            )


def _check_best(config: Config) -> None:
    """Refuses a best checkpoint by a figure that no validation has."""
    key, validation = config.checkpoint.keep_best, config.validation
    name = config.checkpoint.figure.name
    if not key:
        return
    lacks = {
        "validation.enable = false": not validation.enable,
        "validation.generate = 0": name == "exact_match" and not validation.generate,
        "[model.dit]": name == "accuracy" and config.model.dit is not None,
        'validation.metric = ""': name not in LOWEST and not validation.metric,
    }
    for what, true in lacks.items():
        if true:
            raise ConfigError(
                f"checkpoint.keep_best = {shown(key)} with {what}: no validation has this figure; change one of the two"
            )


def _check_vocabulary(config: Config) -> None:
    """Refuses to divide the vocabulary over the pipeline ranks where that is not built, or nobody would decide it."""
    parallelism, planner, how = config.parallelism, config.planner, config.parallelism.vocabulary_parallel
    if how == "tensor":
        return
    key = f'parallelism.vocabulary_parallel = "{how}"'
    if config.model.dit is not None:
        raise ConfigError(f'{key} with [model.dit]: a text encoder predicts no tokens and has no head; set "tensor"')
    if config.elastic.enable or parallelism.pipelines:
        other = "elastic.enable = true" if config.elastic.enable else "parallelism.pipelines"
        raise ConfigError(
            f"{key} with {other}: pipelines of unequal depth would hold different parts of the vocabulary, which is "
            'not built; set "tensor"'
        )
    if how == "search" and (planner.partition != "search" or planner.placement not in ("spread", "search")):
        name = "partition" if planner.partition != "search" else "placement"
        raise ConfigError(
            f'{key} with planner.{name} = "{getattr(planner, name)}": only a search of the partition decides about the '
            f'vocabulary; set "tensor" or "pipeline", or planner.{name} = "search"'
        )


def _check_planner(config: Config) -> None:
    """Refuses a plan that the job of a pipeline cannot have."""
    parallelism = config.parallelism
    if config.elastic.enable and config.planner.placement != "spread":
        parallelism = replace(parallelism, pipeline_parallel_degree=2)  # the least, which its pipelines will have
    check_planner(config.planner, config.model, parallelism, config.activation_checkpoint, config.comm)


def _check_assignment(config: Config) -> None:
    """Refuses numbers of samples that no step can have, and policies that do not fit the model."""
    section, bins = config.assignment, config.training.global_batch_size
    number = section.samples_per_step
    if not section.assigns:
        return
    if config.model.dit is not None:
        raise ConfigError(
            f'assignment.policy = "{section.policy}", assignment.samples_per_step = {number} with [model.dit]: clips '
            "are not assigned to microbatches by what they cost yet; remove both keys"
        )
    most = bins * config.training.seq_len // LEAST_SAMPLE_TOKENS
    if number and number < bins:
        raise ConfigError(
            f"assignment.samples_per_step = {number} is below training.global_batch_size = {bins} microbatches, each "
            "of which needs a sample; raise the first or lower the second"
        )
    if number > most:
        raise ConfigError(
            f"assignment.samples_per_step = {number}, but {bins} microbatches (training.global_batch_size) of "
            f"training.seq_len = {config.training.seq_len} tokens hold at most {most} samples of "
            f"{LEAST_SAMPLE_TOKENS} tokens; lower the first or raise one of the others"
        )
    if section.defer and not config.model.encoders:
        raise ConfigError(
            "assignment.defer = true, but the model has no encoder whose works could come a microbatch earlier; remove "
            "it, or add [model.encoder]"
        )


LEAST_SAMPLE_TOKENS = 2
"""A question and a token to predict."""


def _check_encoder_parallelism(config: Config) -> None:
    """Refuses ways to divide the encoder that do not fit the degrees."""
    section = config.parallelism
    if not config.model.encoders:
        for key, default in (("encoder_context_parallel", "images"), ("encoder_tensor_parallel", "shard")):
            if getattr(section, key) != default:
                raise ConfigError(
                    f'parallelism.{key} = "{getattr(section, key)}", but there is no [model.encoder]; remove the key'
                )
        return
    patches = section.encoder_context_parallel == "patches"
    if patches and section.context_parallel_degree == 1:
        raise ConfigError(
            'parallelism.encoder_context_parallel = "patches" with context_parallel_degree = 1: there is no rank to '
            'share patches with; raise the degree, or set "images"'
        )
    if section.encoder_tensor_parallel == "data" and section.tensor_parallel_degree == 1:
        raise ConfigError(
            'parallelism.encoder_tensor_parallel = "data" with tensor_parallel_degree = 1: there is no rank to divide '
            'the images with; raise the degree, or set "shard"'
        )


# ---------------------------------------------------------------------------------------------- loading


def load(path: str | Path, overrides: typing.Sequence[str] = ()) -> Config:
    """The checked configuration of a TOML file, after its `extends` chain and command-line overrides.

    Args:
        path: a file, or a bare name that is looked up in the folder `configs` of the working
            directory and of the package.
        overrides: `--section.key=value` or `section.key=value`, the value in TOML syntax (a string
            may be left unquoted).
    Raises: ConfigError: with file, dotted key, value, rule and what to change.
    """
    found = find_file(path)
    with explained(str(found)):
        table = read_with_bases(found, ())
        for override in overrides:
            apply_override(table, override)
        if isinstance(job := table.setdefault("job", {}), dict):
            job.setdefault("dump_folder", f"outputs/{found.stem}")
    return of_table(table, str(found))


def of_table(table: dict[str, Any], where: str) -> Config:
    """The checked configuration of a table of TOML. Args: where: what it is, for errors. Raises: ConfigError."""
    with explained(where):
        if isinstance(table.get("model"), dict):
            table = {**table, "model": short_form(table["model"], where)}
        config: Config = build(Config, with_parts(table, where), "", where)
    check(config)
    return config


def find_file(path: str | Path) -> Path:
    """The config file that a user's word names.

    Raises: ConfigError: no such file; with the places searched and the names that exist there.
    """
    direct = Path(at_home(str(path), "config file"))
    if os.path.isfile(direct):  # which is false of names that cannot exist
        return direct
    if os.path.isdir(direct):
        raise ConfigError(f"config file {shown(str(path))} is a folder; name a file in it")
    folders = [Path("configs"), Path(__file__).resolve().parents[1] / "configs"]
    if direct.parent == Path("."):
        for folder in folders:
            if os.path.isfile(folder / direct):
                return folder / direct
    known = sorted({p.name for folder in folders if folder.is_dir() for p in folder.glob("*.toml")})
    near = nearest(direct.name, known)
    hint = f"did you mean {near[0]}?" if near else f"configs/ has {', '.join(known) or 'no file'}"
    raise ConfigError(f"config file {shown(str(path))} does not exist; {hint}")


def dump(config: Config) -> str:
    """The resolved configuration as TOML text that `load` reads back to an equal value."""
    lines: list[str] = []
    dump_table(to_dict(config), (), lines)
    return "\n".join(lines).strip() + "\n"
