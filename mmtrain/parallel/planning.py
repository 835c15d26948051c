"""Planning during training: while a step runs, a thread of each rank plans the next one.

The leader of a replica (or, with planner.search.distributed, each of its ranks) searches. One message an iteration
brings the plan to all ranks, over a process group that only these threads use. Each rank checks and lowers the plan in
its thread. A failed search never fails a step, and a step waits at most `planner.search.patience_s`: it then runs the
first plan, which every rank makes for itself.
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

from mmtrain.config.planner import PlannerConfig
from mmtrain.errors import PlanError
from mmtrain.launch.launched import local_world_size
from mmtrain.modality.metadata import IterationMeta
from mmtrain.parallel.local_model import check_same_program
from mmtrain.parallel.mesh import Mesh, second_replica_group
from mmtrain.planner.bound import lower_bound_s
from mmtrain.planner.grouping import Grouping
from mmtrain.planner.iteration import Iteration, IterationPlan, IterationPlanner
from mmtrain.planner.joint import search_iteration
from mmtrain.planner.make_plan import Search
from mmtrain.planner.result import PlanKind, PlanResult
from mmtrain.planner.search_settings import search_options, search_seed, search_threads
from mmtrain.schedule.io.wire import from_bytes, to_bytes
from mmtrain.schedule.plan import check
from mmtrain.schedule.simulate import simulate

logger = logging.getLogger("mmtrain")

CLOSE_S = 5.0
"""How long the end of a job waits for a cancelled search."""
MESSAGE_TIMEOUT = timedelta(days=1)
"""Timeout of the threads' group: a message may take as long as a search. A rank that ends closes its connections."""


class PlanStatus(IntEnum):
    """How an iteration's search ended; the greatest of all ranks' values counts."""

    READY = 0
    """The searched plan runs."""
    TIMED_OUT = 1
    """It had not ended after `planner.search.patience_s`."""
    INVALID = 2
    """The searched plan breaks a rule, or belongs to another iteration."""
    FAILED = 3
    """The search raised an error, or found no plan."""
    BROKEN = 4
    """The threads of the replica cannot communicate any more; there will be no further search."""
    ERROR = 5
    """The iteration itself is wrong: lost images, layers that do not fit. This ends the job."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One iteration's plan, and how the search for it ended."""

    plan: IterationPlan
    status: PlanStatus
    """READY, or why it is the first plan."""
    evaluations: int
    """Plans tried by all searches of the replica; 0: not known on this rank."""
    search_s: float
    """Seconds of the longest search."""
    bound_s: float
    """Lower bound of the makespan of any plan; NaN on ranks other than the leader."""
    age_s: float = 0.0
    """Seconds from the time the searched plan was ready on this rank to its use; 0 for a first plan."""

    @property
    def makespan_s(self) -> float:
        """Simulated makespan of the plan."""
        return self.plan.result.makespan_s

    @property
    def first_s(self) -> float:
        """Simulated makespan of the first plan; NaN if it has none."""
        return self.plan.first.makespan_s if self.plan.first.has_plan else math.nan


@dataclass(frozen=True, kw_only=True)
class _SearchOutcome:
    """How the search for a step ended, as it is sent to the ranks of its replica, and what a rank made of it."""

    step: int
    status: PlanStatus
    text: str = ""
    """What went wrong."""
    data: bytes = b""
    """The plan in the form of `schedule.io.wire`."""
    kind: PlanKind = "improved"
    message: str = ""
    """The message of the result."""
    grouping: Grouping | None = None
    """The grouping of the samples, if the plan is not for the given one."""
    makespan_s: float = math.inf
    evaluations: int = 0
    search_s: float = 0.0
    plan: IterationPlan | None = None
    """The plan as adopted on this rank."""
    bound_s: float = math.nan
    """The lower bound of what the plan is for, on the leader."""
    ready_s: float = math.nan
    """The time at which it was adopted, on this rank's clock."""
    error: Exception | None = None
    """Why this rank cannot prepare the iteration."""


