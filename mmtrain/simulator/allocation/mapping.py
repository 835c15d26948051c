"""Oobleck's mapping of layers and GPUs to the stages of one pipeline, by an exact dynamic program. Pure.

A stage runs consecutive layers on consecutive GPUs of one node. With S stages of c_s seconds, forward and backward, of
which k* is the first slowest one, and N_b = 4 S microbatches, an iteration takes

    T1 + T2 + T3 = sum of all c_s  +  (N_b - S + k* - 1) c_k*  +  sum of c_s from k* on.

Given t = c_k*, that is a sum over stages: 4 t + c_s before k*, 4 t for k* itself, 3 t + 2 c_s behind it. So for each t
the best stages follow from the best stages of fewer layers on fewer GPUs. An interval of t has a lower bound by the
same recursion: what is refined is always the interval with the least bound, until that is a single t.

Source: Oobleck (Jang, Efficient Multimodal Model Training at Scale, dissertation, University of Michigan, 2026, section
2.4.1.2). Its divide and conquer, O(L^3 n M) for each S, has the same result if its equation 2.1 skips no layer.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from mmtrain.schedule.numba_start import load_numba

_UNITS = 2.0**40
"""Integer units of time of the whole model: sums are exact, and equal stages have equal times."""
_NEVER = 2.0**50

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class MappedStage:
    """One stage of a mapping."""

    layers: tuple[int, int]
    """Range of the layers, the end excluded."""
    gpus: tuple[int, int]
    """Range of the GPUs of the pipeline, the end excluded; all in one node."""
    seconds: float
    """Forward and backward of a microbatch."""


@dataclass(frozen=True)
class StageMapping:
    """The stages of a pipeline."""

    stages: tuple[MappedStage, ...]

    def seconds(self, microbatches: int) -> float:
        """T1 + T2 + T3, and at least T1. Args: microbatches: N_b."""
        each = [stage.seconds for stage in self.stages]
        slowest = max(range(len(each)), key=each.__getitem__)
        steady = microbatches - len(each) + slowest - 1
        return sum(each) + max(0.0, steady * each[slowest] + sum(each[slowest:]))


def map_stages(layer_s: Sequence[Sequence[float]], nodes: int) -> StageMapping | None:
    """The mapping with the least T1 + T2 + T3 at N_b = 4 S that uses all GPUs; None: there is none.

    Times are rounded to 2^-40 of the model's.

    Args:
        layer_s: [g - 1][layer] -> seconds, forward and backward, on g GPUs of one node, up to all of them; infinite:
            the layer cannot be divided so.
        nodes: of the pipeline.
    """
    load_numba()
    of_layers = np.array(layer_s, float)
    unit = of_layers[np.isfinite(of_layers)].max(initial=0.0) * of_layers.shape[1] / _UNITS or 1.0
    rounded = np.rint(np.where(np.isfinite(of_layers), of_layers / unit, _NEVER)).astype(np.int64)
    ends = np.concatenate([np.zeros((len(rounded), 1), np.int64), np.cumsum(rounded, axis=1)], axis=1)
    stages = ends[:, None, :] - ends[:, :, None]
    times = np.unique(stages[(stages > 0) & (stages < int(_NEVER))])
    if not len(times):
        return None
    parents = np.zeros((2, nodes * len(ends) + 1, ends.shape[1], 3), np.int64)

    def bound(low: int, high: int) -> int:
        return int(_least(ends, nodes, times[low], times[high], parents))

    queue = [(bound(0, len(times) - 1), 0, len(times) - 1)]
    while queue:
        value, low, high = heapq.heappop(queue)
        if value == _INFINITE:
            return None
        if low == high:
            _least(ends, nodes, times[low], times[low], parents)
            return StageMapping(_traced(parents, of_layers))
        middle = (low + high) // 2
        for first, last in ((low, middle), (middle + 1, high)):
            heapq.heappush(queue, (bound(first, last), first, last))
    return None


def _traced(parents: Ints, of_layers: npt.NDArray[np.float64]) -> tuple[MappedStage, ...]:
    phase, gpu, layer = 1, parents.shape[1] - 1, parents.shape[2] - 1
    stages: list[MappedStage] = []
    while layer:
        phase, first_gpu, first = map(int, parents[phase, gpu, layer])
        seconds = float(of_layers[gpu - first_gpu - 1, first:layer].sum())
        stages.append(MappedStage(layers=(first, layer), gpus=(first_gpu, gpu), seconds=seconds))
        gpu, layer = first_gpu, first
    return tuple(reversed(stages))


def _compiled(function: Callable[..., Any]) -> Any:
    try:
        return numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # no folder for compiled code can be written
        return numba.njit(nogil=True)(function)


_INFINITE = int(np.iinfo(np.int64).max)


@_compiled
def _least(ends: Ints, nodes: int, low: int, high: int, parents: Ints) -> int:
    """The least sum over stages whose slowest one takes from `low` to `high`; exact if both are equal.

    Args:
        ends: [g - 1, layer] -> units of all layers before it on g GPUs.
        parents: [phase, GPUs, layers] -> phase, GPUs and layers before the last stage, which this writes; phase 1: the
            slowest stage is among them.
    """
    per_node, num_layers = ends.shape[0], ends.shape[1] - 1
    gpus = nodes * per_node
    least = np.full((2, gpus + 1, num_layers + 1), _INFINITE, np.int64)
    least[0, 0, 0] = 0
    for gpu in range(gpus):
        for count in range(1, per_node - gpu % per_node + 1):
            of = ends[count - 1]
            for phase in range(2):
                for first in range(num_layers):
                    before = least[phase, gpu, first]
                    if before == _INFINITE:
                        continue
                    for last in range(first + 1, num_layers + 1):
                        units = of[last] - of[first]
                        if units > high:
                            break
                        slowest = max(units, low)
                        value = before + (4 * slowest + units if phase == 0 else 3 * slowest + 2 * units)
                        if value < least[phase, gpu + count, last]:
                            least[phase, gpu + count, last] = value
                            parents[phase, gpu + count, last, 0] = phase
                            parents[phase, gpu + count, last, 1] = gpu
                            parents[phase, gpu + count, last, 2] = first
                        if phase == 0 and units >= low and before + 4 * units < least[1, gpu + count, last]:
                            least[1, gpu + count, last] = before + 4 * units
                            parents[1, gpu + count, last, 0] = 0
                            parents[1, gpu + count, last, 1] = gpu
                            parents[1, gpu + count, last, 2] = first
    return int(least[1, gpus, num_layers])
