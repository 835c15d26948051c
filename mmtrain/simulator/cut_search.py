"""The search for the best cut of a model, given how long each takes. Pure."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mmtrain.planner.partition.partition import Placed
from mmtrain.simulator.typical_iterations import MOST_MICROBATCHES

WORTH = 0.005
"""Fraction of an iteration that each additional segment has to save: its launches and messages are in no cost model.
They take the host 0.3 to 1.2 ms an action (docs/benchmarks.md), 0.2 to 0.8 % of an iteration of VLM-S."""
CHAIN_WORTH = 0.03
"""Further fraction that a chain has to save: its ranks are balanced for only one mixture of modalities. On others it
loses as much, in the mean of three models and three mixtures (docs/benchmarks.md, partitions)."""
VOCABULARY_WORTH = 2 * WORTH
"""Further fraction that a division of the vocabulary over the pipeline ranks has to save: each rank runs two more works
of each microbatch."""
FINALISTS = 3
"""Candidates that are judged on several iterations, after all candidates were judged on a part of one iteration. As
many separated candidates as without chains become finalists; chains are additional. So are candidates that divide the
vocabulary to those that do not."""
SHARE, LEAST_S, MOST_S = 0.2, 0.8, 6.0
"""The search takes about this fraction of the seconds that a rank computes in an iteration, but at least and at most so
many seconds. They are seconds of constant rates (`TypicalIterations.judging_s`), not of a clock: all ranks do the same
search."""


@dataclass(frozen=True)
class Cut:
    """A way to cut a model that the search may choose."""

    segments: tuple[int, ...]
    """K of each module that is cut, in the model's order; for a chain one number, its chunks on each rank."""
    is_chain: bool = False
    """Whether all modules are one chain, cut by time."""
    placement: Placed = ""
    """How modules on ranks of their own are placed."""
    ranks: tuple[int, ...] = ()
    """The ranks of each group that shares such modules."""
    divides_vocabulary: bool = False
    """Whether each rank has a part of the vocabulary."""

    @property
    def is_even(self) -> bool:
        """Whether all ranks hold a part of each module."""
        return not (self.is_chain or self.placement)

    def worth(self, margin: float = CHAIN_WORTH) -> float:
        """Fraction of an iteration that it has to save. Args: margin: if ranks hold unequal parts of modules."""
        of_vocabulary = VOCABULARY_WORTH if self.divides_vocabulary else 0.0
        return WORTH * sum(self.segments) + of_vocabulary + (0.0 if self.is_even else margin)

    def __str__(self) -> str:
        name = f"chain x {self.segments[0]}" if self.is_chain else " + ".join(map(str, self.segments))
        name += f", {self.placement} {':'.join(map(str, self.ranks))}" if self.placement else ""
        return f"{name}, vocabulary divided" if self.divides_vocabulary else name


@dataclass(frozen=True, kw_only=True)
class Found:
    """The result of a search over ways to cut a model."""

    best: Cut
    finalists: tuple[tuple[Cut, float], ...]
    """The best cuts with the seconds of a mean iteration, chains last, fewest segments first."""
    num_tried: int
    too_large: tuple[Cut, ...] = ()
    """Chains that are better than the best cut, but take more memory."""


def best_cut(
    candidates: Sequence[Cut],
    quick: Callable[[Cut], float],
    exact: Callable[[Cut], float],
    fits: Callable[[Cut, Cut], bool] = lambda chain, separated: True,
    margin: float = CHAIN_WORTH,
) -> Found | None:
    """The candidate with the least seconds x (1 + `Cut.worth`); None: no candidate has a plan.

    Ties go to modules on all ranks, then to a whole vocabulary, then to fewer segments in total, then to fewer segments
    of the first modules.

    Args:
        quick: seconds of a candidate, by which finalists are selected; infinite: it has no plan.
        exact: seconds of a finalist, by which the best one is selected.
        fits: whether a chain, or placed modules, take no more memory than the best cut of modules on all ranks. It is
            asked only for those that are better than that one, best first.
        margin: see `Cut.worth`.
    """

    def ranked(times: Mapping[Cut, float]) -> list[Cut]:
        feasible = [c for c, seconds in times.items() if seconds < math.inf]
        return sorted(feasible, key=lambda c: (times[c] * (1 + c.worth(margin)), *simplicity(c)))

    by_quick = ranked({c: quick(c) for c in candidates})
    finalists = {*by_quick[:FINALISTS], *[c for c in by_quick if c.is_even][:FINALISTS]}
    finalists |= {*[c for c in by_quick if not c.divides_vocabulary][:FINALISTS]}
    times = {c: exact(c) for c in sorted(finalists, key=simplicity)}
    order = ranked(times)
    if not order:
        return None
    separated = next((c for c in order if c.is_even), None)
    best = next(c for c in order if c is separated or separated is None or fits(c, separated))
    too_large = tuple(order[: order.index(best)])
    return Found(best=best, finalists=tuple(times.items()), num_tried=len(candidates), too_large=too_large)


def simplicity(cut: Cut) -> tuple[bool, bool, int, tuple[int, ...], str, tuple[int, ...]]:
    """The sort key of ties; smaller is simpler."""
    return not cut.is_even, cut.divides_vocabulary, sum(cut.segments), cut.segments, cut.placement, cut.ranks


def microbatches_to_judge(
    num_ranks: int, num_microbatches: int, quick_s: Sequence[float], exact_s: Sequence[float], rank_s: float
) -> tuple[int, int]:
    """The numbers of microbatches on which all candidates, and then the finalists, are judged.

    At most half of the search's seconds is for all candidates, the rest for finalists. A pipeline with fewer
    microbatches than half of its ranks does not tell candidates apart, and one with twice as many as ranks is full. Of
    iterations that are no longer than that, there may be several.

    Args:
        num_microbatches: of an iteration of the job.
        quick_s, exact_s: [candidate] -> seconds in which it is judged on a microbatch, of each kind.
        rank_s: seconds that a rank computes in an iteration.
    """
    budget_s = min(MOST_S, max(LEAST_S, SHARE * rank_s))
    most = MOST_MICROBATCHES if num_microbatches <= 2 * num_ranks else min(2 * num_ranks, MOST_MICROBATCHES)
    first = min(most, max(1, num_ranks // 2, int(budget_s / 2 / sum(quick_s))))
    finalists_s = min(2 * FINALISTS, len(exact_s)) * sum(exact_s) / len(exact_s)
    remaining_s = budget_s - first * sum(quick_s)
    return first, max(first, min(MOST_MICROBATCHES, int(remaining_s / finalists_s)))
