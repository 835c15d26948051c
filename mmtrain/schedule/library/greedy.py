"""Greedy list scheduling of a work graph with two queues a rank, under memory limits that cannot deadlock.

Source: DIP, arXiv:2504.14145, section 5.2. Its "disable the forward queue when memory is full" can
deadlock: forwards of many microbatches may fill a rank, so that none of them can get to its backward.
Here `Memory` decides on admission, and always leaves a way to the end.
"""

from mmtrain.errors import PlanError
from mmtrain.schedule.action import Action, Kind
from mmtrain.schedule.graph import WorkGraph
from mmtrain.schedule.library.memory import Memory, choose_options
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import PlanningProblem

Node = tuple[int, int]
"""(stage, work)."""

Choice = tuple[Kind, Node]
"""F or B of a node."""


def greedy(problem: PlanningProblem) -> Plan:
    """The plan that always schedules what can start earliest; older microbatches first among equals.

    Each rank has a queue of forwards and one of backwards. The rank whose next action can start
    earliest is served; if both of its queues have something that could have started before the rank's
    last action ended, forward and backward alternate, else the earlier start wins.

    Raises: PlanError: the activations of one microbatch alone exceed a rank's memory limit.
    """
    return _Greedy(problem).run()


def clusters(graph: WorkGraph) -> list[int]:
    """[work] -> number of the set of works that hang together through `after`, oldest microbatch first."""
    leader = list(range(len(graph.works)))

    def find(work: int) -> int:
        while leader[work] != work:
            work = leader[work]
        return work

    for index, work in enumerate(graph.works):
        for other in work.after:
            leader[find(other)] = find(index)
    oldest: dict[int, tuple[int, int]] = {}
    for index, work in enumerate(graph.works):
        age = (work.microbatch, index)
        oldest[find(index)] = min(age, oldest.get(find(index), age))
    place = {root: number for number, root in enumerate(sorted(oldest, key=oldest.__getitem__))}
    return [place[find(index)] for index in range(len(graph.works))]


