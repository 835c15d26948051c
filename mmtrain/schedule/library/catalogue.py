"""The named schedules: functions from a planning problem to a plan, with the placement of stages that they expect.

Chimera (arXiv:2107.06925) and DualPipe are not included: they send microbatches through a module in both directions, so
each stage has a copy of its weights on two ranks, while a stage of a plan is on one. DualPipeV is the same idea with
one copy.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from mmtrain.schedule.library.auto_schedule import auto_schedule
from mmtrain.schedule.library.breadth_first import gpipe, looped_bfs
from mmtrain.schedule.library.controllable_memory import v_half, v_min
from mmtrain.schedule.library.dual_pipe_v import dual_pipe_v
from mmtrain.schedule.library.interleave import interleave
from mmtrain.schedule.library.names import EAGER_SCHEDULES, MEMORY_BOUNDED_SCHEDULES, ScheduleName, file_of
from mmtrain.schedule.library.one_f_one_b import one_f_one_b
from mmtrain.schedule.library.optimus import optimus
from mmtrain.schedule.library.stp import stp, stp_lean
from mmtrain.schedule.library.zbv import zbv
from mmtrain.schedule.library.zero_bubble import interleaved_zero_bubble, zb_h1, zb_h2
from mmtrain.schedule.passes.braid import braid
from mmtrain.schedule.passes.instruct import Instructed
from mmtrain.schedule.passes.separate import separate_gradients
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.recipe.instructions import Instruction, planned

ChunkPlacement = Literal["loop", "v"]
"""Placement of the chunks of a module. loop: chunk j on rank j mod P. v: down the ranks and back up, 2 chunks a
rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One schedule, named or from a file. It works for any problem; the other fields tell what it is designed for."""

    idea: str
    """A short description for lists."""
    make: Callable[..., Plan]
    placement: ChunkPlacement = "loop"
    least_passes: int = 1
    """Least number of chunks of the whole model on each rank, over all modules; with fewer it becomes another
    schedule."""
    splits_backward: bool = False
    """Whether plans have I and W where splitting is worthwhile."""
    keeps_memory_limits: bool = False
    """Whether plans stay within the problem's memory limits; of named ones by `names.MEMORY_BOUNDED_SCHEDULES`."""
    separates_gradients: bool = False
    """Whether `passes.separate` has changed its plans."""
    make_separated: Callable[[PlanningProblem], Plan] | None = None
    """`make` with gradients separated, within limits that the pass does not know; None: by the pass alone."""
    plans_forward_only: bool = False
    """Whether `make` also plans iterations without any backward."""
    segments: Mapping[str, int] = field(default_factory=dict)
    """Module -> chunks on each rank, where the schedule says so; "": of all others."""
    chain_ranks: tuple[int, ...] = ()
    """[stage] -> rank of a chain of one module; empty: by `placement`."""
    instructions: tuple[Instruction, ...] = ()
    """What ranks run in training steps in addition to compute; see `with_instructions`."""
    refusal: str = ""
    """Why no job can run the schedule, as the rest of a sentence; empty: it can."""
    takes_eager: bool = False
    """Whether `make` has a further argument `eager`: that of `names.EAGER_SCHEDULES`."""
    braids: bool = False
    """Whether its plans may have braids."""
    name: str = ""
    """The name in the catalogue, or of the file."""
    text: str = ""
    """Content of the file that it is from."""

    def with_instructions(self, problem: PlanningProblem) -> PlanningProblem:
        """The problem with the schedule's instructions, of which it may have some; as it is if there is no backward.

        Raises: RecipeError: one is for a module or chunk that the problem lacks.
        """
        graph = problem.graph
        if not self.instructions or not graph.has_any_backward:
            return problem
        more = [one for one in planned(self.instructions, graph) if one.key not in graph.instruction]
        return replace(problem, graph=replace(graph, instructions=(*graph.instructions, *more))) if more else problem

    def eager(self, count: int) -> "Schedule":
        """The schedule with more forwards in flight on the ranks of encoders.

        Args: count: of pairs, see `eager.with_eager`; above 0 only if `make` takes it.
        """
        if not count:
            return self
        assert self.takes_eager
        return replace(self, make=partial(self.make, eager=count))

    def separated(self) -> "Schedule":
        """The schedule with gradients separated."""
        make = self.make_separated or partial(_separated, self.make)
        return replace(self, make=make, separates_gradients=True, splits_backward=True)

    def braided(self) -> "Schedule":
        """The schedule with those blocks that shorten its plans. Its gradients are separated before, if at all."""
        return replace(self, make=partial(_braided, self.make), braids=True)

    @property
    def suffix(self) -> str:
        """The suffix of the file that it is from: .py or .csv."""
        path, _ = file_of(self.name) or ("", "")
        return Path(path).suffix

    @property
    def digest(self) -> str:
        """SHA-256 of the file that it is from; empty: from none."""
        return hashlib.sha256(self.text.encode()).hexdigest() if self.text else ""


