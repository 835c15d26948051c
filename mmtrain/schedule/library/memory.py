"""Admission of forwards under memory limits so that the works can always be finished.

A cluster is a set of works that hang together through `after`, in most iterations one microbatch.
The promise that is kept: the unfinished clusters can be finished one after the other, oldest first
(the banker's algorithm with a fixed order).
"""

import math
from collections.abc import Callable, Mapping, Sequence

from mmtrain.schedule.plan import exceeds
from mmtrain.schedule.problem import Option, PlanningProblem


class Memory:
    """Who holds what on which rank, and what may be added.

    For each cluster c and rank r, need[c][r] = (what c and all younger ones hold on r) + (what c will
    still add to r). As long as need <= limit everywhere, the oldest unfinished cluster can run to its end.
    Stages without a backward hold memory during their forward only; what c and all younger ones hold leaves room for
    the largest of c's that is still to come.
    """

    def __init__(
        self, problem: PlanningProblem, cluster: Sequence[int], options: Mapping[tuple[int, int], Option]
    ) -> None:
        graph = problem.graph
        count, ranks = max(cluster, default=-1) + 1, range(graph.num_ranks)
        self._limit = [math.inf if limit is None else limit for limit in problem.memory_limit_bytes]
        self._held = [[0.0 for _ in ranks] for _ in range(count)]
        self._rest = [[0.0 for _ in ranks] for _ in range(count)]
        self._passing: list[list[list[float]]] = [[[] for _ in ranks] for _ in range(count)]
        self._unfinished = list(range(count))
        self._left = [0] * count
        for (stage, work), option in options.items():
            c, r = cluster[work], graph.stage_rank[stage]
            self._left[c] += 1
            if option.has_backward:
                self._rest[c][r] += option.activation_bytes
                self._left[c] += 1
            else:
                self._passing[c][r].append(option.activation_bytes)
        for passing in self._passing:
            for amounts in passing:
                amounts.sort()

    def footprint(self, cluster: int, rank: int) -> float:
        """Bytes that a cluster needs on a rank at once if nothing else is there."""
        return max(self._rest[cluster][rank], *self._passing[cluster][rank][-1:], 0.0)

    def limit(self, rank: int) -> float:
        """Bytes that the rank's activations may take."""
        return self._limit[rank]

    def room(self, rank: int) -> Callable[[int, Option], bool]:
        """Tells for (cluster, option) whether its forward may start on a rank now and keep the promise."""
        limit = self._limit[rank]
        if limit == math.inf:
            return lambda cluster, option: True
        free: dict[int, float] = {}  # cluster -> what it may add, for the sake of the older ones and of its own passing
        on_rank = 0.0
        for c in reversed(self._unfinished):
            on_rank += self._held[c][rank]
            free[c] = limit - on_rank
        least = math.inf
        for c in self._unfinished:
            passing = self._passing[c][rank]
            within = min(least, free[c] - passing[-1]) if passing else least
            free[c], least = within, min(within, free[c] - self._rest[c][rank])
        slack = 1e-9 * limit

        def fits(cluster: int, option: Option) -> bool:
            amount = option.activation_bytes
            if on_rank + amount > limit + slack:
                return False
            return not option.has_backward or amount <= free[cluster] + slack

        return fits

    def fits_now(self, rank: int, option: Option) -> bool:
        """Whether a forward fits into what is free on its rank, promise or not."""
        return not exceeds(self._on(rank) + option.activation_bytes, self._limit[rank])

    def _on(self, rank: int) -> float:
        return sum(self._held[c][rank] for c in self._unfinished)

    def start_forward(self, cluster: int, rank: int, option: Option) -> bool:
        """Takes the memory of a forward; tells whether the cluster is finished."""
        if option.has_backward:
            self._rest[cluster][rank] -= option.activation_bytes
            self._held[cluster][rank] += option.activation_bytes
        else:
            self._passing[cluster][rank].remove(option.activation_bytes)
        return self._end_one(cluster)

    def end_backward(self, cluster: int, rank: int, option: Option) -> bool:
        """Gives back what a backward frees; tells whether the cluster is finished."""
        self._held[cluster][rank] -= option.activation_bytes
        return self._end_one(cluster)

    def _end_one(self, cluster: int) -> bool:
        self._left[cluster] -= 1
        if not self._left[cluster]:
            self._unfinished.remove(cluster)
        return not self._left[cluster]
