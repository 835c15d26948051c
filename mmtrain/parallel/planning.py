"""Planning beside training: while a step runs, a thread of each rank plans the next one.

The leader of a replica (or, with planner.distributed, each of its ranks) searches, and one message an iteration brings
the plan to all ranks, over a process group that the threads have for themselves. Each rank checks and lowers it
in its thread. Whatever goes wrong there, a step never fails and never waits longer than `planner.patience_s`: it
runs the first plan, which every rank makes for itself.
"""

import logging
import math
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

from mmtrain.config.sections import PlannerConfig
from mmtrain.errors import PlanError
from mmtrain.modality.metadata import IterationMeta
from mmtrain.parallel.build import check_same_program
from mmtrain.parallel.mesh import Mesh, second_replica_group
from mmtrain.planner.bound import lower_bound_s
from mmtrain.planner.iteration import Iteration, IterationPlan, IterationPlanner
from mmtrain.planner.plan import PlanResult
from mmtrain.planner.plan_choice import Search, choose_plan, search_options, search_seed, search_threads
from mmtrain.schedule.io.wire import from_bytes, to_bytes
from mmtrain.schedule.plan import check
from mmtrain.schedule.simulate import simulate

logger = logging.getLogger("mmtrain")

CLOSE_S = 5.0
"""How long the end of a job waits for a search that was told to end."""
MESSAGE_TIMEOUT = timedelta(days=1)
"""Of the threads' group: a message may take as long as a search. A rank that is gone closes its connections."""


class Fate(IntEnum):
    """What became of an iteration's search; of several ranks the greatest counts."""

    READY = 0
    """The searched plan runs."""
    LATE = 1
    """It was not there when the step's patience ended."""
    INVALID = 2
    """It breaks a rule, or belongs to another iteration."""
    FAILED = 3
    """The search raised, or found nothing."""
    BROKEN = 4
    """The threads of the replica cannot talk any more; there will be no further search."""
    ERROR = 5
    """The iteration itself is wrong: lost images, layers that do not fit. This ends the job."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One iteration's plan, and how it came about."""

    plan: IterationPlan
    fate: Fate
    """READY, or why it is the first plan."""
    evaluations: int
    """Plans that were tried, by all searches of the replica; 0 where that is not known here."""
    search_s: float
    """Seconds of the longest search."""
    makespan_s: float
    """Simulated, of the plan."""
    first_s: float
    """Simulated, of the first plan; NaN if it has none."""
    bound_s: float
    """No plan is shorter; NaN but on the leader."""
    age_s: float = 0.0
    """Seconds that the searched plan lay ready on this rank; 0 for a first plan."""


@dataclass(frozen=True, kw_only=True)
class _Message:
    """What one search has to say to the ranks of its replica."""

    step: int
    fate: Fate
    text: str = ""
    """What went wrong."""
    data: bytes = b""
    """The plan, as `schedule.wire` has it."""
    status: Any = "improved"
    """Of the search's result."""
    sentence: str = ""
    """Of the search's result."""
    makespan_s: float = math.inf
    evaluations: int = 0
    search_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class _Found:
    """What a rank's thread has for a step."""

    fate: Fate
    text: str = ""
    plan: IterationPlan | None = None
    evaluations: int = 0
    search_s: float = 0.0
    ready_s: float = math.nan
    """When the plan was adopted, on this rank's clock."""
    error: Exception | None = None


@dataclass(eq=False)
class Ticket:
    """One iteration on its way through the thread."""

    step: int
    meta: IterationMeta
    planner: IterationPlanner
    """Plans it; not the one of other iterations where memory limits have changed since."""
    done: threading.Event = field(default_factory=threading.Event)
    given_up: threading.Event = field(default_factory=threading.Event)
    """Nobody waits for its plan any more."""
    prepared: tuple[Iteration, PlanResult] | None = None
    """The iteration with its first plan, as soon as they are there."""
    bound_s: float = math.nan
    """No plan of it is shorter; on the leader, as soon as it is known."""
    found: _Found = field(default_factory=lambda: _Found(fate=Fate.LATE))
    """Final once `done` is set."""


