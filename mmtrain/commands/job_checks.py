"""What is checked of a job before it starts, in one place: `mmtrain config`, `doctor`, `finetune` and `train` call it,
so that what one of them refuses the others refuse."""

from mmtrain.config import config
from mmtrain.config.config import Config
from mmtrain.config.model import ModelConfig
from mmtrain.errors import shown
from mmtrain.launch.processes import check_temporary_folder
from mmtrain.modality.buckets import check_video
from mmtrain.modality.encoder_choice import check_readable
from mmtrain.schedule.library.names import is_recipe
from mmtrain.simulator.make_job import check_nodes, job_spec, make_job
from mmtrain.spec.job_files import check_files


def check_job(job: Config, *, runs_recipes: bool = True) -> str:
    """Refuses a job whose parts do not fit together, or whose local files cannot be read. Opens no data.

    Args: runs_recipes: a recipe is a program, which `mmtrain config` does not run.
    Returns: how the model is cut, or why that is not known; empty: there is nothing to say.
    Raises: ConfigError: a model that cannot be built, cut or divided, kinds of content that nothing reads, or files of
        weights, adapters or the tokenizer that are missing or damaged.
    """
    check_inputs(job)
    schedule = job.parallelism.pipeline_parallel_schedule
    if not runs_recipes and is_recipe(schedule):
        job_spec(job)
        return f"{shown(schedule)} is a program, which is not run here: how it cuts the model is not checked"
    if job.elastic.enable:
        job_spec(job)
        return "elastic.enable: pipelines follow from the nodes, of which `mmtrain train --nodes N` checks a number"
    made = config.each_pipeline(job, make_job)
    return "; ".join(dict.fromkeys(one.partition_summary for one in made if one.partition_summary))


def check_inputs(job: Config) -> None:
    """The part of `check_job` that does not cut the model, which each rank does by itself. Raises: ConfigError."""
    check_temporary_folder(job.data.num_workers)
    check_video(job)
    check_readable(job.model)
    check_nodes(job)
    check_files(job.model, job.tokenizer)
    _check_adapters(job.model)
    _check_programs(job)


def _check_adapters(model: ModelConfig) -> None:
    """Refuses adapters that the model cannot start from. Raises: ConfigError."""
    if model.lora.pretrained:
        from mmtrain.models.adapter_weights import stored_adapters

        stored_adapters(model)


def _check_programs(job: Config) -> None:
    """Refuses an own metric that is not there, which is not run here, operators that torch does not know, and blocks
    that no compiler here compiles.

    Raises: ConfigError.
    """
    if job.validation.metric:
        from mmtrain.observe.own_metric import check_metric

        check_metric(job.validation.metric)
    if job.activation_checkpoint.save_ops:
        from mmtrain.parallel.activation_memory import saved_ops

        saved_ops(job.activation_checkpoint)
    if job.compile.enable:
        from mmtrain.parallel.compile import check_compiler

        check_compiler()