class _Greedy:
    """One run of the dual-queue list scheduler."""

    def __init__(self, problem: PlanningProblem) -> None:
        self.problem = problem
        self.graph = problem.graph
        self.cluster = clusters(self.graph)
        self.chosen = choose_options(problem, self.cluster)
        self.options = {n: problem.options(*n)[i] for n, i in self.chosen.items()}
        self.memory = Memory(problem, self.cluster, self.options)
        ranks = range(self.graph.num_ranks)
        self.orders: list[list[Action]] = [[] for _ in ranks]
        self.candidates: list[tuple[float, Choice] | None] = [None for _ in ranks]
        self.stale = set(ranks)  # ranks whose candidate must be looked for again
        self.t_last = [0.0 for _ in ranks]
        self.ready: dict[Kind, list[dict[Node, float]]] = {k: [{} for _ in ranks] for k in (Kind.F, Kind.B)}
        self.waiting: dict[tuple[Kind, Node], int] = {}
        self.arrival: dict[tuple[Kind, Node], float] = {}
        self.priority: dict[Kind, dict[Node, tuple[int, ...]]] = {Kind.F: {}, Kind.B: {}}
        for place, (stage, work) in enumerate(self.graph.nodes()):
            w = self.graph.works[work]
            self.priority[Kind.F][stage, work] = (self.cluster[work], w.microbatch, place)
            self.priority[Kind.B][stage, work] = (self.cluster[work], w.microbatch, -place)
        for node in self.graph.nodes():
            for kind in (Kind.F, Kind.B) if self.graph.has_backward(*node) else (Kind.F,):
                self.waiting[kind, node] = len(self.graph.needs(kind, *node))
                self.arrival[kind, node] = 0.0
                if not self.waiting[kind, node]:
                    self._rank_queue(kind, node)[node] = 0.0

    def _rank_queue(self, kind: Kind, node: Node) -> dict[Node, float]:
        return self.ready[kind][self.graph.stage_rank[node[0]]]

    def run(self) -> Plan:
        """The plan."""
        for _ in range(len(self.waiting)):
            kind, node = self._next() or self._forced()
            self._schedule(kind, node)
        return Plan(self.graph, tuple(map(tuple, self.orders)), {n: i for n, i in self.chosen.items() if i})

    def _next(self) -> Choice | None:
        """What the rank that can start earliest does next; None if nothing may start."""
        for rank in self.stale:
            self.candidates[rank] = self._candidate(rank)
        self.stale.clear()
        found = [(c[0], rank) for rank, c in enumerate(self.candidates) if c]
        return self.candidates[min(found)[1]][1] if found else None  # type: ignore[index]

    def _candidate(self, rank: int) -> tuple[float, Choice] | None:
        """The earliest start on a rank and what starts then; None if nothing may start there."""
        last = self.t_last[rank]
        heads: dict[Kind, tuple[float, Node]] = {}
        fits = self.memory.room(rank)
        for kind, ready in ((Kind.F, self.ready[Kind.F][rank]), (Kind.B, self.ready[Kind.B][rank])):
            # What has already arrived by priority, else what arrives first.
            priority = self.priority[kind]
            best: tuple[float, tuple[int, ...], Node] | None = None
            for node, arrival in ready.items():
                entry = (max(arrival, last), priority[node], node)
                if best is not None and entry >= best:
                    continue
                if kind is Kind.B or fits(self.cluster[node[1]], self.options[node]):
                    best = entry
            if best:
                heads[kind] = best[0], best[2]
        if not heads:
            return None
        kind = min(heads, key=lambda k: heads[k][0])
        if len(heads) == 2 and heads[Kind.F][0] == heads[Kind.B][0]:
            previous = self.orders[rank][-1].kind if self.orders[rank] else Kind.B
            kind = Kind.B if previous is Kind.F else Kind.F
        return heads[kind][0], (kind, heads[kind][1])

    def _forced(self) -> Choice:
        """The oldest forward that fits, where the promise cannot be kept (a stage without a backward whose
        inputs have one). Raises: PlanError: none fits."""
        waiting = [(self.priority[Kind.F][node], node) for rank_queue in self.ready[Kind.F] for node in rank_queue]
        for _, node in sorted(waiting):
            if self.memory.fits_now(self.graph.stage_rank[node[0]], self.options[node]):
                return Kind.F, node
        _, node = min(waiting)
        rank = self.graph.stage_rank[node[0]]
        raise PlanError(
            f"rank {rank}: no forward fits into the memory limit of {self.memory.limit(rank):.4g} bytes; "
            f"the oldest that waits, {self.graph.action(Kind.F, *node)}, takes "
            f"{self.options[node].activation_bytes:.4g}; raise the limit"
        )

    def _schedule(self, kind: Kind, node: Node) -> None:
        stage, work = node
        rank, option, cluster = self.graph.stage_rank[stage], self.options[node], self.cluster[work]
        start = max(self.t_last[rank], self.ready[kind][rank].pop(node))
        end = self.t_last[rank] = start + option.duration_s(kind)
        self.orders[rank].append(self.graph.action(kind, stage, work))
        self.stale.add(rank)
        if kind is Kind.F:
            finished = self.memory.start_forward(cluster, rank, option)
            for edge in self.graph.outputs(stage, work):
                self._arrive(Kind.F, (edge.target, edge.target_work), end + self.problem.transfer_s(edge))
            if option.has_backward:
                self._arrive(Kind.B, node, end)
        else:
            finished = self.memory.end_backward(cluster, rank, option)
            for edge in self.graph.inputs(stage, work):
                if edge.grad:
                    self._arrive(Kind.B, (edge.source, edge.work), end + self.problem.transfer_s(edge))
        if finished:  # the promise to this cluster is kept: others may have more room, on all ranks
            self.stale.update(range(self.graph.num_ranks))

    def _arrive(self, kind: Kind, node: Node, when: float) -> None:
        self.arrival[kind, node] = max(self.arrival[kind, node], when)
        self.waiting[kind, node] -= 1
        if not self.waiting[kind, node]:
            self._rank_queue(kind, node)[node] = self.arrival[kind, node]
            self.stale.add(self.graph.stage_rank[node[0]])
