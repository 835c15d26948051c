"""The handcrafted zero-bubble schedules: 1F1B orders whose Ws fill the bubbles.

Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, arXiv:2401.10241, section 2. Generalised from a chain to
a work graph as in `one_f_one_b`: the schedules count pairs of a microbatch and a stage.
"""

from collections.abc import Sequence

from mmtrain.schedule.library.eager import with_eager
from mmtrain.schedule.library.one_f_one_b import alternate
from mmtrain.schedule.library.weights import delay_weights
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import PlanningProblem


def zb_h1(problem: PlanningProblem, *, eager: int = 0) -> Plan:
    """1F1B with the Ws of rank r delayed by r pairs: the bubble of 1F1B less 2(P - 1) Ws.

    On a chain with W at most F and I the bubble is (P - 1)(F + I - W), and every rank holds the activations of 1F1B's
    first rank. Every (stage, work) takes its option 0; memory limits are ignored.

    Args: eager: see `one_f_one_b`.
    Source: arXiv:2401.10241, section 2.2 (ZB-H1).
    """
    return _delayed(problem, eager, None, 1)


def zb_h2(problem: PlanningProblem, *, eager: int = 0) -> Plan:
    """Twice the forwards of 1F1B in flight, and the Ws of rank r delayed by 2r pairs.

    On a chain with F = I = W no rank idles between its first and last action; up to 2P - 1 microbatches are held. Every
    (stage, work) takes its option 0; memory limits are ignored.

    Args: eager: see `one_f_one_b`.
    Source: arXiv:2401.10241, section 2.3 (ZB-H2).
    """
    return _delayed(problem, eager, 2, 2)


def interleaved_zero_bubble(problem: PlanningProblem, *, eager: int = 0) -> Plan:
    """Interleaved 1F1B with the shorter warm-up of plain 1F1B, and the Ws of rank r delayed by r pairs.

    Every (stage, work) takes its option 0; memory limits are ignored.

    Args: eager: see `one_f_one_b`.
    Source: arXiv:2401.10241 (ZB-H1) on the interleaved placement of arXiv:2104.04473.
    """
    return _delayed(problem, eager, 1, 1)


def _delayed(problem: PlanningProblem, eager: int, ahead: int | None, delay: int) -> Plan:
    """Args: ahead: see `alternate`. delay: of Ws, in pairs for each rank before."""

    def make(extra: Sequence[int]) -> Plan:
        return delay_weights(problem, alternate(problem.graph, ahead, extra), lambda rank: delay * rank)

    return with_eager(problem, eager, make)
