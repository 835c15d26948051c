"""Calls of the kernels from Python, with the types that they are compiled for."""

import math
from dataclasses import replace

import numpy as np

from mmtrain.planner.search.instance import Searched
from mmtrain.planner.search.kernels.anneal import ANNEAL, CHOOSE, COST, EVALUATE, JOIN, run
from mmtrain.planner.search.kernels.arrays import Chain, Decoder, Workspace
from mmtrain.planner.search.orders import GroupOrder, inverse
from mmtrain.schedule.numba_start import load_numba
from mmtrain.schedule.passes.instruct import plan_without, without_instructions
from mmtrain.schedule.plan import Plan
from mmtrain.schedule.problem import PlanningProblem

LAST_ITERATIONS = 300
"""Iterations of the memory choice of the best plan."""


def start_chain(searched: Searched, order: GroupOrder, how: Decoder, cost: float, seed: int) -> Chain:
    """A chain whose current state is an order. Args: seed: of its random numbers; 63 bits."""
    at, group_at = order
    num_ranks, num_groups = searched.arrays.node_at.shape
    queued = np.zeros((2, 2, num_groups, num_ranks, 2), np.uint32)
    queued[..., 0] = np.iinfo(np.uint32).max
    return Chain(
        at=at.astype(np.uint32),
        group_at=group_at.astype(np.uint32),
        decoder=how.array,
        best_at=at.astype(np.uint32),
        best_decoder=how.array,
        cost=np.array([cost, cost]),
        random=np.array([2 * seed + 1], np.uint64),
        queued=queued,
        current=np.zeros(2, np.uint8),
    )


def best_of(chain: Chain) -> tuple[GroupOrder, Decoder, float]:
    """The best plan that a chain has found."""
    at = chain.best_at.astype(np.int64)
    return (at, inverse(at)), Decoder.from_array(chain.best_decoder), float(chain.cost[1])


def anneal(
    searched: Searched,
    w: Workspace,
    chain: Chain,
    evaluations: int,
    temperatures: tuple[float, float],
    iterations: int,
    *,
    can_split: bool,
    can_braid: bool,
    reorder: bool,
) -> None:
    """Some evaluations of simulated annealing. Args: temperatures: at the start and at the end, of the makespan."""
    p, mode, component_of, draws = searched.arrays, ANNEAL, searched.component_of, searched.factors
    run(p, w, chain, component_of, mode, evaluations, *temperatures, iterations, can_split, can_braid, reorder, draws)


def evaluate(searched: Searched, w: Workspace, order: GroupOrder, how: Decoder, iterations: int) -> float:
    """The cost of the plan that an order decodes to, which the workspace then holds; inf: it does not fit.

    Args: iterations: of the choice of options.
    """
    chain = start_chain(searched, order, how, 0.0, 0)
    p, mode = searched.arrays, EVALUATE
    off = False, False, False
    return float(run(p, w, chain, searched.component_of, mode, 1, 0.0, 0.0, iterations, *off, searched.factors))


def join(searched: Searched, w: Workspace) -> float:
    """Makes backwards of the workspace's plan whole where splitting them has no use; its cost."""
    return _of_plan(searched, w, JOIN)


def cost_of(searched: Searched, w: Workspace) -> float:
    """The cost of the workspace's plan."""
    return _of_plan(searched, w, COST)


def choose(searched: Searched, w: Workspace, iterations: int) -> float:
    """Chooses options for the orders in a workspace; the greatest part by which a rank's seconds exceed a bound; inf:
    none fit."""
    return _of_plan(searched, w, CHOOSE, iterations)


def fit_memory(problem: PlanningProblem, plan: Plan, *, iterations: int = LAST_ITERATIONS) -> Plan | None:
    """The plan with the same orders and the fastest memory options within the limits.

    None: even the options of least memory do not fit.

    Args: iterations: of the choice.
    """
    load_numba()
    bare = without_instructions(problem)  # the kernels do not know any; they hold nothing that an option could change
    searched = Searched.of(bare)
    w = searched.load(plan_without(plan, bare))
    if choose(searched, w, iterations) == math.inf:
        return None
    return replace(plan, options=searched.chosen(w))


def _of_plan(searched: Searched, w: Workspace, mode: int, iterations: int = 0) -> float:
    """What a mode of the kernels gives for the plan in a workspace."""
    empty = np.zeros((2, searched.num_groups), np.int64)
    unread = searched.decoder(0.0, 0.0, 0.0, False, False)
    chain = start_chain(searched, (empty, empty), unread, 0.0, 0)
    p, component_of = searched.arrays, searched.component_of
    off = False, False, False
    return float(run(p, w, chain, component_of, mode, 1, 0.0, 0.0, iterations, *off, searched.factors))
