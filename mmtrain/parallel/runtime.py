"""Runs a lowered program on this rank: a table from action kind to handler, no scheduling decision.

`PipelineScheduleRuntime` is a subclass of torch's `_PipelineScheduleRuntime`, so that it is one wherever torch or a
user asks. Of torch's class it uses the bookkeeping of gathered parameters. The dispatch loop is its own, since torch's
makes a profiler range, its name and a context for every action. Chain topology, fixed shapes, loss order and adjacency
checks are replaced by the work graph: works are identified by their index, transfers by their edge, losses by work.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mmtrain.errors import PlanError
from mmtrain.models.transfer import to_host
from mmtrain.parallel.action_clock import ActionClock, Times
from mmtrain.parallel.bound_actions import BoundAction, in_turns, split_works
from mmtrain.parallel.bound_instructions import Functions, Instructions
from mmtrain.parallel.passes import Block, filled
from mmtrain.parallel.stage import KeyOf, ModalityStage, ShapeOf
from mmtrain.parallel.torch_private import TorchScheduleRuntime, profiling, reduce_grads, wait_unsharded
from mmtrain.schedule.action import BACKWARD, BRAID, COMPUTE, KINDS, NOT_COMPUTE, STAGE_WIDE, WAITS, Action, Kind
from mmtrain.schedule.graph import WorkGraph
from mmtrain.schedule.passes.lower import Program
from mmtrain.schedule.passes.release import Transfer, releases, transfers
from mmtrain.spec.memory_strategies import StageMemory

Handler = Callable[[BoundAction], None]
RunPass = Callable[[], None]

Feed = Callable[[int, int], tuple[tuple[Any, ...], dict[str, Any]]]
"""A function (stage, work) -> positional and keyword arguments of the chunk's forward, before its received inputs."""


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """What one run of a program left on this rank."""

    losses: dict[int, Tensor] = field(default_factory=dict)
    """The sum of the loss over each work's targets, detached; on the rank of the last stage."""
    predictions: dict[int, Tensor] = field(default_factory=dict)
    """The predicted token of each labelled position of a work, if the feed asked for them."""
    position_losses: dict[int, Tensor] = field(default_factory=dict)
    """The loss [L] of each labelled position of this rank by work, detached; of a job that reports losses by source."""
    times: Callable[[], Times] = lambda: ((), (0.0, 0.0))
    """Reads the clock; waits for the device until the program has ended."""

    def on_host(self, *others: Tensor) -> tuple["StepOutcome", tuple[Tensor, ...]]:
        """The outcome with its tensors on the host, and other tensors there: the one wait of a step."""
        moved = self.losses, self.predictions, self.position_losses, others
        losses, predictions, position_losses, on_host = to_host(moved)
        outcome = replace(self, losses=losses, predictions=predictions, position_losses=position_losses)
        return outcome, on_host

    @cached_property
    def _times(self) -> Times:
        return self.times()

    @property
    def rows(self) -> tuple[tuple[Action, float, float], ...]:
        """Every compute action and instruction with its start and end, seconds on this host's monotonic clock (unless
        `use_clock`). Waits for the device, so read it when the step has."""
        return self._times[0]

    @property
    def span(self) -> tuple[float, float]:
        """Start and end of the program on this rank, same clock. Waits as `rows`."""
        return self._times[1]


