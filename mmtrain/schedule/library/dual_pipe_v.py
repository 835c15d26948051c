"""DualPipeV: forwards and backwards of the two directions in pairs."""

from mmtrain.schedule.action import Kind
from mmtrain.schedule.library.v_shape import Slot, Writer, fill
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import PlanningProblem


def dual_pipe_v(problem: PlanningProblem) -> Plan:
    """The DualPipeV plan: in the steady state a forward of one leg is followed by a backward of the other.

    Where layers run as units, such a pair is one braided block F&B, as in DualPipe; else a plan has F, then B. On one V
    with at least 2P microbatches, and W and I at most F, 2P + 1 activations of a stage are held, and without blocks the
    bubble is (P - 1)(F + I - W), in seconds of one stage. With blocks, whose results are sent at their end, it is the
    published (P - 1)(F&B + B - 3W). See `v_shape.fill` for several modules.

    Source: DeepSeek-AI, DualPipe, arXiv:2412.19437, and the "cut in half" of Qi et al., 2025.
    """
    return fill(problem, template, problem.graph.num_ranks + 0.5, braided=problem.runs_units)


def template(num_ranks: int, num_microbatches: int) -> list[list[Slot]]:
    """The slots of each rank."""
    return [_slots(num_ranks, rank, num_microbatches) for rank in range(num_ranks)]


def _slots(P: int, rank: int, num_microbatches: int) -> list[Slot]:
    behind = P - 1 - rank
    write = Writer(num_microbatches)
    # The way down, until the first microbatch comes back up; then both directions alternately.
    for _ in range(2 * behind):
        write.forward(0)
    for _ in range(rank + 1):
        write.forward(0)
        write.forward(1)
    # The first gradients, split, so that they are sent sooner.
    for _ in range(behind):
        write.backward(1, split=True)
        write.weight()
        write.forward(1)
    # The pairs: down with the gradient of the way up, up with the gradient of the way down.
    for _ in range(num_microbatches - 2 * P + rank + 1):
        write.block(0, Kind.B, 1)
        write.block(1, Kind.B, 0)
    for _ in range(behind):
        write.backward(1)
        write.block(1, Kind.B, 0)
    # Gradients only, split in the second half, so that Ws remain to fill the last waits of the ranks.
    for i in range(rank + 1):
        late = 2 * i >= rank + 1
        write.backward(1, split=late)
        write.backward(0, split=late or 2 * i + 1 >= rank + 1)
    for _ in range(behind):
        write.weight()
        write.backward(0, split=True)
    while write.due:
        write.weight()
    return write.slots
