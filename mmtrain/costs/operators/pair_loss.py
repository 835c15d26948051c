"""The operators of the loss of pairs behind two towers. Pure."""

from mmtrain.costs.operators.operator_graph import Phase
from mmtrain.costs.operators.tape import Tape, Var
from mmtrain.spec.layer import LayerSpec
from mmtrain.spec.work_size import Rates

_FLOAT32 = 4


def contrast(tape: Tape, layer: LayerSpec, *, input_grad: bool) -> Var:
    """The loss, from both embeddings of each pair: norms, the product of all images with all captions, and two
    softmaxes (or a sigmoid), in float32. Args: input_grad: some tower trains."""
    width = layer.attention_flops.pair / 2
    pairs, of_pair = Rates(output=1.0), Rates(pair=_FLOAT32)
    x = tape.input("embeddings", rows=2 * pairs, columns=width, needs_grad=input_grad)
    normed_bytes = x.rows * (width * _FLOAT32)
    normed, logits = tape.tensor("normed", normed_bytes), tape.tensor("logits", of_pair)
    loss = tape.var("loss", rows=Rates(), columns=0, needs_grad=input_grad or layer.trainable)
    tape.stream(
        "contrast.norm", num_bytes=x.num_bytes + normed_bytes * 5, inputs=(x.tensor,), outputs=(normed,), launches=6
    )
    read = normed_bytes + of_pair

    def product(name: str, phase: Phase, times: int, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> None:
        """Adds this many products, each with the FLOPs of the forward one."""
        k, flops = Rates(fixed=width), layer.attention_flops * times
        tape.product(
            name, pairs, pairs, k, flops=flops, num_bytes=read * times, phase=phase, inputs=inputs, outputs=outputs
        )

    product("contrast.logits", Phase.FORWARD, 1, (normed,), (logits,))
    # Scaled; of each direction the log-probabilities, and those of pairs.
    tape.stream("contrast.loss", num_bytes=of_pair * 8, inputs=(logits,), outputs=(loss.tensor,), launches=12)

    def gradients(grad: int) -> dict[Var, int]:
        phase = Phase.BACKWARD_INPUT
        of_logits, of_normed = tape.tensor("logits.grad", of_pair), tape.tensor("normed.grad", normed_bytes)
        tape.stream(
            "contrast.loss.backward",
            num_bytes=of_pair * 8,
            phase=phase,
            inputs=(grad, logits),
            outputs=(of_logits,),
            launches=12,
        )
        product("contrast.logits.backward", phase, 2, (of_logits, normed), (of_normed,))
        of_x = tape.tensor("embeddings.grad", x.num_bytes)
        tape.stream(
            "contrast.norm.backward",
            num_bytes=x.num_bytes + normed_bytes * 6,
            phase=phase,
            inputs=(of_normed,),
            outputs=(of_x,),
            launches=9,
        )
        return {x: of_x}

    return tape.record(loss, gradients)
