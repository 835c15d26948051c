"""torch's own pipeline schedules on emulated devices, for `benchmarks/emulate_peers.py`.

Schedules, stages, boxes and transfers are those of `torch.distributed.pipelining`, through its public classes; only
what a stage computes is replaced, as in `benchmarks/emulation.py`: it spends the seconds of the plan's options on
the same clock, and a message carries the moment it was made, before which plus its transfer time nobody uses it.

*Where the seconds go.* torch splits a backward by the autograd graph: I runs the nodes on the way from the output to
the input, W those from there to the weights, B both. So a chunk is one node of each sort. The node of the weights runs
first in B, and spends all of it, which is less than I and W where exchanges lie under weight gradients; after I it
spends W. In the first stage nothing is on the way to an input: I does nothing there, and W spends all of B.
`as_torch_splits` makes a problem of that, by which virtual time is exact.

*In torch's favour.* A message of torch has one shape for all microbatches, here the largest, but takes the transfer
time of its own bytes, and from when it was made, not from when torch sends it.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from emulation import EmulatedClock, message_shapes
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble

from mmtrain.errors import PlanError
from mmtrain.parallel.mesh import Mesh
from mmtrain.schedule.action import Kind
from mmtrain.schedule.graph import Edge
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import Option, PlanningProblem

SCHEDULES = {
    "torch 1F1B": Schedule1F1B,
    "torch Interleaved1F1B": ScheduleInterleaved1F1B,
    "torch ZBVZeroBubble": ScheduleZBVZeroBubble,
}
"""Peer -> its class in torch."""
_HEADER = 8
"""Elements of float32 that the header of a message takes: four of float64."""


class Meter:
    """A stage's view of its rank's clock, which notes what the stage spends."""

    def __init__(self, clock: EmulatedClock) -> None:
        self._clock = clock
        self.asked_s = 0.0
        """Seconds that were to be spent."""
        self.taken_s = 0.0
        """What they took."""
        self.ends_s: list[float] = []
        """When each spending was over."""

    def start(self, group: Any) -> None:
        """Sets the zero of the rank's clock. Collective over the group."""
        self._clock.start(group)

    def now(self) -> float:
        """Seconds since zero."""
        return self._clock.now()

    def spend(self, seconds: float) -> None:
        """Returns so many seconds later."""
        start_s = self.now()
        self._clock.spend(seconds)
        self.ends_s.append(self.now())
        self.asked_s += seconds
        self.taken_s += self.ends_s[-1] - start_s

    def wait_until(self, moment_s: float) -> None:
        """Returns at a moment, or at once if it is over."""
        self._clock.wait_until(moment_s)


def as_torch_splits(problem: PlanningProblem) -> PlanningProblem:
    """The chain where I of the first stage takes no time, and W all of it, as in torch's split of a backward."""
    costs, index = list(problem.costs), [list(row) for row in problem.cost_index]
    for row in index:
        costs.append(tuple(_weight_alone(option) for option in problem.costs[row[0]]))
        row[0] = len(costs) - 1
    return replace(problem, costs=tuple(costs), cost_index=tuple(map(tuple, index)))


def _weight_alone(option: Option) -> Option:
    whole_s = option.duration_s(Kind.B)
    return replace(option, backward_input_s=0.0, backward_exchange_s=0.0, backward_weight_s=whole_s, split_s=0.0)


class TorchPipeline:
    """One rank of a chain under one of torch's schedules."""

    def __init__(self, peer: str, problem: PlanningProblem, plan: Plan, mesh: Mesh, message_scale: float) -> None:
        """Args:
        problem: one module, whose work w is microbatch w, on the CPU.
        plan: whose options are spent; torch has its own orders.
        message_scale: of the problem's bytes, how many the largest message has.
        Raises: PlanError: a stage has no backward.
        """
        graph = problem.graph
        if not all(graph.has_backward(*node) for node in graph.nodes()):
            raise PlanError(f"{peer}: a stage has no backward for some microbatch, but torch runs one; leave it out")
        shape_of = message_shapes(problem, message_scale)
        shape = (1, max(math.prod(shape_of(*node)) for node in graph.nodes()))
        self._count, self._group = len(graph.works), mesh.pp_group
        self.chunks = {s: _Chunk(s, problem, plan, shape) for s in graph.stages_of_rank(mesh.pp_rank)}
        given = {s: torch.empty(shape, requires_grad=True) if s else torch.empty(1, 1) for s in self.chunks}
        stages = [
            PipelineStage(
                chunk,
                s,
                len(graph.stage_rank),
                mesh.device,
                input_args=given[s],
                output_args=torch.empty(shape, requires_grad=True),
                group=mesh.pp_group,
            )
            for s, chunk in self.chunks.items()
        ]
        kind = SCHEDULES[peer]
        self._schedule = kind(
            stages[0] if kind is Schedule1F1B else stages,
            n_microbatches=self._count,
            loss_fn=lambda output, target: output.mean(),
            scale_grads=False,
        )

    def run(self, clock: EmulatedClock) -> dict[int, Meter]:
        """Stage -> what it spent in one step. Collective. Raises: RuntimeError: from torch; a wrong message came."""
        for chunk in self.chunks.values():
            chunk.clock, chunk.begun = Meter(clock), set()
        inputs = (torch.zeros(self._count, 1),) if 0 in self.chunks else ()
        microbatches = torch.arange(self._count)
        clock.start(self._group)
        self._schedule.step(*inputs, target=microbatches, microbatch=microbatches, return_outputs=False)
        return {stage: chunk.clock for stage, chunk in self.chunks.items()}


