"""A summary of a job's resolved config for the first lines of the log. Pure."""

from mmtrain.config.config import Config
from mmtrain.config.model import ModelConfig
from mmtrain.config.topology import AXES
from mmtrain.planner.iteration import IterationPlanner
from mmtrain.planner.partition.pipeline_layout import show_layout
from mmtrain.planner.plan_choice import show_switches
from mmtrain.spec.modules import families, shape_of
from mmtrain.spec.vae_shapes import VaeShape


def start_lines(config: Config, planner: IterationPlanner, *, device: str, threads: int, cut_s: float) -> list[str]:
    """The models and their data, size and cut of each module, mesh and planner.

    Args: device: its type. threads: of one rank's search. cut_s: seconds that the partition took.
    """
    known = families(config.model)
    names = [section.pretrained or known[module] for module, section in config.model.modules.items()]
    lines = [f"{' + '.join(names)} on {config.data.source}, into {config.job.dump_folder}"]
    for module in planner.spec.modules:
        stages = planner.partition.of_module(module.name)
        total, trained = module.num_params, module.num_trainable_params
        part = "" if trained == total else f" ({trained:,} train)" if trained else " (frozen)"
        lines.append(
            f"{module.name}: {_model(config.model, module.name)}; {total:,} parameters{part}, "
            f"{len(module.layers)} layers in {len(stages)} chunk{'' if len(stages) == 1 else 's'}: "
            f"{show_layout(module, [stage.layers for stage in stages])}"
        )
    if planner.partition_summary:
        lines.append(f"{planner.partition_summary} ({cut_s:.2f} s)")
    degrees = zip(AXES, config.parallelism.mesh_shape.degrees, strict=True)
    training = config.training
    lines.append(
        f"mesh: {', '.join(f'{axis} {degree}' for axis, degree in degrees)} on {device}; "
        f"schedule {config.parallelism.pipeline_parallel_schedule}; {training.steps} steps of "
        f"{training.global_batch_size} microbatches x {training.seq_len} tokens"
    )
    return [*lines, show_switches(config.planner, threads)]


def _model(model: ModelConfig, module: str) -> str:
    """Family and size of a module's model, and where its weights come from."""
    section, shape = model.modules[module], shape_of(model, module)
    parts = [f"{section.pretrained} ({shape.model_type})" if section.pretrained else shape.model_type]
    if isinstance(shape, VaeShape):
        parts.append(f"latents of {shape.channels} channels")
    else:
        parts.append(f"{shape.depth} blocks of width {shape.width}")
    parts += [f"projector {model.projector.kind}"] if module == "vision" else []
    parts += ["random weights"] if section.config or section.weights == "random" else []
    return ", ".join(parts)
