"""Prices of layers and of stages for works: seconds and bytes on one rank of the submesh. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np

from mmtrain.costs.cost_model import CostModel, equal_layers
from mmtrain.modality.catalogue import division_of
from mmtrain.modality.submesh import Submesh
from mmtrain.planner.memory.options import BlockKind, BlockPrice, MemoryChoices, Offer, offer, shape_class, weighted
from mmtrain.planner.partition.partition import StageSpec
from mmtrain.schedule.problem import Option
from mmtrain.spec.layer import LayerSpec
from mmtrain.spec.memory_strategies import BlockMemory
from mmtrain.spec.spec import ModelSpec, ModuleSpec
from mmtrain.spec.work_size import WorkSize

LEAST_BACKWARD_S = 1e-9
"""Seconds that a backward takes at least, even without FLOPs (an embedding): 0 means that there is no backward."""


@dataclass(frozen=True, slots=True)
class _LayerPrice:
    """Seconds and bytes of one layer, or of several layers together, for one work on each rank of the submesh."""

    forward_s: float = 0.0
    backward_input_s: float = 0.0
    """Seconds of I, recomputation included."""
    backward_weight_s: float = 0.0
    kept_bytes: float = 0.0
    host_bytes: float = 0.0
    """Bytes that are moved to host memory and back."""
    waiting_bytes: float = 0.0
    split_s: float = 0.0
    """Further seconds, if the backward is split."""
    forward_exchange_s: float = 0.0
    backward_exchange_s: float = 0.0
    """Seconds of exchanges in I, recomputation included."""
    passing_bytes: float = 0.0
    """Bytes held during the forward alone, if autograd keeps nothing; of several layers the largest."""
    restored_bytes: float = 0.0
    """Bytes restored by the backward, or made in it; of several layers the largest."""

    @property
    def summed(self) -> tuple[float, ...]:
        """The values that add up over layers, in the order of `_SUMMED`."""
        return _summed(self)

    @property
    def of_block(self) -> BlockPrice:
        """The seconds and bytes by which a mix of memory strategies is chosen."""
        return BlockPrice(
            forward_s=self.forward_s,
            backward_s=self.backward_input_s,
            kept_bytes=self.kept_bytes,
            host_bytes=self.host_bytes,
        )


_SUMMED = (
    "forward_s",
    "backward_input_s",
    "backward_weight_s",
    "kept_bytes",
    "host_bytes",
    "waiting_bytes",
    "split_s",
    "forward_exchange_s",
    "backward_exchange_s",
)
"""The first fields of a `_LayerPrice`."""


_summed = attrgetter(*_SUMMED)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePrice:
    """Options and output of one stage for one work."""

    options: int
    """Index in the table of option lists."""
    grad: bool
    """Whether a gradient leaves the stage's end backwards."""
    output_bytes: float


@dataclass(frozen=True, slots=True)
class _Kind:
    """Layers of a stage that cost the same for a work."""

    index: int
    """The first of them."""
    enters: bool
    """Whether a gradient has to leave them backwards."""
    positions: list[int]
    """The index of each layer among the stage's blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _StageShape:
    """The kinds of layers of a stage, given whether a gradient has to leave its first layer."""

    other_layers: list[_Kind]
    """Layers without a memory strategy."""
    blocks: list[_Kind]
    """Blocks with a backward."""
    num_blocks: int
    grad: bool
    """Whether a gradient leaves the stage's end backwards."""
    held_input: int
    """Layer whose output is held as the stage's input until the backward, whatever its first block does; -1: none."""


