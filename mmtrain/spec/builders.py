"""The `ModelSpec` of a configured model: layers, parameters, FLOPs and bytes. Pure; no weights.

Shape legend: D width; H heads; C columns of all query heads (H x head_dim); K columns of all key heads;
I inner width of an MLP; P elements of a patch; m spatial merge; V vocabulary; L width of the language model;
e bytes of one element of an activation.

FLOPs count matrix products and convolutions, as `torch.utils.flop_counter` does: no norms, activation functions,
rotary positions, softmax or loss. Attention counts only the attended pairs. Activation bytes count the tensors that
autograd keeps on a CPU (each storage once, no parameters), without the rotary cosines and sines, which the layers of a
chunk share, and without temporary tensors.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from mmtrain.config.model import ModelConfig, projector_name
from mmtrain.families.catalogue import PROJECTORS
from mmtrain.families.shapes import WINDOWED, LanguageShape, VisionShape
from mmtrain.spec.contrast import contrast_module
from mmtrain.spec.dit_layers import dit_module
from mmtrain.spec.layer import LayerSpec, Replaced, WholeBytes
from mmtrain.spec.linears import (
    LinearLayer,
    adapted_linears,
    block_linears,
    linear_width,
    projector_linears,
    trained_blocks,
    whole_width,
    with_adapters,
)
from mmtrain.spec.model_shapes import dit_shape, language_shape
from mmtrain.spec.module_sizes import projection_of
from mmtrain.spec.spec import ModelSpec, ModuleSpec
from mmtrain.spec.vae_shapes import VaeShape, vae_shape
from mmtrain.spec.vision_shapes import vision_shape
from mmtrain.spec.work_size import Rates

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
"""Tensors of the MLP's inner width that autograd keeps for an activation function and the product after it."""


DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
"""Bytes of an element, by the names of dtypes in `[training]`."""


def model_spec(model: ModelConfig, *, dtype_bytes: int = 4) -> ModelSpec:
    """The modules of a configured model with their layers, parameters, FLOPs and bytes.

    Args: dtype_bytes: bytes of one element in the dtype of compute (float32: 4, bfloat16: 2).
    Raises: ConfigError: the model's configs cannot be read or do not fit together.
    """
    language = language_shape(model)
    modules = []
    if model.vae is not None:
        modules.append(_vae_module(vae_shape(model), dtype_bytes))
    modules += [_vision_module(model, name, vision_shape(model, name), dtype_bytes) for name in model.encoders]
    modules.append(_language_module(model, language, dtype_bytes))
    if model.dit is not None:
        modules.append(dit_module(model, dit_shape(model), dtype_bytes))
    if model.contrast is not None:
        images, captions = modules
        width = captions.layers[-1].output_width
        modules.append(contrast_module(model.contrast, (images.name, captions.name), width))
    return ModelSpec(modules=tuple(modules), tied_embeddings=language.tied)


def _vae_module(shape: VaeShape, e: int) -> ModuleSpec:
    """A frozen VAE's encoder: one layer, whose temporary tensors are not counted."""
    output = Rates(output=shape.channels * e)
    return ModuleSpec(
        name="vae",
        consumes="frames",
        layers=(
            LayerSpec(
                name="encode",
                num_params=shape.num_params,
                trainable=False,
                matmul_flops=shape.flops,
                attention_flops=shape.attention_flops,
                output_bytes=output,
                output_width=shape.channels,
                output_rows="outputs",
            ),
        ),
        frames_per_latent=shape.scale.frames,
        pp_rank=0,
        is_whole=True,
    )


def _vision_module(model: ModelConfig, name: str, shape: VisionShape, e: int) -> ModuleSpec:
    D, taps = shape.width, shape.taps
    section, trained, adapted = model.encoders[name], trained_blocks(model, name), adapted_linears(model, name)
    trainable = section.trainable is True and not section.trainable_layers  # with LoRA only the blocks' adapters train

    def block(index: int) -> LayerSpec:
        kind, trains = shape.block_kind(index), section.trainable is True and index in trained
        bare = replace(_encoder_block(shape, kind, trainable=trains, e=e), name=f"blocks.{index}")
        if index not in trained:
            return bare
        return with_adapters(bare, block_linears(shape), adapted, model.lora, dtype_bytes=e)

    embed = _audio_embed if shape.one_row else _patch_embed
    layers = [embed(shape, trainable=trainable, e=e), *(block(index) for index in range(shape.depth))]
    if shape.final_norm:
        of: Literal["row", "output"] = "row" if shape.pool == 1 else "output"  # the backward of a mean reads nothing
        layers.append(_norm_layer(D, 2 * D, _norm_bytes(shape, e) - D * e, trainable=trainable, e=e, of=of))
    layers.append(_pool(shape, trainable=trainable, e=e) if shape.pooling else _projector(model, name, shape, e=e))
    return ModuleSpec(
        name=name,
        consumes="images",
        shares_units=True,
        layers=tuple(layers),
        merge=shape.merge,
        one_row=shape.one_row,
        pool=shape.pool,
        extra_rows=int(shape.class_token),
        extra_outputs=int(shape.keeps_class_token),
        pooled=bool(shape.pooling),
        window=shape.window,
        # A tap leaves with the output of its block, which is layer tap + 1, and travels on to the projector.
        carried=(*(sum(tap < index for tap in taps) for index in range(len(layers) - 1)), 0) if taps else (),
    )


