"""The kernels as Python calls them: with the types that they are compiled for."""

import numpy as np

from mmtrain.planner.search import kernels
from mmtrain.planner.search.instance import Searched
from mmtrain.planner.search.kernels import Decoder, Workspace
from mmtrain.planner.search.orders import Order


def start_chain(searched: Searched, order: Order, how: Decoder, cost: float, seed: int) -> kernels.Chain:
    """A chain that stands at an order. Args: seed: of its random numbers; 63 bits."""
    at, group_at = order
    num_ranks, num_groups = searched.arrays.node_at.shape
    stay = np.zeros((2, 2, num_groups, num_ranks, 2), np.uint32)
    stay[..., 0] = np.iinfo(np.uint32).max
    return kernels.Chain(
        at=at.astype(np.uint32),
        group_at=group_at.astype(np.uint32),
        how=np.array([float(value) for value in how]),
        best_at=at.astype(np.uint32),
        best_how=np.array([float(value) for value in how]),
        cost=np.array([cost, cost]),
        random=np.array([2 * seed + 1], np.uint64),
        stay=stay,
        here=np.zeros(2, np.uint8),
    )


def best_of(chain: kernels.Chain) -> tuple[Order, Decoder, float]:
    """The best plan that a chain has found."""
    at = chain.best_at.astype(np.int64)
    group_at = np.empty_like(at)
    for half in range(2):
        group_at[half, at[half]] = np.arange(at.shape[1], dtype=np.int64)
    memory, speed, gap, backward_first, split = map(float, chain.best_how)
    return (at, group_at), Decoder(memory, speed, gap, backward_first > 0.5, split > 0.5), float(chain.cost[1])


def anneal(
    searched: Searched,
    w: Workspace,
    chain: kernels.Chain,
    evaluations: int,
    temperatures: tuple[float, float],
    iterations: int,
    *,
    can_split: bool,
    reorder: bool,
) -> None:
    """Some evaluations of simulated annealing. Args: temperatures: at the start and at the end, of the makespan."""
    p, mode = searched.arrays, kernels.ANNEAL
    kernels.run(p, w, chain, searched.cluster_of, mode, evaluations, *temperatures, iterations, can_split, reorder)


def evaluate(searched: Searched, w: Workspace, order: Order, how: Decoder, iterations: int) -> float:
    """The makespan of the plan that an order decodes to, which the workspace then holds; inf: it does not fit.

    Args: iterations: of the choice of options.
    """
    chain = start_chain(searched, order, how, 0.0, 0)
    p, mode = searched.arrays, kernels.EVALUATE
    return float(kernels.run(p, w, chain, searched.cluster_of, mode, 1, 0.0, 0.0, iterations, False, False))


def choose(searched: Searched, w: Workspace, iterations: int) -> float:
    """Options for the orders that a workspace holds; by how much their seconds are above a bound, at most; inf: none
    fit."""
    empty = np.zeros((2, searched.num_groups), np.int64)
    chain = start_chain(searched, (empty, empty), Decoder(0.0, 0.0, 0.0, False, False), 0.0, 0)
    p, mode = searched.arrays, kernels.CHOOSE
    return float(kernels.run(p, w, chain, searched.cluster_of, mode, 1, 0.0, 0.0, iterations, False, False))
