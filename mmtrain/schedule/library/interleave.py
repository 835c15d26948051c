"""DIP's pipeline stage interleaving with works in the order of their microbatches."""

from mmtrain.schedule.library.greedy import greedy
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import PlanningProblem


def interleave(problem: PlanningProblem) -> Plan:
    """The plan of the greedy dual-queue algorithm, older microbatches first, within the memory limits.

    Each microbatch gets its fastest options where these fit alone, else those of least memory.

    Raises: PlanError: the activations of one microbatch alone exceed a rank's memory limit.
    Source: DIP, arXiv:2504.14145, section 5.2.
    """
    return greedy(problem)
