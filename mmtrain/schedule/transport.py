"""A check by execution that a program cannot deadlock or swap messages on a transport.

No transport matches messages by name: only the order in which the two ends post them counts. Three models of which
transfers wait for each other:

- gloo: each directed pair of ranks is a queue of its own (also NCCL with one group a direction);
- paired: each unordered pair of ranks has one stream, which its sends and receives share (NCCL, lazy);
- eager: each rank has one stream for all of its transfers (NCCL communicators made eagerly).
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from mmtrain.errors import PlanError
from mmtrain.schedule.action import RECEIVES, SENDS, STAGE_WIDE, TRANSFERS, WAITS, Action, Kind
from mmtrain.schedule.passes.lower import Program, waits_before
from mmtrain.schedule.plan import check_actions, show_steps

Stream = tuple[int, ...]
"""Names a queue of one rank; transfers in one queue run one after another."""

MODELS: dict[str, Callable[[int, int], Stream]] = {
    "gloo": lambda source, target: (source, target),
    "paired": lambda source, target: (min(source, target), max(source, target)),
    "eager": lambda source, target: (),
}
"""Name -> the queue, on either end, that a message from rank `source` to rank `target` goes through."""


@dataclass(frozen=True, slots=True)
class _TransferEnd:
    """One end of a transfer, posted by a rank."""

    step: int
    action: Action
    source: int
    target: int
    name: tuple[bool, int, int, int, int]
    """The message, equal on both ends: (forward, source stage, target stage, microbatch, sub_microbatch)."""


def check_transport(program: Program, models: Sequence[str] = tuple(MODELS)) -> None:
    """Checks that a program can neither hang nor swap messages under the transport models.

    Raises: PlanError: a wait, send or result is missing, two ends disagree, or a deadlock; with the model, rank, step
        and action.
    """
    check_actions(program.graph, program.actions, partial(_fault, program))
    messages = [
        [_message(program, step, a) if a.kind in TRANSFERS else None for step, a in enumerate(actions)]
        for actions in program.actions
    ]
    for model in models:
        _Execution(program, messages, model).run()


def _message(program: Program, step: int, action: Action) -> _TransferEnd:
    rank_of = program.graph.stage_rank
    forward = action.kind in (Kind.SEND_F, Kind.RECV_F, Kind.WAIT_F)
    producer_first = action.kind in SENDS
    sender, receiver = (action.stage, action.peer) if producer_first else (action.peer, action.stage)
    name = (forward, sender, receiver, action.microbatch, action.sub_microbatch)
    return _TransferEnd(step, action, rank_of[sender], rank_of[receiver], name)


def _fault(program: Program, rank: int, action: Action, seen: set[Action]) -> str:
    """What an action lacks among the rank's actions before it, as the rest of a sentence; empty: nothing."""
    if action.kind in STAGE_WIDE:
        return ""
    graph = program.graph
    work = graph.work_of(action)
    holder = graph.stage_rank[action.stage]
    if action in seen:
        return "occurs twice; keep one"
    if holder != rank:
        return f"belongs on rank {holder}, which holds its stage"
    if action.kind not in TRANSFERS:
        for wait in waits_before(graph, action):
            if wait not in seen:
                return f"needs {wait} before it"
        for (kind, stage, other), edge in graph.needs(action.kind, action.stage, work):
            local = edge is None or graph.is_local(edge)
            if local and not _computed(program, kind, stage, other, seen):
                return f"needs {graph.action(kind, stage, other)} before it"
        return ""
    if graph.stage_rank[action.peer] == rank:
        return "is a transfer within one rank; remove it"
    if action.kind in WAITS:
        receive = Kind.RECV_F if action.kind is Kind.WAIT_F else Kind.RECV_B
        return "" if graph.action(receive, action.stage, work, action.peer) in seen else "waits for no receive"
    if action.kind is Kind.SEND_F:
        made = _computed(program, Kind.F, action.stage, work, seen)
    elif action.kind is Kind.SEND_B:
        consumers = [e.target_work for e in graph.outputs(action.peer, work) if e.target == action.stage]
        made = any(_computed(program, Kind.B, action.stage, w, seen) for w in consumers)
    else:
        return ""
    return "" if made else "sends a result that was not computed before"


def _computed(program: Program, kind: Kind, stage: int, work: int, seen: set[Action]) -> bool:
    kinds = (Kind.B, Kind.I) if kind is Kind.B else (kind,)
    return any(program.graph.action(k, stage, work) in seen for k in kinds)


class _Execution:
    """One run of all ranks' lists under one transport model."""

    def __init__(self, program: Program, messages: list[list[_TransferEnd | None]], model: str) -> None:
        self._program = program
        self._messages = messages
        self._model = model
        self._stream = MODELS[model]
        self._steps = [0] * len(program.actions)
        self._queues: list[dict[Stream, deque[_TransferEnd]]] = [{} for _ in program.actions]
        self._arrived: set[tuple[bool, int, int, int, int]] = set()

    def run(self) -> None:
        """Runs to the end. Raises: PlanError: mismatch or deadlock."""
        ranks = range(len(self._steps))
        while sum(map(self._advance, ranks)) or sum(map(self._deliver, ranks)):
            pass
        stuck = [r for r in ranks if self._steps[r] < len(self._program.actions[r])]
        waiting = [(r, queue[0]) for r in ranks for queue in self._queues[r].values() if queue]
        if stuck or waiting:
            rank, step = (stuck[0], self._steps[stuck[0]]) if stuck else (waiting[0][0], waiting[0][1].step)
            heads = "; ".join(f"rank {r} step {m.step} {m.action}" for r, m in waiting) or "none"
            raise PlanError(
                f"deadlock under {self._model} transport: rank {rank}, step {step}: "
                f"{self._program.actions[rank][step]} never completes; first waiting transfers: {heads}\n"
                + show_steps(self._program.actions, dict(enumerate(self._steps)))
            )

    def _advance(self, rank: int) -> bool:
        """Runs a rank's list until it must wait; returns whether any step ran."""
        messages, start = self._messages[rank], self._steps[rank]
        while self._steps[rank] < len(messages):
            message = messages[self._steps[rank]]
            if message and message.action.kind not in WAITS:
                stream = self._stream(message.source, message.target)
                self._queues[rank].setdefault(stream, deque()).append(message)
            elif message and message.name not in self._arrived:
                break
            self._steps[rank] += 1
        return self._steps[rank] > start

    def _deliver(self, rank: int) -> bool:
        """Delivers messages whose two ends are both at the head of their queues; returns whether there were any."""
        progress = False
        for queue in self._queues[rank].values():
            while queue and queue[0].action.kind in SENDS:
                sent = queue[0]
                other = self._queues[sent.target].get(self._stream(sent.source, sent.target))
                if not other or other[0].action.kind not in RECEIVES or other[0].source != rank:
                    break
                received = other[0]
                if received.name != sent.name:
                    self._raise_mismatch(rank, sent, received)
                queue.popleft()
                other.popleft()
                self._arrived.add(sent.name)
                progress = True
        return progress

    def _raise_mismatch(self, rank: int, sent: _TransferEnd, received: _TransferEnd) -> None:
        actions = self._program.actions
        raise PlanError(
            f"mismatch under {self._model} transport: rank {rank}, step {sent.step}: {sent.action} would be "
            f"received by rank {sent.target}, step {received.step}: {received.action}; give both ends the same "
            "order\n" + show_steps(actions, {rank: sent.step, sent.target: received.step})
        )