class Prices:
    """Prices of layers and stages for works; each kind of layer is priced once for each size."""

    table: dict[tuple[Option, ...], int]
    """All option lists of stages, in the order of their first use -> index."""

    def __init__(
        self,
        *,
        spec: ModelSpec,
        chains: Mapping[str, Sequence[StageSpec]],
        costs: CostModel,
        memory: MemoryChoices,
        submesh: Submesh,
        forward_only: bool,
    ) -> None:
        self._spec = spec
        self._stages = chains
        self.table = {}
        self.costs = costs
        self.submesh = submesh
        self._memory = memory
        self._division = {module.name: division_of(submesh, module) for module in spec.modules}
        self.forward_only = forward_only
        self._class: dict[str, list[int]] = {module.name: equal_layers(module) for module in spec.modules}
        self._of_rank: dict[tuple[str, int], LayerSpec] = {}
        self._shapes: dict[tuple[int, bool], _StageShape] = {}
        self._layers: dict[tuple[str, int, WorkSize, bool, BlockMemory], _LayerPrice] = {}
        self._offers: dict[tuple[int, bool, WorkSize | None], Offer] = {}
        self._chains: dict[tuple[str, WorkSize, bool], list[StagePrice]] = {}

    @property
    def strategies(self) -> tuple[BlockMemory, ...]:
        """The strategies among which blocks may choose; empty: there is no choice."""
        return self._memory.strategies

    def chain(self, module: str, size: WorkSize, grad: bool) -> list[StagePrice]:
        """Options and output of each stage of a module for a work.

        Args:
            grad: whether a gradient has to leave the module's first layer.
        """
        key = (module, size, grad)
        if key not in self._chains:
            prices = self._chains[key] = []
            for stage in self._stages[module]:
                prices.append(self._stage(self._spec.module(module), stage, size, grad))
                grad = prices[-1].grad
        return self._chains[key]

    def _stage(self, module: ModuleSpec, stage: StageSpec, size: WorkSize, grad: bool) -> StagePrice:
        shape = self._shape(module, stage, grad)
        other_layers = _total((len(kind.positions), self._layer(module, kind, size)) for kind in shape.other_layers)
        blocks = [self._layer(module, kind, size, how) for kind in shape.blocks for how in self._memory.allowed]
        offered = self._offered(module, stage, size, grad)
        held_input = 0.0
        if shape.held_input >= 0:
            held_input = self._layer_of_rank(module, shape.held_input).output_bytes(size)
        # The chunk's input is one tensor, which waits for its gradient.
        carried = self._carried_bytes(module, stage.layers[0] - 1, size) if grad else 0.0
        options: list[Option] = []
        for name, price in zip(offered.names, _mixed(offered, other_layers, blocks), strict=True):
            option = self._option(name, price, shape.grad, held_input, carried)
            if not options or option.activation_bytes < options[-1].activation_bytes:
                options.append(option)
        feeds = not stage.last or any(module.name in consumer.after for consumer in self._spec.modules)
        last = stage.layers[1] - 1
        output_bytes = self._layer_of_rank(module, last).output_bytes(size) + self._carried_bytes(module, last, size)
        return StagePrice(
            options=self.table.setdefault(tuple(options), len(self.table)),
            grad=shape.grad,
            output_bytes=output_bytes if feeds else 0.0,
        )

    def _carried_bytes(self, module: ModuleSpec, index: int, size: WorkSize) -> float:
        """Bytes of the activations that travel with the output of a layer. Args: index: -1: of the module's input."""
        count = module.num_carried(index)
        return count * self._layer_of_rank(module, index).output_bytes(size) if count else 0.0

    def _option(self, name: str, price: _LayerPrice, grad: bool, held_input: float, carried: float) -> Option:
        forward, backward, weight = price.forward_s, price.backward_input_s, price.backward_weight_s
        held_bytes, host_s = max(price.kept_bytes, price.passing_bytes) + carried, 0.0
        if price.host_bytes:
            host_s = price.host_bytes / self.costs.host_copy.bytes_per_s
            if not self.costs.host_copy.overlaps:
                forward, backward = forward + host_s, backward + host_s
            held_bytes += held_input
        if grad:
            weight = max(weight, LEAST_BACKWARD_S)
        return Option(
            name=name,
            forward_s=forward,
            backward_input_s=backward,
            backward_weight_s=weight,
            activation_bytes=held_bytes,
            weight_bytes=price.waiting_bytes if grad else None,
            restored_bytes=price.restored_bytes,
            split_s=price.split_s if grad else 0.0,
            forward_exchange_s=price.forward_exchange_s,
            backward_exchange_s=price.backward_exchange_s,
            host_s=host_s,
            contention=self.costs.contention if price.forward_exchange_s or price.backward_exchange_s else 1.0,
        )

    def _offered(self, module: ModuleSpec, stage: StageSpec, size: WorkSize, grad: bool) -> Offer:
        """The mixes of memory strategies that a stage offers for all sizes of a class."""
        shape = self._shape(module, stage, grad)
        strategies = self._memory.allowed
        # With one strategy there is one mix for all sizes.
        typical = shape_class(size) if len(strategies) > 1 else size
        key = (stage.index, grad, typical if len(strategies) > 1 else None)
        if key not in self._offers:
            other_layers = _total(
                (len(kind.positions), self._layer(module, kind, typical)) for kind in shape.other_layers
            )
            kinds = tuple(
                BlockKind(
                    count=len(kind.positions),
                    prices=tuple(self._layer(module, kind, typical, how).of_block for how in strategies),
                )
                for kind in shape.blocks
            )
            positions = tuple(tuple(kind.positions) for kind in shape.blocks)
            self._offers[key] = offer(
                kinds, other_layers.of_block, self.costs.host_copy, strategies, positions, shape.num_blocks
            )
        return self._offers[key]

    def _shape(self, module: ModuleSpec, stage: StageSpec, grad: bool) -> _StageShape:
        if (stage.index, grad) not in self._shapes:
            self._shapes[stage.index, grad] = self._make_shape(module, stage, grad)
        return self._shapes[stage.index, grad]

    def _make_shape(self, module: ModuleSpec, stage: StageSpec, grad: bool) -> _StageShape:
        other_layers: dict[tuple[int, bool], _Kind] = {}
        blocks: dict[tuple[int, bool], _Kind] = {}
        held_input = stage.layers[0] - 1 if grad and module.layers[stage.layers[0]].is_block else -1
        num_blocks = 0
        for index in range(*stage.layers):
            layer = module.layers[index]
            key = self._class[module.name][index], grad
            grad = grad or (layer.trainable and not self.forward_only)
            kinds = blocks if layer.is_block and grad else other_layers
            kinds.setdefault(key, _Kind(*key, [])).positions.append(num_blocks)
            num_blocks += layer.is_block
        return _StageShape(
            other_layers=list(other_layers.values()),
            blocks=list(blocks.values()),
            num_blocks=num_blocks,
            grad=grad,
            held_input=held_input,
        )

    def _layer_of_rank(self, module: ModuleSpec, index: int) -> LayerSpec:
        """A layer with the bytes of one rank of the submesh."""
        key = module.name, self._class[module.name][index]
        if key not in self._of_rank:
            self._of_rank[key] = module.layers[key[1]].of_rank(self._division[module.name])
        return self._of_rank[key]

    def _layer(
        self, module: ModuleSpec, kind: _Kind, size: WorkSize, how: BlockMemory = BlockMemory.KEEP
    ) -> _LayerPrice:
        key = (module.name, kind.index, size, kind.enters, how)
        if key not in self._layers:
            self._layers[key] = self._price(module, kind, size, how)
        return self._layers[key]

    def _price(self, module: ModuleSpec, kind: _Kind, size: WorkSize, how: BlockMemory) -> _LayerPrice:
        index, layer = kind.index, self._layer_of_rank(module, kind.index)
        if how is not BlockMemory.KEEP:
            recomputation = self._memory.recomputation(how)
            repeated = self.costs.repeated_s(module, index, size, recomputation)
            plain = self._layer(module, kind, size)
            return replace(
                plain,
                backward_input_s=plain.backward_input_s + repeated,
                backward_exchange_s=plain.backward_exchange_s
                + self.costs.repeated_exchange_s(module, index, size, recomputation),
                kept_bytes=recomputation.kept_bytes(layer, size),
                restored_bytes=recomputation.peak_bytes(layer, size),
                host_bytes=recomputation.offloaded_bytes(layer, size),
            )
        times = self.costs.layer(module, index, size, input_grad=kind.enters)
        if self.forward_only or not (kind.enters or layer.trainable):  # autograd keeps nothing: one layer at a time
            return _LayerPrice(
                forward_s=times.forward_s,
                passing_bytes=layer.activation_bytes(size) + layer.temporary_bytes(size),
                forward_exchange_s=times.forward_exchange_s,
            )
        if layer.defers_forward:
            times = times.deferred
        return _LayerPrice(
            forward_s=times.forward_s,
            backward_input_s=times.backward_input_s,
            backward_weight_s=times.backward_weight_s,
            kept_bytes=layer.activation_bytes(size),
            waiting_bytes=layer.linear_bytes(size) if layer.splits_backward else 0.0,
            restored_bytes=layer.temporary_bytes(size),
            split_s=times.split_s,
            forward_exchange_s=times.forward_exchange_s,
            backward_exchange_s=times.backward_exchange_s,
        )


