"""The operators of each kind of layer, on one rank of the submesh that divides it. Pure.

They are the kernels that the layers run: Hugging Face's modules kernel by kernel, tensor parallelism with rows divided
or whole between the layers (`families/tensor_table.py`), keys and values gathered over context-parallel ranks, LoRA
adapters next to their linear layers. FLOPs, parameters and the existence of a backward agree with the layer's
`LayerSpec` for one rank.

A DiT's blocks and head run once for all clips of one size whose prompts have as many tokens, see `Operator.each_call`;
its embedding, of prompts and timesteps above all, is priced as one call. The tp ranks may divide its latent tokens;
each rank has all text tokens and timesteps.

Not included: the exchange of image features before the first language layer, FSDP2's gathers, padding, the copies that
join a DiT's rows at the end of a chunk, the float32 exchange of the gradients of its shifts and scales, and the gather
of clean latents in its head.
"""

from mmtrain.costs.operators.dit_layer import DitLayer
from mmtrain.costs.operators.layer_builder import KEYS, DescribedModule
from mmtrain.costs.operators.operator_graph import Graph, Operator
from mmtrain.costs.operators.tape import Tape
from mmtrain.costs.operators.transformer_layer import TransformerLayer
from mmtrain.costs.operators.vae_layer import encode
from mmtrain.spec.layer import LayerSpec
from mmtrain.spec.model_shapes import DitShape
from mmtrain.spec.vae_shapes import VaeShape


def divides_layer(op: Operator) -> bool:
    """Whether an operator is an exchange of tensor parallelism, during which the other pass of a braid can run.

    The other collectives gather keys and values over the context-parallel ranks, inside of attention.
    """
    return op.kind.is_collective and not op.name.startswith(KEYS)


class LayerDescriber(DescribedModule):
    """Makes the graphs of a module's layers."""

    def graph(self, layer: LayerSpec, *, input_grad: bool) -> Graph:
        """Forward and backward of one layer. Args: input_grad: whether a gradient has to leave it backwards."""
        return self.tape(layer, input_grad=input_grad).graph()

    def tape(self, layer: LayerSpec, *, input_grad: bool) -> Tape:
        """The tape of one layer, forward and backward, with its parameters. Arguments: see `graph`."""
        each_call = isinstance(self.shape, DitShape) and layer.name != "embed"
        tape = Tape(dtype_bytes=self.dtype_bytes, compute=self.compute, each_call=each_call)
        if isinstance(self.shape, DitShape):
            tape.backward(DitLayer(self, self.shape, tape, layer, input_grad).build())
        elif isinstance(self.shape, VaeShape):
            encode(tape, self.shape)
        else:
            tape.backward(TransformerLayer(self, self.shape, tape, layer, input_grad).build())
        return tape
