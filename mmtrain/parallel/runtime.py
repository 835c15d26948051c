"""Runs a lowered program on this rank: a table from action kind to handler, no scheduling decision.

`PipelineScheduleRuntime` is torch's `_PipelineScheduleRuntime` with its dispatch loop and profiler
ranges. Its chain topology, fixed shapes, loss order and adjacency checks are replaced
by the work graph: works are identified by their index, transfers by their edge, losses by work.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mmtrain.errors import PlanError
from mmtrain.parallel.stage import ModalityStage, ShapeOf
from mmtrain.parallel.torch_private import (
    TorchAction,
    TorchKind,
    TorchScheduleRuntime,
    fsdp_modules,
    gathers_itself,
    reduce_grads,
    wait_unsharded,
)
from mmtrain.schedule.action import BACKWARD, COMPUTE, KINDS, STAGE_WIDE, WAITS, Action, Kind
from mmtrain.schedule.passes.lower import Program
from mmtrain.schedule.passes.release import Transfer, releases, transfers
from mmtrain.spec.memory_strategies import StageMemory

TORCH_KINDS: dict[Kind, Any] = {
    Kind.F: TorchKind.FORWARD,
    Kind.B: TorchKind.FULL_BACKWARD,
    Kind.I: TorchKind.BACKWARD_INPUT,
    Kind.W: TorchKind.BACKWARD_WEIGHT,
    Kind.SEND_F: TorchKind.SEND_F,
    Kind.RECV_F: TorchKind.RECV_F,
    Kind.SEND_B: TorchKind.SEND_B,
    Kind.RECV_B: TorchKind.RECV_B,
    Kind.UNSHARD: TorchKind.UNSHARD,
    Kind.RESHARD: TorchKind.RESHARD,
    Kind.REDUCE: TorchKind.REDUCE_GRAD,
}
"""Kinds that torch's loop dispatches. A wait is part of the compute action that it stands before."""


class BoundAction(TorchAction):
    """torch's action with the arguments of its handler, looked up once when the program is loaded."""

    ours: Action
    transfer: Transfer | None
    """What a send or receive moves."""
    waits: tuple[tuple[Transfer, tuple[Transfer, ...]], ...]
    """Messages that must have arrived before a compute action, each with the sends whose arrival follows from it."""
    prefetched: tuple[int, int] | None
    """(stage, work) of the next compute action, if that is a backward: its offloaded activations come back during this
    action."""

    def __repr__(self) -> str:
        return str(self.ours)


Feed = Callable[[int, int], tuple[tuple[Any, ...], dict[str, Any]]]
"""(stage, work) -> positional and keyword arguments of the chunk's forward, before its received inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What one run of a program left on this rank."""

    losses: dict[int, Tensor] = field(default_factory=dict)
    """work -> sum of the loss over its targets, detached; on the rank of the last stage."""
    predictions: dict[int, Tensor] = field(default_factory=dict)
    """work -> predicted token of each labelled position, if the feed asked for them."""
    rows: tuple[tuple[Action, float, float], ...] = ()
    """(action, start, end) of every compute action, seconds on this host's monotonic clock (unless `use_clock`)."""
    span: tuple[float, float] = (0.0, 0.0)
    """Start and end of the program on this rank, same clock."""


