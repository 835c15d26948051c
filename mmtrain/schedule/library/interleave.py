"""DIP's pipeline stage interleaving with works in the order of their microbatches, as a recipe.

DIP's "disable the forward queue when memory is full" can deadlock: forwards of many microbatches may fill a rank, so
that none of them can reach its backward. Here `library.memory` decides on admission, so that all works can finish.
"""

from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.recipe.language import Recipe
from mmtrain.schedule.recipe.policy import plan_of

DUAL_QUEUES = Recipe(first="alternate", forward="oldest", backward="oldest", memory=True)


def interleave(problem: PlanningProblem) -> Plan:
    """The plan of the greedy dual-queue algorithm, older microbatches first, within the memory limits.

    Each microbatch gets its fastest options where these fit alone, else those of least memory.

    Raises: PlanError: the activations of one microbatch alone exceed a rank's memory limit.
    Source: DIP, arXiv:2504.14145, section 5.2.
    """
    return plan_of(DUAL_QUEUES, problem, at_once=True)
