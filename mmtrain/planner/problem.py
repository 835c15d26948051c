"""Costs of an iteration, as a planning problem: seconds from a cost model, bytes from the layers."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np

from mmtrain.config.memory_amount import show_bytes
from mmtrain.config.sections import PlannerConfig
from mmtrain.errors import PlanError
from mmtrain.modality.catalogue import division_of
from mmtrain.modality.submesh import Submesh
from mmtrain.planner.batching import Batching
from mmtrain.planner.costs.cost_model import CostModel, equal_layers
from mmtrain.planner.memory.options import BlockKind, BlockPrice, MemoryChoices, Offer, offer, shape_class, weighted
from mmtrain.planner.partition.partition import Partition, StageSpec
from mmtrain.schedule.action import Kind
from mmtrain.schedule.library.greedy import components
from mmtrain.schedule.library.memory import choose_options
from mmtrain.schedule.problem import Option, PlanningProblem
from mmtrain.spec.memory_strategies import BlockMemory
from mmtrain.spec.spec import LayerSpec, ModelSpec, ModuleSpec, WorkSize

LEAST_BACKWARD_S = 1e-9
"""What a backward takes at least, even with no FLOP counted (an embedding): zero means that there is none."""

_GIB = 2.0**30


def make_problem(
    spec: ModelSpec,
    partition: Partition,
    batching: Batching,
    costs: CostModel,
    planner_config: PlannerConfig,
    *,
    memory: MemoryChoices = MemoryChoices(),  # noqa: B008
    limits: Sequence[float | None] | None = None,
    submesh: Submesh = Submesh(),  # noqa: B008
    splits_backward: bool = False,
    forward_only: bool = False,
) -> PlanningProblem:
    """The planning problem of one iteration.

    A stage has a backward for a work if something trainable lies at or before it *in this iteration*:
    a frozen language model needs none for a text-only microbatch.

    Of a split backward, W makes the weight gradients of linear layers; convolutions have theirs in I. Between the two
    the inputs of the linear layers and the gradients of their outputs are held.

    The backward of a recomputed block repeats its forward; while it does, that block is there in full. Offloaded blocks
    come back three at a time: where the limits have no room for that, nothing is offloaded in this iteration.

    Args:
        costs: what layers and transfers take.
        memory: what blocks may do with their activations. Where they may choose, each stage and work has several
            options, if any rank has a limit.
        limits: [pp_rank] bytes that activations may take; None: those of planner_config.
        submesh: the ranks of a stage, which divide each work; bytes are those of one rank, of the one with most patches
            where whole images are divided.
        splits_backward: whether the schedule splits backwards, so that the fixed seconds of an action are those of I
            and of W, and not those of one B.
        forward_only: no backward anywhere (validation); activations are then freed at once.
    Raises: PlanError: what the backward of one block brings back is over the memory limit alone, or a time, size or
        number is outside of `mmtrain.schedule.limits`.
    """
    if limits is None and planner_config.activation_memory_gib:
        limits = [planner_config.activation_memory_gib * _GIB] * partition.num_ranks
    limited = limits is not None and any(limit is not None for limit in limits)

    def attempt(memory: MemoryChoices) -> tuple[PlanningProblem, Sequence[BlockMemory]]:
        prices = _Prices(
            spec=spec,
            chains={name: partition.of_module(name) for name in batching.modules},
            costs=costs,
            memory=memory if limited else memory.fixed,
            submesh=submesh,
            splits_backward=splits_backward,
            forward_only=forward_only,
        )
        return _problem(prices, partition, batching, limits), prices.strategies

    problem, strategies = attempt(memory)
    fewer = tuple(how for how in strategies if how is not BlockMemory.OFFLOAD)
    if 0 < len(fewer) < len(strategies) and not _fits(problem):
        problem, _ = attempt(replace(memory, strategies=fewer))
    _check_restored(problem)
    return problem


def _problem(
    prices: "_Prices", partition: Partition, batching: Batching, limits: Sequence[float | None] | None
) -> PlanningProblem:
    prices_of: list[list[_StagePrice]] = []
    for number, item in enumerate(batching.items):
        grad = not prices.forward_only and any(prices_of[other][-1].grad for other in item.work.after)
        module = batching.module_of(number)
        unevenness = batching.kinds[module].unevenness(prices.submesh, item.units)
        prices_of.append(prices.chain(module, item.size, grad, unevenness))
    try:
        return PlanningProblem.build(
            num_ranks=partition.num_ranks,
            modules=partition.modules,
            stage_rank=partition.stage_rank,
            works=batching.works,
            costs=list(prices.table),
            cost_index=[[price.options for price in chain] for chain in prices_of],
            output_bytes=[[price.output_bytes for price in chain] for chain in prices_of],
            p2p=prices.costs.p2p,
            memory_limit_bytes=limits,
        )
    except PlanError as error:  # a number outside of `mmtrain.schedule.limits`
        raise PlanError(
            f"this job cannot be planned: {error}; times follow from planner.flops_per_s, hardware or profile, sizes "
            "from training.global_batch_size, seq_len and the models"
        ) from error


def _check_restored(problem: PlanningProblem) -> None:
    """Refuses ranks without room for what the backward of one block brings back."""
    for rank, limit in enumerate(problem.memory_limit_bytes):
        if limit is not None and problem.held_limit_bytes[rank] == 0.0:
            most = max(
                option.restored_bytes
                for node in problem.graph.nodes()
                if problem.graph.stage_rank[node[0]] == rank
                for option in problem.options(*node)
            )
            raise PlanError(
                f"pp_rank {rank}: what the backward of one block computes again or brings back takes up to "
                f"{show_bytes(most)} alone, over the memory limit of {show_bytes(limit)} for activations; raise "
                "planner.memory_limit (or activation_memory_gib), or lower training.seq_len or "
                "model.encoder.sub_microbatch_size"
            )


def _fits(problem: PlanningProblem) -> bool:
    """Whether each microbatch fits alone, beside the room that the ranks leave for what backwards bring back."""
    try:
        choose_options(problem, components(problem.graph))
    except PlanError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class _LayerPrice:
    """What one layer takes for one work on each rank of the submesh, or some layers together."""

    forward_s: float = 0.0
    backward_input_s: float = 0.0
    """What recomputation repeats included."""
    backward_weight_s: float = 0.0
    kept_bytes: float = 0.0
    host_bytes: float = 0.0
    """Moved to host memory and back."""
    waiting_bytes: float = 0.0
    passing_bytes: float = 0.0
    """Held during the forward alone, where autograd keeps nothing; of some layers the most."""
    restored_bytes: float = 0.0
    """What the backward brings back; of some layers the most."""

    @property
    def summed(self) -> tuple[float, ...]:
        """What adds up over layers, in the order of `_SUMMED`."""
        return _summed(self)

    @property
    def of_block(self) -> BlockPrice:
        """What a mix of memory strategies is chosen by."""
        return BlockPrice(
            forward_s=self.forward_s,
            backward_s=self.backward_input_s,
            kept_bytes=self.kept_bytes,
            host_bytes=self.host_bytes,
        )


_SUMMED = ("forward_s", "backward_input_s", "backward_weight_s", "kept_bytes", "host_bytes", "waiting_bytes")
"""The first fields of a `_LayerPrice`."""
_summed = attrgetter(*_SUMMED)


@dataclass(frozen=True, slots=True, kw_only=True)
class _StagePrice:
    """What one stage takes for one work."""

    options: int
    """Its place in the table of option lists."""
    grad: bool
    """Whether a gradient leaves the stage's end backwards."""
    output_bytes: float


