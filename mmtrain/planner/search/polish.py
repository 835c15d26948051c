"""Plans that are improved action by action, after the search of orders that a decoder makes."""

import math
import random
from collections.abc import Sequence

import numpy as np

from mmtrain.planner.search.chains import Start
from mmtrain.planner.search.evaluate import evaluate
from mmtrain.planner.search.instance import Searched
from mmtrain.planner.search.kernels.arrays import Workspace
from mmtrain.planner.search.kernels.polish import polish
from mmtrain.planner.search.kernels.timing import Timing

TRIES, NODES = 50, 5
"""Tries that count as one evaluation, and nodes for each further one: they take about as long."""
HOT, COLD = 0.02, 0.005
"""Temperature at the start and at the end, as a part of the makespan an action: in a plan of few actions each matters
more. A hotter one leaves what was decoded, and on a large problem does not find a plan as good again."""
HOTTER = 0.4
"""At the start of each round but the first."""
ROUND, ROUNDS = 400, 8
"""Tries an action of a round, and the least number of rounds for which they are not all one round."""


class Polished:
    """One chain of changes to a plan: in one round, or, where there are many tries an action, in several, from other
    plans and from the best one in turns."""

    def __init__(self, searched: Searched, starts: Sequence[Start], iterations: int, seed: int) -> None:
        """Args:
        starts: the first and each second round begin with one of these, decoded without blocks.
        iterations: of the choice of options.
        """
        self.searched, self._starts, self._iterations = searched, starts, iterations
        self._workspace = w = searched.workspace()
        """The workspace with the current plan."""
        self.cost = self._decode(starts[0])
        """Makespan of the best plan; inf: it did not fit."""
        self._actions = max(1, int(w.length.sum()))
        self.span(0.0, 1.0)
        self._number, self._done = 0, 0
        """The number of the round, and the tries in it."""
        self._random = np.array([2 * random.Random(f"polish {seed}").getrandbits(62) + 1], np.uint64)
        self._order, self._option, self._length = w.order.copy(), w.option.copy(), w.length.copy()
        n = w.option.size
        self._timing = Timing(
            place=np.zeros(4 * n, np.uint32),
            slot=np.zeros(4 * n, np.int32),
            took=np.zeros(4 * n),
            end=np.zeros(4 * n),
            pull=np.zeros(4 * n),
            tail=np.zeros(4 * n),
            spare=np.zeros(w.order.shape),
            backward=np.zeros(n, np.uint32),
            dirty=np.zeros(3 * n // 64 + 1, np.uint64),
            changed=np.zeros(3 * n, np.uint32),
            before=np.zeros(3 * n),
        )

    def span(self, begin: float, end: float, faster: float = 1.0) -> None:
        """Cools down anew. Args:
        begin, end: parts of the budget of the search that are used up when the chain begins and ends.
        faster: how many more tries the chain will have once others have dropped out, than now.
        """
        self._begin, self._end, self._faster = begin, end, faster
        self._round: int | None = None
        """Tries of each round; 0: all are one round; None: not known yet."""

    def run(self, evaluations: int, before: float, after: float) -> None:
        """Tries changes, in rounds where there are many tries an action, or where seconds end the search.

        Args: before, after: part of the budget used up at the start and at the end.
        """
        tries = evaluations * (TRIES + len(self.searched.nodes) // NODES)
        if self.cost == math.inf:
            return
        rest = max(1e-9, self._end - self._begin)
        if self._round is None:
            expected = self._faster * tries * rest / max(1e-9, after - before)
            least = ROUND * self._actions
            self._round = least if expected >= ROUNDS * least else 0
        if not self._round:
            self._run(tries, HOT, (before - self._begin) / rest, (after - self._begin) / rest)
            return
        while tries > 0:
            some = min(tries, self._round - self._done)
            parts = self._done / self._round, (self._done + some) / self._round
            self._run(some, HOTTER if self._number else HOT, *parts)
            tries, self._done = tries - some, self._done + some
            if self._done == self._round:
                self._next_round()

    def best(self) -> Workspace:
        """The workspace with the best plan."""
        w = self._load_best()
        self._run(0, HOT, 1.0, 1.0)  # sets the sequence of its actions
        return w

    def _next_round(self) -> None:
        self._number, self._done = self._number + 1, 0
        start = self._starts[self._number // 2 % len(self._starts)]
        if self._number % 2 or self._decode(start) == math.inf:
            self._load_best()

    def _decode(self, start: Start) -> float:
        how = start.how._replace(braid=False)
        return evaluate(self.searched, self._workspace, start.order, how, self._iterations)

    def _load_best(self) -> Workspace:
        w = self._workspace
        w.order[:], w.option[:], w.length[:] = self._order, self._option, self._length
        return w

    def _run(self, tries: int, hottest: float, before: float, after: float) -> None:
        """Args: before, after: part of the round at the start and at the end."""
        hot, cold = (hottest * (COLD / hottest) ** part / self._actions for part in (before, after))
        p, w, best = self.searched.arrays, self._workspace, (self._order, self._option, self._length)
        self.cost = float(polish(p, w, self._timing, *best, self.cost, self._random, tries, hot, cold))
