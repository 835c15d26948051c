"""Emulated devices: the runtime as it is, on stages that spend modelled seconds instead of computing.

Processes, process groups, transfers, boxes of activations and gradients, autograd and deferred weight gradients are
the real ones. A stage's layers are one weight, whose output has as many bytes as the problem says. How long an action
takes comes from the planning problem, as in the simulator, and is spent on one of two clocks:

- `VirtualClock`: a number that actions and messages move. Nothing waits, so that the load of the machine does not
  matter, and the executed timeline must equal the simulated one.
- `HostClock`: the host's, on which actions really wait. It shows what the runtime costs beside its stages.

Where layers run as units and all exchanges can be hidden, an action on the host's clock is a row of units: compute, and
an exchange on the rank's link, a second clock. The runtime's passes take turns at these exchanges as at real ones, so
that how much a block hides is what they do, and not what the formula says. In virtual time a block takes the seconds
of the formula, and spends them in its first pass.

Each message begins with a header: the time at which it left, and which transfer it is.

Source of the virtual clock: Lamport, Time, clocks, and the ordering of events in a distributed system, Comm. ACM 21(7),
1978.
"""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmtrain.errors import PlanError
from mmtrain.models.loss import LossOutput
from mmtrain.parallel import passes
from mmtrain.parallel.mesh import Mesh
from mmtrain.parallel.runtime import PipelineScheduleRuntime, StepOutcome
from mmtrain.parallel.stage import Arriving, ModalityStage, ShapeOf
from mmtrain.schedule.action import BRAID, Kind
from mmtrain.schedule.graph import Edge, WorkGraph
from mmtrain.schedule.option import Load
from mmtrain.schedule.passes.lower import Program, lower
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.timeline import Timeline

_FLOAT_BYTES = 4
"""Of an element of an emulated activation."""
UNITS = 8
"""Of one action on the host's clock."""
_HEADER = 10
"""Elements that the header takes: five float64."""


class EmulatedClock(Protocol):
    """A rank's clock: seconds from a zero that all ranks share."""

    def start(self, group: dist.ProcessGroup) -> None:
        """Sets the zero. Collective over the group."""

    def now(self) -> float:
        """Seconds since zero."""

    def spend(self, seconds: float) -> None:
        """Returns so many seconds later."""

    def wait_until(self, moment_s: float) -> None:
        """Returns at a moment, or at once if it is over."""


class VirtualClock:
    """A clock that stands still but for what is spent and waited for."""

    def __init__(self) -> None:
        self._now = 0.0

    def start(self, group: dist.ProcessGroup) -> None:
        """Sets the zero."""
        self._now = 0.0

    def now(self) -> float:
        """Seconds since zero."""
        return self._now

    def spend(self, seconds: float) -> None:
        """Moves the clock."""
        self._now += seconds

    def wait_until(self, moment_s: float) -> None:
        """Moves the clock to a moment that is not over."""
        self._now = max(self._now, moment_s)


class HostClock:
    """The host's clock, on which spending is sleeping. All ranks are processes of one host."""

    LEAD_S = 0.005
    """From the agreement on zero to zero itself, so that every rank knows it before."""
    SPIN_S = 0.0002
    """Of a wait that the process is awake: sleep ends late, by about a tenth of a millisecond."""

    def __init__(self) -> None:
        self._zero = time.perf_counter()

    def start(self, group: dist.ProcessGroup) -> None:
        """Waits for all ranks, and for a moment shortly after that is zero for all of them."""
        latest = torch.tensor([time.perf_counter()], dtype=torch.float64)
        dist.all_reduce(latest, op=dist.ReduceOp.MAX, group=group)
        self._zero = float(latest) + self.LEAD_S
        self.wait_until(0.0)

    def now(self) -> float:
        """Seconds since zero."""
        return time.perf_counter() - self._zero

    def spend(self, seconds: float) -> None:
        """Sleeps. What the caller does before and after comes on top, as a host's work beside its device would."""
        self.wait_until(self.now() + seconds)

    def wait_until(self, moment_s: float) -> None:
        """Sleeps until a moment; never returns before it."""
        left = moment_s - self.now()
        if left > self.SPIN_S:
            time.sleep(left - self.SPIN_S)
        while self.now() < moment_s:
            pass


class Link:
    """The link of a rank to those that divide its layers: exchanges follow each other, beside compute."""

    def __init__(self, clock: EmulatedClock) -> None:
        self._clock = clock
        self._free_s = 0.0
        self.exchanged_s = 0.0
        """Seconds of all exchanges."""
        self.exposed_s = 0.0
        """Seconds of them in which the rank waited."""

    def exchange(self, seconds: float) -> None:
        """One exchange of the pass that runs, which waits for it behind other compute."""
        self._free_s = max(self._clock.now(), self._free_s) + seconds
        self.exchanged_s += seconds
        passes.exchange(_Exchanging(self, self._free_s))

    def wait_until(self, moment_s: float) -> None:
        """Waits for the end of an exchange."""
        start = self._clock.now()
        self._clock.wait_until(moment_s)
        self.exposed_s += self._clock.now() - start


