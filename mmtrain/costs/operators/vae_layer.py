"""The operators of a frozen VAE's encoder: convolutions, norms and activation functions one after another. Pure.

Not included: overlap of a residual block with the convolution of its shortcut, copies for padding, and separate calls
for each frame: all clips of a work count as one call.
"""

from mmtrain.costs.operators.functions import reshape, split
from mmtrain.costs.operators.modules import Attention, Elementwise, Norm
from mmtrain.costs.operators.operator_graph import OpKind, Phase
from mmtrain.costs.operators.tape import Tape, Var
from mmtrain.spec.vae_shapes import PIXEL_CHANNELS, EncoderConvolution, VaeShape
from mmtrain.spec.work_size import Rates


def encode(tape: Tape, shape: VaeShape) -> None:
    """Adds the forward of the encoder to a tape; it has no backward."""
    first_convolution = shape.convolutions[0]
    x = tape.input("pixels", rows=_only_rows(first_convolution.positions), columns=PIXEL_CHANNELS)
    for convolution in shape.convolutions:
        if convolution.normed:
            x = Norm(f"{convolution.name}.norm", x.columns, trainable=False)(x)
        if convolution.activated:
            x = Elementwise(f"{convolution.name}.activation", 2.0, 3.0)(x)
        if convolution.name == "mid_block.proj":
            x = _attended(x, shape)
        x = _convolved(x, convolution)


def _attended(qkv: Var, shape: VaeShape) -> Var:
    """Attention among the positions of each latent frame, with one head."""
    return Attention("mid_block.attention", Rates(pair=1.0), shape.attention_width)(*split("mid_block.qkv", qkv, 3))


def _convolved(x: Var, convolution: EncoderConvolution) -> Var:
    """The result of a convolution, its residual added in the same pass over memory."""
    tape, e = x.tape, x.tape.dtype_bytes
    x = reshape(x, rows=x.rows, columns=convolution.inputs)  # the input of a shortcut has the width before its block
    weight = tape.parameter(f"{convolution.name}.weight", convolution.num_params, trainable=False)
    rows = _only_rows(convolution.positions)
    result = tape.var(convolution.name, rows=rows, columns=convolution.outputs, needs_grad=False)
    tape.product(
        convolution.name,
        rows,
        Rates(fixed=convolution.outputs),
        Rates(fixed=convolution.inputs * convolution.taps),
        flops=_only_rows(convolution.flops),
        num_bytes=x.num_bytes + result.num_bytes + Rates(fixed=convolution.num_params * e),
        phase=Phase.FORWARD,
        inputs=(x.tensor, weight.tensor),
        outputs=(result.tensor,),
        kind=OpKind.CONVOLUTION,
    )
    return result


def _only_rows(rates: Rates) -> Rates:
    return Rates(row=rates.row, output=rates.output)
