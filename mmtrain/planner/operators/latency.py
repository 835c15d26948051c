"""How long an operator takes on some hardware. Pure.

The slowest of computing, accessing memory and sending, each at the part of its peak rate that operators of this kind
reach, plus a fixed part a launch, for one call or for each clip (as if all were equally long):

    max(N_fop / (F e_fop), N_mem / (B_mem e_mem), N_net / (B_net e_net)) + launches x fixed

with e = 1 / a of DIP, arXiv:2504.14145, section 6.1. A product that is too small for the device reaches less.
"""

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from mmtrain.planner.operators.coefficients import Coefficients, coefficients, values
from mmtrain.planner.operators.graph import DeviceKind, Graph, Operator, OpKind
from mmtrain.planner.operators.hardware import Hardware, Link, Tiles
from mmtrain.spec.spec import ZERO_WORK, WorkSize

TICK_S = 2.0**-40
"""Seconds are multiples of this (about 1 ps), so that sums of up to two hours are exact in any order."""

_REMEMBERED = 4096

Rule = Callable[[Operator, WorkSize, float], float]
"""(operator, size, seconds by the rates) -> seconds: what a user knows better."""

Floats = npt.NDArray[np.float64]


def product_efficiency(m: Floats, n: Floats, k: Floats, tiles: Tiles) -> Floats:
    """The part of the full rate that products [m, k] x [k, n] reach, elementwise.

    The result is cut into tiles, whole ones also at its edges (tile quantisation); processors take one tile each until
    none is left, in the last wave perhaps only a few of them (wave quantisation); and each tile takes a few more steps
    than k. A long k is cut in two, four, ... where that gives more processors work.

    Source: NVIDIA, Matrix Multiplication Background User's Guide, section 3; stream-K, arXiv:2301.03598.
    """
    m, n, k = np.maximum(m, 1.0), np.maximum(n, 1.0), np.maximum(k, 1.0)
    cut = np.ceil(m / tiles.rows) * np.ceil(n / tiles.columns)
    used = m * n / (cut * (tiles.rows * tiles.columns))
    splits = 2.0 ** np.arange(1 + int(np.log2(max(1, tiles.most_splits))))[:, None]
    waves = np.ceil(cut * splits / tiles.units)
    depth = k / splits
    busy = cut * splits / (waves * tiles.units) * depth / (depth + tiles.fill)
    best: Floats = used * busy.max(axis=0)
    return best


def attention_efficiency(queries: Floats, pairs: Floats, tiles: Tiles) -> Floats:
    """The part of the full rate that attention reaches whose queries see pairs / queries keys on average.

    Keys are read in blocks, the last of which is half empty on average.
    """
    seen = pairs / np.maximum(queries, 1.0)
    return np.where(pairs > 0, seen / (seen + tiles.keys / 2), 1.0)


class Latencies:
    """The seconds of each operator of a graph, for works of any size."""

    def __init__(
        self,
        hardware: Hardware,
        *,
        dtype_bytes: int = 2,
        links: Mapping[DeviceKind, Link] | None = None,
        rule: Rule | None = None,
    ) -> None:
        """Args:
        dtype_bytes: of the numbers in products.
        links: in place of the hardware's own.
        rule: what overrides the seconds of an operator.
        """
        self.hardware = hardware
        self._flops_per_s = hardware.flops_per_s(dtype_bytes)
        self._links = {**hardware.links, **(links or {})}
        self._rule = rule
        self._compiled: WeakKeyDictionary[Graph, _Compiled] = WeakKeyDictionary()

    def __call__(self, graph: Graph, size: WorkSize = ZERO_WORK) -> Floats:
        """[operators] seconds, multiples of `TICK_S`."""
        if graph not in self._compiled:
            self._compiled[graph] = _Compiled(graph, self.hardware, self._flops_per_s, self._links)
        seconds = self._compiled[graph](size)
        if self._rule is not None:
            found = zip(graph.operators, seconds.tolist(), strict=True)
            seconds = np.array([self._rule(op, size, by_rates) for op, by_rates in found], dtype=np.float64)
        return np.rint(seconds / TICK_S) * TICK_S


class _Compiled:
    """A graph's amounts over its devices' rates, as matrices."""

    def __init__(self, graph: Graph, hardware: Hardware, flops_per_s: float, links: Mapping[DeviceKind, Link]) -> None:
        ops = graph.operators
        best = [hardware.efficiency_of(op.kind, op.phase) for op in ops]
        rate = [links[op.device.kind].bytes_per_s if not op.device.kind.computes else 1.0 for op in ops]
        self._rates = np.stack(
            [
                _over([op.flops for op in ops], [flops_per_s * e.compute for e in best]),
                _over([op.mem_bytes for op in ops], [hardware.memory_bytes_per_s * e.memory for e in best]),
                _over([op.net_bytes for op in ops], [r * e.network for r, e in zip(rate, best, strict=True)]),
            ]
        )
        """[computing, memory, network; operators; counts of a work]: seconds at the best rates."""
        self._each_clip = np.array([op.each_clip for op in ops], dtype=bool)
        per_launch = [hardware.launch_s if op.device.kind.computes else links[op.device.kind].latency_s for op in ops]
        self._fixed = np.array([op.launches * s for op, s in zip(ops, per_launch, strict=True)], dtype=np.float64)
        self._tiles = hardware.tiles
        self._products = _Shapes(graph, attention=False)
        self._attention = _Shapes(graph, attention=True)
        self._known: dict[bytes, Floats] = {}
        self._last: tuple[WorkSize, Floats] | None = None

    def __call__(self, size: WorkSize) -> Floats:
        if self._last is None or self._last[0] != size:
            seconds = self._seconds(values(size))
            if size.clips > 1 and self._each_clip.any():
                of_one = self._seconds(values(size, of=size.clips))
                seconds[self._each_clip] = size.clips * of_one[self._each_clip]
            self._last = (size, seconds)
        return self._last[1]

    def _seconds(self, at: Coefficients) -> Floats:
        parts: Floats = self._rates @ at
        if self._products.places:
            parts[0, self._products.places] /= self._product_efficiency(at)
        if self._attention.places:
            m, n, _ = self._attention(at)
            parts[0, self._attention.places] /= attention_efficiency(m, n, self._tiles)
        seconds: Floats = parts.max(axis=0) + self._fixed
        return seconds

    def _product_efficiency(self, at: Coefficients) -> Floats:
        """Works of a language model have the same rows again and again, and only other pairs."""
        key = at[self._products.depends].tobytes()
        if key not in self._known:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[key] = product_efficiency(*self._products(at), self._tiles)
        return self._known[key]


class _Shapes:
    """The extents of a graph's products, or of its attentions."""

    def __init__(self, graph: Graph, *, attention: bool) -> None:
        found = [
            (place, op.shape)
            for place, op in enumerate(graph.operators)
            if op.shape is not None and (op.kind is OpKind.ATTENTION) is attention
        ]
        self.places = [place for place, _ in found]
        self._m = coefficients(shape.m for _, shape in found)
        self._n = coefficients(shape.n for _, shape in found)
        self._k = coefficients(shape.k for _, shape in found)
        self.depends = np.abs(np.concatenate([self._m, self._n, self._k])).any(axis=0)
        """Which counts of a work they depend on."""

    def __call__(self, at: Coefficients) -> tuple[Floats, Floats, Floats]:
        return self._m @ at, self._n @ at, self._k @ at


def _over(amounts: list[Any], rates: list[float]) -> Coefficients:
    return coefficients(amounts) / np.array(rates, dtype=np.float64)[:, None]