class _Exchanging(dist.Work):
    def __init__(self, link: Link, end_s: float) -> None:
        super().__init__()
        self._link, self._end_s = link, end_s

    def wait(self, timeout: Any = None) -> bool:
        self._link.wait_until(self._end_s)
        return True


class _Chunk(nn.Module):
    """Stands for a stage's layers: one weight, which is 1 at first.

    Every element of its output is the mean of its inputs times the weight, or the weight alone: all activations are 1,
    each loss is 1, and the weight's gradient says how much of the losses came back over the stage.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.linear.weight)

    def forward(self, *inputs: Tensor, shape: tuple[int, ...] | None) -> Tensor | LossOutput:
        """An activation of a shape, or the loss where there is none."""
        x = torch.stack([x.mean() for x in inputs]).mean() if inputs else torch.ones(())
        y = self.linear(x.reshape(1, 1))
        return LossOutput(y.sum()) if shape is None else y.reshape(()).expand(shape).contiguous()


class EmulatedStage(ModalityStage):
    """A stage that spends what its plan says; its messages carry the time at which they left."""

    def __init__(self, index: int, problem: PlanningProblem, mesh: Mesh, clock: EmulatedClock, link: Link) -> None:
        num_stages = len(problem.graph.stage_rank)
        super().__init__(_Chunk(), index, num_stages, mesh.device, mesh.pp_group, mesh.channels, torch.float32)
        self.problem, self.clock, self.link = problem, clock, link
        self.plan: Plan | None = None
        self.in_block: dict[tuple[Kind, int], float] = {}
        """(kind, work) of the passes of blocks -> what is left to spend, in virtual time."""
        self._weight_s: dict[int, float] = {}
        """work -> seconds that its W has still to spend, of those of which a part ran under exchanges."""

    @property
    def weight_grad(self) -> float:
        """Of the stage's one weight, since it was built."""
        grad = self.submod.linear.weight.grad
        return 0.0 if grad is None else float(grad)

    def _spend(self, kind: Kind, work: int) -> None:
        assert self.plan is not None
        option = self.plan.option(self.problem, self.stage_index, work)
        if option.contention > 0 or isinstance(self.clock, VirtualClock):
            self.clock.spend(self.in_block.get((kind, work), option.duration_s(kind)))
        elif kind is Kind.W:
            self.clock.spend(self._weight_s.pop(work, option.duration_s(Kind.W)))
        else:
            self._spend_units(option.load(kind))

    def _spend_units(self, load: Load) -> None:
        """Spends an F, I or B unit by unit: weight gradients run under the exchanges of their backward."""
        compute_s, exchange_s = load.forward_s + load.input_s, load.forward_exchange_s + load.input_exchange_s

        def weight(_: bool) -> None:
            self.clock.spend(load.weight_s / UNITS)

        with passes.filled(weight) if load.weight_s else nullcontext():
            for _ in range(UNITS):
                self.clock.spend(compute_s / UNITS)
                self.link.exchange(exchange_s / UNITS)
        self.num_exchanges = UNITS

    def some_weights(self, work: int, num_exchanges: int = 0) -> passes.Fill:
        """As the stage's: a part of W's seconds for each exchange of another pass."""
        assert self.plan is not None
        option = self.plan.option(self.problem, self.stage_index, work)
        if not num_exchanges or option.contention > 0 or isinstance(self.clock, VirtualClock):
            return lambda _: None
        piece_s = option.duration_s(Kind.W) / num_exchanges
        self._weight_s[work] = option.duration_s(Kind.W)

        def spend(_: bool) -> None:
            self.clock.spend(piece_s)
            self._weight_s[work] -= piece_s

        return spend

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = False,
    ) -> Any:
        """As the stage's, and the seconds of F."""
        output = super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)
        self._spend(Kind.F, fwd_chunk_id)
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """As the stage's, and the seconds of B or I."""
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self._spend(Kind.B if full_backward else Kind.I, bwd_chunk_id)

    def backward_weight(self, work: int) -> None:
        """As the stage's, and the seconds of W."""
        super().backward_weight(work)
        self._spend(Kind.W, work)

    def send(self, edge: Edge, forward: bool) -> tuple[dist.Work, Tensor]:
        """As the stage's, with a header in the first elements."""
        box = self.outbox if forward else self.grad_outbox
        message = box[edge].clone()  # other edges may have the same memory
        header = torch.tensor([self.clock.now(), *_name(edge, forward)], dtype=torch.float64)
        message[:_HEADER] = header.view(torch.float32)
        box[edge] = message
        return super().send(edge, forward)

    def receive(self, edge: Edge, forward: bool) -> tuple[dist.Work, Tensor]:
        """As the stage's; what it returns waits until the message has arrived by the clock.

        Raises: PlanError: from that wait, if another message came.
        """
        work, tensor = super().receive(edge, forward)
        return Arriving(work, lambda: self._arrive(tensor, edge, forward)), tensor

    def _arrive(self, message: Tensor, edge: Edge, forward: bool) -> None:
        left_s, *name = message[:_HEADER].view(torch.float64).tolist()
        if tuple(name) != _name(edge, forward):
            raise PlanError(
                f"rank {self.group_rank}: {_words(*_name(edge, forward))} was awaited, but {_words(*map(int, name))} "
                "came; the two ranks post their transfers in different orders"
            )
        message[:_HEADER] = message[-1]  # all elements were equal
        self.clock.wait_until(left_s + self.problem.transfer_s(edge))


