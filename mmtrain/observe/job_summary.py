"""A summary of a job's resolved config for the first lines of the log, and what the last line says."""

from collections.abc import Sequence
from contextlib import suppress

from mmtrain.config.assignment import AssignmentConfig
from mmtrain.config.config import Config
from mmtrain.config.model import ModelConfig
from mmtrain.config.optimizer import OptimizerConfig
from mmtrain.config.sections import TrainingConfig
from mmtrain.data.media_readers import image_processor, image_rules
from mmtrain.errors import ConfigError
from mmtrain.families.shapes import LanguageShape, VisionShape
from mmtrain.modality.sounds import sound_rules
from mmtrain.models.attention.backend import attention_line
from mmtrain.planner.job import Job
from mmtrain.planner.partition.pipeline_layout import show_layout
from mmtrain.planner.search_settings import show_switches
from mmtrain.spec.composites import class_name
from mmtrain.spec.module_sizes import families, shape_of, whole_kind, why_not_whole
from mmtrain.spec.spec import ModuleSpec
from mmtrain.spec.vae_shapes import VaeShape

FEW_CLIPS = 16_000
"""The clips with which a small DiT with random initial weights learns the easiest clips. Source: docs/log.md, Video
quality."""


def start_lines(
    config: Config,
    jobs: Sequence[Job],
    *,
    device: str,
    capability: tuple[int, int] = (0, 0),
    allocator: str = "",
    threads: int,
    cut_s: float,
) -> list[str]:
    """The models and their data, size and cut of each module, mesh, attention and planner.

    Args:
        jobs: [pipeline] -> its job.
        device: its type.
        capability: compute capability of a CUDA device.
        allocator: setting of its allocator.
        threads: of one rank's search.
        cut_s: seconds that the partitions took.
    """
    known = families(config.model)
    names = dict.fromkeys(section.pretrained or known[module] for module, section in config.model.sections.items())
    lines = [f"{' + '.join(names)} on {config.data.description}, into {config.job.dump_folder}"]
    by_depth = {job.partition.num_ranks: job for job in jobs}
    parts = [module for module in jobs[0].spec.modules if module.name not in config.model.sections]
    for module in (module for module in jobs[0].spec.modules if module not in parts):
        total, trained = module.num_params, module.num_trainable_params
        part = "" if trained == total else f" ({trained:,} train)" if trained else " (frozen)"
        lines.append(
            f"{module.name}: {_model(config.model, module.name)}; {total:,} parameters{part}, "
            f"{len(module.layers)} layers in {'; '.join(_cut(job, module) for job in by_depth.values())}"
        )
    lines += _vocabulary(parts)
    if (contrast := config.model.contrast) is not None:
        count = contrast.microbatches or config.training.global_batch_size // config.parallelism.layout.dp
        lines.append(f"contrast: {contrast.loss} loss over the pairs of {count} microbatches of a replica")
    if config.model.encoders:
        encoders = config.model.encoders
        with suppress(ConfigError):  # which the data loader will raise
            lines += [
                (_sounds if section.kind == "audio" else _images)(config, name) for name, section in encoders.items()
            ]
        kind = whole_kind(config.model)
        lines.append(f"exports as {class_name(kind)}" if kind else f"exports as parts: {why_not_whole(config.model)}")
    if summary := "; ".join(filter(None, (job.partition_summary for job in by_depth.values()))):
        lines.append(f"{summary} ({cut_s:.2f} s)")
    degrees, training = config.parallelism.layout.degrees.items(), config.training
    lines.append(
        f"mesh: {', '.join(f'{axis} {degree}' for axis, degree in degrees)} on {device}; "
        f"schedule {config.parallelism.pipeline_parallel_schedule}; {_length(training)} of "
        f"{training.global_batch_size} microbatches x {training.seq_len} tokens"
    )
    lines += [_device_path(config, device, allocator)] if device != "cpu" else []
    lines.append(attention_line(config, device, capability))
    if config.compile.enable:
        lines.append("compile: blocks, while the first steps run, which takes seconds to minutes for each kind of them")
    lines.append(f"seed {config.debug.seed} (debug.seed): initial weights, order of the samples, searches")
    lines.append(show_switches(config.planner, threads))
    if config.assignment.assigns:
        lines.append(_assignment(config.assignment))
    if not config.checkpoint.enable:
        lines.append("no checkpoints (checkpoint.enable = false): this run leaves no model and cannot be continued")
    section = config.planner
    if device != "cpu" and section.enable and not (section.memory_limit or section.search.activation_memory_gib):
        lines.append(
            "planner: no limit of memory, so a searched plan may hold more than a device has; set "
            'planner.memory_limit, such as "90%"'
        )
    return lines


def _device_path(config: Config, device: str, allocator: str) -> str:
    """How an accelerator computes and gets its inputs."""
    training = config.training
    masters = {"all": "float32", "trained": "float32 of what trains, else no", "none": "no"}[training.master_weights]
    low = training.param_dtype == "bfloat16"
    parts = [f"{training.param_dtype} with {masters} masters" if low else training.param_dtype]
    parts.append(f"{config.optimizer.name} {config.optimizer.kernel}")
    parts.append(f"float32 products {'in TF32' if low else 'without TF32'}")
    ahead = training.inputs_ahead_mib
    parts.append(f"inputs up to {ahead:g} MiB ahead" if ahead else "inputs when a forward begins")
    parts.append(f"allocator {allocator or 'as torch has it'}")
    if config.debug.deterministic:
        parts.append("deterministic kernels, which take longer (debug.deterministic)")
    return f"device: {device}; {', '.join(parts)}"


