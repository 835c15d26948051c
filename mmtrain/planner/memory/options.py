"""Which mixes of memory strategies a stage offers for a work: the candidates among which a plan chooses. Pure.

A stage of n blocks could mix strategies in very many ways. Offered are the fastest mix, the leanest, and the fastest
of each of S - 2 buckets of equal size between their bytes. Blocks that cost the same are exchangeable, so a mix is how
many of each kind do what. Source: DIP, arXiv:2504.14145, section 5.3 (S = 10).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import combinations, pairwise

import numpy as np
import numpy.typing as npt

from mmtrain.config.sections import ActivationCheckpointConfig, PlannerConfig
from mmtrain.planner.costs.cost_model import HostCopy
from mmtrain.spec.memory_strategies import BlockMemory, StageMemory, strategies_of
from mmtrain.spec.recomputation import STATIC, Recomputation
from mmtrain.spec.spec import WorkSize

CANDIDATES = 10
"""S: mixes that a stage offers at most."""
UNITS = 24
"""Parts in which the blocks of one kind are dealt to strategies, at most."""
_THINNED = 64
"""Mixes of some kinds that are kept to be combined with the next kind's."""
_CLASS = 1.25
"""Sizes of a class differ by this factor at most."""

Counts = tuple[tuple[int, ...], ...]
"""[kind of block][strategy] -> how many blocks."""
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryChoices:
    """What a stage's blocks may do with their activations."""

    section: ActivationCheckpointConfig = field(default_factory=ActivationCheckpointConfig)
    strategies: tuple[BlockMemory, ...] = ()
    """Among which a plan chooses, in the order in which blocks take them; empty: all do what the section says."""

    @classmethod
    def planned(cls, section: ActivationCheckpointConfig, planner: PlannerConfig) -> "MemoryChoices":
        """What a job lets its planner choose from; nothing where the section decides for all blocks."""
        chooses = planner.enable and planner.memory and section.mode == "none"
        return cls(section=section, strategies=strategies_of(planner.memory_strategies) if chooses else ())

    @property
    def fixed(self) -> "MemoryChoices":
        """Without a choice."""
        return replace(self, strategies=())

    @property
    def allowed(self) -> tuple[BlockMemory, ...]:
        """At least one strategy."""
        return self.strategies or (STATIC[self.section.mode],)

    def recomputation(self, how: BlockMemory) -> Recomputation:
        """What one strategy means."""
        return Recomputation.by(how, self.section)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPrice:
    """What a block takes for a work under one strategy."""

    forward_s: float
    backward_s: float
    """Of the input-gradient pass, with what is computed again."""
    kept_bytes: float
    host_bytes: float = 0.0
    """Moved to host memory and back."""

    @property
    def amounts(self) -> tuple[float, float, float, float]:
        """All of them."""
        return self.forward_s, self.backward_s, self.kept_bytes, self.host_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockKind:
    """Blocks of a stage that cost the same."""

    count: int
    prices: tuple[BlockPrice, ...]
    """[strategy]"""


@dataclass(frozen=True, eq=False)
class Offer:
    """Named mixes of a stage."""

    names: tuple[str, ...]
    """What each block does, as `StageMemory` writes it."""
    counts: npt.NDArray[np.int64]
    """[M, kinds x strategies]: how many blocks."""


@lru_cache(maxsize=1 << 12)
def offer(
    kinds: tuple[BlockKind, ...],
    rest: BlockPrice,
    host: HostCopy,
    strategies: tuple[BlockMemory, ...],
    places: tuple[tuple[int, ...], ...],
    num_blocks: int,
) -> Offer:
    """The mixes of `mixes`, as those of a stage, and in any case that which keeps all, if it may: nothing is faster,
    and its backward brings nothing back, for which the planner would leave room. Arguments as of `stage_memory`."""
    found = mixes(kinds, rest, host)
    if BlockMemory.KEEP in strategies:
        at = strategies.index(BlockMemory.KEEP)
        keep = tuple(tuple(kind.count * (i == at) for i in range(len(strategies))) for kind in kinds)
        found = [keep, *(counts for counts in found if counts != keep)]
    return Offer(
        names=tuple(str(stage_memory(counts, strategies, places, num_blocks)) for counts in found),
        counts=np.array(found, np.int64).reshape(len(found), -1),
    )


