"""The seconds of an operator on some hardware. Pure.

They are the maximum of the times of compute, memory accesses and sending, each at the fraction of its peak rate that
operators of this kind reach, plus a fixed time for each launch, for one call or for each call of a DiT's layer (as if
all of them had as many rows):

    max(N_fop / (F e_fop), N_mem / (B_mem e_mem), N_net / (B_net e_net)) + launches x fixed

with e = 1 / a of DIP, arXiv:2504.14145, section 6.1. A product that is too small for the device is less efficient.
"""

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from mmtrain.costs.operators.coefficients import Coefficients, coefficients, values
from mmtrain.costs.operators.hardware import DeviceLink, Hardware, Tiles
from mmtrain.costs.operators.operator_graph import DeviceKind, Graph, Operator, OpKind
from mmtrain.spec.work_size import ZERO_WORK, WorkSize

TICK_S = 2.0**-40
"""Seconds are multiples of this (about 1 ps), so that sums of up to two hours are exact in every order."""

_REMEMBERED = 4096

LatencyRule = Callable[[Operator, WorkSize, float], float]
"""A user's override: the seconds of an operator, from its size and its seconds by the rates."""

Floats = npt.NDArray[np.float64]


def product_efficiency(m: Floats, n: Floats, k: Floats, tiles: Tiles) -> Floats:
    """[products]: the fraction of the full rate that products [m, k] x [k, n] reach.

    The result is divided into tiles, which are whole also at its edges (tile quantisation). Processors take one tile
    each until all are done, and the last wave may use only a few of them (wave quantisation). Each tile takes a few
    more steps than k. A long k is divided by two, four, ... if that gives more processors work.

    Args: m, n, k: [products].

    Source: NVIDIA, Matrix Multiplication Background User's Guide, section 3; stream-K, arXiv:2301.03598.
    """
    m, n, k = np.maximum(m, 1.0), np.maximum(n, 1.0), np.maximum(k, 1.0)
    num_tiles = np.ceil(m / tiles.rows) * np.ceil(n / tiles.columns)
    tile_share = m * n / (num_tiles * (tiles.rows * tiles.columns))
    splits = 2.0 ** np.arange(1 + int(np.log2(max(1, tiles.most_splits))))[:, None]
    waves = np.ceil(num_tiles * splits / tiles.units)
    depth = k / splits
    unit_share = num_tiles * splits / (waves * tiles.units) * depth / (depth + tiles.fill)
    efficiency: Floats = tile_share * unit_share.max(axis=0)
    return efficiency


def attention_efficiency(queries: Floats, pairs: Floats, tiles: Tiles) -> Floats:
    """[operators]: the fraction of the full rate that attention reaches.

    A query has pairs / queries keys on average. Keys are read in blocks; the last block is half empty on average.

    Args: queries, pairs: [operators].
    """
    keys_per_query = pairs / np.maximum(queries, 1.0)
    return np.where(pairs > 0, keys_per_query / (keys_per_query + tiles.keys / 2), 1.0)


class Latencies:
    """The seconds of each operator of a graph, for works of any size."""

    def __init__(
        self,
        hardware: Hardware,
        *,
        dtype_bytes: int = 2,
        links: Mapping[DeviceKind, DeviceLink] | None = None,
        rule: LatencyRule | None = None,
    ) -> None:
        """Args:
        dtype_bytes: bytes of an element in products.
        links: replacements of the hardware's links.
        rule: overrides the seconds of an operator.
        """
        self.hardware = hardware
        self._flops_per_s = hardware.flops_per_s(dtype_bytes)
        self._links = {**hardware.links, **(links or {})}
        self._rule = rule
        self._compiled: WeakKeyDictionary[Graph, _Compiled] = WeakKeyDictionary()

    def __call__(self, graph: Graph, size: WorkSize = ZERO_WORK) -> Floats:
        """[operators]: seconds, multiples of `TICK_S`."""
        if graph not in self._compiled:
            self._compiled[graph] = _Compiled(graph, self.hardware, self._flops_per_s, self._links)
        seconds = self._compiled[graph](size)
        if self._rule is not None:
            by_rates = zip(graph.operators, seconds.tolist(), strict=True)
            seconds = np.array([self._rule(op, size, rate_s) for op, rate_s in by_rates], dtype=np.float64)
        return np.rint(seconds / TICK_S) * TICK_S


