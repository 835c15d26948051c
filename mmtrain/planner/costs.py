"""Costs of an iteration, as a planning problem: seconds from a cost model, bytes from the layers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from mmtrain.config import PlannerConfig
from mmtrain.errors import PlanError
from mmtrain.models.recomputation import KEEP_ALL, Recomputation
from mmtrain.models.spec import ModelSpec, ModuleSpec, WorkSize
from mmtrain.planner.batching import Batching
from mmtrain.planner.cost_model import CostModel, equal_layers
from mmtrain.planner.partition import Partition, StageSpec
from mmtrain.schedule.action import Kind
from mmtrain.schedule.problem import Option, PlanningProblem

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
    recomputation: Recomputation = KEEP_ALL,
    shares: int = 1,
    splits_backward: bool = False,
    forward_only: bool = False,
) -> PlanningProblem:
    """The planning problem of one iteration.

    A stage has a backward for a work if something trainable lies at or before it *in this iteration*:
    a frozen language model needs none for a text-only microbatch.

    Of a split backward, the second half makes the weight gradients of linear layers; convolutions have theirs in the
    first. Between the halves the inputs of the linear layers and the gradients of their outputs are held.

    The backward of a recomputed block repeats its forward. While it does, one block is there in full, which a
    rank's memory limit leaves room for, once.

    Args:
        costs: what layers and transfers take.
        shares: ranks of a stage's plane (context x tensor parallel), which divide each work; bytes are those of an
            even share.
        splits_backward: whether the schedule splits backwards, so that the fixed seconds of an action are those of I
            and of W, and not those of one B.
        forward_only: no backward anywhere (validation); activations are then freed at once.
    Raises: PlanError: what a block needs to be recomputed alone is over the memory limit.
    """
    prices = _Prices(
        spec=spec,
        chains={name: partition.of_module(name) for name in batching.modules},
        costs=costs,
        recomputation=recomputation,
        shares=shares,
        splits_backward=splits_backward,
        forward_only=forward_only,
    )
    prices_of: list[list[_StagePrice]] = []
    for work, size in zip(batching.works, batching.size_of, strict=True):
        grad = not forward_only and any(prices_of[other][-1].grad for other in work.after)
        prices_of.append(prices.chain(batching.modules[work.module], size, grad))
    peaks = [0.0] * partition.num_ranks
    for rank, peak_bytes in prices.peaks():
        peaks[rank] = max(peaks[rank], peak_bytes)
    return PlanningProblem.build(
        num_ranks=partition.num_ranks,
        modules=partition.modules,
        stage_rank=partition.stage_rank,
        works=batching.works,
        costs=[(option,) for option in prices.table],
        cost_index=[[price.option for price in chain] for chain in prices_of],
        output_bytes=[[price.output_bytes for price in chain] for chain in prices_of],
        p2p=costs.p2p,
        memory_limit_bytes=_limits(planner_config, peaks),
    )


def _limits(planner_config: PlannerConfig, peaks: list[float]) -> list[float] | None:
    """What activations may take on each rank from forward to backward; None: no limit."""
    if not planner_config.activation_memory_gib:
        return None
    limit = planner_config.activation_memory_gib * _GIB
    for rank, peak in enumerate(peaks):
        if peak >= limit:
            raise PlanError(
                f"planner.activation_memory_gib = {planner_config.activation_memory_gib}, but on pp_rank {rank} the "
                f"recomputation of one block takes {peak / _GIB:.3g} GiB; raise it, or lower training.seq_len or "
                "model.encoder.sub_microbatch_size"
            )
    return [limit - peak for peak in peaks]


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerPrice:
    """What one layer takes for one work."""

    forward_s: float
    backward_input_s: float = 0.0
    """What recomputation repeats included."""
    backward_weight_s: float = 0.0
    kept_bytes: float = 0.0
    passing_bytes: float = 0.0
    """Held during the forward alone, where autograd keeps nothing."""
    peak_bytes: float = 0.0
    waiting_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _StagePrice:
    """What one stage takes for one work."""

    option: int
    """Its place in the table of options."""
    grad: bool
    """Whether a gradient leaves the stage's end backwards."""
    peak_bytes: float
    """What the backward needs on top of what was kept."""
    output_bytes: float
    pp_rank: int


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive layers of a module that cost the same."""

    index: int
    """The first of them."""
    count: int


class _Prices:
    """Layers and stages priced for works, each kind of layer once a size."""

    table: dict[Option, int]
    """All options that stages have, by their first use."""

    def __init__(
        self,
        *,
        spec: ModelSpec,
        chains: Mapping[str, Sequence[StageSpec]],
        costs: CostModel,
        recomputation: Recomputation,
        shares: int,
        splits_backward: bool,
        forward_only: bool,
    ) -> None:
        self._spec = spec
        self._stages = chains
        self.table = {}
        self._costs = costs
        self._recomputation = recomputation
        self._shares = shares
        self._forward_only = forward_only
        halves = (Kind.I, Kind.W) if splits_backward else (Kind.B,)
        self._forward_s = costs.action_s(Kind.F)
        self._backward_s = tuple(costs.action_s(kind) for kind in halves)
        self._class: dict[str, list[int]] = {module.name: equal_layers(module) for module in spec.modules}
        self._runs: dict[int, list[_Run]] = {}
        self._layers: dict[tuple[str, int, WorkSize, bool], _LayerPrice] = {}
        self._chains: dict[tuple[str, WorkSize, bool], list[_StagePrice]] = {}

    def chain(self, module: str, size: WorkSize, grad: bool) -> list[_StagePrice]:
        """What each stage of a module takes for a work. Args: grad: whether a gradient has to leave its first layer."""
        key = (module, size, grad)
        if key not in self._chains:
            found = self._chains[key] = []
            for stage in self._stages[module]:
                found.append(self._stage(self._spec.module(module), stage, size, grad))
                grad = found[-1].grad
        return self._chains[key]

    def peaks(self) -> Iterator[tuple[int, float]]:
        """(rank, bytes that a backward needs there on top of what was kept), of everything priced."""
        return ((price.pp_rank, price.peak_bytes) for chain in self._chains.values() for price in chain)

    def _stage(self, module: ModuleSpec, stage: StageSpec, size: WorkSize, grad: bool) -> _StagePrice:
        forward = backward = weight = kept = passing = peak = waiting = 0.0
        for run in self._runs_of(module, stage):
            trains = module.layers[run.index].trainable and not self._forward_only
            # The first of the layers may be the one that a gradient first needs to pass.
            for count, enters in ((run.count, True),) if grad else ((1, False), (run.count - 1, trains)):
                if not count:
                    continue
                price = self._layer(module, run.index, size, enters)
                forward += count * price.forward_s
                backward += count * price.backward_input_s
                weight += count * price.backward_weight_s
                kept += count * price.kept_bytes
                waiting += count * price.waiting_bytes
                passing, peak = max(passing, price.passing_bytes), max(peak, price.peak_bytes)
            grad = grad or trains
        if grad:
            fixed_input, *fixed_weight = self._backward_s
            backward, weight = backward + fixed_input, max(weight + sum(fixed_weight), LEAST_BACKWARD_S)
        option = Option(
            name="keep",
            forward_s=forward + self._forward_s,
            backward_input_s=backward,
            backward_weight_s=weight,
            activation_bytes=max(kept, passing) / self._shares,
            weight_bytes=waiting / self._shares if grad else None,
        )
        feeds = not stage.last or any(module.name in other.after for other in self._spec.modules)
        output = module.layers[stage.layers[1] - 1].output_bytes(size) / self._shares if feeds else 0.0
        return _StagePrice(
            option=self.table.setdefault(option, len(self.table)),
            grad=grad,
            peak_bytes=peak / self._shares,
            output_bytes=output,
            pp_rank=stage.pp_rank,
        )

    def _runs_of(self, module: ModuleSpec, stage: StageSpec) -> list[_Run]:
        if stage.index not in self._runs:
            kinds = self._class[module.name]
            grouped = groupby(range(*stage.layers), key=lambda index: kinds[index])
            self._runs[stage.index] = [_Run(mine[0], len(mine)) for mine in (list(run) for _, run in grouped)]
        return self._runs[stage.index]

    def _layer(self, module: ModuleSpec, index: int, size: WorkSize, input_grad: bool) -> _LayerPrice:
        key = (module.name, self._class[module.name][index], size, input_grad)
        if key not in self._layers:
            self._layers[key] = self._price(module, index, size, input_grad)
        return self._layers[key]

    def _price(self, module: ModuleSpec, index: int, size: WorkSize, input_grad: bool) -> _LayerPrice:
        layer = module.layers[index]
        times = self._costs.layer(module, index, size, input_grad=input_grad)
        if self._forward_only or not (input_grad or layer.trainable):  # autograd keeps nothing: one layer at a time
            return _LayerPrice(forward_s=times.forward_s, passing_bytes=layer.activation_bytes(size))
        repeated = self._costs.repeated_s(module, index, size, self._recomputation)
        return _LayerPrice(
            forward_s=times.forward_s,
            backward_input_s=times.backward_input_s + repeated,
            backward_weight_s=times.backward_weight_s,
            kept_bytes=self._recomputation.kept_bytes(layer, size),
            peak_bytes=self._recomputation.peak_bytes(layer, size),
            waiting_bytes=layer.linear_bytes(size) if layer.splits_backward else 0.0,
        )