@dataclass(frozen=True, slots=True)
class _Kind:
    """Layers of a stage that cost the same for a work."""

    index: int
    """The first of them."""
    enters: bool
    """Whether a gradient has to leave them."""
    places: list[int]
    """Of each: its place among the stage's blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _StageShape:
    """What a stage consists of, by whether a gradient has to leave its first layer."""

    rest: list[_Kind]
    """Layers without a memory strategy."""
    blocks: list[_Kind]
    """Blocks with a backward."""
    num_blocks: int
    grad: bool
    """Whether a gradient leaves the stage's end backwards."""
    held_input: int
    """Layer whose output waits as the stage's input until the backward, whatever its first block does; -1: none."""


class _Prices:
    """Layers and stages priced for works, each kind of layer once a size."""

    table: dict[tuple[Option, ...], int]
    """All option lists that stages have, by their first use."""

    def __init__(
        self,
        *,
        spec: ModelSpec,
        chains: Mapping[str, Sequence[StageSpec]],
        costs: CostModel,
        memory: MemoryChoices,
        submesh: Submesh,
        splits_backward: bool,
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
        passes = (Kind.I, Kind.W) if splits_backward else (Kind.B,)
        self._forward_s = costs.action_s(Kind.F)
        self._backward_s = tuple(costs.action_s(kind) for kind in passes)
        self._class: dict[str, list[int]] = {module.name: equal_layers(module) for module in spec.modules}
        self._of_rank: dict[tuple[str, int], LayerSpec] = {}
        self._shapes: dict[tuple[int, bool], _StageShape] = {}
        self._layers: dict[tuple[str, int, WorkSize, bool, BlockMemory], _LayerPrice] = {}
        self._offers: dict[tuple[int, bool, WorkSize | None], Offer] = {}
        self._chains: dict[tuple[str, WorkSize, bool, float], list[_StagePrice]] = {}

    @property
    def strategies(self) -> tuple[BlockMemory, ...]:
        """Among which blocks may choose; empty: they may not."""
        return self._memory.strategies

    def chain(self, module: str, size: WorkSize, grad: bool, unevenness: float) -> list[_StagePrice]:
        """What each stage of a module takes for a work.

        Args:
            grad: whether a gradient has to leave its first layer.
            unevenness: bytes of the rank with most over those of an even division.
        """
        key = (module, size, grad, unevenness)
        if key not in self._chains:
            found = self._chains[key] = []
            for stage in self._stages[module]:
                found.append(self._stage(self._spec.module(module), stage, size, grad, unevenness))
                grad = found[-1].grad
        return self._chains[key]

    def _stage(
        self, module: ModuleSpec, stage: StageSpec, size: WorkSize, grad: bool, unevenness: float
    ) -> _StagePrice:
        shape = self._shape(module, stage, grad)
        rest = _total((len(kind.places), self._layer(module, kind, size)) for kind in shape.rest)
        blocks = [self._layer(module, kind, size, how) for kind in shape.blocks for how in self._memory.allowed]
        offered = self._offered(module, stage, size, grad)
        held_input = 0.0
        if shape.held_input >= 0:
            held_input = self._layer_of_rank(module, shape.held_input).output_bytes(size)
        found: list[Option] = []
        for name, price in zip(offered.names, _mixed(offered, rest, blocks), strict=True):
            option = self._option(name, price, shape.grad, held_input, unevenness)
            if not found or option.activation_bytes < found[-1].activation_bytes:
                found.append(option)
        feeds = not stage.last or any(module.name in other.after for other in self._spec.modules)
        output_bytes = self._layer_of_rank(module, stage.layers[1] - 1).output_bytes(size)
        return _StagePrice(
            options=self.table.setdefault(tuple(found), len(self.table)),
            grad=shape.grad,
            output_bytes=unevenness * output_bytes if feeds else 0.0,
        )

    def _option(self, name: str, price: _LayerPrice, grad: bool, held_input: float, unevenness: float) -> Option:
        forward, backward, weight = price.forward_s, price.backward_input_s, price.backward_weight_s
        kept = max(price.kept_bytes, price.passing_bytes)
        if price.host_bytes:
            host = self.costs.host_copy
            forward, backward = (host.with_compute_s(s, price.host_bytes) for s in (forward, backward))
            kept += held_input
        if grad:
            fixed_input, *fixed_weight = self._backward_s
            backward, weight = backward + fixed_input, max(weight + sum(fixed_weight), LEAST_BACKWARD_S)
        return Option(
            name=name,
            forward_s=forward + self._forward_s,
            backward_input_s=backward,
            backward_weight_s=weight,
            activation_bytes=unevenness * kept,
            weight_bytes=unevenness * price.waiting_bytes if grad else None,
            restored_bytes=unevenness * price.restored_bytes,
        )

    def _offered(self, module: ModuleSpec, stage: StageSpec, size: WorkSize, grad: bool) -> Offer:
        """The mixes that a stage offers for all sizes of a class."""
        shape = self._shape(module, stage, grad)
        strategies = self._memory.allowed
        # One strategy has one mix, whatever the size.
        typical = shape_class(size) if len(strategies) > 1 else size
        key = (stage.index, grad, typical if len(strategies) > 1 else None)
        if key not in self._offers:
            rest = _total((len(kind.places), self._layer(module, kind, typical)) for kind in shape.rest)
            kinds = tuple(
                BlockKind(
                    count=len(kind.places),
                    prices=tuple(self._layer(module, kind, typical, how).of_block for how in strategies),
                )
                for kind in shape.blocks
            )
            places = tuple(tuple(kind.places) for kind in shape.blocks)
            self._offers[key] = offer(kinds, rest.of_block, self.costs.host_copy, strategies, places, shape.num_blocks)
        return self._offers[key]

    def _shape(self, module: ModuleSpec, stage: StageSpec, grad: bool) -> _StageShape:
        if (stage.index, grad) not in self._shapes:
            self._shapes[stage.index, grad] = self._make_shape(module, stage, grad)
        return self._shapes[stage.index, grad]

    def _make_shape(self, module: ModuleSpec, stage: StageSpec, grad: bool) -> _StageShape:
        rest: dict[tuple[int, bool], _Kind] = {}
        blocks: dict[tuple[int, bool], _Kind] = {}
        held_input = stage.layers[0] - 1 if grad and module.layers[stage.layers[0]].is_block else -1
        num_blocks = 0
        for index in range(*stage.layers):
            layer = module.layers[index]
            key = self._class[module.name][index], grad
            grad = grad or (layer.trainable and not self.forward_only)
            kinds = blocks if layer.is_block and grad else rest
            kinds.setdefault(key, _Kind(*key, [])).places.append(num_blocks)
            num_blocks += layer.is_block
        return _StageShape(
            rest=list(rest.values()),
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
                kept_bytes=recomputation.kept_bytes(layer, size),
                restored_bytes=recomputation.peak_bytes(layer, size),
                host_bytes=recomputation.offloaded_bytes(layer, size),
            )
        times = self.costs.layer(module, index, size, input_grad=kind.enters)
        if self.forward_only or not (kind.enters or layer.trainable):  # autograd keeps nothing: one layer at a time
            return _LayerPrice(forward_s=times.forward_s, passing_bytes=layer.activation_bytes(size))
        return _LayerPrice(
            forward_s=times.forward_s,
            backward_input_s=times.backward_input_s,
            backward_weight_s=times.backward_weight_s,
            kept_bytes=layer.activation_bytes(size),
            waiting_bytes=layer.linear_bytes(size) if layer.splits_backward else 0.0,
        )


def _mixed(offered: Offer, rest: _LayerPrice, blocks: Sequence[_LayerPrice]) -> Iterator[_LayerPrice]:
    """What a stage takes under each mix that it offers."""
    if len(offered.names) == 1:
        yield _total([(1, rest), *zip(offered.counts[0].tolist(), blocks, strict=True)])
        return
    sums = np.array(rest.summed) + weighted(offered.counts, [price.summed for price in blocks], len(_SUMMED))
    most = np.array([price.restored_bytes for price in blocks])
    restored = ((offered.counts > 0) * most).max(axis=1, initial=0.0)
    for row, more in zip(sums.tolist(), restored.tolist(), strict=True):
        yield _LayerPrice(*[*row, rest.passing_bytes, more])


def _total(prices: Iterable[tuple[int, _LayerPrice]]) -> _LayerPrice:
    """What layers take together. Args: prices: how many, and the price of one."""
    forward = inside = later = kept = host = waiting = passing = restored = 0.0
    for count, price in prices:
        forward += count * price.forward_s
        inside += count * price.backward_input_s
        later += count * price.backward_weight_s
        kept += count * price.kept_bytes
        host += count * price.host_bytes
        waiting += count * price.waiting_bytes
        passing = max(passing, price.passing_bytes)
        restored = max(restored, price.restored_bytes) if count else restored
    return _LayerPrice(forward, inside, later, kept, host, waiting, passing, restored)
