"""ZBV: no bubble between the first and last action of a rank, with the memory of 1F1B."""

from mmtrain.schedule.action import Kind
from mmtrain.schedule.library.v_shape import Slot, Writer, fill
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import PlanningProblem


def zbv(problem: PlanningProblem) -> Plan:
    """The ZBV plan: each rank holds a stage of the way down and one of the way up.

    On one V with F = I = W and at least 2P - 1 microbatches no rank idles between its first and last action, and every
    rank holds the activations of P microbatches, as in 1F1B. See `v_shape.fill` for several modules.

    Source: Qi et al., arXiv:2401.10241, section 6.
    """
    return fill(problem, template, float(problem.graph.num_ranks))


def template(num_ranks: int, num_microbatches: int) -> list[list[Slot]]:
    """The slots of each rank."""
    return [_slots(num_ranks, rank, num_microbatches) for rank in range(num_ranks)]


def _slots(P: int, rank: int, num_microbatches: int) -> list[Slot]:
    write = Writer(num_microbatches)

    def backward(leg: int) -> None:
        write.backward(leg, split=True)
        write.weight(leg)

    # The way down, until the first microbatch comes back up.
    for _ in range(2 * (P - rank) - 1):
        write.forward(0)
    # Down and up alternately, until the first gradient arrives.
    for _ in range(rank):
        write.forward(1)
        write.forward(0)
    # Up and backward, until the gradient is on its way up, too.
    for _ in range(P - rank):
        write.forward(1)
        backward(1)
    # All four in turn, each I directly followed by its W.
    while write.done(Kind.F, 0) < num_microbatches or write.done(Kind.F, 1) < write.done(Kind.F, 0):
        write.forward(0)
        backward(0)
        write.forward(1)
        backward(1)
    # Gradients that other ranks wait for first, their Ws last.
    for _ in range(rank):
        write.backward(0, split=True)
        write.backward(1, split=True)
    for _ in range(P - rank):
        backward(0)
    write.weights()
    return write.slots