def _patch_embed(shape: VisionShape, *, trainable: bool, e: int) -> LayerSpec:
    """The first layer of an encoder of images."""
    D, P = shape.width, shape.patch_dim
    num_params = (P + shape.embed_bias + 2 * shape.embed_norm + shape.num_positions) * D
    if shape.fixed_grid is not None:
        num_params += (shape.fixed_grid[1] * shape.fixed_grid[2] + 2 * shape.class_token) * D
    activation = Rates(output=shape.patches_per_output * P * e, row=shape.embed_norm * (D + 2) * e)
    if shape.num_positions:  # the positions of each row, and their weights
        count = shape.positions_per_row
        activation += Rates(row=count * (_INT64 + _FLOAT32 * (count > 1)))
    return LayerSpec(
        name="embed",
        num_params=num_params,
        trainable=trainable,
        matmul_flops=Rates(output=shape.patches_per_output * 2 * P * D),
        activation_bytes=activation,
        output_bytes=Rates(row=D * e),
        output_width=D,
        whole_bytes=WholeBytes(activation=activation),
    )


def _audio_embed(shape: VisionShape, *, trainable: bool, e: int) -> LayerSpec:
    """The first layer of an encoder of sound: two convolutions over three frames, the second with stride two."""
    D, P, M, firsts, positions = shape.width, shape.patch_dim, shape.mel_bins, shape.first_convolutions, shape.max_rows
    activation = Rates(row=P * e + 2 * firsts * D * e + D * e)  # input; the first outputs before and after GELU
    return LayerSpec(
        name="embed",
        num_params=3 * M * D + D + 3 * D * D + D + positions * D,
        num_fixed_params=positions * D,
        trainable=trainable,
        matmul_flops=Rates(row=firsts * 2 * 3 * M * D + 2 * 3 * D * D),
        inner_flops=Rates(row=2 * 3 * D * D),
        activation_bytes=activation,
        output_bytes=Rates(row=D * e),
        output_width=D,
        whole_bytes=WholeBytes(activation=activation),
    )