class PipelineScheduleRuntime(TorchScheduleRuntime):
    """torch's runtime of action lists, over a work graph that is new in every step."""

    def __init__(self, stages: Sequence[ModalityStage], *, reduced: Callable[[int], None] = lambda stage: None) -> None:
        """Args: reduced: called after the REDUCE of a stage."""
        super().__init__(list(stages), n_microbatches=1, loss_fn=None, scale_grads=False)
        self._by_index = {stage.stage_index: stage for stage in stages}
        self._reduced = reduced
        self._feed: Feed | None = None
        self._loss_grad: Tensor | None = None
        self._calls: list[tuple[Handler, BoundAction]] = []
        self._pending: dict[Transfer, tuple[dist.Work, Tensor]] = {}
        self._sent: dict[Transfer, tuple[dist.Work, Tensor]] = {}
        self._clock = ActionClock(stages[0].device)
        self._losses: dict[int, Tensor] = {}
        self._predictions: dict[int, Tensor] = {}
        self._position_losses: dict[int, Tensor] = {}
        self._instructions: Instructions | None = None
        self._running: Action | None = None
        self._awaited: Transfer | None = None
        self._block = Block(stages[0].device)
        self._passes: dict[Kind, Callable[[BoundAction], RunPass]] = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.I: self._backward,
            Kind.W: self._backward_weight,
        }
        """Makes the computation of a pass whose inputs are there."""
        self._handlers: dict[Kind, Handler] = {
            **dict.fromkeys((*COMPUTE, BRAID), self._compute),
            Kind.SEND_F: self._send,
            Kind.RECV_F: self._receive,
            Kind.SEND_B: self._send,
            Kind.RECV_B: self._receive,
            Kind.UNSHARD: self._unshard,
            Kind.REDUCE: self._reduce,
            Kind.RESHARD: self._reshard,
        }
        # A wait is part of the compute action that it stands before.
        assert set(self._handlers) == set(KINDS) - WAITS | {BRAID}, "a kind of action has no handler"

    def load(
        self,
        program: Program,
        shape_of: ShapeOf,
        functions: Functions = MappingProxyType({}),
        key_of: KeyOf | None = None,
    ) -> None:
        """Makes `program` the one that `step` runs.

        Args: functions: of its instructions. key_of: of the dropout of each work; None: nothing is dropped.
        Raises: PlanError: a wait is at the wrong position, a transfer has no edge, a backward is not B, or I and then
            W, a block is not of two passes that the runtime can run in turns, or the name of a memory option is not one
            for its stage, or an instruction has no function.
        """
        graph, actions = program.graph, program.actions[self.rank]
        moved = transfers(program, self.rank)
        arrivals = releases(program, self.rank, moved)
        strategies = self._strategies(program)
        instructions = Instructions(graph, functions)
        calls: list[tuple[Handler, BoundAction]] = []
        computes: list[tuple[int, BoundAction]] = []
        waits: list[tuple[Transfer, tuple[Transfer, ...]]] = []
        for index, action in enumerate(actions):
            kind = action.kind
            if kind in WAITS:
                waits.append((moved[index], arrivals.get(index, ())))
                continue
            if waits and (kind in NOT_COMPUTE or kind not in self._handlers):
                raise PlanError(
                    f"rank {self.rank}, step {index}, action {action}: a wait must stand right before the compute "
                    f"action that needs it, but {actions[index - 1]} stands before this one"
                )
            if kind not in self._handlers:
                bound = self._bind(action, graph)
                instructions.bind(bound, f"rank {self.rank}, step {index}")
                calls.append((self._instruct, bound))
                continue
            bound = BoundAction(action, self._by_index[action.stage])
            if kind not in NOT_COMPUTE:
                bound.waits = tuple(waits)
                bound.parts = tuple(self._bind(part, graph) for part in in_turns(action, self.rank, index))
                if computes:
                    backwards = (part for part in bound.parts if part.action.kind in BACKWARD)
                    computes[-1][1].prefetched = tuple((part.stage, part.work) for part in backwards)
                computes.append((index, bound))
                waits = []
            elif kind not in STAGE_WIDE:
                bound.transfer = moved[index]
            calls.append((self._handlers[kind], bound))
        if waits:
            raise PlanError(f"rank {self.rank}: {actions[-1]} is the last action, but nothing needs what it waits for")
        split = split_works(computes, self.rank)
        self._calls, self._instructions = calls, instructions
        for index, stage in self._by_index.items():
            stage.start_step(graph, shape_of, split.get(index, ()), strategies.get(index, {}), key_of)

    def _bind(self, action: Action, graph: WorkGraph) -> BoundAction:
        """A pass with its work, and where its result goes."""
        kind, stage = action.kind, action.stage
        bound = BoundAction(action, self._by_index[stage], work=graph.work_of(action))
        if kind is Kind.F:
            edges = graph.outputs(stage, bound.work)
            bound.makes_loss = not edges
            bound.moves = tuple((e, self._by_index[e.target]) for e in edges if graph.is_local(e))
        elif kind in BACKWARD:
            edges = graph.inputs(stage, bound.work)
            bound.moves = tuple((e, self._by_index[e.source]) for e in edges if e.grad and graph.is_local(e))
        return bound

    def _strategies(self, program: Program) -> dict[int, dict[int, StageMemory]]:
        """Stage of this rank -> work -> how its blocks treat their activations.

        Raises: PlanError: a name that does not fit the stage, or one for a work that the stage does not have.
        """
        options: dict[int, dict[int, StageMemory]] = {index: {} for index in self._by_index}
        for (index, work), name in program.memory.items():
            if index not in options:
                continue  # of another rank
            where = f"rank {self.rank}, stage {index}, work {work}"
            if not (0 <= work < len(program.graph.works) and index in program.graph.stages(work)):
                raise PlanError(f"{where}: a memory option {name!r}, but the stage does not have this work")
            try:
                options[index][work] = StageMemory.parse(name, self._by_index[index].memory.num_blocks)
            except PlanError as error:
                raise PlanError(f"{where}: {error}") from None
        return options

    def step(self, feed: Feed, *, loss_grad: float = 1.0) -> StepOutcome:  # type: ignore[override]
        """Runs the loaded program once.

        Args:
            feed: arguments of each chunk's forward.
            loss_grad: gradient of the objective by each work's loss sum: 1 / number of targets of the batch.
        Raises: PlanError: a tensor was made and never used.
        """
        self._feed = feed
        self._loss_grad = torch.full((), loss_grad, device=self._stages[0].device)  # no copy that the host waits for
        self._losses, self._predictions, self._position_losses, self._awaited = {}, {}, {}, None
        self._clock.start()
        try:
            self._step_microbatches()
        except Exception as error:
            error.add_note(f"while this rank was {self.doing}")
            raise
        finally:
            self._feed = None
        for work, _ in self._sent.values():
            work.wait()
        self._running = None
        self._sent.clear()
        times = self._clock.stop()
        leftovers = [text for stage in self._by_index.values() for text in stage.leftovers()]
        leftovers += [f"transfer of {edge} started and never waited for" for edge, _ in self._pending]
        leftovers += [f"stage {index}: parameters gathered" for index in self.unshard_ops]
        if leftovers:
            raise PlanError(f"rank {self.rank}: a step ended with unused tensors: {'; '.join(leftovers)}")
        return StepOutcome(
            losses=self._losses,
            predictions=self._predictions,
            position_losses=self._position_losses,
            times=times,
        )

    @property
    def doing(self) -> str:
        """The action that runs now, and the transfer that it waits for; empty between two steps."""
        if self._running is None:
            return ""
        if self._awaited is None:
            return f"in {self._running}"
        edge, forward = self._awaited
        stage, what = (edge.source, "output") if forward else (edge.target, "gradient")
        graph = self._by_index[self._running.stage].graph
        assert graph is not None
        return f"in {self._running}, for the {what} of stage {stage} from pp rank {graph.stage_rank[stage]}"

    def use_clock(self, clock: Callable[[], float]) -> None:
        """Times the actions of coming steps on another clock of the host; on a device events are used all the same."""
        self._clock.host = clock

    def register_custom_function(self, *args: Any, **kwargs: Any) -> None:
        """Raises: NotImplementedError: handlers are methods here."""
        raise NotImplementedError("the handlers of this runtime are its methods; override one in a subclass")

    def _step_microbatches(self, *args: Any, **kwargs: Any) -> None:
        """Runs the loaded actions; while a profiler records, each of them in a range of its name."""
        if profiling():
            for handler, bound in self._calls:
                self._running = bound.action
                with torch.profiler.record_function(f"PP:{bound.action}"):
                    handler(bound)
            return
        for handler, bound in self._calls:
            self._running = bound.action
            handler(bound)

    # ------------------------------------------------------------------------------------ handlers

    def _compute(self, bound: BoundAction) -> None:
        """Runs the pass of a compute action, or both of a block in turns."""
        self._ready(bound)
        passes = [self._passes[part.action.kind](part) for part in bound.parts]
        for stage, work in bound.prefetched:
            stage.prefetch(work)
        start = self._clock.now()
        if len(passes) == 1:
            passes[0]()
        elif bound.parts[1].action.kind is Kind.W:
            alone, weights = bound.parts
            with filled(weights.stage.some_weights(weights.work, alone.stage.num_exchanges)):
                passes[0]()
            passes[1]()
        else:
            self._block.run(passes[0], passes[1], shared=list({part.stage: None for part in bound.parts}))
        self._clock.record(bound.action, start)
        for part in bound.parts:
            forward = part.action.kind is Kind.F
            for edge, stage in part.moves:
                if forward:
                    stage.inbox[edge] = part.stage.outbox.pop(edge)
                else:
                    stage.grad_inbox[edge] = part.stage.grad_outbox.pop(edge)

    def _forward(self, bound: BoundAction) -> RunPass:
        assert self._feed is not None and self._instructions is not None
        instructions = self._instructions
        stage, work = bound.stage, bound.work
        args, kwargs = self._feed(stage.stage_index, work)

        def run() -> None:
            output = stage.forward_one_chunk(work, args, kwargs)
            instructions.keep(stage.stage_index, work, output)
            if bound.makes_loss:
                self._losses[work] = output.loss_sum.detach()
                if output.predictions is not None:
                    self._predictions[work] = output.predictions
                if output.losses is not None:
                    self._position_losses[work] = output.losses

        return run

    def _backward(self, bound: BoundAction) -> RunPass:
        stage = bound.stage
        backward = stage.backward_input if bound.action.kind is Kind.I else stage.backward_one_chunk
        return partial(backward, bound.work, loss=self._loss_grad)

    def _backward_weight(self, bound: BoundAction) -> RunPass:
        return partial(bound.stage.backward_weight, bound.work)

    def _instruct(self, bound: BoundAction) -> None:
        """Calls the function of an instruction."""
        assert self._instructions is not None
        start = self._clock.now()
        self._instructions.run(bound)
        self._clock.record(bound.action, start)

    def _ready(self, bound: BoundAction) -> None:
        """Waits for the parameters and the received inputs of an action."""
        for part in bound.parts:
            if part.stage.stays_gathered:
                self._assert_unsharded(part.stage)
        for transfer, arrived in bound.waits:
            arriving, tensor = self._pending.pop(transfer)
            self._awaited = transfer
            arriving.wait()
            self._awaited = None
            edge, forward = transfer
            if forward:
                self._by_index[edge.target].inbox[edge] = tensor
            else:
                self._by_index[edge.source].grad_inbox[edge] = tensor
            for sent in arrived if tensor.numel() else ():  # an empty tensor was never sent, and proves nothing
                self._sent.pop(sent)[0].wait()  # returns at once: the peer has these, or it would not have answered

    def _send(self, bound: BoundAction) -> None:
        assert bound.transfer is not None
        self._sent[bound.transfer] = bound.stage.send(*bound.transfer)

    def _receive(self, bound: BoundAction) -> None:
        assert bound.transfer is not None
        self._pending[bound.transfer] = bound.stage.receive(*bound.transfer)

    def _unshard(self, bound: BoundAction) -> None:
        index = bound.stage.stage_index
        assert index not in self.unsharded_stages and index not in self.unshard_ops, f"{bound.action} comes twice"
        for part in bound.stage.fsdp_modules:
            self.unshard_ops[index].append(part.unshard(async_op=True))

    def _reduce(self, bound: BoundAction) -> None:
        self._finish_unshard(bound.stage)
        if bound.stage.reduces:
            reduce_grads(bound.stage)
        self._reduced(bound.stage.stage_index)

    def _reshard(self, bound: BoundAction) -> None:
        self._finish_unshard(bound.stage)
        for part in bound.stage.fsdp_modules:
            part.reshard()
        self.unsharded_stages.discard(bound.stage.stage_index)

    def _finish_unshard(self, stage: ModalityStage) -> None:
        """A stage without work in this step never waited for its all-gather."""
        if stage.stage_index in self.unshard_ops:
            self._assert_unsharded(stage)
            wait_unsharded(stage.fsdp_modules)