def _name(edge: Edge, forward: bool) -> tuple[int, int, int, int]:
    return int(forward), edge.source, edge.target, edge.work


def _words(forward: int, source: int, target: int, work: int) -> str:
    what = "the activation" if forward else "the gradient of the activation"
    return f"{what} of work {work} from stage {source} to stage {target}"


class EmulatedRuntime(PipelineScheduleRuntime):
    """The runtime of one rank on emulated stages of a problem."""

    def __init__(
        self, problem: PlanningProblem, mesh: Mesh, clock: EmulatedClock, *, message_scale: float = 1.0
    ) -> None:
        """Args:
        mesh: of as many pipeline ranks as the problem has, on the CPU.
        clock: of this rank, of one kind on all ranks.
        message_scale: of the problem's bytes, how many are really sent; transfers take the problem's time.
        Raises: PlanError: another number of ranks, or a rank without a stage.
        """
        graph = problem.graph
        if len(mesh.pp_ranks) != graph.num_ranks:
            raise PlanError(
                f"the problem has {graph.num_ranks} ranks, but {len(mesh.pp_ranks)} run; start as many as it has"
            )
        indices = graph.stages_of_rank(mesh.pp_rank)
        if not indices:
            raise PlanError(f"rank {mesh.pp_rank} holds no stage of the problem; give each rank one")
        self.link = Link(clock)
        self.emulated = [EmulatedStage(index, problem, mesh, clock, self.link) for index in indices]
        super().__init__(self.emulated)
        self.use_clock(clock.now)
        self._problem, self._mesh, self._wait = problem, mesh, clock
        self._shape_of = message_shapes(problem, message_scale)

    def run(self, plan: Plan, program: Program | None = None) -> StepOutcome:
        """What one execution of a plan left on this rank. Collective.

        Args: program: of the plan; None: it is lowered here.
        Raises: PlanError: as `load` and `step`; or a message was another than the one awaited.
        """
        program = program or lower(plan, self._problem, sharded=False)
        for stage in self.emulated:
            stage.plan, stage.in_block = plan, {}
            for entry, work in zip(plan.orders[self._mesh.pp_rank], plan.works[self._mesh.pp_rank], strict=True):
                left_s = self._problem.entry_cost(entry, work, plan.options).seconds
                for part in entry.parts if entry.kind is BRAID else ():
                    if part.stage == stage.stage_index:
                        stage.in_block[part.kind, program.graph.work_of(part)] = left_s
                    left_s = 0.0
        # What blocks do with their activations is in the seconds of the options; there are no blocks.
        self.load(Program(program.graph, program.actions), self._shape_of)
        graph = program.graph

        def feed(stage: int, work: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return (), {"shape": self._shape_of(stage, work) if graph.outputs(stage, work) else None}

        self._wait.start(self._mesh.column_group or self._mesh.pp_group)
        return self.step(feed)

    def timeline(self, outcome: StepOutcome) -> Timeline:
        """The executed timeline of all ranks, on every rank. Collective. Args: outcome: of this rank."""
        rows: list[Any] = [outcome.rows] * len(self._mesh.pp_ranks)
        if len(rows) > 1:
            dist.all_gather_object(rows, outcome.rows, group=self._mesh.pp_group)
        return executed_timeline(self._problem.graph, rows)


def executed_timeline(graph: WorkGraph, rows: Sequence[Sequence[tuple[Any, float, float]]]) -> Timeline:
    """The timeline of what ranks ran. Args: rows: `StepOutcome.rows` of each rank."""
    return Timeline.from_rows(graph, [(rank, *row) for rank, mine in enumerate(rows) for row in mine])


def message_shapes(problem: PlanningProblem, scale: float) -> ShapeOf:
    """Shapes of float32 that have `scale` times the bytes of the problem, but room for more than a header."""

    def shape_of(stage: int, work: int) -> tuple[int, ...]:
        amount = problem.output_bytes[work][problem.graph.position[stage]]
        return (max(_HEADER + 1, round(scale * amount / _FLOAT_BYTES)),)

    return shape_of
