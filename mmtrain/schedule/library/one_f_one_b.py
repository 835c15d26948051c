"""1F1B on a work graph: Megatron's one-forward-one-backward orders where the graph is a plain chain.

The order depends on the shape of the graph, never on costs. On a chain with one stage a rank it is PipeDream's
non-interleaved 1F1B, with several it is Megatron-LM's interleaved 1F1B (arXiv:2104.04473, section 2.2). The rules also
cover several modules, several sub-microbatches, absent modalities and frozen stages:

- Microbatches run in groups of P. Within a group, forwards run segment by segment in forward order (all of the group's
microbatches through one segment, then the next), backwards segment by segment in backward order.
- A *pair* is one microbatch in one segment of a rank, with all its sub-microbatches (and all its stages, where a mixed
partition puts the end of one module and the beginning of the next on one rank). Pipeline rank r has at most P - r pairs
between forward and backward if it has one segment with a backward, at most 2(P - r - 1) + (V - 1)P + 1 if it has V > 1
(Megatron's warm-up, plus one).
- The orders are those of unit-time ranks that follow both orders, alternate where both are possible, and after a
backward wait for a forward whose missing inputs are being computed.
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence

from mmtrain.schedule.action import Action, Kind
from mmtrain.schedule.graph import WorkGraph, linear_extension
from mmtrain.schedule.library.eager import with_eager
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import PlanningProblem
from mmtrain.schedule.table import Table

StageWork = tuple[int, int]
"""A stage and a work."""


def one_f_one_b(problem: PlanningProblem, *, eager: int = 0) -> Plan:
    """One forward, one backward; with several stages a rank, Megatron-LM's interleaved order.

    The bubble on a chain of V stages a rank is (P - 1)(F + I + W) / V, in seconds of all stages of a rank, with several
    stages if P divides M; at most P microbatches are held, with several stages P + (P - 1) / V. The order depends only
    on the work graph. Every (stage, work) takes its option 0; memory limits are ignored.

    Args: eager: pairs more that ranks with encoders may have in flight, see `with_eager`.
    Source: PipeDream-Flush, arXiv:2006.09503, and Megatron-LM's interleaved schedule, arXiv:2104.04473, section 2.2.
    """
    return with_eager(problem, eager, lambda extra: Plan(problem.graph, alternate(problem.graph, extra=extra)))


def alternate(graph: WorkGraph, ahead: int | None = None, extra: Sequence[int] = ()) -> tuple[tuple[Action, ...], ...]:
    """One order of F and B a rank: one forward, one backward, under the limit of pairs in flight.

    Args:
        ahead: pairs that a rank may start before its first backward for each rank behind it; 1 or 2. None: as in 1F1B,
            1 on a rank with one segment and 2 on a rank with several.
        extra: [rank] -> pairs more that it may have in flight; empty: none.
    """
    items = graph.items
    together = joined(graph)
    nodes = list(zip(items.stage, items.work, strict=True))
    names = [(together.get(stage, stage), graph.works[work].microbatch) for stage, work in nodes]
    works = Counter(names)
    number = {name: i for i, name in enumerate(works)}
    tick = math.lcm(*works.values(), 1)
    trained: list[set[int]] = [set() for _ in range(graph.num_ranks)]
    for node, has_backward in enumerate(items.has_backward):
        if has_backward:
            trained[items.rank[node]].add(names[node][0])
    return Table(
        forwards=[items.item(Kind.F, *node) for node in forward_order(graph)],
        backwards=[items.item(Kind.B, *node) for node in backward_order(graph)],
        pair=[number[name] for name in names],
        in_flight=[
            _limit(graph.num_ranks, rank, len(stages), ahead) + (extra[rank] if extra else 0)
            for rank, stages in enumerate(trained)
        ],
        ticks=[tick // works[name] for name in names],
    ).run(graph)


def _limit(P: int, rank: int, V: int, ahead: int | None) -> int:
    """Maximum number of pairs in flight on a rank with V trained segments."""
    ahead = ahead or (1 if V <= 1 else 2)
    return ahead * (P - rank - 1) + max(V - 1, 0) * P + 1


def segments(graph: WorkGraph) -> dict[int, int]:
    """The segment of each stage: its index among its rank's stages in forward order, counted from 0.

    Stages that `joined` combines are in one segment.
    """
    count = [0] * graph.num_ranks
    segment: dict[int, int] = {}
    together = joined(graph)
    for module in module_order(graph):
        for stage in graph.modules[module].stages:
            if stage in together:
                segment[stage] = segment[together[stage]]
                continue
            rank = graph.stage_rank[stage]
            segment[stage] = count[rank]
            count[rank] += 1
    return segment


def joined(graph: WorkGraph) -> dict[int, int]:
    """First stage of a module -> last stage of the module before it, where a mixed partition put both into one part.

    That is the case if both are on the same one of several ranks and both modules cycle through the ranks.
    """
    last_of: dict[int, int] = {}
    order = module_order(graph)
    for before, behind in itertools.pairwise(order):
        last, first = graph.modules[before].stages[-1], graph.modules[behind].stages[0]
        same = graph.num_ranks > 1 and graph.stage_rank[last] == graph.stage_rank[first]
        if same and _cycles(graph, before) and _cycles(graph, behind):
            last_of[first] = last_of.get(last, last)
    return last_of


def _cycles(graph: WorkGraph, module: int) -> bool:
    ranks = [graph.stage_rank[stage] for stage in graph.modules[module].stages]
    return all(b == (a + 1) % graph.num_ranks for a, b in itertools.pairwise(ranks))


def module_order(graph: WorkGraph) -> list[int]:
    """The modules in topological order of this iteration; by index where there is a choice (or a cycle)."""
    feeds = {(graph.works[o].module, w.module) for i, w in enumerate(graph.works) for o in graph.sources(i)}
    remaining = list(range(len(graph.modules)))
    order: list[int] = []
    while remaining:
        free = [m for m in remaining if not any((other, m) in feeds for other in remaining if other != m)]
        order.append((free or remaining)[0])
        remaining.remove(order[-1])
    return order


def forward_order(graph: WorkGraph, group_size: int = 0) -> list[StageWork]:
    """All (stage, work) by group of microbatches (of P; or `group_size`), segment, microbatch and sub-microbatch."""
    nodes = list(graph.nodes())
    before = {n: [(e.source, e.work) for e in graph.inputs(*n)] for n in nodes}
    return _in_groups(graph, before, group_size, 1)


def backward_order(graph: WorkGraph, group_size: int = 0) -> list[StageWork]:
    """All (stage, work) with a backward by group of microbatches, segment from the last, and microbatch."""
    nodes = [node for node in graph.nodes() if graph.has_backward(*node)]
    before = {n: [(e.target, e.target_work) for e in graph.outputs(*n) if e.grad] for n in nodes}
    return _in_groups(graph, before, group_size, -1)


def _in_groups(
    graph: WorkGraph, before: dict[StageWork, list[StageWork]], group_size: int, way: int
) -> list[StageWork]:
    """The nodes by group of microbatches, but each after its predecessors. Args: way: 1 forward, -1 backward."""
    segment, group = segments(graph), _groups(graph, group_size)

    def key(node: StageWork) -> tuple[int, ...]:
        stage, work = node
        w = graph.works[work]
        position = way * graph.position[stage]
        return group[w.microbatch], way * segment[stage], w.microbatch, w.sub_microbatch, position, stage

    return linear_extension(before, key)


def _groups(graph: WorkGraph, size: int) -> dict[int, int]:
    numbers = sorted({w.microbatch for w in graph.works})
    return {number: i // (size or graph.num_ranks) for i, number in enumerate(numbers)}