class _Chunk(nn.Module):
    """Stands for a stage's layers."""

    clock: Meter
    begun: set[int]
    """Works whose backward has run in part."""

    def __init__(self, stage: int, problem: PlanningProblem, plan: Plan, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.stage, self.problem, self.plan, self.shape = stage, problem, plan, shape

    def forward(self, x: Tensor, microbatch: Tensor) -> Tensor:
        """Args: x: a message, or in the first stage anything. microbatch: [1], its number."""
        work = int(microbatch)
        for edge in self.problem.graph.inputs(self.stage, work):
            self.arrived(x, edge, forward=True)
        return _Output.apply(_ToInput.apply(x, self, work), _ToWeight.apply(self.weight, self, work), self, work)

    def spend(self, kind: Kind, work: int) -> None:
        """Spends the seconds of an action."""
        self.clock.spend(self.plan.option(self.problem, self.stage, work).duration_s(kind))

    def spend_backward(self, work: int, first: Kind, second: Kind | None) -> None:
        """Spends the seconds of `first` where nothing of this backward has run yet, otherwise those of `second`."""
        kind = second if work in self.begun else first
        self.begun.add(work)
        if kind:
            self.spend(kind, work)

    def message(self, edges: tuple[Edge, ...], forward: bool) -> Tensor:
        """What is sent on over an edge, if there is one."""
        message = torch.ones(self.shape)
        for edge in edges:
            header = torch.tensor([self.clock.now(), edge.source, edge.work, forward], dtype=torch.float64)
            message[0, :_HEADER] = header.view(torch.float32)
        return message

    def arrived(self, message: Tensor, edge: Edge, forward: bool) -> None:
        """Waits until a message is there. Raises: PlanError: it is another."""
        left_s, *name = message.detach()[0, :_HEADER].view(torch.float64).tolist()
        if name != [edge.source, edge.work, forward]:
            raise PlanError(f"stage {self.stage}: awaited (source, work, forward) of {edge}, {forward}; {name} came")
        self.clock.wait_until(left_s + self.problem.transfer_s(edge))


class _ToInput(Function):
    """The way from the output to the input: its backward is I, or the end of B."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, chunk: _Chunk, work: int) -> Tensor:
        ctx.chunk, ctx.work = chunk, work
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.chunk.spend_backward(ctx.work, Kind.I, None)
        return ctx.chunk.message(ctx.chunk.problem.graph.inputs(ctx.chunk.stage, ctx.work), False), None, None


class _ToWeight(Function):
    """The way from there to the weight: its backward is W after I, and otherwise B.

    Made after `_ToInput`, so that autograd runs it before that one in B, whose gradient leaves at the very end.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, chunk: _Chunk, work: int) -> Tensor:
        ctx.chunk, ctx.work = chunk, work
        return weight.detach().clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.chunk.spend_backward(ctx.work, Kind.B, Kind.W)
        return grad, None, None


class _Output(Function):
    """Joins the two; I and W both run its backward, which the gradient of the next stage must have reached."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, chunk: _Chunk, work: int) -> Tensor:
        ctx.chunk, ctx.work = chunk, work
        chunk.spend(Kind.F, work)
        return chunk.message(chunk.problem.graph.outputs(chunk.stage, work), True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        for edge in ctx.chunk.problem.graph.outputs(ctx.chunk.stage, ctx.work):
            ctx.chunk.arrived(grad, edge, forward=False)
        return grad.new_zeros(()), grad.new_ones(()), None, None
