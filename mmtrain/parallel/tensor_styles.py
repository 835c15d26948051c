"""How one module computes with this rank's part of its parameters.

The parameters are DTensors of the tp mesh, so that FSDP2, checkpoints and the optimizer know the shard of a rank. The
computation is that of plain tensors, with the exchanges of `RowShards` around it, so that not every operation pays
for the dispatch of DTensor.
"""

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from mmtrain.families.tensor_table import Style
from mmtrain.models.adapter_layers import AdapterDropout, lengthened, product_of, row_growth, squared_lengths
from mmtrain.parallel.grads import local_part
from mmtrain.parallel.row_shards import RowShards
from mmtrain.parallel.tensor_vocabulary import VocabularyEmbedding
from mmtrain.parallel.weight_grads import linear

Divided = dict[nn.Parameter, nn.Parameter]
"""Whole parameter -> this rank's part of it, of all modules of a chunk: a shared parameter stays shared."""

TensorExchange = Callable[[Tensor], Tensor]


class DividedModule(ParallelStyle):
    """A module with divided parameters; subclasses define its computation."""

    def __init__(self, divided: Divided, placements: Mapping[str, Placement], *, partial: bool = False) -> None:
        """Args:
        placements: of each parameter, by name.
        partial: each rank uses the whole parameters only for its own rows or columns, so that their gradients
            must still be summed over tp; `finish_gradients` or FSDP2 does it once a step.
        """
        super().__init__()
        self._divided, self._placements = divided, placements
        self._partial = partial

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        compute = self._forward(module)
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in self._divided:
                self._divided[parameter] = _divide(parameter, mesh, self._placements[name])
            module.register_parameter(name, self._divided[parameter])
        module.forward = compute  # type: ignore[method-assign]
        return module

    @abstractmethod
    def _forward(self, module: nn.Module) -> Callable[..., Tensor]:
        """What replaces the forward of a module whose parameters are still whole."""

    def _local(self, module: nn.Module, name: str) -> Tensor | None:
        """This rank's part of a parameter; its gradient becomes one of the DTensor."""
        parameter = getattr(module, name)
        if parameter is None:
            return None
        partial = self._partial and self._placements[name].is_replicate()
        return parameter.to_local(grad_placements=[Partial()] if partial else None)


class DividedLinear(DividedModule):
    """A linear layer between two exchanges; a bias that is not divided is added after the second."""

    def __init__(
        self,
        divided: Divided,
        placements: Mapping[str, Placement],
        *,
        before: TensorExchange | None = None,
        after: TensorExchange | None = None,
        partial: bool = False,
    ) -> None:
        super().__init__(divided, placements, partial=partial)
        self._before, self._after = before, after

    def _forward(self, module: nn.Module) -> Callable[..., Tensor]:
        assert type(module) is nn.Linear, module
        later = self._after is not None and self._placements["bias"].is_replicate()

        def forward(x: Tensor) -> Tensor:
            weight, bias = self._local(module, "weight"), self._local(module, "bias")
            assert weight is not None
            if self._before is not None:
                x = self._before(x)
            x = linear(module, x, weight, None if later else bias)
            if self._after is not None:
                x = self._after(x)
            return x + bias if later and bias is not None else x

        return forward


class DividedMagnitude(DividedModule):
    """The lengths of the rows of an adapted weight (DoRA), of which this rank has rows or columns."""

    def __init__(
        self,
        divided: Divided,
        placements: Mapping[str, Placement],
        *,
        sum_columns: TensorExchange | None = None,
        join_rows: TensorExchange | None = None,
        before: TensorExchange | None = None,
        after: TensorExchange | None = None,
        partial: bool = False,
    ) -> None:
        """Args:
        sum_columns: sums [1, E] over the ranks, which have columns of the weight; None: each has all columns.
        join_rows: [1, E / tp] of this rank's rows -> [1, E] of all; None: it needs its own alone.
        before, after: the exchanges of the base layer, for its product with dropped inputs.
        """
        super().__init__(divided, placements, partial=partial)
        self._sum_columns, self._join_rows = sum_columns, join_rows
        self._before, self._after = before, after

    def _forward(self, module: nn.Module) -> Callable[..., Tensor]:
        def forward(
            x: Tensor,
            *,
            lora_A: nn.Module,
            lora_B: nn.Module,
            scaling: float,
            base_layer: nn.Module,
            base_result: Tensor | None = None,
            adapter_name: str = "",
        ) -> Tensor:
            magnitude = self._local(module, "weight")
            weight, down, up = (local_part(layer.weight) for layer in (base_layer, lora_A, lora_B))  # type: ignore[arg-type]
            squares = squared_lengths(weight, down, up, scaling)
            bias = None if base_layer.bias is None else local_part(base_layer.bias)  # type: ignore[arg-type]
            if self._sum_columns is not None:
                squares = self._sum_columns(squares[None])[0]
            if self._join_rows is not None:
                squares = self._join_rows(squares[None])[0]
                bias = None if bias is None else self._join_rows(bias[None])[0]
            growth = row_growth(magnitude, squares)
            product = product_of(base_result, bias, lambda: self._product(x, weight))
            return lengthened(product, lora_B(lora_A(x)) * scaling, growth)

        return forward

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        """The product of the base layer alone."""
        product = nn.functional.linear(x if self._before is None else self._before(x), weight)
        return product if self._after is None else self._after(product)


