"""The search: from a planning problem to the best plan that a budget finds."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from mmtrain.planner.plan import PlanResult, make_plan
from mmtrain.schedule.problem import PlanningProblem

Strategy = Literal["anneal", "mcts", "random", "dfs", "first"]


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """What a search may do, and for how long."""

    budget_evaluations: int = 1000
    """Plans tried; 0: no limit."""
    budget_s: float = 0.0
    """Seconds; 0: no limit. If it ends the search, the plan depends on the speed of the machine."""
    seed: int = 0
    threads: int = 1
    """The plan does not depend on it."""
    strategy: Strategy = "anneal"
    reorder: bool = True
    """Search the order of microbatches."""
    split: bool = True
    """Backwards may be split into input and weight halves."""
    memory: bool = True
    """Choose a memory option for each stage and work; else the fastest that fits for all."""


def search(
    problem: PlanningProblem, options: SearchOptions, *, cancelled: Callable[[], bool] = lambda: False
) -> PlanResult:
    """The best checked plan that the search found, with its timeline.

    Args: cancelled: asked now and then; the search ends early where it says True.
    """
    return make_plan(problem, "interleave")


def warm() -> None:
    """Compiles or loads the kernels, so that no search has to."""
