"""The result of planning: a plan, or the sentence that says why there is none."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from mmtrain.errors import PlanError
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.simulate import simulate
from mmtrain.schedule.timeline import Timeline

PlanKind = Literal["optimal", "improved", "first", "infeasible"]
"""What a result is: a plan that no other one can shorten, one of a search, one of a schedule, or none."""


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """A plan for a problem; with the status "infeasible" there is none, and reading it raises the message."""

    problem: PlanningProblem
    status: PlanKind
    message: str
    """One sentence for the user."""
    plan_or_none: Plan | None = None
    """The plan, for callers that continue without one; all others read `plan`."""
    expected_s: float | None = None
    """Mean makespan over drawn seconds, by which a search chose the plan; None: it chose by the makespan."""
    evaluations: int = 1
    """Plans that were tried."""
    seed: int = 0
    """Seed of the search."""

    @property
    def has_plan(self) -> bool:
        """Whether there is a plan."""
        return self.plan_or_none is not None

    @property
    def plan(self) -> Plan:
        """The plan. Raises: PlanError: there is none; its message is that of the result."""
        if self.plan_or_none is None:
            raise PlanError(self.message)
        return self.plan_or_none

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated timeline of the plan. Raises: PlanError: there is no plan, or it cannot run to its end."""
        return simulate(self.problem, self.plan)

    @property
    def makespan_s(self) -> float:
        """Seconds of the plan; infinite: there is none."""
        return self.timeline.makespan_s if self.has_plan else math.inf

    @property
    def cost_s(self) -> float:
        """Seconds by which plans are compared: the mean over drawn seconds, if there is one, else the makespan."""
        return self.makespan_s if self.expected_s is None else self.expected_s
