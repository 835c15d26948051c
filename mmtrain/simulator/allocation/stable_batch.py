"""How many samples show how much of a model's work each module has: Entrain's smallest stable batch. Pure.

Source: Entrain (Jang, Efficient Multimodal Model Training at Scale, dissertation, University of Michigan, 2026,
algorithm 2). Where it falls short, this differs: the allowed error is divided among the doublings of the batch, of
which each is one more chance to pass by luck; and batches must agree with all known samples, since a rare heavy sample
is in none of a few small batches.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mmtrain.errors import ConfigError

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

LARGEST = 1 << 16
"""Samples of the largest batch that is tried by default."""
LEAST_PROBABILITY = 1e-4
"""The least alpha and p_error; the number of batches that are drawn grows as its inverse."""
_AT_ONCE = 16
"""Batches that are drawn together, before a size is given up; a change would change the draws."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The batches of one size."""

    num_samples: int
    """The samples of each batch."""
    num_batches: int
    """The number of batches, k and the reference batch; fewer if these already disagree."""
    allocations: tuple[tuple[tuple[int, ...], int], ...]
    """The pipeline ranks of each module, each with the number of batches that ask for them, the most frequent first."""
    passed: bool
    """Whether all of them ask for what all samples together ask for."""


@dataclass(frozen=True, kw_only=True)
class StableBatch:
    """The result of algorithm 2."""

    trials: tuple[Trial, ...]
    whole: tuple[int, ...]
    """Pipeline ranks of each module by all samples together."""
    num_samples: int
    """The samples of the smallest stable batch, b_min; 0: no batch that was tried is stable."""
    message: str
    """What this says, in one sentence."""


def check_probabilities(alpha: float, p_error: float) -> None:
    """Checks the arguments of `stable_batch`.

    Raises: ConfigError: alpha or p_error is below `LEAST_PROBABILITY`, or not below 1.
    """
    for name, value in (("alpha", alpha), ("p_error", p_error)):
        if not LEAST_PROBABILITY <= value < 1:
            raise ConfigError(f"allocate: {name} = {value}; it must be from {LEAST_PROBABILITY} to below 1")


def num_trials(alpha: float, p_error: float) -> int:
    """The number k of agreeing batches that show, with confidence 1 - alpha, that at most p_error of all batches
    disagree."""
    return math.ceil(math.log(alpha) / math.log1p(-p_error))


def proportional(work: Floats, num_ranks: int, most: Sequence[int]) -> Counts:
    """[batch, module] -> pipeline ranks in proportion to work, rounded to the nearest that are possible.

    Each module has at least one rank and at most its number of layers. Ties go to the first module.

    Args: work: [batch, module], of any unit; not all 0 in a row. most: [module] -> its layers.
    """
    least, limit = np.ones(len(most), np.int64), np.asarray(most, np.int64)
    assert len(most) <= num_ranks <= limit.sum()
    exact = num_ranks * work / work.sum(axis=1, keepdims=True)
    ranks = np.clip(np.floor(exact).astype(np.int64), least, limit)
    rows = np.arange(len(ranks))
    while (missing := num_ranks - ranks.sum(axis=1)).any():
        wanted = np.where(ranks < limit, exact - ranks, -np.inf)
        excess = np.where(ranks > least, ranks - exact, -np.inf)
        up, down = missing > 0, missing < 0
        ranks[rows[up], wanted.argmax(axis=1)[up]] += 1
        ranks[rows[down], excess.argmax(axis=1)[down]] -= 1
    return np.asarray(ranks, np.int64)


def stable_batch(
    work: Floats,
    num_ranks: int,
    most: Sequence[int],
    *,
    alpha: float = 0.05,
    p_error: float = 0.05,
    seed: int = 0,
    largest: int = LARGEST,
    is_whole: bool = False,
) -> StableBatch:
    """The smallest of the batches 1, 2, 4, ... samples that show the allocation, as far as trials can say.

    A batch is drawn from the known samples, with replacement; its ratio is that of summed work.

    Args:
        work: [sample, module] -> its work in any unit.
        num_ranks: pipeline ranks of a replica.
        most: [module] -> its layers.
        alpha: chance of calling a batch stable that is not; half of it is for the first size, a quarter for the second,
            and so on.
        p_error: batches of a stable size of which another allocation would follow, at most.
        seed: of the draws.
        largest: samples of the largest batch.
        is_whole: the samples are all of their source.
    Raises: ConfigError: alpha or p_error is out of range, or there are more ranks than layers, or fewer than modules.
    """
    check_probabilities(alpha, p_error)
    if not len(most) <= num_ranks <= sum(most):
        raise ConfigError(
            f"allocate: {num_ranks} pipeline ranks for {len(most)} modules of {', '.join(map(str, most))} layers; each "
            "module needs a rank, and each rank a layer: change --gpus or a degree"
        )
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, num_ranks))))
    whole = tuple(map(int, proportional(work.sum(axis=0, keepdims=True), num_ranks, most)[0]))
    trials: list[Trial] = []
    size, share = 1, alpha
    while size <= largest:
        share /= 2
        trials.append(_trial(rng, work, size, 1 + num_trials(share, p_error), num_ranks, most, whole))
        if trials[-1].passed:
            break
        size *= 2
    stable = trials[-1].passed
    return StableBatch(
        trials=tuple(trials),
        whole=whole,
        num_samples=trials[-1].num_samples if stable else 0,
        message=_message(trials[-1], whole, len(work), is_whole, alpha, p_error),
    )


def _trial(
    rng: np.random.Generator,
    work: Floats,
    size: int,
    num_batches: int,
    num_ranks: int,
    most: Sequence[int],
    whole: tuple[int, ...],
) -> Trial:
    counts: Counter[tuple[int, ...]] = Counter()
    while counts.total() < num_batches and set(counts) <= {whole}:
        sums = _summed(rng, work, size, min(_AT_ONCE, num_batches - counts.total()))
        counts.update(map(tuple, proportional(sums, num_ranks, most).tolist()))
    found = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    return Trial(
        num_samples=size,
        num_batches=counts.total(),
        allocations=tuple(found),
        passed=[allocation for allocation, _ in found] == [whole],
    )


def _summed(rng: np.random.Generator, work: Floats, size: int, num_batches: int) -> Floats:
    """[batch, module] -> the work of samples drawn with replacement; of large batches, how often each is drawn."""
    if size <= len(work):
        return np.asarray(work[rng.integers(len(work), size=(num_batches, size))].sum(axis=1))
    return np.asarray(rng.multinomial(size, np.full(len(work), 1 / len(work)), size=num_batches) @ work)


def _message(last: Trial, whole: tuple[int, ...], num_known: int, is_whole: bool, alpha: float, p_error: float) -> str:
    known = f"all {num_known} samples of the source" if is_whole else f"the {num_known} samples that were read"
    if last.passed:
        return (
            f"b_min = {last.num_samples}: {last.num_batches} batches of that many samples all ask for "
            f"{_ratio(whole)}, as {known} do; with confidence {1 - alpha:g} at most {p_error:g} of such batches do not"
        )
    others = [(allocation, count) for allocation, count in last.allocations if allocation != whole]
    return (
        f"no stable batch up to {last.num_samples} samples: the ratio lies near the border between {_ratio(whole)}, "
        f"which {known} ask for, and {_ratio(others[0][0])}, for which {others[0][1]} of {last.num_batches} batches ask"
    )


def _ratio(allocation: Sequence[int]) -> str:
    return ":".join(map(str, allocation))