class PlanAhead:
    """Plans of coming iterations, made by a thread of this rank. Every rank of the job makes one at the same time.

    All ranks of a replica submit the same iterations in the same order and take them in that order.

    Args:
        seed: of the job.
        search: finds plans; it may raise, answer nonsense, or take too long.
        warm: what the thread does first where it searches.
    """

    def __init__(
        self,
        planner: IterationPlanner,
        mesh: Mesh,
        *,
        seed: int,
        search: Search,
        warm: Callable[[], None] = lambda: None,
    ) -> None:
        self._planner, self._mesh, self._seed, self._search, self._warm = planner, mesh, seed, search, warm
        self._section: PlannerConfig = planner.section
        self._searches = mesh.is_leader or self._section.distributed
        self._group = second_replica_group(mesh, MESSAGE_TIMEOUT)
        self.threads = search_threads(self._section.threads, num_cores(), ranks_here(mesh.shape.world_size))
        """Of a search."""
        self.counts: Counter[Fate] = Counter()
        """How many iterations had each fate."""
        self._pricing = threading.Lock()
        """Cost models remember what they were asked last, and serve one thread at a time."""
        self._broken = False
        self._current: Ticket | None = None
        self._open: list[Ticket] = []
        self._queue: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="plan-ahead", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------- on the training thread

    def submit(self, step: int, meta: IterationMeta, planner: IterationPlanner | None = None) -> Ticket:
        """Begins to plan a step; returns at once. Args: planner: instead of the job's, with other memory limits."""
        ticket = Ticket(step, meta, planner or self._planner)
        self._open.append(ticket)
        self._queue.put(ticket)
        return ticket

    def take(self, ticket: Ticket, patience_s: float | None) -> Planned:
        """The plan of a submitted step, equal on all ranks of the replica. Collective over it.

        Args: patience_s: waits so long before the first plan is taken instead; None: as long as it takes.
        Raises:
            DataError: an image or token of the batch would be lost or used twice.
            PlanError: no plan fits, with the rank and the bytes.
        """
        self._wait(ticket, patience_s)
        self._open.remove(ticket)
        if ticket.done.is_set():
            found = ticket.found
        else:
            found = _Found(fate=Fate.BROKEN) if self._broken else _Found(fate=Fate.LATE, text=_late(patience_s))
        fate, text = self._agree(found)
        self.counts[fate] += 1
        if fate is Fate.READY:
            assert found.plan is not None and ticket.prepared is not None
            return _planned(ticket, found.plan, ticket.prepared[1], found, fate)
        ticket.given_up.set()
        if fate is Fate.ERROR:
            raise found.error or PlanError(f"step {ticket.step}: {text}")
        if fate is Fate.BROKEN:
            self._broken = True
        iteration, first = ticket.prepared or self._prepare(ticket)
        plan = ticket.planner.finish(iteration, first)
        check_same_program(plan.program.hash, self._mesh)
        if text:
            logger.warning("step %d runs its first plan, the search is %s: %s", ticket.step, fate.name.lower(), text)
        return _planned(ticket, plan, first, found, fate)

    def now(self, step: int, meta: IterationMeta, planner: IterationPlanner | None = None) -> Planned:
        """The plan of a step, waited for. Collective over the replica. Arguments as of `submit`, errors of `take`."""
        return self.take(self.submit(step, meta, planner), None)

    def forward(self, meta: IterationMeta, planner: IterationPlanner | None = None) -> IterationPlan:
        """The plan of an iteration without backwards, in the order of the schedule. Errors as of `take`."""
        planner = planner or self._planner
        return planner.finish(*planner.prepared(meta, forward_only=True, pricing=self._pricing))

    def close(self) -> None:
        """Ends the thread; searches that nobody waits for any more are told to end."""
        for ticket in self._open:
            ticket.given_up.set()
        self._queue.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            logger.warning("a search of step %d does not end; it is left behind", self._current_step())

    def _wait(self, ticket: Ticket, patience_s: float | None) -> None:
        if self._broken:
            return
        current = self._current
        stuck = current is not None and current is not ticket and current.given_up.is_set()
        # An earlier search that was told to end, and has not during a whole step, is not worth waiting for again.
        ticket.done.wait(0.0 if stuck and patience_s is not None else patience_s)

    def _agree(self, found: _Found) -> tuple[Fate, str]:
        """The fate of a step on all ranks of the replica, and what this rank has to say of it."""
        number = found.plan.program.hash if found.plan else 0
        mine = torch.tensor([found.fate, number], dtype=torch.int64)
        rows = [mine]
        if self._mesh.replica_group is not None:
            rows = [torch.empty_like(mine) for _ in self._mesh.replica_ranks]
            dist.all_gather(rows, mine, group=self._mesh.replica_group)
        fates = [Fate(int(row[0])) for row in rows]
        worst = max(fates)
        if worst is Fate.READY and len({int(row[1]) for row in rows}) > 1:
            return Fate.INVALID, "it is another program on some ranks" if self._mesh.is_leader else ""
        first = self._mesh.replica_ranks[fates.index(worst)]
        if worst is Fate.ERROR:
            return worst, f"rank {first} cannot prepare the iteration; its own message says why"
        speaks = first == self._mesh.rank  # one rank of the replica is enough
        return worst, found.text if speaks else ""

    def _current_step(self) -> int:
        return self._current.step if self._current else 0

    # ---------------------------------------------------------------------------------- in the thread

    def _serve(self) -> None:
        if self._searches:
            try:
                self._warm()
            except BaseException as error:  # the search will say the same, and is counted
                logger.warning("the search cannot be prepared: %s: %s", type(error).__name__, error)
        while (ticket := self._queue.get()) is not None:
            self._current = ticket
            try:
                ticket.found = self._plan(ticket)
            except BaseException as error:
                self._broken = True
                text = f"the ranks of the replica cannot exchange plans any more: {type(error).__name__}: {error}"
                ticket.found = _Found(fate=Fate.BROKEN, text=text)
            self._current = None
            ticket.done.set()

    def _plan(self, ticket: Ticket) -> _Found:
        """All of one iteration. Raises: whatever the exchange of plans raises, and nothing else."""
        if self._broken:
            return _Found(fate=Fate.BROKEN)
        error: Exception | None = None
        message = _Message(step=ticket.step, fate=Fate.LATE, text="nobody waits for it any more")
        if not ticket.given_up.is_set():
            try:
                ticket.prepared = iteration, first = self._prepare(ticket)
                if self._mesh.is_leader:
                    ticket.bound_s = lower_bound_s(iteration.problem)
                message = self._offer(ticket, iteration, first) if self._searches else message
            except Exception as found:
                error = found
                message = replace(message, fate=Fate.ERROR, text=str(found))
        message = self._exchange(message)  # in any case: the threads of a replica stay in step
        if error is not None:
            return _Found(fate=Fate.ERROR, error=error)
        return self._adopt(ticket, message)

    def _prepare(self, ticket: Ticket) -> tuple[Iteration, PlanResult]:
        """An iteration with its first plan. For any thread."""
        return ticket.planner.prepared(ticket.meta, searched=True, pricing=self._pricing)

    def _offer(self, ticket: Ticket, iteration: Iteration, first: PlanResult) -> _Message:
        """What this rank's search says. Never raises."""
        mesh, section, problem = self._mesh, self._section, iteration.problem
        member = mesh.replica_ranks.index(mesh.rank)
        options = search_options(
            section,
            seed=search_seed(self._seed, ticket.step, member),
            threads=self.threads,
            num_searchers=len(mesh.replica_ranks) if section.distributed else 1,
        )
        message = _Message(step=ticket.step, fate=Fate.FAILED)
        start = time.perf_counter()
        try:
            result = choose_plan(problem, first, section, options, self._search, ticket.given_up.is_set)
            message = replace(message, search_s=time.perf_counter() - start, evaluations=int(result.evaluations))
            plan, status, sentence = result.plan, str(result.status), str(result.message)
        except Exception as error:
            return replace(message, text=f"it raised {type(error).__name__}: {error}")
        if plan is None:
            return replace(message, text=sentence)
        try:
            if plan.graph != problem.graph:
                raise PlanError("its work graph is that of another iteration")
            makespan_s = math.inf
            if section.distributed:  # only a plan that can run may win over those of the other ranks
                check(plan, problem)
                makespan_s = simulate(problem, plan).makespan_s
            return replace(
                message, fate=Fate.READY, data=to_bytes(plan), status=status, sentence=sentence, makespan_s=makespan_s
            )
        except Exception as error:
            return replace(message, fate=Fate.INVALID, text=_text(error))

    def _exchange(self, mine: _Message) -> _Message:
        """The message that counts. Collective over the threads of the replica."""
        group, ranks = self._group, self._mesh.replica_ranks
        if group is None:
            return mine
        source, more = 0, {}
        if self._section.distributed:
            row = torch.tensor([mine.makespan_s, mine.evaluations, mine.search_s], dtype=torch.float64)
            rows = [torch.empty_like(row) for _ in ranks]
            dist.all_gather(rows, row, group=group)
            source = min(range(len(ranks)), key=lambda member: (float(rows[member][0]), member))
            more = {
                "evaluations": sum(int(row[1]) for row in rows),
                "search_s": max(float(row[2]) for row in rows),
            }
        box: list[Any] = [mine]
        dist.broadcast_object_list(box, src=ranks[source], group=group, device=torch.device("cpu"))
        message: _Message = replace(box[0], **more)
        if message.step != mine.step:
            raise PlanError(f"a plan of step {message.step} came for step {mine.step}")
        return message

    def _adopt(self, ticket: Ticket, message: _Message) -> _Found:
        """The plan of a message as this rank will run it. Never raises."""
        found = _Found(fate=message.fate, text=message.text, evaluations=message.evaluations, search_s=message.search_s)
        if message.fate is not Fate.READY:
            # A leader that could not prepare the iteration says so itself.
            return replace(found, fate=min(message.fate, Fate.FAILED))
        if ticket.given_up.is_set() or ticket.prepared is None:
            return replace(found, fate=Fate.LATE)
        iteration = ticket.prepared[0]
        try:
            result = PlanResult(
                status=message.status,
                message=message.sentence,
                plan=from_bytes(iteration.problem.graph, message.data),
                evaluations=message.evaluations,
                seed=search_seed(self._seed, ticket.step),
            )
            plan = ticket.planner.adopt(iteration, result)
            return replace(found, plan=plan, ready_s=time.perf_counter())
        except Exception as error:
            return replace(found, fate=Fate.INVALID, text=_text(error))


def num_cores() -> int:
    """Cores of this machine that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ranks_here(world_size: int) -> int:
    """Ranks of the job on this machine, as the launcher says; all of them if it does not."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


def _planned(ticket: Ticket, plan: IterationPlan, first: PlanResult, found: _Found, fate: Fate) -> Planned:
    assert plan.result.timeline is not None
    return Planned(
        plan=plan,
        fate=fate,
        evaluations=found.evaluations,
        search_s=found.search_s,
        makespan_s=plan.result.timeline.makespan_s,
        first_s=first.timeline.makespan_s if first.timeline else math.nan,
        bound_s=ticket.bound_s,
        age_s=time.perf_counter() - found.ready_s if fate is Fate.READY else 0.0,
    )


def _late(patience_s: float | None) -> str:
    waited = 0.0 if patience_s is None else patience_s
    return f"it is not there {waited:g} s after the step wanted it (planner.patience_s)"


def _text(error: Exception) -> str:
    """The first line of what is wrong with a plan."""
    what = str(error).split("\n", 1)[0]
    return what if isinstance(error, PlanError) else f"{type(error).__name__}: {what}"