def _projector(model: ModelConfig, name: str, shape: VisionShape, *, e: int) -> LayerSpec:
    """The last layer of the vision module: a norm (of mlp and native), merged neighbours, two linear layers (of linear
    one).

    Each tap has a merger of its own, whose norm comes after the merge; its features stand next to the others.
    """
    projection = projection_of(model, name)
    assert projection is not None
    features, inner, width = shape.features_per_token, projection.width, projection.outputs
    merged = features * shape.width
    # Parameters of its norm, and bytes of a row that are kept before the first product.
    norms = {
        "own": (2 * shape.width, 2 * shape.width * e + 2 * e),
        "encoder": ((1 if shape.rms_norm else 2) * shape.width, _norm_bytes(shape, e)),
        "": (0, shape.width * e),
    }
    norm_params, row_bytes = norms[PROJECTORS[projection.kind].norm]
    # With windows also the original order of the features.
    normed = features * row_bytes + (_INT64 if shape.window else 0)
    taps = len(shape.taps)
    # Of a tap two statistics and the norm's output. The norm's input is also the next block's, which keeps it, or a
    # part of the chunk's input, which is held until its gradient leaves; neither if the encoder is frozen.
    section = model.encoders[name]
    frozen = section.trainable is False or bool(section.trainable_layers)  # of ranges the most that it may be
    normed += taps * ((1 + frozen) * merged + 2) * e
    gathered = 0 if section.trainable is False else taps * merged * e
    mergers = 1 + taps
    linears = [(merged, inner), (inner, width)] if inner else [(merged, width)]
    flops = [2 * inputs * outputs for inputs, outputs in linears]
    projector = LayerSpec(
        name="projector",
        num_params=norm_params + taps * 2 * merged + mergers * sum((i + 1) * o for i, o in linears),
        trainable=model.projector_of(name).trainable is True,
        weight_before_products=norm_params > 0,
        matmul_flops=Rates(output=mergers * sum(flops)),
        inner_flops=Rates(output=mergers * sum(flops[1:])),
        activation_bytes=Rates(output=normed + mergers * _kept_by_activation(projection.hidden_act) * inner * e),
        linear_bytes=Rates(output=mergers * (merged + 2 * inner + width) * e),
        output_bytes=Rates(output=mergers * width * e),
        output_width=mergers * width,
        output_rows="outputs",
        gathered_rows=Rates(output=gathered),
        # Ranks divide the inner columns, or those of one layer's outputs; the norm and the features have all rows.
        whole_bytes=WholeBytes(
            activation=Rates(output=normed), linear=Rates(output=mergers * (merged + width * (inner > 0)) * e)
        ),
    )
    each = len(projector_linears(model, name)) // mergers
    own, adapted = projector_linears(model, name)[:each], adapted_linears(model, projector_name(name))
    adapted = adapted[: len(adapted) // mergers]
    return with_adapters(projector, own, adapted, model.lora, dtype_bytes=e, copies=mergers, of="output")


def _pool(shape: VisionShape, *, trainable: bool, e: int) -> LayerSpec:
    """The last layer of a tower of images."""
    D, I, P = shape.width, shape.mlp_width, shape.embedding_width
    output = Rates(output=P * e)
    if shape.pooling == "token":  # norm of the class token, and a projection
        kept = Rates(output=_norm_bytes(shape, e))
        return LayerSpec(
            name="pool",
            num_params=2 * D + D * P,
            trainable=trainable,
            weight_before_products=True,
            matmul_flops=Rates(output=2 * D * P),
            activation_bytes=kept,
            linear_bytes=Rates(output=(D + P) * e),
            output_bytes=output,
            output_width=P,
            output_rows="outputs",
            whole_bytes=WholeBytes(activation=kept, linear=Rates(output=(D + P) * e)),
        )
    # Attention of one query of each image over its rows, a norm, and an MLP. torch projects keys and values at once.
    mlp = _kept_by_activation(shape.hidden_act) * I * e
    # The rows, their keys and values, and how much each head attends to them; of each image queries and its output.
    kept = Rates(row=(3 * D + shape.num_heads) * e, output=3 * D * e + _norm_bytes(shape, e) + mlp)
    return LayerSpec(
        name="pool",
        num_params=D + 4 * D * D + 4 * D + 2 * D + 2 * D * I + I + D,
        trainable=trainable,
        matmul_flops=Rates(row=4 * D * D, output=4 * D * D + 4 * D * I),
        inner_flops=Rates(output=4 * D * D + 4 * D * I),
        passing_flops=Rates(row=4 * D * D, output=2 * D * D + 4 * D * I),  # queries are a parameter's
        attention_flops=Rates(row=4 * D),
        activation_bytes=kept,
        linear_bytes=Rates(row=3 * D * e, output=(5 * D + 2 * I) * e),
        output_bytes=output,
        output_width=P,
        output_rows="outputs",
        whole_bytes=WholeBytes(activation=kept, linear=Rates(row=3 * D * e, output=(5 * D + 2 * I) * e)),
    )


def _encoder_block(shape: VisionShape, kind: str, *, trainable: bool, e: int) -> LayerSpec:
    """One encoder block of a kind."""
    D, H, I = shape.width, shape.num_heads, shape.mlp_width
    # Query, key, value and the input of the output projection. Where they come from one layer, value is a view of the
    # joint tensor, which is kept whole.
    attention = (5 if shape.joint_qkv else 3) * D * e + D * e
    attention += H * _FLOAT32  # log-sum-exp
    # Outputs of single images; the outputs of contiguous heads of sound are copied to rows.
    attention += D * e if shape.packed or shape.one_row else 0
    # Gated: gate, its activation, the other inner columns and their product.
    mlp = (_kept_by_activation(shape.hidden_act) + (2 if shape.gated_mlp else 0)) * I * e
    linears = 3 if shape.gated_mlp else 2
    biases = (1 + shape.qkv_bias * (2 + shape.key_bias)) * D + (linears - 1) * I + D
    pair_flops = 4 * D
    return LayerSpec(
        name="blocks",
        kind=kind,
        num_params=4 * D * D + linears * D * I + biases + (2 if shape.rms_norm else 4) * D,
        trainable=trainable,
        weight_before_products=True,
        matmul_flops=Rates(row=8 * D * D + 2 * linears * D * I),
        attention_flops=Rates(window_pair=pair_flops) if kind == WINDOWED else Rates(pair=pair_flops),
        activation_bytes=Rates(row=2 * _norm_bytes(shape, e) + attention + mlp),
        # Query, key, value, output; the MLP's inner and last width.
        product_bytes=Rates(row=(5 * D + (linears - 1) * I) * e),
        linear_bytes=Rates(row=linear_width(block_linears(shape)) * e),
        attention_bytes=Rates(row=D * e + H * _FLOAT32),
        output_bytes=Rates(row=D * e),
        output_width=D,
        whole_bytes=_whole_of_block(block_linears(shape), D, e),
        row_bytes=WholeBytes(activation=Rates(row=2 * (_norm_bytes(shape, e) - D * e))),
        # Divided ranks keep neither the joint query-key-value tensor nor the joined outputs of single images. Images of
        # one fixed size are not divided.
        gathered_keys=Replaced(old=Rates(row=(5 if shape.joint_qkv else 3) * D * e), new=Rates(row=2 * D * e))
        if shape.packed
        else Replaced(),
        unread_bytes=Rates(row=D * e),
    )


def _whole_of_block(linears: Sequence[LinearLayer], D: int, e: int) -> WholeBytes:
    """The undivided bytes of a block: the outputs of its two norms are gathered, and so are the gradients of its two
    residual branches."""
    return WholeBytes(
        activation=Rates(row=2 * D * e),
        product=Rates(row=2 * D * e),
        linear=Rates(row=whole_width(linears) * e),
    )


def _norm_bytes(shape: VisionShape, e: int) -> int:
    """Bytes of one row that a norm of the encoder keeps, including its output, which the next product reads."""
    if shape.rms_norm:
        return _FLOAT32 * (shape.width + 1) + 2 * shape.width * e  # float32 input and scale, normed, times weight
    return 2 * shape.width * e + 2 * e  # input, two statistics, output


def _language_module(model: ModelConfig, shape: LanguageShape, e: int) -> ModuleSpec:
    D, V = shape.width, shape.vocab_size
    section, trained, adapted = model.language, trained_blocks(model, "language"), adapted_linears(model, "language")
    trainable = section.trainable is True and not section.trainable_layers
    taps = 0 if model.reads_pairs else max((len(vision_shape(model, n).taps) for n in model.encoders), default=0)
    fixed = _decoder_layer(shape, trainable=False, e=e)
    block = replace(fixed, trainable=section.trainable is True)
    block = with_adapters(block, block_linears(shape), adapted, model.lora, dtype_bytes=e)
    norm = _FLOAT32 * (D + 1) + 2 * D * e
    head = LayerSpec(
        name="head",
        num_params=D + V * D,
        num_shared_params=V * D if shape.tied else 0,
        trainable=trainable,
        weight_before_products=True,
        # Rows without a label are removed before the norm; the loss keeps float32 log-probabilities, the labels and the
        # indices of their rows.
        matmul_flops=Rates(output=2 * D * V),
        activation_bytes=Rates(output=norm + _FLOAT32 * V + 2 * _INT64),
        linear_bytes=Rates(output=(D + V) * e),
        divided_columns=Replaced(old=Rates(output=_FLOAT32 * V), new=Rates(output=V * e)),
        # Ranks divide the vocabulary, not the rows.
        whole_bytes=WholeBytes(activation=Rates(output=norm + 2 * _INT64), linear=Rates(output=D * e)),
    )
    return ModuleSpec(
        name="language",
        consumes="captions" if model.reads_clips else "texts" if model.reads_pairs else "documents",
        position_axes=shape.position_axes,
        after=() if model.reads_pairs else tuple(model.encoders),
        # Features of the j-th tap are added to the output of decoder layer j, which is layer j + 1.
        carried=tuple(max(0, taps - index) for index in range(shape.depth + 2)) if taps else (),
        layers=(
            LayerSpec(
                name="embed",
                num_params=V * D + (0 if shape.rotary else shape.max_positions * D),
                trainable=trainable,
                matmul_flops=Rates(),
                # Features of taps are held until their gradients leave; of image tokens alone, so this is the most.
                activation_bytes=Rates(row=_INT64 * (1 + (not shape.rotary)) + taps * D * e),
                output_bytes=Rates(row=D * e),
                output_width=D,
                whole_bytes=WholeBytes(activation=Rates(row=_INT64 * (1 + (not shape.rotary)))),
                row_bytes=WholeBytes(activation=Rates(row=taps * D * e)),
            ),
            *(replace(block if i in trained else fixed, name=f"layers.{i}") for i in range(shape.depth)),
            _embedding(shape, trainable=trainable, e=e)
            if shape.embedding_width
            else _norm_layer(D, D, norm - D * e, trainable=trainable, e=e)
            if model.dit is not None
            else head,
        ),
    )


def _embedding(shape: LanguageShape, *, trainable: bool, e: int) -> LayerSpec:
    """The last layer of a tower of texts: the norm of one token of each, and a projection."""
    D, P = shape.width, shape.embedding_width
    kept = Rates(output=2 * D * e + 2 * e + _INT64)
    linear = Rates(output=(D + P) * e)
    return LayerSpec(
        name="norm",
        num_params=2 * D + D * P + P * shape.embedding_bias,
        trainable=trainable,
        weight_before_products=True,
        matmul_flops=Rates(output=2 * D * P),
        activation_bytes=kept,
        linear_bytes=linear,
        output_bytes=Rates(output=P * e),
        output_width=P,
        output_rows="outputs",
        whole_bytes=WholeBytes(activation=kept, linear=linear),
    )


def _norm_layer(
    width: int, num_params: int, kept_bytes: int, *, trainable: bool, e: int, of: Literal["row", "output"] = "row"
) -> LayerSpec:
    """The norm behind a module's blocks.

    Args: kept_bytes: of one row; not of its output, which no product reads. of: what its rows are.
    """
    kept = Rates(**{of: kept_bytes})
    return LayerSpec(
        name="norm",
        num_params=num_params,
        trainable=trainable,
        matmul_flops=Rates(),
        activation_bytes=kept,
        output_bytes=Rates(**{of: width * e}),
        output_width=width,
        output_rows="outputs" if of == "output" else "rows",
        row_bytes=WholeBytes(activation=kept),
    )


def _decoder_layer(shape: LanguageShape, *, trainable: bool, e: int) -> LayerSpec:
    """One decoder layer."""
    D, I = shape.width, shape.mlp_width
    C, K = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    inner = 2 if shape.gated_mlp else 1  # linear layers before the inner columns
    params = 2 * D * C + 2 * D * K + (inner + 1) * D * I + (2 if shape.rms_norm else 4) * D
    params += (C + 2 * K) * shape.qkv_bias + D * shape.output_bias + (inner * I + D) * shape.mlp_bias
    params += 2 * shape.head_dim * shape.head_norms
    # Of an RMSNorm float32 input and scale, normed, times weight; else input, two statistics, output.
    norms = 2 * (_FLOAT32 * (D + 1) + 2 * D * e if shape.rms_norm else 2 * D * e + 2 * e)
    # Query, key, value; outputs of single documents (of one length: of all at once) and their join; log-sum-exp.
    attention = (C + 2 * K + (1 if shape.padded else 2) * C) * e + shape.num_heads * _FLOAT32
    if shape.head_norms:  # float32 input and scale of each head, normed
        attention += _FLOAT32 * (C + K + shape.num_heads + shape.num_kv_heads) + (C + K) * e
    # Gated: gate, its activation, up, their product.
    mlp = (_kept_by_activation(shape.hidden_act) + 2 * shape.gated_mlp) * I * e
    return LayerSpec(
        name="layers",
        num_params=params,
        trainable=trainable,
        weight_before_products=True,
        matmul_flops=Rates(row=4 * D * C + 4 * D * K + 2 * (inner + 1) * D * I),
        attention_flops=Rates(pair=4 * C),
        activation_bytes=Rates(row=norms + attention + mlp),
        product_bytes=Rates(row=(C + 2 * K + 2 * D + inner * I) * e),
        linear_bytes=Rates(row=linear_width(block_linears(shape)) * e),
        attention_bytes=Rates(row=C * e + shape.num_heads * _FLOAT32),
        output_bytes=Rates(row=D * e),
        output_width=D,
        whole_bytes=_whole_of_block(block_linears(shape), D, e),
        row_bytes=WholeBytes(activation=Rates(row=norms - 2 * D * e)),
        # There is one call of attention for the rows of all documents, so its output is not joined.
        gathered_keys=Replaced(old=Rates(row=(C + 2 * K) * e), new=Rates(row=2 * K * e)),
        unread_bytes=Rates(row=D * e),
    )


def _kept_by_activation(name: str) -> int:
    """Number of tensors that an activation function keeps; for an unknown one the largest known number."""
    return _KEPT_BY_ACTIVATION.get(name, max(_KEPT_BY_ACTIVATION.values()))
