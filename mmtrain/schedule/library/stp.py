"""STP: forwards and backwards as braided blocks, so that exchanges of tensor parallelism lie under compute."""

from functools import partial

from mmtrain.schedule.action import Kind
from mmtrain.schedule.library import dual_pipe_v
from mmtrain.schedule.library.v_shape import Slot, Writer, fill
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import PlanningProblem


def stp(problem: PlanningProblem) -> Plan:
    """The STP plan: from the first backwards on, each rank runs blocks of a forward and a backward of one chunk.

    On one V with F = I = W, at least 3P - 1 microbatches, and blocks that hide all exchanges AR of a chunk, the
    makespan is 2M(F + I + W) + (P - 1)(F + I - W) + (4P - 1)AR in seconds of one chunk, and rank r exposes
    (2P + 1 + r)AR. At most 3P activations of a chunk are held between actions, and one more within a block, if W needs
    none; else 4P - 1.
    With fewer microbatches, but at least 2P, fewer forwards run in blocks with the first Ws: M - 2P on a rank. With
    fewer than 2P it has the order of DualPipeV, in blocks. See `v_shape.fill` for several modules.

    Source: Qi et al., Synergistic Tensor and Pipeline Parallelism, section 4.2 and figure 5.
    """
    return fill(problem, template, 1.5 * problem.graph.num_ranks, braided=True)


def stp_lean(problem: PlanningProblem) -> Plan:
    """The plan of STP with the least warm-up after which blocks have a forward and a backward of one chunk.

    Ranks run one more forward before the first blocks, not r + 1 and then one in each block: on one V and at least 2P
    microbatches 2P + 1 activations of a chunk are held between actions, if W needs none; else 3P. With F = I = W, and
    blocks that hide all exchanges AR of a chunk, the makespan is 2M(F + I + W) + 3(P - 1)F + (2P + 1)AR in seconds of
    one chunk. With fewer microbatches it has the order of DualPipeV, in blocks. See `v_shape.fill` for several modules.

    Source: the idea of Qi et al., Synergistic Tensor and Pipeline Parallelism, figure 11b; the order is our own.
    """
    return fill(problem, partial(template, lean=True), problem.graph.num_ranks + 0.5, braided=True)


def template(num_ranks: int, num_microbatches: int, *, lean: bool = False) -> list[list[Slot]]:
    """The slots of each rank."""
    if num_microbatches < 2 * num_ranks:
        return dual_pipe_v.template(num_ranks, num_microbatches)
    return [_slots(num_ranks, rank, num_microbatches, lean) for rank in range(num_ranks)]


def _slots(P: int, rank: int, num_microbatches: int, lean: bool) -> list[Slot]:
    behind = P - 1 - rank
    write = Writer(num_microbatches)
    # More forwards down, before and with the gradients; with 3P - 1 microbatches the latter are as many as these.
    num_early, num_late = (1, 0) if lean else (rank + 1, min(behind, num_microbatches - 2 * P))
    # The way down, until the first microbatch comes back up; then both directions, and one microbatch more each.
    for _ in range(2 * behind):
        write.forward(0)
    for _ in range(rank + 1):
        write.forward(0)
        write.forward(1)
    for _ in range(num_early):
        write.forward(0)
    # The first gradients, split, so that they are sent sooner.
    for i in range(behind):
        write.block(1, Kind.I)
        if i < num_late:
            write.block(0, Kind.W)
        else:
            write.weight()
    # Both chunks in turns; the last ones split, so that Ws remain.
    num_down = 2 * behind + rank + 1 + num_early + num_late
    num_blocks = 2 * (num_microbatches - num_down) + 1
    for i in range(num_blocks):
        write.block(1 - i % 2, Kind.B if i < num_blocks - rank else Kind.I)
    # Forwards of the way up alone remain.
    for _ in range(num_down - P - 1):
        write.backward(0)
        write.block(1, Kind.I)
    # Gradients only, with the Ws in the waits of the ranks.
    for _ in range(rank + 1):
        write.backward(0)
        write.backward(1)
    write.backward(0)
    for _ in range(behind):
        write.weight()
        write.weight()
        write.backward(0)
    while write.due:
        write.weight()
    return write.slots