class _Compiled:
    """A graph's amounts divided by its devices' rates, as matrices."""

    def __init__(
        self, graph: Graph, hardware: Hardware, flops_per_s: float, links: Mapping[DeviceKind, DeviceLink]
    ) -> None:
        ops = graph.operators
        efficiencies = [hardware.efficiency_of(op.kind, op.phase) for op in ops]
        rate = [links[op.device.kind].bytes_per_s if not op.device.kind.computes else 1.0 for op in ops]
        self._rates = np.stack(
            [
                _over([op.flops for op in ops], [flops_per_s * e.compute for e in efficiencies]),
                _over([op.mem_bytes for op in ops], [hardware.memory_bytes_per_s * e.memory for e in efficiencies]),
                _over([op.net_bytes for op in ops], [r * e.network for r, e in zip(rate, efficiencies, strict=True)]),
            ]
        )
        """[compute, memory, network; operators; counts of a work]: seconds at the best rates."""
        self._each_call = np.array([op.each_call for op in ops], dtype=bool)
        per_launch = [hardware.launch_s if op.device.kind.computes else links[op.device.kind].latency_s for op in ops]
        self._fixed = np.array([op.launches * s for op, s in zip(ops, per_launch, strict=True)], dtype=np.float64)
        self._tiles = hardware.tiles
        self._products = _Shapes(graph, attention=False)
        self._attention = _Shapes(graph, attention=True)
        self._efficiencies: dict[bytes, Floats] = {}
        self._last: tuple[WorkSize, Floats] | None = None

    def __call__(self, size: WorkSize) -> Floats:
        last = self._last  # read once: threads share it
        if last is not None and last[0] == size:
            return last[1]
        seconds = self._seconds(values(size))
        if size.calls > 1 and self._each_call.any():
            of_one = self._seconds(values(size, of=size.calls))
            seconds[self._each_call] = size.calls * of_one[self._each_call]
        self._last = (size, seconds)
        return seconds

    def _seconds(self, at: Coefficients) -> Floats:
        resource_s: Floats = self._rates @ at
        if self._products.indices:
            resource_s[0, self._products.indices] /= self._product_efficiency(at)
        if self._attention.indices:
            m, n, _ = self._attention(at)
            resource_s[0, self._attention.indices] /= attention_efficiency(m, n, self._tiles)
        seconds: Floats = resource_s.max(axis=0) + self._fixed
        return seconds

    def _product_efficiency(self, at: Coefficients) -> Floats:
        # Remembered, because works of a language model often differ only in their pairs.
        key = at[self._products.depends].tobytes()
        known = self._efficiencies.get(key)
        if known is None:
            if len(self._efficiencies) >= _REMEMBERED:
                self._efficiencies.clear()
            known = self._efficiencies[key] = product_efficiency(*self._products(at), self._tiles)
        return known


class _Shapes:
    """The sizes of a graph's matrix products, or of its attention operators."""

    def __init__(self, graph: Graph, *, attention: bool) -> None:
        shapes = [
            (index, op.shape)
            for index, op in enumerate(graph.operators)
            if op.shape is not None and (op.kind is OpKind.ATTENTION) is attention
        ]
        self.indices = [index for index, _ in shapes]
        self._m = coefficients(shape.m for _, shape in shapes)
        self._n = coefficients(shape.n for _, shape in shapes)
        self._k = coefficients(shape.k for _, shape in shapes)
        self.depends = np.abs(np.concatenate([self._m, self._n, self._k])).any(axis=0)
        """[counts of a work]: whether they depend on it."""

    def __call__(self, at: Coefficients) -> tuple[Floats, Floats, Floats]:
        return self._m @ at, self._n @ at, self._k @ at


def _over(amounts: list[Any], rates: list[float]) -> Coefficients:
    return coefficients(amounts) / np.array(rates, dtype=np.float64)[:, None]
