"""The `ModelSpec` of a configured model: layers, parameters, FLOPs and bytes. Pure; no weights.

Shape legend: D width; H heads; C columns of all query heads (H x head_dim); K columns of all key heads;
I width between the two linear layers of an MLP; P numbers of a patch; m spatial merge; V vocabulary;
L width of the language model; e bytes of one activation number.

FLOPs count matrix products and convolutions, as `torch.utils.flop_counter` does: no norms, activation
functions, rotary positions, softmax or loss. Attention counts only the pairs that are attended.
Activation bytes count what autograd keeps on a CPU (each storage once, no parameters): not the rotary
cosines and sines, which the layers of a chunk share, and not temporary tensors.
"""

from dataclasses import replace

from mmtrain.config import ModelConfig
from mmtrain.models.shapes import LanguageShape, VisionShape, language_shape, vision_shape
from mmtrain.models.spec import LayerSpec, ModelSpec, ModuleSpec, Rates

_FLOAT32 = 4
_INT64 = 8

_KEPT_BY_ACTIVATION = {
    "relu": 1,
    "silu": 2,
    "gelu": 2,
    "gelu_pytorch_tanh": 2,
    "gelu_new": 5,
    "quick_gelu": 3,
}
"""Tensors of the MLP's inner width that an activation function and the product after it keep together."""


def model_spec(model: ModelConfig, *, dtype_bytes: int = 4) -> ModelSpec:
    """What planning knows of a configured model.

    Args: dtype_bytes: bytes of one number in the dtype that the model computes in (float32: 4, bfloat16: 2).
    Raises: ConfigError: the model's configs cannot be read or do not fit together.
    """
    language = language_shape(model)
    modules = []
    if model.encoder is not None:
        modules.append(_vision_module(model, vision_shape(model), language.width, dtype_bytes))
    modules.append(_language_module(model, language, dtype_bytes))
    return ModelSpec(modules=tuple(modules), tied_embeddings=language.tied)


def _vision_module(model: ModelConfig, shape: VisionShape, language_width: int, e: int) -> ModuleSpec:
    assert model.encoder is not None
    D, P = shape.width, shape.patch_dim
    patches = shape.merge**2  # a merged token is this many patches; a class token is none of them
    trainable = not model.encoder.frozen
    embed_params = P * D  # Qwen2-VL: no bias, positions are rotary
    if not shape.packed:
        assert shape.fixed_grid is not None
        num_positions = shape.fixed_grid[1] * shape.fixed_grid[2] + shape.class_token
        embed_params += D + num_positions * D + (D if shape.class_token else 0)
    layers = [
        LayerSpec(
            name="embed",
            num_params=embed_params,
            trainable=trainable,
            matmul_flops=Rates(output=patches * 2 * P * D),
            activation_bytes=Rates(output=patches * P * e),
            output_bytes=Rates(row=D * e),
            output_width=D,
        )
    ]
    block = _encoder_block(shape, trainable=trainable, eager=model.encoder.attention == "eager", e=e)
    layers += [replace(block, name=f"blocks.{i}") for i in range(shape.depth)]
    if shape.final_norm:
        layers.append(
            LayerSpec(
                name="norm",
                num_params=2 * D,
                trainable=trainable,
                matmul_flops=Rates(),
                activation_bytes=Rates(row=D * e + 2 * e),
                output_bytes=Rates(row=D * e),
                output_width=D,
            )
        )
    inner = patches * D if model.projector.kind == "native" else model.projector.hidden_size or patches * D
    layers.append(
        LayerSpec(
            name="projector",
            num_params=2 * D + (patches * D + 1) * inner + (inner + 1) * language_width,
            trainable=not model.projector.frozen,
            weight_before_products=True,
            matmul_flops=Rates(output=2 * patches * D * inner + 2 * inner * language_width),
            activation_bytes=Rates(output=patches * (2 * D * e + 2 * e) + 2 * inner * e),
            output_bytes=Rates(output=language_width * e),
            output_width=language_width,
            output_rows="outputs",
        )
    )
    return ModuleSpec(name="vision", layers=tuple(layers), merge=shape.merge, extra_rows=1 if shape.class_token else 0)