def _mixed(offered: Offer, other_layers: _LayerPrice, blocks: Sequence[_LayerPrice]) -> Iterator[_LayerPrice]:
    """The price of a stage under each mix that it offers."""
    if len(offered.names) == 1:
        yield _total([(1, other_layers), *zip(offered.counts[0].tolist(), blocks, strict=True)])
        return
    sums = np.array(other_layers.summed) + weighted(offered.counts, [price.summed for price in blocks], len(_SUMMED))
    restored_of_block = np.array([price.restored_bytes for price in blocks])
    restored = ((offered.counts > 0) * restored_of_block).max(axis=1, initial=other_layers.restored_bytes)
    for row, restored_bytes in zip(sums.tolist(), restored.tolist(), strict=True):
        yield _LayerPrice(*[*row, other_layers.passing_bytes, restored_bytes])


def _total(prices: Iterable[tuple[int, _LayerPrice]]) -> _LayerPrice:
    """The price of several layers together. Args: prices: (number of layers, price of each)."""
    sums, passing, restored = [0.0] * len(_SUMMED), 0.0, 0.0
    for count, price in prices:
        sums = [total + count * value for total, value in zip(sums, price.summed, strict=True)]
        passing = max(passing, price.passing_bytes)
        restored = max(restored, price.restored_bytes) if count else restored
    return _LayerPrice(*[*sums, passing, restored])
