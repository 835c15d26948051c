"""The mixes of memory strategies that a stage offers for a work: the candidates among which a plan chooses. Pure.

A stage of n blocks can mix strategies in very many ways. It offers the fastest mix, the mix of least memory, and the
fastest mix in each of S - 2 equal intervals of bytes between them. Blocks that cost the same are exchangeable, so a mix
is a number of blocks for each kind and strategy. Source: DIP, arXiv:2504.14145, section 5.3 (S = 10).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import combinations, pairwise

import numpy as np
import numpy.typing as npt

from mmtrain.config.planner import PlannerConfig
from mmtrain.config.sections import ActivationCheckpointConfig
from mmtrain.costs.cost_model import HostCopy
from mmtrain.spec.memory_strategies import BlockMemory, StageMemory, strategies_of
from mmtrain.spec.recomputation import STATIC, Recomputation
from mmtrain.spec.work_size import WorkSize

CANDIDATES = 10
"""S: mixes that a stage offers at most."""
UNITS = 24
"""Largest number of groups in which the blocks of one kind are assigned to strategies."""
_THINNED = 64
"""Mixes of the first kinds that are combined with those of the next kind."""
_CLASS = 1.25
"""Largest factor between sizes of one class."""

BlockCounts = tuple[tuple[int, ...], ...]
"""[kind of block][strategy] -> how many blocks."""
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryChoices:
    """The memory strategies that a stage's blocks may use."""

    section: ActivationCheckpointConfig = field(default_factory=ActivationCheckpointConfig)
    strategies: tuple[BlockMemory, ...] = ()
    """The strategies among which a plan chooses, in the order in which blocks take them; empty: `section` decides for
    all."""

    @classmethod
    def planned(cls, section: ActivationCheckpointConfig, planner: PlannerConfig) -> "MemoryChoices":
        """The strategies among which a job's planner chooses; none if the section decides for all blocks."""
        chooses = planner.enable and planner.search.memory and section.mode == "none"
        return cls(section=section, strategies=strategies_of(planner.search.memory_strategies) if chooses else ())

    @property
    def fixed(self) -> "MemoryChoices":
        """The strategies of `section` alone, without a choice."""
        return replace(self, strategies=())

    @property
    def allowed(self) -> tuple[BlockMemory, ...]:
        """The strategies that blocks may use, at least one."""
        return self.strategies or (STATIC[self.section.mode],)

    def recomputation(self, how: BlockMemory) -> Recomputation:
        """The recomputation of one strategy."""
        return Recomputation.by(how, self.section)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPrice:
    """Seconds and bytes of a block for a work under one strategy."""

    forward_s: float
    backward_s: float
    """Seconds of the input-gradient pass, recomputation included."""
    kept_bytes: float
    host_bytes: float = 0.0
    """Moved to host memory and back."""

    @property
    def amounts(self) -> tuple[float, float, float, float]:
        """The four values of the price."""
        return self.forward_s, self.backward_s, self.kept_bytes, self.host_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockKind:
    """Blocks of a stage that cost the same."""

    count: int
    prices: tuple[BlockPrice, ...]
    """The price of each strategy."""


@dataclass(frozen=True, eq=False)
class Offer:
    """Named mixes of a stage."""

    names: tuple[str, ...]
    """The strategies of the blocks, as text of `StageMemory`."""
    counts: npt.NDArray[np.int64]
    """[M mixes, kinds x strategies]: number of blocks."""


@lru_cache(maxsize=1 << 12)
def offer(
    kinds: tuple[BlockKind, ...],
    other_layers: BlockPrice,
    host_copy: HostCopy,
    strategies: tuple[BlockMemory, ...],
    positions: tuple[tuple[int, ...], ...],
    num_blocks: int,
) -> Offer:
    """The named mixes of a stage: those of `mixes`, and first the mix that keeps all, if that strategy is allowed.

    Keeping all is the fastest, and its backward restores no tensors for which the planner has to leave room.
    Arguments: see `mixes` and `stage_memory`.
    """
    offered = mixes(kinds, other_layers, host_copy)
    if BlockMemory.KEEP in strategies:
        keep_index = strategies.index(BlockMemory.KEEP)
        all_kept = tuple(tuple(kind.count * (i == keep_index) for i in range(len(strategies))) for kind in kinds)
        offered = [all_kept, *(counts for counts in offered if counts != all_kept)]
    return Offer(
        names=tuple(str(stage_memory(counts, strategies, positions, num_blocks)) for counts in offered),
        counts=np.array(offered, np.int64).reshape(len(offered), -1),
    )