def _encoder_block(shape: VisionShape, *, trainable: bool, eager: bool, e: int) -> LayerSpec:
    """One encoder block."""
    D, H, I = shape.width, shape.num_heads, shape.mlp_width
    norms = 2 * (2 * D * e + 2 * e)  # each keeps its input, two statistics and its output
    # Query, key, value and what the output projection reads; the packed encoder holds the whole joint
    # query-key-value tensor by its value part, and a copy of the output joined from single pictures.
    attention = (6 if shape.packed else 4) * D * e
    if eager:
        pairs = H * (_FLOAT32 + (e if e != _FLOAT32 else 0))  # softmax in float32 and its copy
    else:
        pairs = 0
        attention += H * _FLOAT32 + (D * e if shape.packed else 0)  # log-sum-exp; outputs of single pictures
    mlp = _kept_by_activation(shape.hidden_act) * I * e
    return LayerSpec(
        name="blocks",
        num_params=4 * D * D + (4 if shape.qkv_bias else 1) * D + 4 * D + 2 * D * I + I + D,
        trainable=trainable,
        weight_before_products=True,
        matmul_flops=Rates(row=8 * D * D + 4 * D * I),
        attention_flops=Rates(pair=4 * D),
        activation_bytes=Rates(row=norms + attention + mlp, pair=pairs),
        output_bytes=Rates(row=D * e),
        output_width=D,
    )


def _language_module(model: ModelConfig, shape: LanguageShape, e: int) -> ModuleSpec:
    D, V = shape.width, shape.vocab_size
    trainable = not model.language.frozen
    block = _decoder_layer(shape, trainable=trainable, e=e)
    norm = _FLOAT32 * (D + 1) + 2 * D * e
    return ModuleSpec(
        name="language",
        after=("vision",) if model.encoder is not None else (),
        layers=(
            LayerSpec(
                name="embed",
                num_params=V * D,
                trainable=trainable,
                matmul_flops=Rates(),
                activation_bytes=Rates(row=_INT64),
                output_bytes=Rates(row=D * e),
                output_width=D,
            ),
            *(replace(block, name=f"layers.{i}") for i in range(shape.depth)),
            LayerSpec(
                name="head",
                num_params=D + V * D,
                num_shared_params=V * D if shape.tied else 0,
                trainable=trainable,
                weight_before_products=True,
                # Rows without a label are dropped before the norm; the loss keeps float32 log-probabilities,
                # the labels and the indices of their rows.
                matmul_flops=Rates(output=2 * D * V),
                activation_bytes=Rates(output=norm + _FLOAT32 * V + 2 * _INT64),
            ),
        ),
    )


def _decoder_layer(shape: LanguageShape, *, trainable: bool, e: int) -> LayerSpec:
    """One decoder layer."""
    D, I = shape.width, shape.mlp_width
    C, K = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    params = 2 * D * C + 2 * D * K + 3 * D * I + 2 * D
    params += (C + 2 * K) * shape.qkv_bias + D * shape.output_bias + (2 * I + D) * shape.mlp_bias
    norms = 2 * (_FLOAT32 * (D + 1) + 2 * D * e)  # float32 input and scale, normed, times weight
    # Query, key, value; outputs of single documents and their join; log-sum-exp.
    attention = (C + 2 * K + 2 * C) * e + shape.num_heads * _FLOAT32
    mlp = (_kept_by_activation(shape.hidden_act) + 2) * I * e  # gate, its activation, up, their product
    return LayerSpec(
        name="layers",
        num_params=params,
        trainable=trainable,
        weight_before_products=True,
        matmul_flops=Rates(row=4 * D * C + 4 * D * K + 6 * D * I),
        attention_flops=Rates(pair=4 * C),
        activation_bytes=Rates(row=norms + attention + mlp),
        output_bytes=Rates(row=D * e),
        output_width=D,
    )


def _kept_by_activation(name: str) -> int:
    """Tensors that an activation function keeps; the most of the known ones for an unknown one."""
    return _KEPT_BY_ACTIVATION.get(name, max(_KEPT_BY_ACTIVATION.values()))
