"""Admission of forwards under memory limits so that all works can finish.

A component is a set of works connected through `after`, in most iterations one microbatch. The guarantee: the
unfinished components can be finished one after the other, oldest first (the banker's algorithm with a fixed order).
"""

import math
from collections.abc import Iterator, Mapping, Sequence

from mmtrain.errors import PlanError
from mmtrain.schedule.action import Action
from mmtrain.schedule.graph import WorkGraph
from mmtrain.schedule.plan import exceeds
from mmtrain.schedule.problem import Option, PlanningProblem


def components(graph: WorkGraph) -> list[int]:
    """[work] -> number of its connected component of the graph, by the newest microbatch in it."""
    leader = list(range(len(graph.works)))

    def find(work: int) -> int:
        while leader[work] != work:
            leader[work] = work = leader[leader[work]]
        return work

    for index in range(len(graph.works)):
        for other in graph.sources(index):
            leader[find(other)] = find(index)
    newest: dict[int, int] = {}  # in the order of the first works
    for index, work in enumerate(graph.works):
        newest[find(index)] = max(work.microbatch, newest.get(find(index), 0))
    number_of = {root: number for number, root in enumerate(sorted(newest, key=newest.__getitem__))}
    return [number_of[find(index)] for index in range(len(graph.works))]


def choose_options(problem: PlanningProblem, component: Sequence[int]) -> dict[tuple[int, int], int]:
    """The option of each (stage, work): 0 (the fastest) in each component that fits alone, else that of least memory.

    Args: component: [work] -> number of its component, the oldest first.
    Raises: PlanError: a component alone exceeds a rank's memory limit even so; with microbatch and bytes.
    """
    graph = problem.graph
    fastest = dict.fromkeys(graph.nodes(), 0)
    if all(limit is None for limit in problem.held_limit_bytes):
        return fastest
    smallest = _smallest(problem)
    oversize = {c for c, _ in _memory(problem, component, fastest).oversize()}
    chosen = {node: smallest[node] if component[node[1]] in oversize else 0 for node in fastest}
    memory = _memory(problem, component, chosen)
    for number, rank in memory.oversize():
        together = sorted({w.microbatch for w, c in zip(graph.works, component, strict=True) if c == number})
        what = f"microbatch {together[0]}" if len(together) == 1 else f"microbatches {together}, which are connected,"
        raise PlanError(
            f"rank {rank}: {what} alone needs {memory.footprint(number, rank):.4g} "
            f"bytes for its activations, over the memory limit of {memory.limit(rank):.4g} bytes; raise "
            "the limit, shorten the microbatch or use more ranks"
        )
    return chosen


def oversize_groups(problem: PlanningProblem, group: Sequence[int]) -> set[int]:
    """The groups of works that exceed a rank's memory limit alone, even with the options of least memory.

    Args: group: [work] -> number of its group.
    """
    return {number for number, _ in _memory(problem, group, _smallest(problem)).oversize()}


def _smallest(problem: PlanningProblem) -> dict[tuple[int, int], int]:
    """The option of least memory of each (stage, work)."""
    return {
        node: min(range(len(options)), key=lambda i: (options[i].activation_bytes, i))
        for node in problem.graph.nodes()
        for options in [problem.options(*node)]
    }


def _memory(problem: PlanningProblem, component: Sequence[int], chosen: Mapping[tuple[int, int], int]) -> "Memory":
    return Memory.of(problem, component, {node: problem.options(*node)[i] for node, i in chosen.items()})