def mixes(kinds: Sequence[BlockKind], other_layers: BlockPrice, host_copy: HostCopy) -> list[BlockCounts]:
    """[mix][kind][strategy] -> blocks: the mixes that a stage offers, by ascending seconds and descending bytes.

    Args:
        other_layers: seconds and bytes of the stage's other layers, which do not depend on the mix.
        host_copy: rate of copies of offloaded activations.
    Source: DIP, arXiv:2504.14145, section 5.3.
    """
    combined: list[BlockCounts] = [()]
    amounts = np.array([other_layers.amounts])
    for i, kind in enumerate(kinds):
        counts = _deals(kind.count, len(kind.prices))
        kind_amounts = weighted(counts, [price.amounts for price in kind.prices], 4)
        if i:  # combine each mix of the earlier kinds with each mix of this kind
            best_before = sorted(_best_mixes(amounts, host_copy, _THINNED))
            combined, amounts = [combined[j] for j in best_before], amounts[best_before]
            best_of_kind = sorted(_best_mixes(kind_amounts, host_copy, _THINNED))
            counts, kind_amounts = counts[best_of_kind], kind_amounts[best_of_kind]
        dealt = [tuple(map(int, row)) for row in counts]
        combined = [(*earlier, row) for earlier in combined for row in dealt]
        amounts = (amounts[:, None, :] + kind_amounts[None, :, :]).reshape(-1, 4)
    return [combined[j] for j in _best_mixes(amounts, host_copy, CANDIDATES)]


def stage_memory(
    counts: BlockCounts, strategies: Sequence[BlockMemory], positions: Sequence[Sequence[int]], num_blocks: int
) -> StageMemory:
    """The strategy of each block of a stage under a mix.

    Args:
        positions: [kind] -> indices of its blocks in the stage. Each kind takes the strategies in their order.
        num_blocks: blocks of the stage; a block of no kind keeps its activations.
    """
    blocks = [BlockMemory.KEEP] * num_blocks
    for row, block_positions in zip(counts, positions, strict=True):
        dealt = (how for how, count in zip(strategies, row, strict=True) for _ in range(count))
        for position, how in zip(block_positions, dealt, strict=True):
            blocks[position] = how
    return StageMemory(tuple(blocks))


def shape_class(size: WorkSize) -> WorkSize:
    """The representative of all sizes of about this size: mixes are computed once for each class.

    It depends only on the class, not on the size that came first, so plans do not depend on that either.
    """
    return WorkSize(**{f.name: _rounded(getattr(size, f.name)) for f in fields(WorkSize)})


def _rounded(count: float) -> int:
    return round(_CLASS ** round(math.log(count, _CLASS))) if count > 0 else 0


def _deals(count: int, num_strategies: int) -> npt.NDArray[np.int64]:
    """[M, K]: the ways to assign `count` blocks to K strategies; with more than `UNITS` blocks, in equal groups.

    Rows are in descending order, so that of two equal mixes the one with more blocks of the first strategies is chosen.
    """
    units = min(count, UNITS)
    edges = np.array([round(count * i / units) for i in range(units + 1)], np.int64)
    rows: Iterable[Sequence[int]] = (
        (-1, *bars, units + num_strategies - 1)
        for bars in combinations(range(units + num_strategies - 1), num_strategies - 1)
    )
    unit_counts = np.array([[b - a - 1 for a, b in pairwise(row)] for row in rows], np.int64).reshape(
        -1, num_strategies
    )[::-1]
    return np.diff(edges[np.cumsum(unit_counts, axis=1)], axis=1, prepend=0)


def weighted(counts: npt.NDArray[np.int64], rows: Sequence[Sequence[float]], width: int) -> Floats:
    """[M, width]: the product of counts [M, K] and rows [K, width].

    The order of additions is fixed, unlike in a matrix library: ranks must get the same bits on any processor.
    """
    total = np.zeros((len(counts), width))
    for column, row in zip(counts.T, rows, strict=True):
        total += column[:, None] * np.array(row)
    return total


def seconds(amounts: Floats, host_copy: HostCopy) -> Floats:
    """[M] forward plus backward seconds, copies included. Args: amounts: [M, 4], see `BlockPrice.amounts`."""
    forward, backward, _, moved = amounts.T
    copies = moved / host_copy.bytes_per_s
    if host_copy.overlaps:
        return np.asarray(np.maximum(forward, copies) + np.maximum(backward, copies))
    return np.asarray(forward + backward + 2 * copies)


def _best_mixes(amounts: Floats, host_copy: HostCopy, num_mixes: int) -> list[int]:
    """Indices of the fastest mix, of that of least memory, and of the fastest in each of `num_mixes` - 2 equal
    intervals of bytes between them; the fastest first."""
    total, kept_bytes = seconds(amounts, host_copy), amounts[:, 2]
    # Sums in another order differ in their last digits; after rounding, equal mixes keep their order.
    order = np.lexsort(tuple(np.round(values / max(values.max(), 1e-300), 12) for values in (kept_bytes, total)))
    front, least_bytes = [], math.inf
    for i in map(int, order):  # each takes less memory than all faster ones
        if kept_bytes[i] < least_bytes * (1 - 1e-12):
            front.append(i)
            least_bytes = kept_bytes[i]
    if len(front) <= num_mixes:
        return front
    top, width = kept_bytes[front[0]], (kept_bytes[front[0]] - kept_bytes[front[-1]]) / (num_mixes - 2)
    chosen = {front[0]: 0, front[-1]: 0}
    used_buckets: set[int] = set()
    for i in front[1:-1]:
        bucket = min(num_mixes - 3, int((top - kept_bytes[i]) / width))
        if bucket not in used_buckets:
            used_buckets.add(bucket)
            chosen[i] = 0
    return [i for i in front if i in chosen]