@dataclass(eq=False)
class PendingPlan:
    """One iteration that was submitted to the thread."""

    step: int
    meta: IterationMeta
    planner: IterationPlanner
    """The planner of this iteration: memory limits may change between iterations."""
    done: threading.Event = field(default_factory=threading.Event)
    given_up: threading.Event = field(default_factory=threading.Event)
    """Set when no step waits for its plan any more."""
    iteration: Iteration | None = None
    """The iteration with its first plan, once the thread has made it."""
    bound_s: float = math.nan
    """The lower bound, as in `Planned`."""
    outcome: _SearchOutcome | None = None
    """Set before `done`."""

    def prepare(self) -> Iteration:
        """The iteration with its first plan."""
        return self.planner.prepare(self.meta, searched=True)


class PlanAhead:
    """Plans of coming iterations, made by a thread of this rank. Every rank of the job makes one at the same time.

    All ranks of a replica submit the same iterations in the same order and take them in that order.

    Args:
        seed: of the job.
        search: finds plans; it may raise, return an invalid plan, or take too long.
        warm: called once by a thread that searches, before its first search.
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
        self._section: PlannerConfig = planner.job.section
        self._searches = mesh.is_leader or self._section.search.distributed
        self._group = second_replica_group(mesh, MESSAGE_TIMEOUT)
        self.threads = search_threads(
            self._section.search.threads, num_cores(), local_world_size(mesh.layout.world_size)
        )
        """The threads of a search."""
        self.counts: Counter[PlanStatus] = Counter()
        """How many iterations had each status."""
        self._broken = False
        self._current: PendingPlan | None = None
        self._open: list[PendingPlan] = []
        self._queue: queue.SimpleQueue[PendingPlan | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="plan-ahead", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------- on the training thread

    def submit(self, step: int, meta: IterationMeta, planner: IterationPlanner | None = None) -> PendingPlan:
        """Starts planning a step; returns at once. Args: planner: one with other memory limits than the job's."""
        pending = PendingPlan(step, meta, planner or self._planner)
        self._open.append(pending)
        self._queue.put(pending)
        return pending

    def take(self, pending: PendingPlan, patience_s: float | None = None) -> Planned:
        """The plan of a submitted step, equal on all ranks of the replica. Collective over it.

        Args: patience_s: seconds to wait before it uses the first plan instead; None: as long as the search takes.
        Raises:
            DataError: an image or token of the batch would be lost or used twice.
            PlanError: no plan fits, with the rank and the bytes.
        """
        self._wait(pending, patience_s)
        self._open.remove(pending)
        outcome = pending.outcome if pending.done.is_set() else None
        if outcome is None and self._broken:
            outcome = _SearchOutcome(step=pending.step, status=PlanStatus.BROKEN)
        outcome = outcome or _SearchOutcome(step=pending.step, status=PlanStatus.TIMED_OUT, text=_timed_out(patience_s))
        status, text = self._agree(outcome)
        self.counts[status] += 1
        if status is PlanStatus.READY:
            assert outcome.plan is not None
            return _planned(pending, outcome.plan, outcome, status)
        pending.given_up.set()
        if status is PlanStatus.ERROR:
            raise outcome.error or PlanError(f"step {pending.step}: {text}")
        if status is PlanStatus.BROKEN:
            self._broken = True
        iteration = pending.iteration or pending.prepare()
        plan = pending.planner.finish(iteration, iteration.first)
        check_same_program(plan.program.hash, self._mesh)
        if text:
            how = status.name.lower().replace("_", " ")
            logger.warning("step %d runs its first plan (search %s): %s", pending.step, how, text)
        return _planned(pending, plan, outcome, status)

    def close(self) -> None:
        """Cancels all searches and ends the thread."""
        for pending in self._open:
            pending.given_up.set()
        self._queue.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            logger.warning("the search of step %d does not end; the job ends without it", self._current_step())

    def _wait(self, pending: PendingPlan, patience_s: float | None) -> None:
        if self._broken:
            return
        current = self._current
        stuck = current is not None and current is not pending and current.given_up.is_set()
        # An earlier search was cancelled a whole step ago and still runs: do not wait for it again.
        pending.done.wait(0.0 if stuck and patience_s is not None else patience_s)

    def _agree(self, outcome: _SearchOutcome) -> tuple[PlanStatus, str]:
        """The status of a step on all ranks of the replica, and the message that this rank logs."""
        number = outcome.plan.program.hash if outcome.plan else 0
        local = torch.tensor([outcome.status, number], dtype=torch.int64)
        rows = [local]
        if self._mesh.replica_group is not None:
            rows = [torch.empty_like(local) for _ in self._mesh.replica_ranks]
            dist.all_gather(rows, local, group=self._mesh.replica_group)
        statuses = [PlanStatus(int(row[0])) for row in rows]
        worst = max(statuses)
        if worst is PlanStatus.READY and len({int(row[1]) for row in rows}) > 1:
            return PlanStatus.INVALID, "the program differs between ranks" if self._mesh.is_leader else ""
        first = self._mesh.replica_ranks[statuses.index(worst)]
        if worst is PlanStatus.ERROR:
            return worst, f"rank {first} cannot prepare the iteration; see its own message"
        return worst, outcome.text if first == self._mesh.rank else ""  # one rank of the replica logs it

    def _current_step(self) -> int:
        return self._current.step if self._current else 0

    # ---------------------------------------------------------------------------------- in the thread

    def _serve(self) -> None:
        if self._searches:
            try:
                self._warm()
            except BaseException as error:  # the search will fail in the same way, and is counted
                logger.warning("the search cannot be prepared: %s: %s", type(error).__name__, error)
        while (pending := self._queue.get()) is not None:
            self._current = pending
            try:
                pending.outcome = self._plan(pending)
            except BaseException as error:
                self._broken = True
                text = f"the ranks of the replica cannot exchange plans any more: {type(error).__name__}: {error}"
                pending.outcome = _SearchOutcome(step=pending.step, status=PlanStatus.BROKEN, text=text)
            self._current = None
            pending.done.set()

    def _plan(self, pending: PendingPlan) -> _SearchOutcome:
        """Prepares, searches, exchanges and adopts the plan of one iteration. Raises only what the exchange raises."""
        if self._broken:
            return _SearchOutcome(step=pending.step, status=PlanStatus.BROKEN)
        error: Exception | None = None
        outcome = _SearchOutcome(step=pending.step, status=PlanStatus.TIMED_OUT, text="it was cancelled")
        if not pending.given_up.is_set():
            try:
                pending.iteration = iteration = pending.prepare()
                if self._mesh.is_leader:
                    pending.bound_s = lower_bound_s(iteration.problem)
                outcome = self._offer(pending, iteration) if self._searches else outcome
            except Exception as raised:
                error = raised
                outcome = replace(outcome, status=PlanStatus.ERROR, text=str(raised))
        outcome = self._exchange(outcome)  # also after an error, since it is collective
        if error is not None:
            return _SearchOutcome(step=pending.step, status=PlanStatus.ERROR, error=error)
        return self._adopt(pending, outcome)

    def _offer(self, pending: PendingPlan, iteration: Iteration) -> _SearchOutcome:
        """The result of this rank's search, as it is sent. Never raises."""
        mesh, section, planner = self._mesh, self._section, pending.planner
        member = mesh.replica_ranks.index(mesh.rank)
        options = search_options(
            section,
            seed=search_seed(self._seed, pending.step, member),
            threads=self.threads,
            num_searchers=len(mesh.replica_ranks) if section.search.distributed else 1,
            noise=planner.job.costs.noise,
        )
        outcome = _SearchOutcome(step=pending.step, status=PlanStatus.FAILED)
        start = time.perf_counter()
        try:
            result = iteration.first
            if section.search.interleave:
                cancelled = pending.given_up.is_set
                iteration, result = search_iteration(planner, iteration, options, self._search, cancelled=cancelled)
            outcome = replace(outcome, search_s=time.perf_counter() - start, evaluations=int(result.evaluations))
            plan, message = result.plan_or_none, str(result.message)
        except Exception as error:
            return replace(outcome, text=f"it raised {type(error).__name__}: {error}")
        if plan is None:
            return replace(outcome, text=message)
        try:
            problem = iteration.problem
            if plan.graph != problem.graph:
                raise PlanError("its work graph is that of another iteration")
            makespan_s = math.inf
            if section.search.distributed:  # only a valid plan may be preferred to those of the other ranks
                check(plan, problem)
                makespan_s = result.expected_s or simulate(problem, plan).makespan_s
            outcome = replace(outcome, data=to_bytes(plan), kind=result.status, message=message)
            outcome = replace(outcome, grouping=iteration.grouping)
            return replace(outcome, status=PlanStatus.READY, makespan_s=makespan_s)
        except Exception as error:
            return replace(outcome, status=PlanStatus.INVALID, text=_text(error))

    def _exchange(self, local: _SearchOutcome) -> _SearchOutcome:
        """The best plan of all ranks that search. Collective over the threads of the replica."""
        group, ranks = self._group, self._mesh.replica_ranks
        if group is None:
            return local
        source, more = 0, {}
        if self._section.search.distributed:
            row = torch.tensor([local.makespan_s, local.evaluations, local.search_s], dtype=torch.float64)
            rows = [torch.empty_like(row) for _ in ranks]
            dist.all_gather(rows, row, group=group)
            source = min(range(len(ranks)), key=lambda member: (float(rows[member][0]), member))
            more = {
                "evaluations": sum(int(row[1]) for row in rows),
                "search_s": max(float(row[2]) for row in rows),
            }
        box: list[Any] = [local]
        dist.broadcast_object_list(box, src=ranks[source], group=group, device=torch.device("cpu"))
        outcome: _SearchOutcome = replace(box[0], **more)
        if outcome.step != local.step:
            raise PlanError(f"a plan of step {outcome.step} was received for step {local.step}")
        return outcome

    def _adopt(self, pending: PendingPlan, outcome: _SearchOutcome) -> _SearchOutcome:
        """Checks and lowers the plan that was received. Never raises."""
        if outcome.status is not PlanStatus.READY:
            # A leader that could not prepare the iteration raises that error itself.
            return replace(outcome, status=min(outcome.status, PlanStatus.FAILED))
        iteration = pending.iteration
        if pending.given_up.is_set() or iteration is None:
            return replace(outcome, status=PlanStatus.TIMED_OUT)
        try:
            bound_s = pending.bound_s
            if outcome.grouping is not None:
                iteration = pending.planner.regrouped(iteration, outcome.grouping)
                bound_s = lower_bound_s(iteration.problem) if self._mesh.is_leader else math.nan
            result = PlanResult(
                problem=iteration.problem,
                status=outcome.kind,
                message=outcome.message,
                plan_or_none=from_bytes(iteration.problem.graph, outcome.data),
                evaluations=outcome.evaluations,
                seed=search_seed(self._seed, pending.step),
            )
            check(result.plan, iteration.problem)
            plan = pending.planner.finish(iteration, result)
            return replace(outcome, plan=plan, bound_s=bound_s, ready_s=time.perf_counter())
        except Exception as error:
            return replace(outcome, status=PlanStatus.INVALID, text=_text(error))


def num_cores() -> int:
    """Cores of this machine that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _planned(pending: PendingPlan, plan: IterationPlan, outcome: _SearchOutcome, status: PlanStatus) -> Planned:
    return Planned(
        plan=plan,
        status=status,
        evaluations=outcome.evaluations,
        search_s=outcome.search_s,
        bound_s=outcome.bound_s if status is PlanStatus.READY else pending.bound_s,
        age_s=time.perf_counter() - outcome.ready_s if status is PlanStatus.READY else 0.0,
    )


def _timed_out(patience_s: float | None) -> str:
    waited = 0.0 if patience_s is None else patience_s
    return f"it had not ended {waited:g} s after the step needed it (planner.search.patience_s)"


def _text(error: Exception) -> str:
    """The first line of the error of a plan."""
    first_line = str(error).split("\n", 1)[0]
    return first_line if isinstance(error, PlanError) else f"{type(error).__name__}: {first_line}"
