"""Admission of forwards under memory limits so that all works can finish.

A component is a set of works connected through `after`, in most iterations one microbatch. The guarantee: the
unfinished components can be finished one after the other, oldest first (the banker's algorithm with a fixed order).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from mmtrain.errors import PlanError
from mmtrain.schedule.action import Action, Kind
from mmtrain.schedule.plan import exceeds
from mmtrain.schedule.problem import Option, PlanningProblem


def choose_options(problem: PlanningProblem, component: Sequence[int]) -> dict[tuple[int, int], int]:
    """(stage, work) -> option 0 (the fastest) in each component that fits alone, else its option of least memory.

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
    """(stage, work) -> the option of least memory."""
    return {
        node: min(range(len(options)), key=lambda i: (options[i].activation_bytes, i))
        for node in problem.graph.nodes()
        for options in [problem.options(*node)]
    }


def _memory(problem: PlanningProblem, component: Sequence[int], chosen: Mapping[tuple[int, int], int]) -> "Memory":
    return Memory(problem, component, {node: problem.options(*node)[i] for node, i in chosen.items()})


class Memory:
    """The bytes that components hold on each rank, and which forwards may be added.

    For each component c and rank r, need[c][r] = (what c and all younger ones hold on r) + (what c will still add to
    r). As long as need <= limit everywhere, the oldest unfinished component can run to its end. Stages without a
    backward hold memory during their forward only; room is kept for the largest such forward of c that has not run.
    """

    def __init__(
        self,
        problem: PlanningProblem,
        component: Sequence[int],
        options: Mapping[tuple[int, int], Option],
        limits: Sequence[float | None] | None = None,
    ) -> None:
        """Args: limits: bytes a rank; None: those of the problem."""
        graph = problem.graph
        count, ranks = max(component, default=-1) + 1, range(graph.num_ranks)
        self.num_components, self.num_ranks = count, graph.num_ranks
        given = problem.held_limit_bytes if limits is None else limits
        self._limit = [math.inf if limit is None else limit for limit in given]
        self._held = [[0.0 for _ in ranks] for _ in range(count)]
        self._total = [0.0 for _ in ranks]
        self._rest = [[0.0 for _ in ranks] for _ in range(count)]
        self._passing: list[list[list[float]]] = [[[] for _ in ranks] for _ in range(count)]
        self._unfinished = list(range(count))
        self._to_come = [[0 for _ in ranks] for _ in range(count)]  # forwards
        self._left = [0] * count
        for (stage, work), option in options.items():
            c, r = component[work], graph.stage_rank[stage]
            self._left[c] += 1
            self._to_come[c][r] += 1
            if option.has_backward:
                self._rest[c][r] += option.activation_bytes
                self._left[c] += 1
            else:
                self._passing[c][r].append(option.activation_bytes)
        for passing in self._passing:
            for amounts in passing:
                amounts.sort()
        self._owing = [[c for c in range(count) if self._to_come[c][r]] for r in ranks]

    def footprint(self, component: int, rank: int) -> float:
        """Bytes that a component needs on a rank that is otherwise empty."""
        return max(self._rest[component][rank], *self._passing[component][rank][-1:], 0.0)

    def oversize(self) -> Iterator[tuple[int, int]]:
        """(component, rank) where a component alone exceeds the limit."""
        for component in range(self.num_components):
            for rank in range(self.num_ranks):
                if exceeds(self.footprint(component, rank), self._limit[rank]):
                    yield component, rank

    def limit(self, rank: int) -> float:
        """Bytes that the rank's activations may take."""
        return self._limit[rank]

    def room(self, rank: int) -> Callable[[int, Option], bool]:
        """A function of (component, option): whether its forward may start on a rank now and keep the guarantee."""
        limit = self._limit[rank]
        if limit == math.inf:
            return lambda component, option: True
        on_rank, slack = self._total[rank], 1e-9 * limit

        def fits(component: int, option: Option) -> bool:
            amount = option.activation_bytes
            if on_rank + amount > limit + slack:
                return False
            if not option.has_backward:
                return True
            # Room is kept for what this component and the older ones will still add, on top of what is held.
            for c in self._owing[rank]:
                if c > component:
                    return True
                passing = self._passing[c][rank]
                to_come = max(passing[-1] if passing else 0.0, self._rest[c][rank] if c < component else 0.0)
                free = limit + slack - amount - to_come
                if on_rank > free and self._held_from(c, rank) > free:
                    return False
            return True

        return fits

    def fits_now(self, rank: int, option: Option) -> bool:
        """Whether a forward fits into the free memory of its rank, ignoring the guarantee."""
        return not exceeds(self._total[rank] + option.activation_bytes, self._limit[rank])

    def refusal(self, rank: int, forward: Action, option: Option) -> PlanError:
        """The error where no waiting forward fits, with the oldest of them."""
        return PlanError(
            f"rank {rank}: no forward fits into the memory limit of {self.limit(rank):.4g} bytes; the oldest "
            f"waiting one, {forward}, takes {option.activation_bytes:.4g}; raise the limit"
        )

    def start_forward(self, component: int, rank: int, option: Option) -> bool:
        """Allocates the memory of a forward; returns whether the component has finished."""
        self._to_come[component][rank] -= 1
        if not self._to_come[component][rank]:
            self._owing[rank].remove(component)
        if option.has_backward:
            self._rest[component][rank] -= option.activation_bytes
            self._add(component, rank, option.activation_bytes)
        else:
            self._passing[component][rank].remove(option.activation_bytes)
        return self._end_one(component)

    def end_input(self, component: int, rank: int, option: Option) -> None:
        """Frees the memory that an I frees."""
        self._add(component, rank, option.growth_bytes(Kind.I))

    def end_backward(self, component: int, rank: int, option: Option, *, split: bool = False) -> bool:
        """Frees the memory that a B or W frees; returns whether the component has finished."""
        self._add(component, rank, option.growth_bytes(Kind.W if split else Kind.B))
        return self._end_one(component)

    def _held_from(self, component: int, rank: int) -> float:
        return sum(self._held[c][rank] for c in self._unfinished if c >= component)

    def _add(self, component: int, rank: int, amount: float) -> None:
        self._held[component][rank] += amount
        self._total[rank] += amount

    def _end_one(self, component: int) -> bool:
        self._left[component] -= 1
        if not self._left[component]:
            self._unfinished.remove(component)
        return not self._left[component]
