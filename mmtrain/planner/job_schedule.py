"""The schedule of a job: by its name, or from a file."""

from mmtrain.config.config import Config
from mmtrain.schedule.library.catalogue import Schedule
from mmtrain.schedule.recipe.files import schedule_of


def job_schedule(config: Config) -> Schedule:
    """The schedule of a job, which may be from a file. Errors: as of `schedule_of`."""
    section = config.parallelism
    schedule = schedule_of(section.pipeline_parallel_schedule, section.pipeline_parallel_degree)
    schedule = schedule.eager(config.planner.search.eager_forwards)
    if section.separate_gradients:
        schedule = schedule.separated()
    return schedule.braided() if config.planner.search.braid else schedule
