"""The named schedules: functions from a planning problem to a plan."""

from collections.abc import Callable

from mmtrain.schedule.library.interleave import interleave
from mmtrain.schedule.library.one_f_one_b import one_f_one_b
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import PlanningProblem

SCHEDULES: dict[str, Callable[[PlanningProblem], Plan]] = {"1F1B": one_f_one_b, "interleave": interleave}
"""Name in `parallelism.pipeline_parallel_schedule` -> schedule."""
