"""Optimus in its coarse form: encoders run before and after everything else."""

from dataclasses import replace

from mmtrain.schedule.action import Action, Kind
from mmtrain.schedule.graph import WorkGraph
from mmtrain.schedule.library.eager import encoders
from mmtrain.schedule.library.one_f_one_b import alternate, backward_order, forward_order
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import PlanningProblem


def optimus(problem: PlanningProblem) -> Plan:
    """All forwards of encoders, then 1F1B of the modules that they feed, then all backwards of encoders.

    An encoder is a module that feeds another one in this iteration. The fine-grained part of Optimus, encoder kernels
    within the language model's bubbles, is not included. Every (stage, work) takes its option 0; memory limits are
    ignored.

    Source: Feng et al., Optimus, arXiv:2408.03505, section 4 (coarse-grained bubble exploitation).
    """
    graph = problem.graph
    modules = encoders(graph)
    rest = [index for index, work in enumerate(graph.works) if work.module not in modules]
    middle = alternate(_without_inputs(graph, rest))
    before = _orders(graph, Kind.F, [n for n in forward_order(graph) if graph.works[n[1]].module in modules])
    behind = _orders(graph, Kind.B, [n for n in backward_order(graph) if graph.works[n[1]].module in modules])
    return Plan(graph, tuple((*a, *b, *c) for a, b, c in zip(before, middle, behind, strict=True)))


def _without_inputs(graph: WorkGraph, kept: list[int]) -> WorkGraph:
    """The graph of some works only, as if the works that feed them had finished."""
    return WorkGraph(
        num_ranks=graph.num_ranks,
        modules=graph.modules,
        stage_rank=graph.stage_rank,
        works=tuple(replace(graph.works[index], after=(), links=()) for index in kept),
        backward=tuple(graph.backward[index] for index in kept),
    )


def _orders(graph: WorkGraph, kind: Kind, nodes: list[tuple[int, int]]) -> list[list[Action]]:
    orders: list[list[Action]] = [[] for _ in range(graph.num_ranks)]
    for stage, work in nodes:
        orders[graph.stage_rank[stage]].append(graph.action(kind, stage, work))
    return orders