class Memory:
    """What components hold in pools (the memory of each rank, or what else has a limit), and which forwards may start.

    For each component c and pool r, need[c][r] = (what c and all younger ones hold of r) + (what c will still add to
    r). As long as need <= limit everywhere, the oldest unfinished component can run to its end. Stages without a
    backward hold memory during their forward only; room is kept for the largest such forward of c that has not run.
    """

    def __init__(
        self,
        component: Sequence[int],
        pool: Sequence[int],
        amount: Sequence[float],
        kept: Sequence[float],
        has_backward: Sequence[bool],
        limits: Sequence[float],
    ) -> None:
        """Args:
        component: [node] -> number of its component, the oldest first.
        pool: [node] -> pool of its F; -1: none.
        amount: [node] -> held from the start of F to the end of B or I.
        kept: [node] -> held from the end of I to the end of W.
        has_backward: [node]
        limits: [pool]
        """
        count, pools = max(component, default=-1) + 1, range(len(limits))
        self.num_components = count
        self._component, self._pool, self._amount, self._kept = component, pool, amount, kept
        self._has_backward, self._limit = has_backward, list(limits)
        self._held = [[0.0 for _ in pools] for _ in range(count)]
        self._total = [0.0 for _ in pools]
        self._rest = [[0.0 for _ in pools] for _ in range(count)]
        self._passing: list[list[list[float]]] = [[[] for _ in pools] for _ in range(count)]
        self._unfinished = list(range(count))
        self._to_come = [[0 for _ in pools] for _ in range(count)]  # forwards
        self._left = [0] * count
        for node, c in enumerate(component):
            r = pool[node]
            if r >= 0:
                self._left[c] += 1 + has_backward[node]
                self._to_come[c][r] += 1
                if has_backward[node]:
                    self._rest[c][r] += amount[node]
                else:
                    self._passing[c][r].append(amount[node])
        for passing in self._passing:
            for amounts in passing:
                amounts.sort()
        self._owing = [[c for c in range(count) if self._to_come[c][r]] for r in pools]

    @classmethod
    def of(
        cls,
        problem: PlanningProblem,
        component: Sequence[int],
        options: Mapping[tuple[int, int], Option],
        limits: Sequence[float | None] | None = None,
    ) -> "Memory":
        """The memory of the ranks of a problem.

        Args: component: [work]. options: of each (stage, work). limits: bytes a rank; None: those of the problem.
        """
        items = problem.graph.items
        chosen = [options[node] for node in zip(items.stage, items.work, strict=True)]
        given = problem.held_limit_bytes if limits is None else limits
        return cls(
            component=[component[work] for work in items.work],
            pool=items.rank,
            amount=[option.activation_bytes for option in chosen],
            kept=[option.held_for_weight_bytes for option in chosen],
            has_backward=items.has_backward,
            limits=[math.inf if limit is None else limit for limit in given],
        )

    def footprint(self, component: int, pool: int) -> float:
        """What a component needs of a pool that is otherwise empty."""
        return max(self._rest[component][pool], *self._passing[component][pool][-1:], 0.0)

    def oversize(self) -> Iterator[tuple[int, int]]:
        """Each (component, pool) where a component alone exceeds the limit."""
        for component in range(self.num_components):
            for pool, limit in enumerate(self._limit):
                if exceeds(self.footprint(component, pool), limit):
                    yield component, pool

    def widen(self) -> None:
        """Raises limits to what each component holds alone."""
        self._limit = [max(limit, *(rest[r] for rest in self._rest)) for r, limit in enumerate(self._limit)]

    def limit(self, pool: int) -> float:
        """The bytes that a pool may hold."""
        return self._limit[pool]

    def fits(self, node: int) -> bool:
        """Whether a forward may start now and keep the guarantee."""
        pool = self._pool[node]
        if pool < 0 or (limit := self._limit[pool]) == math.inf:
            return True
        amount, total, slack = self._amount[node], self._total[pool], 1e-9 * limit
        if total + amount > limit + slack:
            return False
        if not self._has_backward[node]:
            return True
        # Room is kept for what this component and the older ones will still add, on top of what is held.
        component = self._component[node]
        for c in self._owing[pool]:
            if c > component:
                return True
            passing = self._passing[c][pool]
            to_come = max(passing[-1] if passing else 0.0, self._rest[c][pool] if c < component else 0.0)
            free = limit + slack - amount - to_come
            if total > free and self._held_from(c, pool) > free:
                return False
        return True

    def fits_now(self, node: int) -> bool:
        """Whether a forward fits into what is free, ignoring the guarantee."""
        pool = self._pool[node]
        return pool < 0 or not exceeds(self._total[pool] + self._amount[node], self._limit[pool])

    def refusal(self, forward: Action, node: int) -> PlanError:
        """The error where no waiting forward fits. Args: forward: the oldest of them, of a node."""
        rank = self._pool[node]
        return PlanError(
            f"rank {rank}: no forward fits into the memory limit of {self.limit(rank):.4g} bytes; the oldest "
            f"waiting one, {forward}, takes {self._amount[node]:.4g}; raise the limit"
        )

    def start_forward(self, node: int) -> None:
        """Allocates the memory of a forward."""
        component, pool, amount = self._component[node], self._pool[node], self._amount[node]
        if pool < 0:
            return
        self._to_come[component][pool] -= 1
        if not self._to_come[component][pool]:
            self._owing[pool].remove(component)
        if self._has_backward[node]:
            self._rest[component][pool] -= amount
            self._add(node, amount)
        else:
            self._passing[component][pool].remove(amount)
        self._end_one(component)

    def end_input(self, node: int) -> None:
        """Frees the memory that an I frees."""
        self._add(node, self._kept[node] - self._amount[node])

    def end_backward(self, node: int, *, split: bool = False) -> None:
        """Frees the memory that a B or W frees."""
        self._add(node, -(self._kept[node] if split else self._amount[node]))
        if self._pool[node] >= 0:
            self._end_one(self._component[node])

    def _held_from(self, component: int, pool: int) -> float:
        return sum(self._held[c][pool] for c in self._unfinished if c >= component)

    def _add(self, node: int, amount: float) -> None:
        pool = self._pool[node]
        if pool >= 0:
            self._held[self._component[node]][pool] += amount
            self._total[pool] += amount

    def _end_one(self, component: int) -> None:
        self._left[component] -= 1
        if not self._left[component]:
            self._unfinished.remove(component)