def _length(training: TrainingConfig) -> str:
    """How long a job is."""
    return f"{training.steps} steps" if training.steps else f"{training.epochs:g} epochs in steps"


def high_rate(config: Config) -> str:
    """A warning that the default learning rate is too high for published weights, where modules with such weights train
    with it; else the empty string."""
    default = OptimizerConfig().lr
    of_groups = {group.module for group in config.optimizer.groups if group.lr is not None and not group.pattern}
    modules = [
        name
        for name, section in config.model.sections.items()
        if section.pretrained
        and section.weights == "pretrained"
        and getattr(section, "trainable", False)
        and name not in of_groups
    ]
    if config.optimizer.lr != default or "" in of_groups or not modules:
        return ""
    return (
        f"optimizer.lr = {default:g} is the default, which is meant for random weights; published ones "
        f"({', '.join(modules)}) may lose what they know: set 1e-5 or 2e-5, or 1e-4 for low-rank adapters"
    )


def few_clips(config: Config, clips: int | None) -> str:
    """A warning that samples will show little, where the DiT began with random weights and has seen few clips since;
    else the empty string.

    Args: clips: that it has learned from; None: not known.
    """
    dit = config.model.dit
    if dit is None or clips is None or clips > FEW_CLIPS or (dit.pretrained and dit.weights == "pretrained"):
        return ""
    return (
        f"the DiT has learned from {clips:,} clips since its random weights, so samples will show little: one square "
        f"(debug_square.toml) takes {FEW_CLIPS:,}, several shapes (debug_t2v.toml) more than 32,000 "
        "(docs/text_to_video.md); raise training.steps, or start from published weights (model.dit.pretrained)"
    )


def _assignment(section: AssignmentConfig) -> str:
    """A line on which microbatches samples go to."""
    parts = [f"assignment: {section.policy}"]
    parts += [f"{section.samples_per_step} samples a step"] if section.samples_per_step else []
    parts += ["deferred images"] if section.defer else []
    parts += ["fewer microbatches where it pays"] if section.fewer_microbatches else []
    return ", ".join(parts)


def _vocabulary(parts: Sequence[ModuleSpec]) -> list[str]:
    """A line for the rows of pipeline ranks, if they divide it. Args: parts: modules without a section."""
    rows = [module.vocabulary for module in parts if module.vocabulary]
    if not rows:
        return []
    sizes = sorted({f"{own.last - own.first:,}" for own in rows})
    layers = [layer for module in parts for layer in module.layers]
    size = sum(layer.num_params - layer.num_shared_params for layer in layers)
    return [f"vocabulary: {rows[0].total:,} tokens, {' or '.join(sizes)} on each pipeline rank; {size:,} parameters"]


def _sounds(config: Config, module: str) -> str:
    """The windows of an encoder of sound."""
    rules = sound_rules(config.model, module)
    tokens = rules.num_tokens(rules.window_rows)
    seconds = rules.seconds(rules.window_samples)
    of_window = "up to " if rules.packs_rows else ""
    return (
        f"{module}: sound of {rules.rate:,} samples a second, in windows of {of_window}{seconds:g} s, "
        f"{of_window}{tokens:,} tokens each"
    )


def _images(config: Config, module: str) -> str:
    """The sizes of an encoder's images, and whose rule they follow."""
    geometry, _ = image_rules(config, module)
    _, processor = image_processor(config) if module == "vision" else ("", "")
    if geometry.max_patches:
        sizes = f"{geometry.max_patches:,} patches"
    elif geometry.layout == "packed":
        sizes = f"{geometry.min_pixels:,} to {geometry.max_pixels:,} pixels"
    else:
        sizes = f"{geometry.image_size} x {geometry.image_size} pixels"
    side = geometry.patch_size * geometry.merge
    whose = f"processor of {processor}" if processor else "default processor"
    what = "images" if module == "vision" else module
    return f"{what}: {sizes} each, {side} x {side} a token, {whose}"


def _cut(job: Job, module: ModuleSpec) -> str:
    """The chunks of a module in a pipeline."""
    stages = job.partition.of_module(module.name)
    layout = show_layout(module, [stage.layers for stage in stages])
    return f"{len(stages)} chunk{'' if len(stages) == 1 else 's'}: {layout}"


def _model(model: ModelConfig, module: str) -> str:
    """Family and size of a module's model, and where its weights come from."""
    section, shape = model.sections[module], shape_of(model, module)
    parts = [f"{section.pretrained} ({shape.model_type})" if section.pretrained else shape.model_type]
    if isinstance(shape, VaeShape):
        parts.append(f"latents of {shape.channels} channels")
    else:
        parts.append(f"{shape.depth} blocks of width {shape.width}")
    if isinstance(shape, VisionShape | LanguageShape) and shape.embedding_width:
        parts.append(f"embeddings of {shape.embedding_width} columns")
    elif module in model.encoders:
        parts.append(f"projector {model.projector_of(module).kind}")
    parts += ["random weights"] if section.config or section.weights == "random" else []
    return ", ".join(parts)
