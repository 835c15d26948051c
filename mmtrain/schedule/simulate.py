"""The simulator of orders: when each action of a plan runs, given costs and transfers."""

from itertools import accumulate

from mmtrain.schedule.action import BACKWARD, Action, Kind
from mmtrain.schedule.plan import Plan, held_bytes
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.timeline import Timeline


def simulate(problem: PlanningProblem, plan: Plan) -> Timeline:
    """The timeline of a plan: each rank runs its order, an action starts once what it needs has arrived.

    A result reaches another rank `latency_s + bytes / bytes_per_s` after its end, its own rank at
    once; transfers occupy no rank. Memory and peaks follow the chosen options.

    Raises: PlanError: deadlock; with rank, step, the waiting action and the missing one, and the orders.
    """
    run = _Run(problem, plan)
    run.to_the_end()
    rows: list[tuple[int, Action, float, float]] = []
    memory, peaks = [], []
    for rank, held in enumerate(held_bytes(plan, problem)):
        order, starts, ends = plan.orders[rank], run.starts[rank], run.ends[rank]
        rows += zip([rank] * len(order), order, starts, ends, strict=True)
        profile = [(0.0, 0.0)]
        for action, start, end, (during, after) in zip(order, starts, ends, held, strict=True):
            if action.kind is Kind.F or during > max(profile[-1][1], after):
                profile.append((start, during))
            profile.append((end, after))
        memory.append(tuple(profile))
        peaks.append(max((during for during, _ in held), default=0.0))
    return Timeline.from_rows(plan.graph, rows, memory=tuple(memory), peak_bytes=tuple(peaks))


class _Run:
    """The ranks as they run their orders.

    The needs of an action are those of `WorkGraph.needs`, written out for speed. A *node* is (stage, work), counted
    work by work along the chain of its module, so that the stage before has the number before.
    """

    def __init__(self, problem: PlanningProblem, plan: Plan) -> None:
        graph = problem.graph
        self.plan = plan
        self.starts: list[list[float]] = [[] for _ in plan.orders]
        """[rank][step]"""
        self.ends: list[list[float]] = [[] for _ in plan.orders]
        self._graph, self._costs, self._cost_index = graph, problem.costs, problem.cost_index
        self._places = [graph.place[stage][1] for stage in range(len(graph.stage_rank))]
        self._first = [0, *accumulate(len(graph.stages(work)) for work in range(len(graph.works)))]
        self._rank = [graph.stage_rank[stage] for work in range(len(graph.works)) for stage in graph.stages(work)]
        self._grad = [flag for row in graph.backward for flag in row]
        latency, rate = problem.p2p.latency_s, problem.p2p.bytes_per_s
        self._send = [latency + amount / rate for row in problem.output_bytes for amount in row]
        self._forward: list[float | None] = [None] * len(self._rank)
        """[node] -> end of F."""
        self._backward: list[float | None] = [None] * len(self._rank)
        """[node] -> end of B or I."""

    def to_the_end(self) -> None:
        """Runs all orders."""
        steps = [0] * len(self.plan.orders)
        progress = True
        while progress:
            progress = False
            for rank in range(len(steps)):
                before = steps[rank]
                steps[rank] = self._advance(rank, before)
                progress = progress or steps[rank] > before
        if any(step < len(order) for step, order in zip(steps, self.plan.orders, strict=True)):
            for _ in self.plan.run_order():  # says what waits for what
                pass

    def _advance(self, rank: int, step: int) -> int:
        """Runs a rank's order from a step until it waits for another rank; the step that waits."""
        order, works = self.plan.orders[rank], self.plan.works[rank]
        starts, ends, options = self.starts[rank], self.ends[rank], self.plan.options
        free = ends[-1] if ends else 0.0
        while step < len(order):
            action, work = order[step], works[step]
            place = self._places[action.stage]
            node = self._first[work] + place
            ready = self._ready_s(action.kind, node, work, rank)
            if ready is None:
                break
            start = max(free, ready)
            chosen = options.get((action.stage, work), 0) if options else 0
            option = self._costs[self._cost_index[work][place]][chosen]
            free = start + option.duration_s(action.kind)
            starts.append(start)
            ends.append(free)
            if action.kind is Kind.F:
                self._forward[node] = free
            elif action.kind is not Kind.W:
                self._backward[node] = free
            step += 1
        return step

    def _ready_s(self, kind: Kind, node: int, work: int, rank: int) -> float | None:
        """When all that an action needs has arrived on its rank; None: not known yet."""
        if kind is Kind.F:
            if node > self._first[work]:
                return self._arrival_s(self._forward[node - 1], node - 1, node - 1, rank)
            ready: float | None = 0.0
            for other in self._graph.works[work].after:
                source = self._first[other + 1] - 1
                arrival = self._arrival_s(self._forward[source], source, source, rank)
                if arrival is None:
                    return None
                ready = max(ready or 0.0, arrival)
            return ready
        if kind is Kind.W:
            return self._backward[node]
        assert kind in BACKWARD
        ready = self._forward[node]
        if ready is None or not self._grad[node]:
            return ready
        inside = node + 1 < self._first[work + 1]
        targets = (node + 1,) if inside else [self._first[other] for other in self._graph.consumers[work]]
        for target in targets:
            if self._grad[target]:
                arrival = self._arrival_s(self._backward[target], target, node, rank)
                if arrival is None:
                    return None
                ready = max(ready, arrival)
        return ready

    def _arrival_s(self, end: float | None, maker: int, sender: int, rank: int) -> float | None:
        """When a result that ended on the rank of node `maker` is on a rank; node `sender` says how large it is."""
        if end is None or self._rank[maker] == rank:
            return end
        return end + self._send[sender]
