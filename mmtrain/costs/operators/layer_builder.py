"""What the operators of all layers share: the division over a submesh, linear layers with adapters, keys. Pure."""

from dataclasses import dataclass, field

from mmtrain.config.model import LoRAConfig
from mmtrain.costs.operators.exchanges import (
    DIVIDED_ROWS,
    WHOLE_ROWS,
    gather_for_parts,
    sum_whole,
    use_for_parts,
)
from mmtrain.costs.operators.functions import add, concat, split
from mmtrain.costs.operators.modules import (
    AddRow,
    Attention,
    Elementwise,
    Linear,
    activation,
)
from mmtrain.costs.operators.operator_graph import DeviceKind
from mmtrain.costs.operators.tape import Tape, Var
from mmtrain.spec.layer import Division, LayerSpec
from mmtrain.spec.linears import LinearLayer as NamedLinear
from mmtrain.spec.module_sizes import ModuleShape, Projection
from mmtrain.spec.work_size import Rates

PROJECTOR_LINEARS = ("fc1", "fc2")
"""Names of the linear layers of a projector here, by `Linear.position`."""
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

    shape: ModuleShape
    division: LinkedDivision = field(default_factory=LinkedDivision)
    dtype_bytes: int = 2
    compute: DeviceKind = DeviceKind.GPU
    adapted: tuple[NamedLinear, ...] = ()
    """Linear layers of a block with an adapter."""
    adapted_projector: tuple[NamedLinear, ...] = ()
    """Linear layers of the projector with an adapter, of each of its equal parts."""
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    projection: Projection | None = None
    """The projector of the encoder's features into the language model, of a language model that of the first encoder;
    None: there is no encoder."""
    is_part: bool = False
    """Whether it has a part of a divided vocabulary, or joins such parts, and no other layer."""
    num_parts: int = 0
    """Parts of a divided vocabulary whose results it takes in."""


class LayerBuilder:
    """One layer on one tape, and the methods that all modules share."""

    def __init__(self, module: DescribedModule, width: int, tape: Tape, layer: LayerSpec, input_grad: bool) -> None:
        """Args: width: columns of the activations between layers."""
        self.of, self.width, self.tape, self.layer, self.input_grad = module, width, tape, layer, input_grad
        self.trainable = layer.trainable and layer.adapters is None
        self.adapted: frozenset[str] = frozenset()
        """Names of the linear layers of this layer with an adapter."""
        if layer.adapters:
            of_block = (x.name for x in module.adapted)
            of_projector = (PROJECTOR_LINEARS[x.position] for x in module.adapted_projector)
            self.adapted = frozenset(of_block if layer.is_block else of_projector)
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
        first, second = (f"{name}.{own}" for own in names)
        result = self._linear(first, inputs, inner / self.tp, bias=True)(x)
        if names[0] in self.adapted:
            result = self._adapted(first, x, result, inputs, inner / self.tp)
        x = activation(f"{name}.activation", function)(result)
        result = self._linear(second, inner / self.tp, outputs, bias=True)(x)
        if names[1] in self.adapted:  # its matrices are divided, and summed, as those of the layer
            result = self._adapted(second, x, result, inner / self.tp, outputs)
        return sum_whole(f"{name}.sum", self.tp, self.link)(result)

    def _linear(self, name: str, inputs: float, outputs: float, *, bias: bool) -> Linear:
        return Linear(name, inputs, outputs, bias=bias, trainable=self.trainable)

    def _with_adapter(self, name: str, x: Var, result: Var, inputs: float, outputs: float, *, sums: bool) -> Var:
        if name not in self.adapted:
            return result
        return self._adapted(name, x, result, inputs, outputs, sums=sums)

    def _adapted(self, name: str, x: Var, result: Var, inputs: float, outputs: float, *, sums: bool = False) -> Var:
        """The output of a layer, and that of its adapter. Args: sums: ranks that divide the inputs sum its rows."""
        lora, product = self.of.lora, result

        def summed(of: str, x: Var) -> Var:
            return self.between.sum_shard(f"{name}.{of}.sum", self.tp, self.link)(x) if sums else x

        if lora.dropout:
            x = Elementwise(f"{name}.dropout", 4.0, 4.0, 3, 3)(x)
        if lora.dropout and lora.use_dora:
            product = summed("dropped", Linear(f"{name}.dropped", inputs, outputs, counted=False, trainable=False)(x))
        narrow = summed("lora_A", Linear(f"{name}.lora_A", inputs, lora.rank)(x))
        wide = Linear(f"{name}.lora_B", lora.rank, outputs)(narrow)
        if lora.use_dora:
            self.tape.stream(f"{name}.lengths", num_bytes=Rates(fixed=4 * inputs * outputs * self.tape.dtype_bytes))
            wide = AddRow(f"{name}.magnitude", outputs)(add(f"{name}.lengthened", product, wide))
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
