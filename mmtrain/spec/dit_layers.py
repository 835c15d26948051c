"""The layers of a diffusion transformer: parameters, FLOPs and bytes. Pure; no weights.

Shape legend: D width; H heads; I inner width of an MLP; P elements of a patch; Z sines and cosines of a timestep;
X width of the text; e bytes of one element of an activation. What is counted: see `spec/builders.py`.
"""

from dataclasses import replace

from mmtrain.config.model import ModelConfig
from mmtrain.spec.layer import LayerSpec, WholeBytes
from mmtrain.spec.model_shapes import DitShape
from mmtrain.spec.spec import ModuleSpec
from mmtrain.spec.work_size import TIME_ROWS, Rates

_FLOAT32 = 4


def dit_module(model: ModelConfig, shape: DitShape, e: int) -> ModuleSpec:
    """A diffusion transformer with its layers."""
    assert model.dit is not None
    trainable = model.dit.trainable is True
    block = _block(shape, trainable=trainable, e=e)
    return ModuleSpec(
        name="dit",
        consumes="latents",
        patch=shape.patch,
        latents_arrive=model.vae is not None,
        after=("language",) if model.vae is None else ("vae", "language"),
        layers=(
            _embed(shape, trainable=trainable, e=e),
            *(replace(block, name=f"blocks.{i}") for i in range(shape.depth)),
            _head(shape, trainable=trainable, e=e),
        ),
    )


def _output_bytes(shape: DitShape, e: int) -> Rates:
    """Bytes of the activation between two chunks: latent tokens, text tokens and the rows of each clip's timestep.

    In a job with a VAE all rows have additional columns for the clean latents.
    """
    width = shape.width + shape.clean_columns
    return Rates(row=width * e, text=width * e, clip=TIME_ROWS * width * e)


def _whole_output_bytes(shape: DitShape, e: int) -> Rates:
    """The bytes of `_output_bytes` without those of latent tokens, whose rows tensor-parallel ranks divide."""
    return _output_bytes(shape, e)._replace(row=0.0)


def _embed(shape: DitShape, *, trainable: bool, e: int) -> LayerSpec:
    """The first layer of a DiT: patches, and two linear layers each for text and timestep."""
    D, P, Z, X = shape.width, shape.patch_dim, shape.time_width, shape.text_width
    projected = (TIME_ROWS - 1) * D
    time, text = 2 * Z * D + 2 * D * D + 2 * D * projected, 2 * X * D + 2 * D * D
    return LayerSpec(
        name="embed",
        num_params=(P + 1) * D + (Z + 1) * D + (D + 1) * D + (D + 1) * projected + (X + 1) * D + (D + 1) * D,
        trainable=trainable,
        matmul_flops=Rates(row=2 * P * D, text=text, clip=time),
        inner_flops=Rates(text=2 * D * D, clip=time - 2 * Z * D),
        passing_flops=Rates(text=text),
        activation_bytes=Rates(row=P * e, text=(X + 2 * D) * e, clip=(Z + 4 * D) * e),
        # Without the convolution, whose weight gradients I computes; its FLOPs are too few to be counted apart.
        # The gradients of all rows of a timestep are one tensor.
        linear_bytes=Rates(text=(X + 3 * D) * e, clip=(Z + 4 * D + TIME_ROWS * D) * e),
        output_bytes=_output_bytes(shape, e),
        output_width=D + shape.clean_columns,
        output_rows="conditioned",
        # All except the activations between two linear layers, and the six outputs of the timestep's last layer.
        whole_bytes=WholeBytes(
            activation=Rates(row=P * e, text=X * e, clip=(Z + 2 * D) * e),
            linear=Rates(text=(X + D) * e, clip=(Z + 3 * D) * e),
            output=_whole_output_bytes(shape, e),
        ),
    )


def _block(shape: DitShape, *, trainable: bool, e: int) -> LayerSpec:
    """One block of a DiT: self-attention, cross-attention to the clip's own text, MLP."""
    D, H, I = shape.width, shape.num_heads, shape.mlp_width
    tokens, texts = 12 * D * D + 4 * D * I, 4 * D * D
    # In float32: the inputs of the norms, and the outputs of those without parameters; input and output of the norms of
    # queries and keys (three of tokens, one of texts); the MLP's output. Scales of each row, log-sum-exp.
    head_scales = 3
    float32 = (5 + shape.cross_norm) * D + 2 * (2 + shape.cross_norm) + head_scales + 3 * 2 * D + 2 * H
    # The inputs of the linear layers (5), query, key and value of self-attention, cross-attention's query, and the
    # output of self-attention's output layer.
    activation = float32 * _FLOAT32 + 10 * D * e + 2 * I * e
    # Of these by rows: inputs and outputs of the norms, the output of self-attention's output layer, the MLP's output.
    by_rows = ((5 + shape.cross_norm) * D + 2 * (2 + shape.cross_norm)) * _FLOAT32 + D * e
    # The table shifted by the timestep and two scales, in float32; the parameters of a norm too, if they are not.
    of_clip = 8 + 2 * (shape.cross_norm and e < _FLOAT32)
    return LayerSpec(
        name="blocks",
        num_params=8 * (D + 1) * D + 2 * D * I + I + D + 4 * D + (2 * D if shape.cross_norm else 0) + 6 * D,
        trainable=trainable,
        matmul_flops=Rates(row=tokens, text=texts),
        inner_flops=Rates(row=tokens),  # a trainable table of shifts comes before them, not before texts
        attention_flops=Rates(pair=4 * D, cross_pair=4 * D),
        # The blocks of a chunk share the texts themselves.
        activation_bytes=Rates(row=activation, text=2 * D * e + (2 * D + 1) * _FLOAT32, clip=of_clip * D * _FLOAT32),
        product_bytes=Rates(row=(7 * D + I) * e, text=2 * D * e),
        linear_bytes=Rates(row=(12 * D + 2 * I) * e, text=3 * D * e),
        attention_bytes=Rates(row=2 * D * e + 2 * H * _FLOAT32),
        output_bytes=_output_bytes(shape, e),
        output_width=D + shape.clean_columns,
        output_rows="conditioned",
        # Gathered inputs of three sublayers, the summands after them, and scales of all rows.
        whole_bytes=WholeBytes(
            activation=Rates(row=head_scales * _FLOAT32 + 3 * D * e, text=_FLOAT32, clip=of_clip * D * _FLOAT32),
            product=Rates(row=3 * D * e),
            linear=Rates(row=6 * D * e, text=D * e),
            output=_whole_output_bytes(shape, e),
        ),
        row_bytes=WholeBytes(activation=Rates(row=by_rows)),
    )


def _head(shape: DitShape, *, trainable: bool, e: int) -> LayerSpec:
    """The last layer of a DiT: a norm shifted and scaled by the timestep, a linear layer, the squared error."""
    D, P = shape.width, shape.output_dim
    activation = Rates(row=_FLOAT32 * (2 * D + 2) + D * e + P * _FLOAT32, clip=D * e)
    linear = Rates(row=(D + P) * e)
    return LayerSpec(
        name="head",
        num_params=2 * D + (D + 1) * P,
        trainable=trainable,
        weight_before_products=True,
        matmul_flops=Rates(row=2 * D * P),
        activation_bytes=activation,
        linear_bytes=linear,
        whole_bytes=WholeBytes(activation=activation, linear=linear),
    )
