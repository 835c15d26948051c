"""The schedule of a job: by its name, or from a file."""

from mmtrain.config.config import Config
from mmtrain.errors import ConfigError
from mmtrain.schedule.library.catalogue import Schedule
from mmtrain.schedule.recipe.schedule_files import schedule_of


def job_schedule(config: Config) -> Schedule:
    """The schedule of a job, which may be from a file.

    Raises: as `schedule_of`; ConfigError: it splits backwards of blocks that are compiled.
    """
    section = config.parallelism
    schedule = schedule_of(section.pipeline_parallel_schedule, section.pipeline_parallel_degree)
    schedule = schedule.eager(config.planner.search.eager_forwards)
    if section.separate_gradients:
        schedule = schedule.separated()
    if config.compile.enable and schedule.splits_backward:
        raise ConfigError(
            f'parallelism.pipeline_parallel_schedule = "{section.pipeline_parallel_schedule}" splits backwards, but '
            "with compile.enable = true a block makes all its gradients at once; choose a schedule without split "
            'backwards, such as "interleave" or "1F1B"'
        )
    return schedule.braided() if config.planner.search.braid else schedule
