"""Strategies: how a search continues from a good start. Each chain has its own random numbers and memory."""

import math
import random
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from mmtrain.planner.search.evaluate import anneal, best_of, evaluate, start_chain
from mmtrain.planner.search.instance import Searched
from mmtrain.planner.search.kernels.arrays import Decoder, Workspace
from mmtrain.planner.search.orders import GroupOrder, order_of

HOT, COLD = 1e-3, 6e-5
"""Temperature of annealing at the start and at the end, as a part of the makespan. A hotter chain leaves the sweep's
order, and on a large problem does not find one as good again."""
ROLLOUTS = 10
"""Random completions of each new node of the tree (DIP, section 5.1)."""
EXPLORATION = 0.05
"""Weight of rarely visited nodes, relative to scores between 0 and 1."""


class Start(NamedTuple):
    """An order, how it is decoded, and the makespan of its plan."""

    order: GroupOrder
    how: Decoder
    cost: float


class Chain(ABC):
    """One chain of a strategy."""

    def __init__(
        self,
        searched: Searched,
        workspace: Workspace,
        start: Start,
        seed: tuple[int, int],
        reorder: bool,
        can_split: bool,
        can_braid: bool,
        iterations: int,
    ) -> None:
        """Args: seed: of the search, and the number of the chain."""
        self.searched, self.workspace, self.best = searched, workspace, start
        self.seed, self.reorder, self.iterations = seed, reorder, iterations
        self.can_split, self.can_braid = can_split, can_braid
        self.random = random.Random(f"{seed[0]} {seed[1]}")
        self.begin()

    @abstractmethod
    def begin(self) -> None:
        """Sets up the state of the strategy."""

    @abstractmethod
    def run(self, evaluations: int, before: float, after: float) -> None:
        """Tries plans. Args: before, after: part of the budget used up at the start and at the end."""

    def evaluate(self, order: GroupOrder) -> float:
        """The makespan of an order with the start's decoder; updates `best`."""
        how = self.best.how
        cost = evaluate(self.searched, self.workspace, order, how, self.iterations)
        if cost < self.best.cost:
            self.best = Start(order, how, cost)
        return cost


class AnnealChain(Chain):
    """Simulated annealing on orders and decoder."""

    def begin(self) -> None:
        self.state = start_chain(self.searched, *self.best, self.random.getrandbits(62))

    def run(self, evaluations: int, before: float, after: float) -> None:
        anneal(
            self.searched,
            self.workspace,
            self.state,
            evaluations,
            (_temperature(before), _temperature(after)),
            self.iterations,
            can_split=self.can_split,
            can_braid=self.can_braid,
            reorder=self.reorder,
        )
        if self.state.cost[1] < self.best.cost:
            self.best = Start(*best_of(self.state))


def _temperature(progress: float) -> float:
    return float(HOT * (COLD / HOT) ** progress)


@dataclass
class _TreeNode:
    """The choice of one group for one position."""

    group: int
    parent: "_TreeNode | None" = None
    children: "list[_TreeNode]" = field(default_factory=list)
    visits: int = 0
    best: float = math.inf
    """The least makespan of all plans below."""


class TreeChain(Chain):
    """Monte Carlo tree search over the sequence of groups (DIP, section 5.1).

    The number of a node's children grows with the square root of its visits. A node that tried each of hundreds of
    groups first would never get below the first position.
    """

    def begin(self) -> None:
        self.root = _TreeNode(-1)
        self._rollouts_remaining = 0
        self._leaf = self.root
        self._leaf_best = math.inf
        self._prefix: list[int] = []

    def run(self, evaluations: int, before: float, after: float) -> None:
        for _ in range(evaluations):
            if not self._rollouts_remaining:
                self._select()
            self._leaf_best = min(self._leaf_best, self.evaluate(self._rollout()))
            self._rollouts_remaining -= 1
            if not self._rollouts_remaining:
                self._propagate()

    def _select(self) -> None:
        """Descends to a node that may have one more child, and adds it."""
        node, self._prefix = self.root, []
        chosen: set[int] = set()
        while len(chosen) < self.searched.num_groups:
            widest = min(self.searched.num_groups - len(chosen), 1 + math.isqrt(node.visits))
            if len(node.children) < widest:
                tried = chosen | {child.group for child in node.children}
                group = self.random.choice([g for g in range(self.searched.num_groups) if g not in tried])
                child = _TreeNode(group, node)
                node.children.append(child)
                node = child
                self._prefix.append(group)
                break
            node = max(node.children, key=self._bound)
            self._prefix.append(node.group)
            chosen.add(node.group)
        self._leaf, self._leaf_best, self._rollouts_remaining = node, math.inf, ROLLOUTS

    def _bound(self, node: _TreeNode) -> float:
        assert node.parent is not None
        rarity = math.sqrt(math.log(node.parent.visits + 1) / max(1, node.visits))
        return self.best.cost / node.best + EXPLORATION * rarity

    def _rollout(self) -> GroupOrder:
        chosen = set(self._prefix)
        rest = [group for group in range(self.searched.num_groups) if group not in chosen]
        self.random.shuffle(rest)
        sequence = np.array([*self._prefix, *rest], np.int64)
        return order_of(np.stack([sequence, sequence]))

    def _propagate(self) -> None:
        node: _TreeNode | None = self._leaf
        while node is not None:
            node.visits += 1
            node.best = min(node.best, self._leaf_best)
            node = node.parent
