"""How far real seconds of actions lie from modelled ones, and draws of such seconds. Pure.

A search keeps the plans that look best in the simulator: those where nothing has slack, so that each action that takes
longer than modelled delays the end. Plans are therefore compared by their mean makespan over drawn seconds.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from mmtrain.errors import PlanError

Factors = npt.NDArray[np.float64]
"""[draws, nodes, 3]: factors of the seconds of F, I and W of each (stage, work)."""

MOST = 1.0
"""Largest deviation: seconds that often double are not modelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Standard deviations of actual over modelled seconds (of their logarithms). All 0: seconds are exact."""

    forward: float = 0.0
    """The deviation of F."""
    backward: float = 0.0
    """The deviation of B and I."""
    backward_weight: float = 0.0
    """The deviation of W."""
    shared: float = 0.0
    """Part of the variance that all actions of a rank have in common in an iteration, 0 .. 1."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 <= value <= MOST:
                raise PlanError(f"noise.{field.name} = {value}; it must be in 0 .. {MOST:g}, a part of the seconds")

    @classmethod
    def uniform(cls, deviation: float) -> "Noise":
        """Noise of equal deviation for all kinds of actions, each action on its own."""
        return cls(forward=deviation, backward=deviation, backward_weight=deviation)

    @classmethod
    def of(cls, residuals: Sequence[tuple[int, str, float]]) -> "Noise":
        """The noise that explains residuals.

        Args: residuals: (step, name of a field, logarithm of actual over modelled seconds) of actions of one rank.
        """
        values = {f.name: [v for _, name, v in residuals if name == f.name] for f in fields(cls)}
        deviation = {name: min(MOST, float(np.std(of))) if of else 0.0 for name, of in values.items()}
        by_step: dict[int, list[float]] = defaultdict(list)
        for step, name, value in residuals:
            if deviation[name]:
                by_step[step].append((value - float(np.mean(values[name]))) / deviation[name])
        # The variance of the means of steps: what actions share, and a part of what each has on its own.
        own = float(np.mean([1 / len(of) for of in by_step.values()])) if by_step else 1.0
        between = float(np.var([np.mean(of) for of in by_step.values()])) if by_step else 0.0
        shared = (between - own) / (1 - own) if own < 1 else 0.0
        return cls(**{**deviation, "shared": min(1.0, max(0.0, shared))})

    def factors(self, node_rank: npt.NDArray[np.int64], draws: int, seed: int) -> Factors:
        """Draws with mean 1. Args: node_rank: [nodes] rank of each (stage, work)."""
        random = np.random.default_rng(seed)
        num_ranks = int(node_rank.max(initial=0)) + 1
        of_rank = random.standard_normal((draws, num_ranks))[:, node_rank, None]
        own = random.standard_normal((draws, len(node_rank), 3))
        normal = np.sqrt(self.shared) * of_rank + np.sqrt(1 - self.shared) * own
        deviation = np.array([self.forward, self.backward, self.backward_weight])
        return np.asarray(np.exp(deviation * normal - deviation**2 / 2))


EXACT = Noise()
"""No noise."""
