"""The linear layers of one block of each family, and the FLOPs and bytes of LoRA adapters on them. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

from mmtrain.config.layer_ranges import layers_of
from mmtrain.config.model import (
    EncoderConfig,
    LanguageConfig,
    LoRAConfig,
    ModelConfig,
    ProjectorConfig,
    projector_name,
    projector_section,
    section_of,
)
from mmtrain.errors import ConfigError, nearest
from mmtrain.families.catalogue import PROJECTORS, TABLES
from mmtrain.families.shapes import FULL, LanguageShape, VisionShape
from mmtrain.spec.layer import AdapterSpec, LayerSpec
from mmtrain.spec.model_shapes import language_shape
from mmtrain.spec.module_sizes import projection_of, shape_of
from mmtrain.spec.vision_shapes import vision_shape
from mmtrain.spec.work_size import Rates


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearLayer:
    """One linear layer of a block."""

    name: str
    """Name inside of the block, as `self_attn.q_proj`."""
    inputs: int
    outputs: int
    position: int
    """The order of the layer among the linear layers of a block; those of one position read the same tensor. 0: the
    block's normed input; 1: the output of attention; 2 and 3: the input and the inner columns of the MLP.
    Tensor-parallel ranks divide the outputs of those at even positions and the inputs of those at odd positions."""

    @property
    def divides_outputs(self) -> bool:
        """Whether tensor-parallel ranks divide its outputs; otherwise they divide its inputs."""
        return self.position % 2 == 0

    @property
    def last_name(self) -> str:
        """The name of the layer in a config."""
        return self.name.rpartition(".")[2]


def block_linears(shape: VisionShape | LanguageShape, kind: str = FULL) -> tuple[LinearLayer, ...]:
    """The linear layers of one block of a kind, in the order of their use: those that the table of tensor parallelism
    divides, whose columns and rows take turns."""
    D, I = shape.width, shape.mlp_width
    query = key = D
    if isinstance(shape, LanguageShape):
        query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    table = TABLES[shape.model_type].of_kind(kind)
    styles = [(name, style) for name, style in table.items() if style in ("columns", "rows")]
    names = [[name for name, _ in run] for _, run in groupby(styles, lambda item: item[1])]
    # One layer, or three, make query, key and value.
    outputs = ([query, key, key] if len(names[0]) > 1 else [query + 2 * key], [D], [I] * len(names[2]), [D])
    return tuple(
        LinearLayer(name=name, inputs=inputs, outputs=columns, position=position)
        for position, inputs in enumerate((D, query, D, I))
        for name, columns in zip(names[position], outputs[position], strict=True)
    )


def projector_linears(model: ModelConfig, module: str) -> tuple[LinearLayer, ...]:
    """The linear layers of an encoder's projector, in the order of their use, by their names in a chunk; of a merger
    for each tap, too."""
    projection, shape = projection_of(model, module), vision_shape(model, module)
    assert projection is not None
    table = TABLES[shape.model_type]
    styles = dict(PROJECTORS[projection.kind].table or table.merger)
    for number, _ in enumerate(shape.taps):
        styles |= {name.format(number): style for name, style in table.tap_merger.items()}
    merged = shape.width * shape.features_per_token
    inner, outputs = projection.width, projection.outputs
    first = [(merged, inner or outputs), (inner, outputs)]
    return tuple(
        LinearLayer(name=_own_name(name, module), inputs=inputs, outputs=columns, position=position)
        for name, style in styles.items()
        if style in _LINEAR
        for position in (int(style == "rows_whole"),)
        for inputs, columns in (first[position],)
    )


_LINEAR = ("columns_whole", "columns_gather", "rows_whole")
"""Styles of the linear layers of a projector."""


def _own_name(name: str, module: str) -> str:
    """A name of a table, of an encoder `vision` and its `projector`, for an encoder of the model."""
    part, _, rest = name.partition(".")
    return f"{projector_name(module) if part == 'projector' else module}.{rest}"


def linear_width(linears: Sequence[LinearLayer], rank: int = 0, *, dropout: bool = False) -> int:
    """Number of input and output columns of linear layers; an input that several of them read counts once.

    Args: rank: rank of an adapter on each; then the inputs and outputs of the adapter's two matrices count instead.
        dropout: of the adapters, each of which then has inputs of its own.
    """
    return _input_width(linears, dropout) + sum(linear.outputs + 2 * rank for linear in linears)


def whole_width(linears: Sequence[LinearLayer], rank: int = 0, *, dropout: bool = False) -> int:
    """Number of the columns of `linear_width` that each tensor-parallel rank holds undivided, for all rows.

    They are the gathered inputs of layers whose outputs the ranks divide, and the gradients of the others' outputs.

    Args: see `linear_width`. The second matrix of an adapter on the others reads only this rank's rows.
    """
    if rank:
        output_columns = sum(2 * rank if linear.divides_outputs else rank for linear in linears)
    else:
        output_columns = sum(linear.outputs for linear in linears if not linear.divides_outputs)
    return _input_width([linear for linear in linears if linear.divides_outputs], dropout) + output_columns


def _input_width(linears: Sequence[LinearLayer], dropout: bool) -> int:
    if dropout:
        return sum(linear.inputs for linear in linears)
    return sum({linear.position: linear.inputs for linear in linears}.values())


def adapted_linears(model: ModelConfig, module: str) -> tuple[LinearLayer, ...]:
    """The linear layers of each block of a module that get a LoRA adapter; empty unless its trainable = "lora".

    Args: module: `vision` or `language`, or the projector of an encoder by its name: these are all its layers.
    Raises: ConfigError: model.lora.target_modules has a name that is in no module with adapters, or no name that is in
        this module.
    """
    linears = _linears_with_adapters(model)
    if module not in linears:
        return ()
    _check_targets(model.lora, linears)
    return tuple(
        x for x in linears[module] if not model.lora.target_modules or x.last_name in model.lora.target_modules
    )


def adapted_layers(model: ModelConfig, module: str, *, unused: Iterable[int] = ()) -> dict[str, LinearLayer]:
    """Name in a chunk -> each linear layer of a module, and of its projector, that gets an adapter. Errors: see
    `adapted_linears`.

    Args: unused: blocks of the class that no job has, whose layers are those instead.
    """
    linears = adapted_linears(model, module)
    blocks = sorted(unused) if unused else sorted(trained_blocks(model, module)) if linears else []
    container = _own_name(TABLES[shape_of(model, module).model_type].blocks, module) if blocks else ""
    found = {f"{container}.{index}.{linear.name}": linear for index in blocks for linear in linears}
    projector = () if unused or module not in model.encoders else adapted_linears(model, projector_name(module))
    return found | {linear.name: linear for linear in projector}


def trained_blocks(model: ModelConfig, module: str) -> frozenset[int]:
    """The blocks of an encoder or the language model that train or have adapters.

    Raises: ConfigError: trainable_layers names blocks that the module does not have.
    """
    section, depth = model.sections[module], block_count(model, module)
    assert isinstance(section, EncoderConfig | LanguageConfig)
    if section.trainable is False:
        return frozenset()
    return layers_of(f"{section_of(module)}.trainable_layers", section.trainable_layers, depth)


def block_count(model: ModelConfig, module: str) -> int:
    """The number of blocks of an encoder or the language model that a job has."""
    return (vision_shape(model, module) if module in model.encoders else language_shape(model)).depth


def with_adapters(
    layer: LayerSpec,
    linears: Sequence[LinearLayer],
    adapted: Sequence[LinearLayer],
    lora: LoRAConfig,
    *,
    dtype_bytes: int,
    copies: int = 1,
    of: Literal["row", "output"] = "row",
) -> LayerSpec:
    """A frozen layer with LoRA adapters on some of its linear layers; the layer itself if there are none.

    Args:
        linears: all linear layers. adapted: those with an adapter.
        dtype_bytes: bytes of one element of an activation.
        copies: equal parts of the layer (mergers), each with the given linear layers.
        of: what the rows of its products are.
    Source: LoRA, arXiv:2106.09685; DoRA, arXiv:2402.09353, which keeps the outputs of the layers that it scales.
    """
    if not adapted:
        return layer
    rank, by_rows = lora.rank, [x for x in adapted if not x.divides_outputs]
    by_outputs, dropout = [x for x in adapted if x.divides_outputs], lora.dropout > 0

    def rates(amount: float) -> Rates:
        return Rates(**{of: copies * amount})

    def kept(linears: Sequence[LinearLayer], *, outputs: bool = True) -> Rates:
        """The bytes kept of the rows between A and B, of dropped inputs, with DoRA of outputs, and of two rows of
        lengths."""
        columns = sum(x.outputs for x in linears) * (lora.use_dora and outputs)
        width = rank * len(linears) + columns
        if dropout:
            width += sum(x.inputs for x in linears)
            if of == "row":  # instead of the inputs, of which attention alone keeps its own
                width -= _input_width([x for x in linears if x.position != 1], False)
        return rates(width * dtype_bytes) + Rates(fixed=2 * copies * columns * dtype_bytes)

    # Without a gradient of the layer's input, the backward ends at the first adapters.
    first_position = min(x.position for x in adapted)
    dropped = adapted if lora.use_dora and dropout else []  # layers whose product is computed of these inputs, too
    again = sum(2 * x.inputs * x.outputs for x in dropped)
    inside_flops = sum(2 * x.inputs * x.outputs for x in (*linears, *dropped) if x.position > first_position)
    inside_flops += sum(2 * rank * x.inputs for x in adapted if x.position > first_position)
    inside_flops += sum(2 * rank * x.outputs for x in adapted)  # the gradient of A's output, for A's own weight
    attention = layer.attention_flops + layer.attention_flops if first_position == 0 else Rates()
    num_params = copies * sum(rank * (x.inputs + x.outputs) + x.outputs * lora.use_dora for x in adapted)
    return replace(
        layer,
        num_params=layer.num_params + num_params,
        trainable=True,
        matmul_flops=layer.matmul_flops + rates(again),
        adapters=AdapterSpec(
            num_params=num_params,
            flops=rates(sum(2 * rank * (x.inputs + x.outputs) for x in adapted)),
            inside_flops=rates(inside_flops) + attention,
        ),
        # A frozen linear layer keeps nothing; its adapter keeps the same input, or that which dropout left of it.
        activation_bytes=layer.activation_bytes + kept(adapted),
        linear_bytes=rates(linear_width(adapted, rank, dropout=dropout) * dtype_bytes),
        whole_bytes=replace(
            layer.whole_bytes,
            activation=layer.whole_bytes.activation + kept(by_outputs, outputs=False),
            linear=rates(whole_width(adapted, rank, dropout=dropout) * dtype_bytes),
        ),
        # The second matrix of an adapter on a layer whose inputs are divided reads and writes rows.
        row_bytes=replace(
            layer.row_bytes,
            activation=layer.row_bytes.activation
            + rates(sum(rank + x.outputs * lora.use_dora for x in by_rows) * dtype_bytes),
            linear=rates(sum(rank + x.outputs for x in by_rows) * dtype_bytes),
        ),
    )


def _linears_with_adapters(model: ModelConfig) -> dict[str, tuple[LinearLayer, ...]]:
    """Name of a module, or of the projector of an encoder, with adapters -> its linear layers."""
    found = {name: block_linears(vision_shape(model, name)) for name, s in model.encoders.items() if _has_lora(s)}
    if _has_lora(model.language):
        found["language"] = block_linears(language_shape(model))
    for name in () if model.reads_pairs else model.encoders:
        if _has_lora(model.projector_of(name)):
            found[projector_name(name)] = projector_linears(model, name)
    return found


def _has_lora(section: EncoderConfig | LanguageConfig | ProjectorConfig) -> bool:
    return section.trainable == "lora"


def _check_targets(lora: LoRAConfig, linears_of: dict[str, tuple[LinearLayer, ...]]) -> None:
    names = {module: [x.last_name for x in linears] for module, linears in linears_of.items()}
    there_are = "; ".join(f"{_called(module)} have {', '.join(dict.fromkeys(of))}" for module, of in names.items())
    all_names = [name for of in names.values() for name in of]
    for target in lora.target_modules:
        if target not in all_names:
            near = nearest(target, all_names)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(
                f"model.lora.target_modules: {target!r} is no linear layer of the modules with adapters; "
                f"{hint}{there_are}"
            )
    for module, of in names.items():
        if lora.target_modules and not set(lora.target_modules) & set(of):
            section = _section(module)
            raise ConfigError(
                f"model.lora.target_modules = {lora.target_modules} names no layer of {_called(module)}, but "
                f'{section}.trainable = "lora"; {there_are}. Name one, or set {section}.trainable = false'
            )


def _section(module: str) -> str:
    """The section that configures a module, or a projector by its name."""
    if module != "projector" and not module.endswith("_projector"):
        return section_of(module)
    return projector_section("vision" if module == "projector" else module.removesuffix("_projector"))


def _called(module: str) -> str:
    return f"the {module} blocks" if _section(module) == section_of(module) else f"the layers of the {module}"
