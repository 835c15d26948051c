"""Which part of a stage's seconds belongs to each of its layers, and which to the action itself. Pure.

A module's layers were timed as stages of their own, and all of them as one stage. Each boundary between two stages
costs something that the one stage does not pay: dispatch, the start of autograd, activations that leave the caches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mmtrain.planner.profile.fits import SizeFit, fit_sizes
from mmtrain.spec.spec import WorkSize

LEAST_SHARE = 0.1
"""Of a layer's seconds as a stage of its own, at least so much is the layer's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """Seconds of one kind of action, taken apart."""

    layers: Mapping[int, tuple[float | None, ...]]
    """Work -> seconds of each layer, None where it has no such action. Together with `fixed_s` they are what the one
    stage took."""
    fixed_s: float
    """Of each action, whatever its layers."""


def attribute(
    sizes: Mapping[int, WorkSize],
    single: Mapping[int, Sequence[float | None]],
    joined: Mapping[int, float],
    blocks: tuple[int, int] | None = None,
) -> Attribution:
    """What each layer and each action takes.

    The fixed part is what a boundary costs apart from what grows with the work, plus what the first of several equal
    blocks takes longer than the second (work that is done once for all of them). The rest of the one stage's seconds
    is divided by what the layers took alone, without a boundary each.

    Args:
        sizes: of each work.
        single: work -> seconds of each layer as a stage of its own; None where it has no such action.
        joined: work -> seconds of all of them as one stage.
        blocks: places of the first and second of several equal layers.
    """
    works = [work for work in joined if any(seconds is not None for seconds in single.get(work, ()))]
    boundary = _boundary(sizes, {work: single[work] for work in works}, joined)
    first = max(0.0, _median_lead(single, works, *blocks)) if blocks else 0.0
    fixed = boundary.fixed + first
    layers: dict[int, tuple[float | None, ...]] = {}
    for work in works:
        alone = list(single[work])
        if blocks and alone[blocks[1]] is not None:
            alone[blocks[0]] = alone[blocks[1]]
        cut = boundary(sizes[work])
        shares = [None if x is None else max(x - cut, LEAST_SHARE * x) for x in alone]
        total = sum(x for x in shares if x is not None)
        scale = max(0.0, joined[work] - fixed) / total if total else 0.0
        layers[work] = tuple(None if x is None else x * scale for x in shares)
    return Attribution(layers=layers, fixed_s=fixed)


def _boundary(
    sizes: Mapping[int, WorkSize], single: Mapping[int, Sequence[float | None]], joined: Mapping[int, float]
) -> SizeFit:
    """Seconds of one boundary between stages: a fixed part and one that grows with the activation."""
    found = {}
    for work, times in single.items():
        present = [seconds for seconds in times if seconds is not None]
        if len(present) > 1:
            found[work] = max(0.0, sum(present) - joined[work]) / (len(present) - 1)
    if not found:
        return SizeFit()
    rows = [WorkSize(rows=sizes[work].rows, pairs=0, outputs=0) for work in found]
    # Differences of long times: their errors are as large for small works as for large ones.
    return fit_sizes(rows, list(found.values()), floor=float(np.median(list(found.values()))))


def _median_lead(single: Mapping[int, Sequence[float | None]], works: Sequence[int], one: int, other: int) -> float:
    """By how much one layer takes longer than another."""
    both = [(single[work][one], single[work][other]) for work in works]
    leads = [a - b for a, b in both if a is not None and b is not None]
    return float(np.median(leads)) if leads else 0.0