class PipelineScheduleRuntime(TorchScheduleRuntime):
    """torch's runtime of action lists, over a work graph that is new in every step."""

    def __init__(self, stages: Sequence[ModalityStage]) -> None:
        super().__init__(list(stages), n_microbatches=1, loss_fn=None, scale_grads=False)
        self._by_index = {stage.stage_index: stage for stage in stages}
        self._feed: Feed | None = None
        self._loss_grad: Tensor | None = None
        self._pending: dict[Transfer, tuple[dist.Work, Tensor]] = {}
        self._sent: dict[Transfer, tuple[dist.Work, Tensor]] = {}
        self._clock = _Clock(stages[0].device)
        self._losses: dict[int, Tensor] = {}
        self._predictions: dict[int, Tensor] = {}
        self._running: Action | None = None
        self._awaited: Transfer | None = None
        table: dict[Any, Callable[[Any, Any], None]] = {
            TorchKind.FORWARD: self._forward,
            TorchKind.FULL_BACKWARD: self._backward,
            TorchKind.BACKWARD_INPUT: self._backward,
            TorchKind.BACKWARD_WEIGHT: self._backward_weight,
            TorchKind.SEND_F: self._send,
            TorchKind.RECV_F: self._receive,
            TorchKind.SEND_B: self._send,
            TorchKind.RECV_B: self._receive,
            TorchKind.REDUCE_GRAD: self._reduce,
            TorchKind.RESHARD: self._reshard,
        }
        builtin = {TorchKind.UNSHARD}  # torch's own branch is the right one
        assert set(table) | builtin == set(TORCH_KINDS.values()), "the dispatch table is not complete"
        assert set(TORCH_KINDS) | WAITS == set(KINDS), "a kind of action has no handler"
        self._comp_type_to_function_map.update({kind: self._noted(handler) for kind, handler in table.items()})

    def load(self, program: Program, shape_of: ShapeOf) -> None:
        """Makes `program` the one that `step` runs.

        Raises: PlanError: a wait is at the wrong position, a backward is not B, or I and then W, or the name of a
            memory option is not one for its stage.
        """
        graph, actions = program.graph, program.actions[self.rank]
        bound = []
        moved, arrivals = transfers(program, self.rank), releases(program, self.rank)
        strategies = self._strategies(program)
        waits: list[tuple[Transfer, tuple[Transfer, ...]]] = []
        before: BoundAction | None = None
        for index, action in enumerate(actions):
            kind = action.kind
            if kind in WAITS:
                waits.append((moved[index], arrivals.get(index, ())))
                continue
            if waits and kind not in COMPUTE:
                raise PlanError(
                    f"rank {self.rank}, step {index}, action {action}: a wait must stand right before the compute "
                    f"action that needs it, but {actions[index - 1]} stands before this one"
                )
            if kind not in TORCH_KINDS:
                raise PlanError(
                    f"rank {self.rank}, step {index}: no handler runs {action}; plan without braids and instructions"
                )
            transfer = moved.get(index)
            work = transfer[0].work if transfer else None if kind in STAGE_WIDE else graph.work_of(action)
            item = BoundAction(action.stage, TORCH_KINDS[kind], work)
            item.ours, item.transfer, item.waits = action, transfer, tuple(waits)
            item.prefetched = None
            if kind in COMPUTE:
                if before is not None and kind in BACKWARD:
                    before.prefetched = action.stage, graph.work_of(action)
                before = item
            bound.append(item)
            waits = []
        if waits:
            raise PlanError(f"rank {self.rank}: {actions[-1]} is the last action, but nothing needs what it waits for")
        split = _split_works(program, self.rank)
        self._n_microbatches = max(1, len(graph.works))
        self.pipeline_order_with_comms = {self.rank: bound}
        for stage in self._by_index.values():
            index = stage.stage_index
            stage.start_step(graph, shape_of, split.get(index, ()), strategies.get(index, {}))

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
        self._loss_grad = torch.tensor(loss_grad, device=self._stages[0].device)
        self._losses, self._predictions = {}, {}
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
        rows, span = self._clock.stop()
        leftovers = [text for stage in self._by_index.values() for text in stage.leftovers()]
        leftovers += [f"transfer of {edge} started and never waited for" for edge, _ in self._pending]
        if leftovers:
            raise PlanError(f"rank {self.rank}: a step ended with unused tensors: {'; '.join(leftovers)}")
        return StepOutcome(losses=self._losses, predictions=self._predictions, rows=rows, span=span)

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

    # torch's chain set-up (shape inference, adjacency checks) and loss bookkeeping are not used.
    def _initialize_stages(self, *args: Any, **kwargs: Any) -> None: ...

    def _update_losses(self, *args: Any, **kwargs: Any) -> None: ...

    def _assert_unsharded(self, stage: ModalityStage) -> None:  # type: ignore[override]
        """Waits for a stage's UNSHARD; one whose parameters are gathered at each use has none."""
        if not gathers_itself(stage.submod):
            super()._assert_unsharded(stage)

    # ------------------------------------------------------------------------------------ handlers

    def _noted(self, handler: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def run(action: BoundAction, ctx: Any) -> None:
            self._running, self._awaited = action.ours, None
            handler(action, ctx)

        return run

    def _forward(self, action: BoundAction, ctx: Any) -> None:
        assert self._feed is not None and action.microbatch_index is not None
        stage, work = self._by_index[action.stage_index], action.microbatch_index
        self._assert_unsharded(stage)
        self._finish_waits(action)
        args, kwargs = self._feed(stage.stage_index, work)
        self._prefetch(action)
        with self._clock.measure(action.ours):
            output = stage.forward_one_chunk(work, args, kwargs)
        graph = stage.graph
        assert graph is not None
        consumers = graph.outputs(stage.stage_index, work)
        if not consumers:
            self._losses[work] = output.loss_sum.detach()
            if output.predictions is not None:
                self._predictions[work] = output.predictions
        for edge in consumers:
            if graph.is_local(edge):
                self._by_index[edge.target].inbox[edge] = stage.outbox.pop(edge)

    def _backward(self, action: BoundAction, ctx: Any) -> None:
        assert action.microbatch_index is not None
        stage, work = self._by_index[action.stage_index], action.microbatch_index
        self._assert_unsharded(stage)
        self._finish_waits(action)
        self._prefetch(action)
        backward = stage.backward_input if action.ours.kind is Kind.I else stage.backward_one_chunk
        with self._clock.measure(action.ours):
            backward(work, loss=self._loss_grad)
        graph = stage.graph
        assert graph is not None
        for edge in graph.inputs(stage.stage_index, work):
            if edge.grad and graph.is_local(edge):
                self._by_index[edge.source].grad_inbox[edge] = stage.grad_outbox.pop(edge)

    def _backward_weight(self, action: BoundAction, ctx: Any) -> None:
        assert action.microbatch_index is not None
        self._prefetch(action)
        with self._clock.measure(action.ours):
            self._by_index[action.stage_index].backward_weight(action.microbatch_index)

    def _prefetch(self, action: BoundAction) -> None:
        if action.prefetched is not None:
            stage, work = action.prefetched
            self._by_index[stage].prefetch(work)

    def _send(self, action: BoundAction, ctx: Any) -> None:
        assert action.transfer is not None
        self._sent[action.transfer] = self._by_index[action.stage_index].send(*action.transfer)

    def _receive(self, action: BoundAction, ctx: Any) -> None:
        assert action.transfer is not None
        self._pending[action.transfer] = self._by_index[action.stage_index].receive(*action.transfer)

    def _finish_waits(self, action: BoundAction) -> None:
        stage = self._by_index[action.stage_index]
        for transfer, arrived in action.waits:
            arriving, tensor = self._pending.pop(transfer)
            self._awaited = transfer
            arriving.wait()
            self._awaited = None
            edge, forward = transfer
            (stage.inbox if forward else stage.grad_inbox)[edge] = tensor
            for sent in arrived if tensor.numel() else ():  # an empty tensor was never sent, and proves nothing
                self._sent.pop(sent)[0].wait()  # returns at once: the peer has these, or it would not have answered

    def _reduce(self, action: BoundAction, ctx: Any) -> None:
        stage = self._by_index[action.stage_index]
        self._finish_unshard(stage)
        reduce_grads(stage)

    def _reshard(self, action: BoundAction, ctx: Any) -> None:
        stage = self._by_index[action.stage_index]
        self._finish_unshard(stage)
        for part in fsdp_modules(stage.submod):
            part.reshard()
        self.unsharded_stages.discard(stage.stage_index)

    def _finish_unshard(self, stage: ModalityStage) -> None:
        """A stage without work in this step never waited for its all-gather."""
        if fsdp_modules(stage.submod) and stage.stage_index in self.unshard_ops:
            self._assert_unsharded(stage)
            wait_unsharded(stage.submod)


_BEFORE = {Kind.F: None, Kind.B: Kind.F, Kind.I: Kind.F, Kind.W: Kind.I}
"""Compute kind -> the kind that the same stage runs before it for the same work."""


def _split_works(program: Program, rank: int) -> dict[int, list[int]]:
    """Stage of a rank -> its works whose backward is split.

    Raises: PlanError: compute actions of a stage and work that are not F, then perhaps B, or I and then W.
    """
    split_works: dict[int, list[int]] = {}
    last: dict[tuple[int, int], Action] = {}
    for index, action in enumerate(program.actions[rank]):
        if action.kind not in COMPUTE:
            continue
        node = action.stage, program.graph.work_of(action)
        before = last[node].kind if node in last else None
        if before is not _BEFORE[action.kind]:
            raise PlanError(
                f"rank {rank}, step {index}: {action} comes after {last.get(node, 'nothing')}; a stage runs F of a "
                "work, then B, or I and then W"
            )
        last[node] = action
        if action.kind is Kind.I:
            split_works.setdefault(node[0], []).append(node[1])
    for action in last.values():
        if action.kind is Kind.I:
            raise PlanError(f"rank {rank}: no W comes after {action}; a backward is B, or I and then W")
    return split_works


class _Clock:
    """Start and end of each compute action: the host's clock on a CPU, device events elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self.host: Callable[[], float] = time.perf_counter
        self._device = device
        self._rows: list[tuple[Action, Any, Any]] = []
        self._start = 0.0
        self._zero: Any = None

    def start(self) -> None:
        self._rows = []
        self._start = self.host()
        if self._device.type != "cpu":
            self._zero = self._event()

    def measure(self, action: Action) -> "_Measure":
        return _Measure(self, action)

    def now(self) -> Any:
        return self.host() if self._device.type == "cpu" else self._event()

    def record(self, action: Action, start: Any, end: Any) -> None:
        self._rows.append((action, start, end))

    def stop(self) -> tuple[tuple[tuple[Action, float, float], ...], tuple[float, float]]:
        if self._device.type == "cpu":
            return tuple(self._rows), (self._start, self.host())
        last = self._event()
        last.synchronize()

        def seconds(event: Any) -> float:
            return self._start + float(self._zero.elapsed_time(event)) / 1e3

        return tuple((a, seconds(s), seconds(e)) for a, s, e in self._rows), (self._start, seconds(last))

    def _event(self) -> Any:
        event = torch.Event(self._device.type, enable_timing=True)
        event.record()
        return event


class _Measure:
    __slots__ = ("_action", "_clock", "_start")

    def __init__(self, clock: _Clock, action: Action) -> None:
        self._clock, self._action = clock, action

    def __enter__(self) -> None:
        self._start = self._clock.now()

    def __exit__(self, *error: object) -> None:
        self._clock.record(self._action, self._start, self._clock.now())
