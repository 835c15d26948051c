"""The parts of a stage's measured seconds that belong to each of its layers and to the action itself. Pure.

A module's layers were timed as separate stages, and all of them as one stage. Each boundary between two stages has a
cost that the one stage does not have: dispatch, the start of autograd, activations that leave the caches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mmtrain.costs.profile.fits import SizeFit, fit_sizes
from mmtrain.spec.work_size import WorkSize

LEAST_SHARE = 0.1
"""Smallest fraction of the seconds of a stage with one layer that is attributed to the layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """Seconds of one kind of action, divided into those of its layers and a fixed part."""

    layers: Mapping[int, tuple[float | None, ...]]
    """Work -> seconds of each layer, None if it has no such action. With `fixed_s` they sum to the seconds of the one
    stage."""
    fixed_s: float
    """Seconds of each action, independent of its layers."""


def attribute(
    sizes: Mapping[int, WorkSize],
    single: Mapping[int, Sequence[float | None]],
    joined: Mapping[int, float],
    blocks: tuple[int, int] | None = None,
) -> Attribution:
    """The seconds of each layer and the fixed seconds of each action.

    The fixed seconds are the constant part of a boundary, plus the time by which the first of several equal blocks is
    slower than the second (work that is done once for all of them). The other seconds of the one stage are divided in
    proportion to those of the layers as separate stages, less one boundary each.

    Args:
        sizes: work -> its size.
        single: work -> seconds of each layer as a separate stage; None if it has no such action.
        joined: work -> seconds of all layers as one stage.
        blocks: indices of the first and second of several equal layers.
    """
    works = [work for work in joined if any(seconds is not None for seconds in single.get(work, ()))]
    boundary_fit = _boundary(sizes, {work: single[work] for work in works}, joined)
    first_block_s = max(0.0, _median_lead(single, works, *blocks)) if blocks else 0.0
    fixed_s = boundary_fit.fixed + first_block_s
    layers: dict[int, tuple[float | None, ...]] = {}
    for work in works:
        single_s = list(single[work])
        if blocks and single_s[blocks[1]] is not None:
            single_s[blocks[0]] = single_s[blocks[1]]
        boundary_s = boundary_fit(sizes[work])
        layer_seconds = [None if x is None else max(x - boundary_s, LEAST_SHARE * x) for x in single_s]
        total = sum(x for x in layer_seconds if x is not None)
        scale = max(0.0, joined[work] - fixed_s) / total if total else 0.0
        layers[work] = tuple(None if x is None else x * scale for x in layer_seconds)
    return Attribution(layers=layers, fixed_s=fixed_s)


def _boundary(
    sizes: Mapping[int, WorkSize], single: Mapping[int, Sequence[float | None]], joined: Mapping[int, float]
) -> SizeFit:
    """Seconds of one boundary between stages: a constant part and a part proportional to the activation."""
    boundaries = {}
    for work, times in single.items():
        present = [seconds for seconds in times if seconds is not None]
        if len(present) > 1:
            boundaries[work] = max(0.0, sum(present) - joined[work]) / (len(present) - 1)
    if not boundaries:
        return SizeFit()
    rows = [WorkSize(rows=sizes[work].rows, pairs=0, outputs=0) for work in boundaries]
    # Differences of long times: their absolute errors do not depend on the size of the work.
    return fit_sizes(rows, list(boundaries.values()), floor=float(np.median(list(boundaries.values()))))


def _median_lead(
    single: Mapping[int, Sequence[float | None]], works: Sequence[int], layer: int, reference: int
) -> float:
    """Median seconds by which one layer is slower than another."""
    seconds = [(single[work][layer], single[work][reference]) for work in works]
    leads = [a - b for a, b in seconds if a is not None and b is not None]
    return float(np.median(leads)) if leads else 0.0
