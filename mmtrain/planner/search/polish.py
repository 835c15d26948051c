"""Plans that are improved action by action, after the search of orders that a decoder makes."""

import math
import random
from dataclasses import dataclass, field

import numpy as np

from mmtrain.planner.search.chains import Start
from mmtrain.planner.search.evaluate import evaluate
from mmtrain.planner.search.instance import Searched
from mmtrain.planner.search.kernels.arrays import Workspace
from mmtrain.planner.search.kernels.polish import Timing, polish

TRIES = 100
"""Tries that count as one evaluation: they take about as long."""
HOT, COLD = 0.1, 0.005
"""Temperature at the start and at the end, as a part of the makespan an action: in a plan of few actions each matters
more. A hotter one leaves what was decoded, and on a large problem does not find a plan as good again."""


@dataclass
class Polished:
    """One chain of changes to a plan."""

    searched: Searched
    workspace: Workspace
    """Its own, with the current plan."""
    cost: float
    """Makespan of the best plan; inf: it did not fit."""
    seed: int
    _random: "np.ndarray[tuple[int, ...], np.dtype[np.uint64]]" = field(init=False)

    def __post_init__(self) -> None:
        self._random = np.array([2 * random.Random(f"polish {self.seed}").getrandbits(62) + 1], np.uint64)
        self._order, self._option = self.workspace.order.copy(), self.workspace.option.copy()
        n = self.workspace.option.size
        self._timing = Timing(
            place=np.zeros(4 * n, np.uint32),
            slot=np.zeros(4 * n, np.uint32),
            end=np.zeros(4 * n),
            backward=np.zeros(n, np.uint32),
            dirty=np.zeros(3 * n, np.uint8),
            changed=np.zeros(3 * n, np.uint32),
            before=np.zeros(3 * n),
        )

    @classmethod
    def of(cls, searched: Searched, start: Start, iterations: int, seed: int) -> "Polished":
        """A chain from what an order decodes to, without blocks. Args: iterations: of the choice of options."""
        workspace, how = searched.workspace(), start.how._replace(braid=False)
        return cls(searched, workspace, evaluate(searched, workspace, start.order, how, iterations), seed)

    def run(self, evaluations: int, before: float, after: float) -> None:
        """Tries changes. Args: before, after: part of the budget for them that is used up at the start, at the end."""
        if self.cost < math.inf:
            self._run(TRIES * evaluations, before, after)

    def best(self) -> Workspace:
        """The workspace with the best plan."""
        w = self.workspace
        w.order[:], w.option[:] = self._order, self._option
        self._run(0, 1.0, 1.0)  # sets the sequence of its actions
        return w

    def _run(self, tries: int, before: float, after: float) -> None:
        actions = int(self.workspace.length.sum())
        hot, cold = (HOT * (COLD / HOT) ** part / max(1, actions) for part in (before, after))
        p, w, best = self.searched.arrays, self.workspace, (self._order, self._option)
        self.cost = float(polish(p, w, self._timing, *best, self.cost, self._random, tries, hot, cold))