class DividedNorm(DividedModule):
    """A norm of this rank's rows, or heads; its parameters are whole."""

    def __init__(self, divided: Divided, *, partial: bool, after: TensorExchange | None = None) -> None:
        super().__init__(divided, {"weight": Replicate(), "bias": Replicate()}, partial=partial)
        self._after = after

    def _forward(self, module: nn.Module) -> Callable[..., Tensor]:
        names = [name for name, _ in module.named_parameters(recurse=False)]
        original = copy.deepcopy(module).to("meta")  # the class's own arithmetic, to be called with plain parameters

        def forward(x: Tensor) -> Tensor:
            parameters = {name: self._local(module, name) for name in names}
            out: Tensor = torch.func.functional_call(original, parameters, (x,))
            return out if self._after is None else self._after(out)

        return forward


class DividedColumnNorm(DividedModule):
    """A root-mean-square norm of rows whose columns the ranks divide; the arithmetic is that of `nn.RMSNorm`."""

    def __init__(self, divided: Divided, *, sum_squares: TensorExchange) -> None:
        """Args: sum_squares: [..., 1] of this rank's columns -> of all columns, which each rank uses for its own."""
        super().__init__(divided, {"weight": Shard(0)})
        self._sum_squares = sum_squares

    def _forward(self, module: nn.Module) -> Callable[..., Tensor]:
        assert type(module) is nn.RMSNorm, module
        (columns,), module_eps = module.normalized_shape, module.eps

        def forward(x: Tensor) -> Tensor:
            weight = self._local(module, "weight")
            eps = torch.finfo(x.dtype).eps if module_eps is None else module_eps
            wide = x.float()
            mean_square = self._sum_squares(wide.square().sum(-1, keepdim=True)) / columns
            normed = wide * torch.rsqrt(mean_square + eps)
            return (normed if weight is None else normed * weight).to(x.dtype)

        return forward


class GatheredInputs(ParallelStyle):
    """A module whose layers compute columns of all rows of its first input, and of the others as they are."""

    def __init__(self, rows: RowShards) -> None:
        super().__init__()
        self._rows = rows

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        rows, compute = self._rows, module.forward

        def forward(x: Tensor, *others: Any) -> Any:
            x = rows.gather_for_parts(x)
            for other in others:
                if isinstance(other, tuple):  # rotary tables, [1, rows, ...]: attention must not see padding
                    x = x[:, : other[0].shape[1]]
            return compute(x, *(rows.use_for_parts(o) if isinstance(o, Tensor) else o for o in others))

        module.forward = forward  # type: ignore[method-assign]
        return module


class MovedTable(ParallelStyle):
    """A block of a DiT, whose own table of shifts and scales is moved by the timestep, for this rank's rows."""

    def __init__(self, name: str, rows: RowShards) -> None:
        """Args: name: of the table."""
        super().__init__()
        self._name, self._rows = name, rows

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        rows, compute, name = self._rows, module.forward, self._name

        def forward(x: Tensor, text: Tensor, time: Tensor, rotary: Any) -> Any:
            moved = rows.use_for_rows(getattr(module, name) + time.float())
            # The block itself adds its table to what it is given: nothing is left to add. An attribute of the instance
            # is found before a parameter.
            vars(module)[name] = 0.0
            try:
                return compute(x, text, moved, rotary)
            finally:
                del vars(module)[name]

        module.forward = forward  # type: ignore[method-assign]
        return module