def mixes(kinds: Sequence[BlockKind], rest: BlockPrice, host: HostCopy, most: int = CANDIDATES) -> list[Counts]:
    """The mixes that a stage offers, the fastest first, each leaner than the one before.

    Args: rest: what the stage's other layers take, whatever its blocks do.
    """
    found: list[Counts] = [()]
    amounts = np.array([rest.amounts])
    for i, kind in enumerate(kinds):
        counts = _deals(kind.count, len(kind.prices))
        mine = weighted(counts, [price.amounts for price in kind.prices], 4)
        if i:  # the kinds before, each way of them with each way of this one
            keep = sorted(_best(amounts, host, _THINNED))
            found, amounts = [found[j] for j in keep], amounts[keep]
            own = sorted(_best(mine, host, _THINNED))
            counts, mine = counts[own], mine[own]
        dealt = [tuple(map(int, row)) for row in counts]
        found = [(*before, row) for before in found for row in dealt]
        amounts = (amounts[:, None, :] + mine[None, :, :]).reshape(-1, 4)
    return [found[j] for j in _best(amounts, host, most)]


def stage_memory(
    counts: Counts, strategies: Sequence[BlockMemory], places: Sequence[Sequence[int]], num_blocks: int
) -> StageMemory:
    """What each block of a stage does under a mix.

    Args:
        places: [kind] -> its blocks by their place in the stage. Each kind takes the strategies in their order.
        num_blocks: of the stage; those of no kind keep all.
    """
    blocks = [BlockMemory.KEEP] * num_blocks
    for row, mine in zip(counts, places, strict=True):
        dealt = (how for how, count in zip(strategies, row, strict=True) for _ in range(count))
        for place, how in zip(mine, dealt, strict=True):
            blocks[place] = how
    return StageMemory(tuple(blocks))


def shape_class(size: WorkSize) -> WorkSize:
    """A size that stands for all that are about as large: mixes are found once a class.

    It depends on the class alone, not on which of its sizes came first, so that plans do not either.
    """
    return WorkSize(**{f.name: _rounded(getattr(size, f.name)) for f in fields(WorkSize)})


def _rounded(amount: float) -> int:
    return round(_CLASS ** round(math.log(amount, _CLASS))) if amount > 0 else 0


def _deals(count: int, num_strategies: int) -> npt.NDArray[np.int64]:
    """[M, K]: the ways to deal so many blocks to K strategies; where there are too many, in equal parts.

    Those with most of the first strategy come first: of two mixes that are equal, earlier blocks then take it.
    """
    units = min(count, UNITS)
    edges = np.array([round(count * i / units) for i in range(units + 1)], np.int64)
    rows: Iterable[Sequence[int]] = (
        (-1, *bars, units + num_strategies - 1)
        for bars in combinations(range(units + num_strategies - 1), num_strategies - 1)
    )
    parts = np.array([[b - a - 1 for a, b in pairwise(row)] for row in rows], np.int64).reshape(-1, num_strategies)[
        ::-1
    ]
    return np.diff(edges[np.cumsum(parts, axis=1)], axis=1, prepend=0)


def weighted(counts: npt.NDArray[np.int64], rows: Sequence[Sequence[float]], width: int) -> Floats:
    """[M, width]: for each of [M, K] counts the sum of as many of each of K rows.

    Added in one order, not by a library of products: ranks must get the same bits on any processor.
    """
    total = np.zeros((len(counts), width))
    for column, row in zip(counts.T, rows, strict=True):
        total += column[:, None] * np.array(row)
    return total


def seconds(amounts: Floats, host: HostCopy) -> Floats:
    """[M] forward and backward seconds of [M, 4] amounts, copies included."""
    forward, backward, _, moved = amounts.T
    copies = moved / host.bytes_per_s
    if host.overlaps:
        return np.asarray(np.maximum(forward, copies) + np.maximum(backward, copies))
    return np.asarray(forward + backward + 2 * copies)


def _best(amounts: Floats, host: HostCopy, most: int) -> list[int]:
    """The fastest, the leanest, and the fastest of each of `most` - 2 buckets of bytes between them; fastest first."""
    total, held = seconds(amounts, host), amounts[:, 2]
    # Sums in another order differ in their last digits; equal mixes then keep the order that they came in.
    order = np.lexsort(tuple(np.round(values / max(values.max(), 1e-300), 12) for values in (held, total)))
    front, least = [], math.inf
    for i in map(int, order):  # each leaner than all that are faster
        if held[i] < least * (1 - 1e-12):
            front.append(i)
            least = held[i]
    if len(front) <= most:
        return front
    top, width = held[front[0]], (held[front[0]] - held[front[-1]]) / (most - 2)
    chosen = {front[0]: 0, front[-1]: 0}
    taken: set[int] = set()
    for i in front[1:-1]:
        bucket = min(most - 3, int((top - held[i]) / width))
        if bucket not in taken:
            taken.add(bucket)
            chosen[i] = 0
    return [i for i in front if i in chosen]