def _separated(make: Callable[[PlanningProblem], Plan], problem: PlanningProblem) -> Plan:
    return separate_gradients(make(problem), problem)


def _braided(make: Callable[[PlanningProblem], Plan], problem: PlanningProblem) -> Plan:
    return braid(make(problem), problem)


_SCHEDULES = {
    "GPipe": Schedule(idea="all forwards, then all backwards", make=gpipe),
    "1F1B": Schedule(
        idea="one forward, one backward; with several chunks a rank, Megatron's interleaved order",
        make=one_f_one_b,
    ),
    "Interleaved1F1B": Schedule(idea="1F1B with at least 2 chunks a rank", make=one_f_one_b, least_passes=2),
    "LoopedBFS": Schedule(idea="all forwards, then all backwards, chunk by chunk", make=looped_bfs, least_passes=2),
    "ZB-H1": Schedule(idea="1F1B, weight gradients of rank r after r more pairs", make=zb_h1, splits_backward=True),
    "ZB-H2": Schedule(
        idea="twice the forwards in flight, weight gradients after 2r pairs",
        make=zb_h2,
        splits_backward=True,
    ),
    "ZB-AutoSchedule": Schedule(
        idea="list scheduling by cost with split backwards, within memory limits",
        make=auto_schedule,
        splits_backward=True,
    ),
    "InterleavedZeroBubble": Schedule(
        idea="ZB-H1 with at least 2 chunks a rank",
        make=interleaved_zero_bubble,
        least_passes=2,
        splits_backward=True,
    ),
    "ZBV": Schedule(idea="down the ranks and back up", make=zbv, placement="v", splits_backward=True),
    "V-half": Schedule(
        idea="down and back up, gradients back sooner", make=v_half, placement="v", splits_backward=True
    ),
    "V-min": Schedule(
        idea="down and back up, gradients back as soon as possible", make=v_min, placement="v", splits_backward=True
    ),
    "DualPipeV": Schedule(
        idea="down and back up, in pairs of a forward and a backward",
        make=dual_pipe_v,
        placement="v",
        splits_backward=True,
    ),
    "STP": Schedule(
        idea="down and back up, in blocks of a forward and a backward of one chunk",
        make=stp,
        placement="v",
        splits_backward=True,
        braids=True,
    ),
    "STP-lean": Schedule(
        idea="STP with a third less memory and a larger bubble",
        make=stp_lean,
        placement="v",
        splits_backward=True,
        braids=True,
    ),
    "Optimus": Schedule(idea="all encoder forwards, 1F1B of the rest, all encoder backwards", make=optimus),
    "interleave": Schedule(idea="greedy dual queues by cost, within memory limits (DIP)", make=interleave),
}
CATALOGUE: Mapping[str, Schedule] = {
    name: replace(
        _SCHEDULES[name],
        name=name,
        make=Instructed(_SCHEDULES[name].make),
        keeps_memory_limits=name in MEMORY_BOUNDED_SCHEDULES,
        takes_eager=name in EAGER_SCHEDULES,
    )
    for name in get_args(ScheduleName)
}
"""Name in `parallelism.pipeline_parallel_schedule` -> schedule."""
