"""The schedule of an iteration without backward: validation."""

from mmtrain.errors import PlanError
from mmtrain.schedule.library.interleave import interleave
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import PlanningProblem


def forward_only(problem: PlanningProblem) -> Plan:
    """The plan of forwards only: a rank never waits while a forward could start, older microbatches first.

    Raises: PlanError: a stage has a backward, or one activation alone exceeds a rank's memory limit.
    """
    for stage, work in problem.graph.nodes():
        if problem.graph.has_backward(stage, work):
            raise PlanError(
                f"stage {stage} has a backward for work {work}, but schedule forward_only plans none; make "
                "the problem forward-only or choose another schedule"
            )
    return interleave(problem)
