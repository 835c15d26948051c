"""The linear layers of one block of each family, which of them get a low-rank adapter, and what that costs. Pure."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mmtrain.config.model import LoRAConfig, ModelConfig, section_of
from mmtrain.errors import ConfigError
from mmtrain.spec.shapes import LanguageShape, VisionShape, language_shape, vision_shape
from mmtrain.spec.spec import AdapterSpec, LayerSpec, Rates


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """One linear layer of a block."""

    name: str
    """Inside of the block, as in `self_attn.q_proj`."""
    inputs: int
    outputs: int
    place: int
    """Its order among the linear layers of a block: those of one place read one tensor. 0: the block's normed input;
    1: what attention made; 2 and 3: the input and the inner columns of the MLP. So what those of even places give, and
    those of odd ones read, is what tensor-parallel ranks divide."""

    @property
    def divides_outputs(self) -> bool:
        """Whether tensor-parallel ranks divide what it gives, and not what it reads."""
        return self.place % 2 == 0

    @property
    def last_name(self) -> str:
        """The name that a config calls it by."""
        return self.name.rpartition(".")[2]


def block_linears(shape: VisionShape | LanguageShape) -> tuple[Linear, ...]:
    """The linear layers of one block, in the order of their use."""
    D, I = shape.width, shape.mlp_width
    if isinstance(shape, LanguageShape):
        C, K = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        query, key, value, out = (f"self_attn.{name}_proj" for name in "qkvo")
        return (*_separate(query, key, value, out, D=D, C=C, K=K), *_gated_mlp(D, I))
    if shape.model_type in ("qwen2_vl_vision", "qwen2_5_vl_vision"):
        attention: tuple[Linear, ...] = (
            Linear(name="attn.qkv", inputs=D, outputs=3 * D, place=0),
            Linear(name="attn.proj", inputs=D, outputs=D, place=1),
        )
        return (*attention, *(_gated_mlp(D, I) if shape.model_type == "qwen2_5_vl_vision" else _mlp("mlp.", D, I)))
    attn, out = ("attention", "o_proj") if shape.model_type == "vit" else ("self_attn", "out_proj")
    query, key, value, out = (f"{attn}.{name}" for name in ("q_proj", "k_proj", "v_proj", out))
    prefix = "" if shape.model_type == "whisper_encoder" else "mlp."
    return (*_separate(query, key, value, out, D=D, C=D, K=D), *_mlp(prefix, D, I))


def linear_width(linears: Sequence[Linear], rank: int = 0) -> int:
    """Columns that linear layers read and give, each tensor once, so those of one place read once.

    Args: rank: of an adapter of each, whose columns count instead: what its two matrices read and give.
    """
    read = {linear.place: linear.inputs for linear in linears}
    return sum(read.values()) + sum(linear.outputs + 2 * rank for linear in linears)


def whole_width(linears: Sequence[Linear], rank: int = 0) -> int:
    """Of these columns, those that each tensor-parallel rank has all of, for all rows: what is gathered before the
    layers whose outputs the ranks divide, and the gradients of what the others give.

    Args: rank: as in `linear_width`. Behind an adapter of the others its second half reads this rank's rows alone.
    """
    read = {linear.place: linear.inputs for linear in linears if linear.divides_outputs}
    if rank:
        given = sum(2 * rank if linear.divides_outputs else rank for linear in linears)
    else:
        given = sum(linear.outputs for linear in linears if not linear.divides_outputs)
    return sum(read.values()) + given


def adapted_linears(model: ModelConfig, module: str) -> tuple[Linear, ...]:
    """The linear layers of each block of a module that get an adapter; empty unless its trainable = "lora".

    Args: module: `vision` or `language`.
    Raises: ConfigError: model.lora.target_modules has a name that no module with adapters has, or none that this
        one has.
    """
    known = {name: block_linears(shape) for name, shape in _shapes_with_adapters(model).items()}
    if module not in known:
        return ()
    _check_targets(model.lora, known)
    return tuple(x for x in known[module] if not model.lora.target_modules or x.last_name in model.lora.target_modules)


def with_adapters(
    block: LayerSpec,
    shape: VisionShape | LanguageShape,
    adapted: Sequence[Linear],
    *,
    rank: int,
    dtype_bytes: int,
) -> LayerSpec:
    """A frozen block with these of its linear layers adapted; the block itself if there are none.

    Args: rank: of each adapter. dtype_bytes: of one number.
    """
    if not adapted:
        return block
    # Without a gradient that leaves the block, the backward ends at the adapters that come first.
    first = min(linear.place for linear in adapted)
    inside = sum(2 * x.inputs * x.outputs for x in block_linears(shape) if x.place > first)
    inside += sum(2 * rank * x.inputs for x in adapted if x.place > first)
    inside += sum(2 * rank * x.outputs for x in adapted)  # the gradient of A's output, for A's own weight
    attention = block.attention_flops + block.attention_flops if first == 0 else Rates()
    num_params = rank * sum(x.inputs + x.outputs for x in adapted)
    return replace(
        block,
        num_params=block.num_params + num_params,
        trainable=True,
        adapters=AdapterSpec(
            num_params=num_params,
            flops=Rates(row=2 * num_params),
            inside_flops=Rates(row=inside) + attention,
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
    )


def _shapes_with_adapters(model: ModelConfig) -> dict[str, VisionShape | LanguageShape]:
    found: dict[str, VisionShape | LanguageShape] = {}
    if model.encoder is not None and model.encoder.trainable == "lora":
        found["vision"] = vision_shape(model)
    if model.language.trainable == "lora":
        found["language"] = language_shape(model)
    return found


def _check_targets(lora: LoRAConfig, known: dict[str, tuple[Linear, ...]]) -> None:
    names = {module: [x.last_name for x in linears] for module, linears in known.items()}
    there_are = "; ".join(f"the {module} blocks have {', '.join(of)}" for module, of in names.items())
    every = [name for of in names.values() for name in of]
    for target in lora.target_modules:
        if target not in every:
            near = difflib.get_close_matches(target, every, 1)
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


def _separate(query: str, key: str, value: str, out: str, *, D: int, C: int, K: int) -> tuple[Linear, ...]:
    """Attention with one linear layer each; C columns of all query heads, K of all key heads."""
    return (
        Linear(name=query, inputs=D, outputs=C, place=0),
        Linear(name=key, inputs=D, outputs=K, place=0),
        Linear(name=value, inputs=D, outputs=K, place=0),
        Linear(name=out, inputs=C, outputs=D, place=1),
    )


def _mlp(prefix: str, D: int, I: int) -> tuple[Linear, ...]:
    return (
        Linear(name=f"{prefix}fc1", inputs=D, outputs=I, place=2),
        Linear(name=f"{prefix}fc2", inputs=I, outputs=D, place=3),
    )


def _gated_mlp(D: int, I: int) -> tuple[Linear, ...]:
    return (
        Linear(name="mlp.gate_proj", inputs=D, outputs=I, place=2),
        Linear(name="mlp.up_proj", inputs=D, outputs=I, place=2),
        Linear(name="mlp.down_proj", inputs=I, outputs=D, place=3),
    )
