"""All forwards before all backwards: GPipe and Looped BFS."""

from mmtrain.schedule.action import Action, Kind
from mmtrain.schedule.library.one_f_one_b import backward_order, forward_order
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import PlanningProblem


def gpipe(problem: PlanningProblem) -> Plan:
    """All forwards, then all backwards; with several stages a rank, by groups of P microbatches.

    The bubble on a chain of one stage a rank is (P - 1) / (M + P - 1) for M microbatches, and the activations of all of
    them are held. Every (stage, work) takes its option 0; memory limits are ignored.

    Source: Huang et al., GPipe, arXiv:1811.06965. Backwards start with the oldest microbatch, as in torch.
    """
    return _forwards_first(problem, problem.graph.num_ranks)


def looped_bfs(problem: PlanningProblem) -> Plan:
    """All forwards, then all backwards, each segment of a rank with all microbatches before the next.

    With V segments the bubble on a chain is (P - 1) / (MV + P - 1), and parameters gathered for each segment are
    gathered the fewest times. Every (stage, work) takes its option 0; memory limits are ignored.

    Source: Lamy-Poirier, Breadth-First Pipeline Parallelism, arXiv:2211.05953.
    """
    return _forwards_first(problem, len(problem.graph.works))


def _forwards_first(problem: PlanningProblem, group_size: int) -> Plan:
    graph = problem.graph
    orders: list[list[Action]] = [[] for _ in range(graph.num_ranks)]
    for kind, nodes in ((Kind.F, forward_order(graph, group_size)), (Kind.B, backward_order(graph, group_size))):
        for stage, work in nodes:
            orders[graph.stage_rank[stage]].append(graph.action(kind, stage, work))
    return Plan(graph, tuple(map(tuple, orders)))
