"""The handcrafted zero-bubble schedules: 1F1B orders whose Ws fill the bubbles.

Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, arXiv:2401.10241, section 2. Generalised from a chain to
a work graph as in `one_f_one_b`: the schedules count pairs of a microbatch and a stage.
"""

from mmtrain.schedule.library.one_f_one_b import alternate
from mmtrain.schedule.library.weights import delay_weights
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import PlanningProblem


def zb_h1(problem: PlanningProblem) -> Plan:
    """1F1B with the Ws of rank r delayed by r pairs: the bubble of 1F1B less 2(P - 1) Ws.

    On a chain with W at most F and I the bubble is (P - 1)(F + I - W), and every rank holds the activations of 1F1B's
    first rank. Every (stage, work) takes its option 0; memory limits are ignored.

    Source: arXiv:2401.10241, section 2.2 (ZB-H1).
    """
    return delay_weights(problem, alternate(problem.graph), lambda rank: rank)


def zb_h2(problem: PlanningProblem) -> Plan:
    """Twice the forwards of 1F1B in flight, and the Ws of rank r delayed by 2r pairs.

    On a chain with F = I = W no rank idles between its first and last action; up to 2P - 1 microbatches are held. Every
    (stage, work) takes its option 0; memory limits are ignored.

    Source: arXiv:2401.10241, section 2.3 (ZB-H2).
    """
    return delay_weights(problem, alternate(problem.graph, ahead=2), lambda rank: 2 * rank)


def interleaved_zero_bubble(problem: PlanningProblem) -> Plan:
    """Interleaved 1F1B with the shorter warm-up of plain 1F1B, and the Ws of rank r delayed by r pairs.

    Every (stage, work) takes its option 0; memory limits are ignored.

    Source: arXiv:2401.10241 (ZB-H1) on the interleaved placement of arXiv:2104.04473.
    """
    return delay_weights(problem, alternate(problem.graph, ahead=1), lambda rank: rank)
