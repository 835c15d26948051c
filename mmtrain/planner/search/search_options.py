"""What a search may spend, and what it may change."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mmtrain.costs.noise import EXACT, Noise
from mmtrain.errors import PlanError
from mmtrain.planner.search.chains import AnnealChain, Chain, TreeChain
from mmtrain.schedule.number_ranges import THREADS

if TYPE_CHECKING:  # a search needs no config, whose import takes as long as the rest of the planner
    from mmtrain.config.planner import Strategy

CHAINS: dict[str, type[Chain]] = {
    "anneal": AnnealChain,
    "mcts": TreeChain,
}
"""Strategy -> its chains; others may be added."""


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Budget and search space of a search."""

    budget_evaluations: int = 1000
    """Plans tried; 0: no limit."""
    budget_s: float = 0.0
    """Seconds; 0: no limit. If it ends the search, the plan depends on the speed of the machine."""
    seed: int = 0
    threads: int = 1
    """The plan depends on it only if budget_s ends the search."""
    strategy: "Strategy" = "anneal"
    """anneal; mcts, which is DIP's (section 5.1); first: no search; or one that was added to CHAINS."""
    reorder: bool = True
    """Search the order of microbatches."""
    split: bool = True
    """Backwards may be split into I and W."""
    braid: bool = False
    """Forwards and backwards may run as one block, where layers run as units."""
    memory: bool = True
    """Choose a memory option for each stage and work; else the fastest one that fits for all."""
    noise: Noise = EXACT
    """The noise of actual seconds. Plans are then compared by their mean makespan over drawn seconds."""
    draws: int = 64
    """Draws for the comparison of the last plans; all plans are compared by an eighth of them."""

    def __post_init__(self) -> None:
        for name in ("budget_evaluations", "budget_s", "seed"):
            if not 0 <= getattr(self, name) < math.inf:
                raise PlanError(f"{name} = {getattr(self, name)}; it must be finite and at least 0")
        if self.draws < 1:
            raise PlanError(f"draws = {self.draws}; it must be at least 1")
        THREADS.check("threads", self.threads)
        if self.strategy not in (*CHAINS, "first"):
            raise PlanError(f"strategy {self.strategy!r} does not exist; choose one of {', '.join(CHAINS)}, first")
