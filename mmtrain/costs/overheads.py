"""What a rank's host does in addition to the compute of its actions, and a planning problem that counts it.

Where the host runs behind its device (a CPU, or a GPU with short actions), each action and each message takes the rank
some time: looking up arguments, starting autograd, posting a transfer, waking up. A search that does not know this
finds plans of many short actions, which look good only in the simulator.
"""

from dataclasses import dataclass, fields, replace

from mmtrain.schedule.action import Kind
from mmtrain.schedule.number_ranges import SECONDS
from mmtrain.schedule.problem import Option, PlanningProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """Seconds of a rank's host in addition to the compute of its actions. All 0: they are hidden, or part of it."""

    forward_s: float = 0.0
    """Seconds of each F: its dispatch, arguments and bookkeeping."""
    backward_s: float = 0.0
    """Seconds of each B: those of an F, and the start of autograd."""
    backward_input_s: float = 0.0
    """Seconds of each I."""
    backward_weight_s: float = 0.0
    """Seconds of each W."""
    send_s: float = 0.0
    """Seconds of each message to another rank, after the action that makes it."""
    receive_s: float = 0.0
    """Seconds of each message from another rank: posting its receive, and taking it once it is there."""
    message_s: float = 0.0
    """The seconds from the end of an action to the start of one that waits for its message, without the transfer:
    waking up."""

    def __post_init__(self) -> None:
        for field in fields(self):
            SECONDS.check(f"overheads.{field.name}", getattr(self, field.name))

    def __add__(self, other: "Overheads") -> "Overheads":
        return Overheads(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    @property
    def split_s(self) -> float:
        """The seconds that I and W take longer together than B."""
        return max(0.0, self.backward_input_s + self.backward_weight_s - self.backward_s)


NO_OVERHEADS = Overheads()

DISPATCH = {Kind.F: "forward_s", Kind.B: "backward_s", Kind.I: "backward_input_s", Kind.W: "backward_weight_s"}
"""Compute kind -> its field of `Overheads`."""


def charged(problem: PlanningProblem, overheads: Overheads) -> PlanningProblem:
    """The problem with the overheads as part of its seconds; orders and option indices keep their meaning.

    Each list of options is copied for each number of messages that its actions receive and send.
    """
    if overheads == NO_OVERHEADS:
        return problem
    graph = problem.graph
    costs: list[tuple[Option, ...]] = []
    index_of: dict[tuple[int, float, float], int] = {}
    rows: list[list[int]] = []
    for work, row in enumerate(problem.cost_index):
        rows.append([])
        for stage, index in zip(graph.stages(work), row, strict=True):
            into, out = (
                [edge.grad for edge in edges if not graph.is_local(edge)]
                for edges in (graph.inputs(stage, work), graph.outputs(stage, work))
            )
            forward_s = overheads.forward_s + len(into) * overheads.receive_s + len(out) * overheads.send_s
            backward_s = overheads.backward_s + sum(out) * overheads.receive_s + sum(into) * overheads.send_s
            key = index, forward_s, backward_s
            if key not in index_of:
                index_of[key] = len(costs)
                costs.append(tuple(_slower(o, forward_s, backward_s, overheads.split_s) for o in problem.costs[index]))
            rows[-1].append(index_of[key])
    return replace(
        problem,
        costs=tuple(costs),
        cost_index=tuple(map(tuple, rows)),
        p2p=replace(problem.p2p, latency_s=problem.p2p.latency_s + overheads.message_s),
    )


def _slower(option: Option, forward_s: float, backward_s: float, split_s: float) -> Option:
    slower = replace(option, forward_s=option.forward_s + forward_s)
    if not option.has_backward:
        return slower
    return replace(slower, backward_input_s=option.backward_input_s + backward_s, split_s=option.split_s + split_s)
