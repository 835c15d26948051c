"""The linear layers of one block of each family, and the FLOPs and bytes of LoRA adapters on them. Pure."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from mmtrain.config.model import LoRAConfig, ModelConfig, section_of
from mmtrain.errors import ConfigError
from mmtrain.families.catalogue import TABLES
from mmtrain.families.shapes import FULL, LanguageShape, VisionShape
from mmtrain.spec.layer import AdapterSpec, LayerSpec
from mmtrain.spec.shapes import language_shape
from mmtrain.spec.vision_shapes import vision_shape
from mmtrain.spec.work_size import Rates


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """One linear layer of a block."""

    name: str
    """Name inside of the block, as `self_attn.q_proj`."""
    inputs: int
    outputs: int
    position: int
    """Its order among the linear layers of a block; those of one position read the same tensor. 0: the block's normed
    input; 1: the output of attention; 2 and 3: the input and the inner columns of the MLP. Tensor-parallel ranks divide
    the outputs of those at even positions and the inputs of those at odd positions."""

    @property
    def divides_outputs(self) -> bool:
        """Whether tensor-parallel ranks divide its outputs; otherwise they divide its inputs."""
        return self.position % 2 == 0

    @property
    def last_name(self) -> str:
        """Its name in a config."""
        return self.name.rpartition(".")[2]


def block_linears(shape: VisionShape | LanguageShape, kind: str = FULL) -> tuple[Linear, ...]:
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
        Linear(name=name, inputs=inputs, outputs=columns, position=position)
        for position, inputs in enumerate((D, query, D, I))
        for name, columns in zip(names[position], outputs[position], strict=True)
    )


def linear_width(linears: Sequence[Linear], rank: int = 0) -> int:
    """Number of input and output columns of linear layers; an input that several of them read counts once.

    Args: rank: rank of an adapter on each; then the inputs and outputs of the adapter's two matrices count instead.
    """
    input_widths = {linear.position: linear.inputs for linear in linears}
    return sum(input_widths.values()) + sum(linear.outputs + 2 * rank for linear in linears)


def whole_width(linears: Sequence[Linear], rank: int = 0) -> int:
    """Number of the columns of `linear_width` that each tensor-parallel rank holds undivided, for all rows.

    They are the gathered inputs of layers whose outputs the ranks divide, and the gradients of the others' outputs.

    Args: rank: see `linear_width`. The second matrix of an adapter on the others reads only this rank's rows.
    """
    input_widths = {linear.position: linear.inputs for linear in linears if linear.divides_outputs}
    if rank:
        output_columns = sum(2 * rank if linear.divides_outputs else rank for linear in linears)
    else:
        output_columns = sum(linear.outputs for linear in linears if not linear.divides_outputs)
    return sum(input_widths.values()) + output_columns


def adapted_linears(model: ModelConfig, module: str) -> tuple[Linear, ...]:
    """The linear layers of each block of a module that get a LoRA adapter; empty unless its trainable = "lora".

    Args: module: `vision` or `language`.
    Raises: ConfigError: model.lora.target_modules has a name that is in no module with adapters, or no name that is in
        this module.
    """
    linears = {name: block_linears(shape) for name, shape in _shapes_with_adapters(model).items()}
    if module not in linears:
        return ()
    _check_targets(model.lora, linears)
    return tuple(
        x for x in linears[module] if not model.lora.target_modules or x.last_name in model.lora.target_modules
    )


def with_adapters(
    block: LayerSpec,
    shape: VisionShape | LanguageShape,
    adapted: Sequence[Linear],
    *,
    rank: int,
    dtype_bytes: int,
) -> LayerSpec:
    """A frozen block with LoRA adapters on some of its linear layers; the block itself if there are none.

    Args:
        adapted: the linear layers with an adapter.
        rank: rank of each adapter.
        dtype_bytes: bytes of one element of an activation.
    Source: LoRA, arXiv:2106.09685.
    """
    if not adapted:
        return block
    # Without a gradient of the block's input, the backward ends at the first adapters.
    first_position = min(linear.position for linear in adapted)
    inside_flops = sum(2 * x.inputs * x.outputs for x in block_linears(shape) if x.position > first_position)
    inside_flops += sum(2 * rank * x.inputs for x in adapted if x.position > first_position)
    inside_flops += sum(2 * rank * x.outputs for x in adapted)  # the gradient of A's output, for A's own weight
    attention = block.attention_flops + block.attention_flops if first_position == 0 else Rates()
    num_params = rank * sum(x.inputs + x.outputs for x in adapted)
    by_rows = [x for x in adapted if not x.divides_outputs]
    return replace(
        block,
        num_params=block.num_params + num_params,
        trainable=True,
        adapters=AdapterSpec(
            num_params=num_params,
            flops=Rates(row=2 * num_params),
            inside_flops=Rates(row=inside_flops) + attention,
        ),
        # A frozen linear layer keeps nothing; its adapter keeps the same input, and the rows between A and B.
        activation_bytes=block.activation_bytes + Rates(row=rank * len(adapted) * dtype_bytes),
        linear_bytes=Rates(row=linear_width(adapted, rank) * dtype_bytes),
        whole_bytes=replace(
            block.whole_bytes,
            activation=block.whole_bytes.activation
            + Rates(row=rank * sum(x.divides_outputs for x in adapted) * dtype_bytes),
            linear=Rates(row=whole_width(adapted, rank) * dtype_bytes),
        ),
        # The second matrix of an adapter on a layer whose inputs are divided reads and writes rows.
        row_bytes=replace(
            block.row_bytes,
            activation=block.row_bytes.activation + Rates(row=rank * len(by_rows) * dtype_bytes),
            linear=Rates(row=sum(rank + x.outputs for x in by_rows) * dtype_bytes),
        ),
    )


def _shapes_with_adapters(model: ModelConfig) -> dict[str, VisionShape | LanguageShape]:
    shapes: dict[str, VisionShape | LanguageShape] = {}
    for name, section in model.encoders.items():
        if section.trainable == "lora":
            shapes[name] = vision_shape(model, name)
    if model.language.trainable == "lora":
        shapes["language"] = language_shape(model)
    return shapes


def _check_targets(lora: LoRAConfig, linears_of: dict[str, tuple[Linear, ...]]) -> None:
    names = {module: [x.last_name for x in linears] for module, linears in linears_of.items()}
    there_are = "; ".join(f"the {module} blocks have {', '.join(of)}" for module, of in names.items())
    all_names = [name for of in names.values() for name in of]
    for target in lora.target_modules:
        if target not in all_names:
            near = difflib.get_close_matches(target, all_names, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(
                f"model.lora.target_modules: {target!r} is no linear layer of the modules with adapters; "
                f"{hint}{there_are}"
            )
    for module, of in names.items():
        if lora.target_modules and not set(lora.target_modules) & set(of):
            section = section_of(module)
            raise ConfigError(
                f"model.lora.target_modules = {lora.target_modules} names no layer of the {module} blocks, but "
                f'{section}.trainable = "lora"; {there_are}. Name one, or set {section}.trainable = false'
            )
