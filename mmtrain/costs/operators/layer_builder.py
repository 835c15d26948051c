"""What the operators of all layers share: the division over a submesh, linear layers with adapters, keys. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mmtrain.costs.operators.exchanges import (
    DIVIDED_ROWS,
    WHOLE_ROWS,
    gather_for_parts,
    sum_whole,
    use_for_parts,
)
from mmtrain.costs.operators.functions import add, concat, split
from mmtrain.costs.operators.graph import DeviceKind
from mmtrain.costs.operators.modules import (
    AddRow,
    Attention,
    Elementwise,
    Linear,
    activation,
)
from mmtrain.costs.operators.tape import Tape, Var
from mmtrain.spec.layer import Division, LayerSpec
from mmtrain.spec.linears import Linear as NamedLinear
from mmtrain.spec.modules import Projection, Shape
from mmtrain.spec.work_size import Rates

KEYS = "key_value.gather"
"""Name of the exchange of keys and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkedDivision(Division):
    """The division of a module over the ranks of a submesh, and the links that they use."""

    tp_link: DeviceKind = DeviceKind.NVLINK
    group_link: DeviceKind = DeviceKind.NVLINK
    head_groups: int = 1
    """Groups of key heads that are gathered one after the other, the next under the attention of the current."""


@dataclass(frozen=True, kw_only=True)
class DescribedModule:
    """What the operators of a module's layers follow from, in addition to the layer."""

    shape: Shape
    division: LinkedDivision = field(default_factory=LinkedDivision)
    dtype_bytes: int = 2
    compute: DeviceKind = DeviceKind.GPU
    adapted: tuple[NamedLinear, ...] = ()
    """Linear layers of a block with an adapter."""
    rank: int = 0
    """Rank of the adapters."""
    projection: Projection | None = None
    """The projector of the encoder's features into the language model, of a language model that of the first encoder;
    None: there is no encoder."""


class LayerBuilder:
    """One layer on one tape, and the methods that all modules share."""

    def __init__(self, module: DescribedModule, width: int, tape: Tape, layer: LayerSpec, input_grad: bool) -> None:
        """Args: width: columns of the activations between layers."""
        self.of, self.width, self.tape, self.layer, self.input_grad = module, width, tape, layer, input_grad
        self.trainable = layer.trainable and layer.adapters is None
        self.adapted: Mapping[str, NamedLinear] = {x.name: x for x in module.adapted} if layer.adapters else {}
        division = module.division
        self.tp, self.link, self.row_parts = division.tp, division.tp_link, division.row_parts
        self.between = WHOLE_ROWS if division.whole_rows else DIVIDED_ROWS
        self.rows = Rates(row=1 / division.groups)
        """All rows of a group; a rank holds 1 / row_parts of them between layers."""
        self.outputs = Rates(output=1 / division.groups)

    def _columns(self, name: str, x: Var, inputs: float, outputs: float, *, bias: bool) -> Var:
        """A linear layer whose outputs the tp ranks divide, with its adapter."""
        result = self._linear(name, inputs, outputs / self.tp, bias=bias)(x)
        return self._with_adapter(name, x, result, inputs, outputs / self.tp, sums=False)

    def _rows(self, name: str, x: Var, inputs: float, outputs: float, *, bias: bool) -> Var:
        """A linear layer whose inputs the tp ranks divide, with its adapter; each rank gets its rows of the sum."""
        result = self._linear(name, inputs / self.tp, outputs, bias=bias and self.tp == 1)(x)
        result = self.between.sum_shard(f"{name}.sum", self.tp, self.link)(result)
        if bias and self.tp > 1:
            result = AddRow(f"{name}.bias", outputs, trainable=self.trainable)(result)
        return self._with_adapter(name, x, result, inputs / self.tp, outputs, sums=True)

    def _input(self, name: str, rows: Rates) -> Var:
        """An activation of the layer before."""
        return self.tape.input(name, rows=rows, columns=self.width, needs_grad=self.input_grad)

    def _between(self, name: str = "x", rows: Rates | None = None) -> Var:
        """The activation of the layer before: this rank's rows. Args: rows: of all tp ranks; None: of the work."""
        return self._input(name, (rows or self.rows) * (1 / self.row_parts))

    def _gathered(self, name: str, x: Var) -> Var:
        return self.between.gather_for_parts(f"{name}.gather", self.tp, self.link)(x)

    def _for_parts(self, name: str, x: Var) -> Var:
        return use_for_parts(f"{name}.parts", self.tp, self.link)(x)

    def _two_linears(
        self, name: str, names: tuple[str, str], x: Var, inputs: float, inner: float, outputs: float, function: str
    ) -> Var:
        """Two linear layers with an activation function; the tp ranks divide the inner columns. Returns whole rows."""
        x = self._for_parts(name, x)
        x = self._linear(f"{name}.{names[0]}", inputs, inner / self.tp, bias=True)(x)
        x = activation(f"{name}.activation", function)(x)
        x = self._linear(f"{name}.{names[1]}", inner / self.tp, outputs, bias=True)(x)
        return sum_whole(f"{name}.sum", self.tp, self.link)(x)

    def _linear(self, name: str, inputs: float, outputs: float, *, bias: bool) -> Linear:
        return Linear(name, inputs, outputs, bias=bias, trainable=self.trainable)

    def _with_adapter(self, name: str, x: Var, result: Var, inputs: float, outputs: float, *, sums: bool) -> Var:
        if name not in self.adapted:
            return result
        narrow = Linear(f"{name}.lora_A", inputs, self.of.rank)(x)
        if sums:
            narrow = self.between.sum_shard(f"{name}.lora_A.sum", self.tp, self.link)(narrow)
        wide = Linear(f"{name}.lora_B", self.of.rank, outputs)(narrow)
        return add(f"{name}.adapted", result, Elementwise(f"{name}.scaling", 2.0, 2.0)(wide))

    def _attended_keys(self, name: str, key: Var, value: Var) -> tuple[Var, ...]:
        """The keys and values of all rows to which this rank's queries attend. Args: name: of their exchange."""
        division = self.of.division
        if division.key_groups == 1:
            return key, value
        key_value = concat("key_value", key, value)
        return (gather_for_parts(name, division.key_groups, division.group_link)(key_value),)

    def _attended(self, query: Var, key: Var, value: Var, pairs: Rates, head: float) -> Var:
        """Attention; in groups of heads, whose keys arrive under the attention of the group before."""
        groups = max(1, min(self.of.division.head_groups, int(key.columns / head)))
        if groups == 1:
            return Attention("attention", pairs, head)(query, *self._attended_keys(KEYS, key, value))
        named = zip(("query", "key", "value"), (query, key, value), strict=True)
        queries, *key_values = (split(f"{name}.groups", x, groups) for name, x in named)
        keys = [self._attended_keys(f"{KEYS}.{g}", *pair) for g, pair in enumerate(zip(*key_values, strict=True))]
        return concat(
            "attention.groups",
            *(Attention(f"attention.{g}", pairs, head)(queries[g], *keys[g]) for g in range(groups)),
        )