class DividedVocabulary(DividedModule):
    """A token embedding of this rank's part of the vocabulary."""

    def __init__(self, divided: Divided, mesh: DeviceMesh, rows: RowShards) -> None:
        super().__init__(divided, {"weight": Shard(0)})
        self._mesh, self._rows = mesh, rows

    def _forward(self, module: nn.Module) -> Callable[..., Tensor]:
        assert isinstance(module, nn.Embedding)
        embed = VocabularyEmbedding(module.padding_idx, self._mesh, self._rows)

        def forward(ids: Tensor) -> Tensor:
            weight = self._local(module, "weight")
            assert weight is not None
            return embed(ids, weight)

        return forward


def make_styles(
    module: nn.Module, style: Style, divided: Divided, mesh: DeviceMesh, rows: RowShards
) -> Iterator[tuple[str, ParallelStyle]]:
    """Paths below the module, or "", each with how it computes: one; more for a linear layer with adapters (LoRA).

    Of an adapter y = B A x, the matrix at the divided side of its layer is divided like the layer, and the other one
    is whole.

    Args: rows: of this rank between layers.
    """
    own_rows = rows.degree > 1
    whole: Mapping[str, Placement] = {"weight": Replicate(), "bias": Replicate()}
    by_output: Mapping[str, Placement] = {"weight": Shard(0), "bias": Shard(0)}
    by_input: Mapping[str, Placement] = {"weight": Shard(1), "bias": Replicate()}
    base = ".base_layer" if hasattr(module, "base_layer") else ""
    if style == "norm_gather":
        yield "", DividedNorm(divided, partial=own_rows, after=rows.gather_for_parts)
    elif style in ("norm", "norm_heads"):
        yield "", DividedNorm(divided, partial=own_rows or style == "norm_heads")
    elif style == "vocabulary":
        yield "", DividedVocabulary(divided, mesh, rows)
    elif style == "norm_columns":
        yield "", DividedColumnNorm(divided, sum_squares=rows.sum_for_parts)
    elif style == "gathered":
        yield "", GatheredInputs(rows)
    elif style in ("columns", "columns_whole", "columns_gather"):
        before = None if style == "columns" else rows.use_for_parts
        after = rows.gather_columns if style == "columns_gather" else None
        yield base, DividedLinear(divided, by_output, before=before, after=after)
        for name in _adapters(module):
            yield f".lora_A.{name}", DividedLinear(divided, whole, before=before, partial=True)
            yield f".lora_B.{name}", DividedLinear(divided, by_output, after=after)
        # Each rank has the lengths of the rows that it computes, or of all rows if it gathers the columns.
        lengths = by_output if after is None else whole
        yield from _dora(module, divided, lengths, join_rows=after, before=before, after=after)
    else:
        assert style in ("rows", "rows_whole"), style
        after, partial = (rows.sum, False) if style == "rows_whole" else (rows.sum_shard, own_rows)
        before = None if style == "rows_whole" else rows.pause
        yield base, DividedLinear(divided, by_input, before=before, after=after, partial=partial)
        for name in _adapters(module):
            yield f".lora_A.{name}", DividedLinear(divided, by_input, after=after, partial=partial)
            yield f".lora_B.{name}", DividedLinear(divided, whole, partial=partial)
            if isinstance(dropout := module.lora_dropout[name], AdapterDropout):  # of its part of the columns
                dropout.part = mesh.get_local_rank(), mesh.size()
        yield from _dora(module, divided, whole, sum_columns=rows.sum, after=after, partial=partial)


def _dora(
    module: nn.Module,
    divided: Divided,
    placements: Mapping[str, Placement],
    **settings: Any,
) -> Iterator[tuple[str, ParallelStyle]]:
    """The style of the lengths of a layer's rows, if it has them. Args: settings: of `DividedMagnitude`."""
    for name in getattr(module, "lora_magnitude_vector", None) or ():
        yield f".lora_magnitude_vector.{name}", DividedMagnitude(divided, placements, **settings)


def _adapters(module: nn.Module) -> list[Any]:
    return list(module.lora_A.keys()) if hasattr(module, "lora_A") else []


def _divide(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    """This rank's part of a parameter that is equal on all ranks, without communication."""
    local = parameter.detach()
    if isinstance(placement, Shard):
        parts = local.chunk(mesh.size(), placement.dim)
        assert len(parts) == mesh.size() and parts[0].shape == parts[-1].shape, (local.shape, placement)
        local = parts[mesh.get_local_rank()].clone()  # a view would keep the whole in memory
    return nn.Parameter(
        DTensor.from_local(local, mesh, [placement], run_check=False), requires_grad=parameter.requires_grad
    )
