"""The modules of which model descriptions consist: `module(x)` adds its operators to the tape of x. Pure.

Sizes are those of one rank: a linear layer whose outputs four ranks divide has a quarter of the outputs.

Reads and writes count each operand of each kernel of eager PyTorch once; caches are ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from mmtrain.costs.operators.operator_graph import OpKind, Phase, ProductShape
from mmtrain.costs.operators.tape import Gradients, Parameter, Var
from mmtrain.spec.work_size import Rates


def _weight_product(
    name: str,
    x: Var,
    weight: Parameter,
    result: Var,
    *,
    reach: float,
    num_bytes: Rates,
    kind: OpKind = OpKind.MATMUL,
    weight_phase: Phase = Phase.BACKWARD_WEIGHT,
) -> Gradients:
    """The gradients of the product [rows, reach] x [reach, columns] of x and a weight, whose forward is added.

    Args: num_bytes: read and written by each of the three products. weight_phase: of the weight's gradient.
    """
    tape = x.tape
    R, K, O = result.rows, Rates(fixed=reach), Rates(fixed=result.columns)
    product = partial(tape.product, flops=R * (2 * reach * result.columns), num_bytes=num_bytes, kind=kind)
    product(name, R, O, K, phase=Phase.FORWARD, inputs=(x.tensor, weight.tensor), outputs=(result.tensor,))

    def gradients(grad: int) -> dict[Var, int]:
        grads = {}
        if x.needs_grad:
            dx, phase = f"{name}.dx", Phase.BACKWARD_INPUT
            grads[x] = tape.tensor(dx, x.num_bytes)
            product(dx, R, K, O, phase=phase, inputs=(grad, weight.tensor), outputs=(grads[x],))
        if weight.trainable:
            dw = f"{name}.dw"
            weight_grad = tape.tensor(dw, Rates(fixed=weight.count * tape.dtype_bytes))
            product(dw, O, K, R, phase=weight_phase, inputs=(grad, x.tensor), outputs=(weight_grad,))
            tape.accumulate(name, weight, weight_grad, weight_phase)
        return grads

    return gradients


@dataclass(frozen=True, slots=True)
class Linear:
    """[R, inputs] -> [R, outputs]; the gradients of weight and bias are operators of the weight phase."""

    name: str
    inputs: float
    outputs: float
    bias: bool = False
    trainable: bool = True
    counted: bool = True
    """Whether its weight is a parameter of its own; not that of another product."""

    def __call__(self, x: Var) -> Var:
        tape, e, rows = x.tape, x.tape.dtype_bytes, x.rows
        count = self.inputs * self.outputs * self.counted
        weight = tape.parameter(f"{self.name}.weight", count, trainable=self.trainable)
        bias = tape.parameter(f"{self.name}.bias", self.outputs, trainable=self.trainable) if self.bias else None
        result = tape.var(self.name, rows=rows, columns=self.outputs, needs_grad=x.needs_grad or self.trainable)
        num_bytes = rows * ((self.inputs + self.outputs) * e) + Rates(fixed=self.inputs * self.outputs * e)
        of_product = _weight_product(self.name, x, weight, result, reach=self.inputs, num_bytes=num_bytes)

        def gradients(grad: int) -> Mapping[Var, int]:
            grads = of_product(grad)
            if bias is not None and self.trainable:
                db, phase = f"{self.name}.db", Phase.BACKWARD_WEIGHT
                bias_grad = tape.tensor(db, Rates(fixed=bias.count * e))
                tape.stream(db, num_bytes=rows * (self.outputs * e), phase=phase, inputs=(grad,), outputs=(bias_grad,))
                tape.accumulate(f"{self.name}.bias", bias, bias_grad, phase)
            return grads

        return tape.record(result, gradients)


@dataclass(frozen=True, slots=True)
class Convolution:
    """[R', inputs] -> [R, outputs] over `taps` neighbours; I computes the weight gradients."""

    name: str
    inputs: float
    outputs: float
    taps: float = 1.0
    stride: float = 1.0
    """Input rows for each output row."""
    bias: bool = False
    trainable: bool = True

    def __call__(self, x: Var) -> Var:
        tape, reach = x.tape, self.inputs * self.taps
        count = reach * self.outputs + (self.outputs if self.bias else 0.0)
        weight = tape.parameter(f"{self.name}.weight", count, trainable=self.trainable)
        needs_grad = x.needs_grad or self.trainable
        result = tape.var(self.name, rows=x.rows * (1 / self.stride), columns=self.outputs, needs_grad=needs_grad)
        gradients = _weight_product(
            self.name,
            x,
            weight,
            result,
            reach=reach,
            num_bytes=x.num_bytes + result.num_bytes + Rates(fixed=count * tape.dtype_bytes),
            kind=OpKind.CONVOLUTION,
            weight_phase=Phase.BACKWARD_INPUT,
        )
        return tape.record(result, gradients)


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm of each row; I computes its weight gradients.

    `rms`: RMSNorm as in transformers, six kernels through float32 (LayerNorm is one kernel). `fused`: torch's RMSNorm,
    one kernel.
    """

    name: str
    columns: float
    rms: bool = False
    trainable: bool = True
    affine: bool = True
    """Whether it has parameters."""
    fused: bool = False

    def __call__(self, x: Var) -> Var:
        tape, e = x.tape, x.tape.dtype_bytes
        weights: tuple[int, ...] = ()
        if self.affine:
            count = self.columns * (1 if self.rms else 2)
            weights = (tape.parameter(f"{self.name}.weight", count, trainable=self.trainable).tensor,)
        needs_grad = x.needs_grad or (self.trainable and self.affine)
        result = tape.var(self.name, rows=x.rows, columns=self.columns, needs_grad=needs_grad)
        number = x.rows * self.columns
        by_parts = self.rms and not self.fused
        # Root mean square: to float32, square's mean, times the scale, back, times the weight.
        forward = (e + 4 + 4 + 4 + 4 + 4 + e + e + e) if by_parts else 2 * e
        backward = (4 * e + 8 * 4) if by_parts else 3 * e
        return tape.pointwise(
            self.name,
            (x,),
            result,
            forward_bytes=number * forward,
            backward_bytes=number * backward,
            kind=OpKind.NORM,
            launches=(6, 8) if by_parts else (1, 2),
            weights=weights,
        )


@dataclass(frozen=True, slots=True)
class Elementwise:
    """[R, C] -> [R, C] with `forward` and `backward` reads and writes of the whole activation, and their kernels."""

    name: str
    forward: float = 2.0
    backward: float = 3.0
    forward_launches: int = 1
    backward_launches: int = 1

    def __call__(self, x: Var) -> Var:
        return self.of((x,))

    def of(self, operands: tuple[Var, ...]) -> Var:
        """The result of several operands of one size, all of which the backward reads."""
        first, tape = operands[0], operands[0].tape
        needs_grad = any(x.needs_grad for x in operands)
        result = tape.var(self.name, rows=first.rows, columns=first.columns, needs_grad=needs_grad)
        return tape.pointwise(
            self.name,
            operands,
            result,
            forward_bytes=first.num_bytes * self.forward,
            backward_bytes=first.num_bytes * self.backward,
            launches=(self.forward_launches, self.backward_launches),
        )


_ACTIVATIONS = {
    "relu": (2.0, 3.0, 1, 1),
    "silu": (2.0, 3.0, 1, 1),
    "gelu": (2.0, 3.0, 1, 1),
    "gelu_pytorch_tanh": (2.0, 3.0, 1, 1),
    "quick_gelu": (7.0, 13.0, 3, 5),
    "gelu_new": (18.0, 34.0, 8, 14),
}
"""Activation function of transformers -> reads and writes forward and backward, kernels forward and backward."""


def activation(name: str, function: str) -> Elementwise:
    """An activation function by its Hugging Face name; an unknown one has the cost of the slowest known one."""
    forward, backward, launches, backward_launches = _ACTIVATIONS.get(function, max(_ACTIVATIONS.values()))
    return Elementwise(name, forward, backward, launches, backward_launches)


@dataclass(frozen=True, slots=True)
class AddRow:
    """x plus a row of a table of `count` numbers: positions and a class token, or one bias for all rows."""

    name: str
    count: float
    trainable: bool = True

    def __call__(self, x: Var) -> Var:
        tape = x.tape
        table = tape.parameter(f"{self.name}.weight", self.count, trainable=self.trainable)
        result = tape.var(self.name, rows=x.rows, columns=x.columns, needs_grad=x.needs_grad or self.trainable)
        tape.stream(self.name, num_bytes=3 * x.num_bytes, inputs=(x.tensor, table.tensor), outputs=(result.tensor,))

        def gradients(grad: int) -> dict[Var, int]:
            if self.trainable:
                table_grad = tape.tensor(f"{self.name}.dw", Rates(fixed=self.count * tape.dtype_bytes))
                tape.stream(
                    f"{self.name}.dw",
                    phase=Phase.BACKWARD_INPUT,
                    num_bytes=x.num_bytes,
                    inputs=(grad,),
                    outputs=(table_grad,),
                )
                tape.accumulate(self.name, table, table_grad, Phase.BACKWARD_INPUT)
            return {x: grad}

        return tape.record(result, gradients)


@dataclass(frozen=True, slots=True)
class Attention:
    """softmax(Q K^T) V over the attended pairs, in a kernel that does not write the scores to memory."""

    name: str
    pairs: Rates
    """The (query, key) pairs of this rank's queries, of one head."""
    head_dim: float

    def __call__(self, query: Var, *keys: Var) -> Var:
        """[queries, columns] -> [queries, columns]. Args: keys: keys and values, as two activations or as one."""
        tape, operands = query.tape, (query, *keys)
        needs_grad = any(x.needs_grad for x in operands)
        result = tape.var(self.name, rows=query.rows, columns=query.columns, needs_grad=needs_grad)
        flops = self.pairs * (4 * query.columns)
        read = sum((x.num_bytes for x in operands), Rates())
        shape = ProductShape(m=query.rows, n=self.pairs, k=Rates(fixed=self.head_dim))
        tensors = tuple(x.tensor for x in operands)
        tape.op(
            self.name,
            OpKind.ATTENTION,
            inputs=tensors,
            outputs=(result.tensor,),
            flops=flops,
            mem_bytes=read + result.num_bytes,
            shape=shape,
        )

        def gradients(grad: int) -> dict[Var, int]:
            grads = {x: tape.tensor(f"{self.name}.dx", x.num_bytes) for x in operands}
            tape.op(
                f"{self.name}.backward",
                OpKind.ATTENTION,
                phase=Phase.BACKWARD_INPUT,
                inputs=(grad, *tensors, result.tensor),
                outputs=tuple(grads.values()),
                flops=flops * 2,
                mem_bytes=2 * read + 2 * result.num_bytes,
                shape=shape,
                launches=2,
            )
            return grads

        return tape.record(result, gradients)


@dataclass(frozen=True, slots=True)
class Embedding:
    """Ids [R] -> [R, columns]. The gradient of the table is dense: as large as the table for any number of ids."""

    name: str
    vocab_size: float
    columns: float
    trainable: bool = True

    def __call__(self, ids: Var) -> Var:
        tape, e = ids.tape, ids.tape.dtype_bytes
        table = tape.parameter(f"{self.name}.weight", self.vocab_size * self.columns, trainable=self.trainable)
        result = tape.var(self.name, rows=ids.rows, columns=self.columns, needs_grad=self.trainable)
        tape.stream(
            self.name,
            kind=OpKind.EMBEDDING,
            num_bytes=2 * result.num_bytes + ids.rows * 8,
            inputs=(ids.tensor, table.tensor),
            outputs=(result.tensor,),
        )

        def gradients(grad: int) -> dict[Var, int]:
            table_grad = tape.tensor(f"{self.name}.dw", Rates(fixed=table.count * e))
            tape.stream(
                f"{self.name}.backward",
                kind=OpKind.EMBEDDING,
                phase=Phase.BACKWARD_INPUT,
                num_bytes=Rates(fixed=table.count * e) + 2 * result.num_bytes,
                inputs=(grad, ids.tensor),
                outputs=(table_grad,),
                launches=2,
            )
            tape.accumulate(self.name, table, table_grad, Phase.BACKWARD_INPUT)
            return {}

        return tape.record(result, gradients)


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """Logits [R, vocab_size] -> a scalar; keeps log-probabilities in float32."""

    name: str
    vocab_size: float

    def __call__(self, logits: Var) -> Var:
        tape, e = logits.tape, logits.tape.dtype_bytes
        number = logits.rows * self.vocab_size
        # To float32; the largest; exponentials and their sum; log-probabilities.
        log_probabilities = tape.tensor(f"{self.name}.log_probabilities", number * 4)
        result = tape.var(self.name, rows=Rates(), columns=0, needs_grad=logits.needs_grad)
        return tape.pointwise(
            self.name,
            (logits,),
            result,
            forward_bytes=number * (e + 5 * 4),
            backward_bytes=number * (e + 4 * 4),
            kind=OpKind.CROSS_ENTROPY,
            launches=(4, 4),
            saved=(log_probabilities,),
        )


@dataclass(frozen=True, slots=True)
class ChunkedHead:
    """[R, inputs] -> a scalar: logits and their loss piece by piece, of which nothing is kept; I makes the weight
    gradient, too. The launches of one piece are counted.

    Pieces of positions read the weight, and read and write its gradient, once each. Logits and loss are operators of
    the forward here, which leaves them to the backward. A part of the tokens, whose backward repeats the product, has
    pieces of tokens, which read and write as all logits do.
    """

    name: str
    inputs: float
    outputs: float
    chunk_tokens: int
    """Positions of a piece."""
    repeats: bool
    """Whether it is a part of the tokens, whose backward repeats the product."""
    trainable: bool = True

    def __call__(self, x: Var) -> Var:
        tape, e, rows = x.tape, x.tape.dtype_bytes, x.rows
        weight = tape.parameter(f"{self.name}.weight", self.inputs * self.outputs, trainable=self.trainable)
        needs_grad = x.needs_grad or self.trainable
        logits = tape.var(self.name, rows=rows, columns=self.outputs, needs_grad=needs_grad)
        weight_bytes = Rates(fixed=self.inputs * self.outputs * e)
        if not self.repeats:
            weight_bytes = rows * (2 * self.inputs * self.outputs * e / self.chunk_tokens)
        num_bytes, inside = rows * ((self.inputs + self.outputs) * e) + weight_bytes, Phase.BACKWARD_INPUT
        of_product = _weight_product(
            self.name, x, weight, logits, reach=self.inputs, num_bytes=num_bytes, weight_phase=inside
        )
        number = rows * self.outputs
        loss = tape.var("loss", rows=Rates(), columns=0, needs_grad=needs_grad)
        # To float32; the largest; the target's; less the largest, exponentials, in place; their sum.
        of_loss, kind, made = number * (e + 7 * 4), OpKind.CROSS_ENTROPY, (logits.tensor,)
        tape.stream("loss", kind=kind, num_bytes=of_loss, inputs=made, outputs=(loss.tensor,), launches=8)

        def gradients(grad: int) -> Mapping[Var, int]:
            of_logits = tape.tensor(f"{self.name}.grad", logits.num_bytes)
            # Exponentials times the gradient, in place; to the dtype of compute.
            of_grad, launches = number * (3 * 4 + e), 4
            if self.repeats:
                again = tape.tensor(f"{self.name}.again", logits.num_bytes)
                columns, reach = Rates(fixed=self.outputs), Rates(fixed=self.inputs)
                tape.product(
                    f"{self.name}.again",
                    rows,
                    columns,
                    reach,
                    flops=number * (2 * self.inputs),
                    num_bytes=num_bytes,
                    phase=inside,
                    inputs=(x.tensor, weight.tensor),
                    outputs=(again,),
                )
                of_grad, launches = of_grad + number * (e + 5 * 4), 8  # to float32, less the largest, exponentials
            tape.stream(
                "loss.backward",
                kind=kind,
                num_bytes=of_grad,
                phase=inside,
                inputs=(grad, logits.tensor),
                outputs=(of_logits,),
                launches=launches,
            )
            return of_product(of_logits)

        return tape.record(loss, gradients)


@dataclass(frozen=True, slots=True)
class SquaredError:
    """Predictions [R, columns] -> a scalar; keeps the difference to the targets in float32."""

    name: str

    def __call__(self, x: Var) -> Var:
        tape, e = x.tape, x.tape.dtype_bytes
        number = x.rows * x.columns
        difference = tape.tensor(f"{self.name}.difference", number * 4)
        result = tape.var(self.name, rows=Rates(), columns=0, needs_grad=x.needs_grad)
        # To float32; minus the targets; squares; their sum.
        return tape.pointwise(
            self.name,
            (x,),
            result,
            forward_bytes=number * (e + 7 * 4),
            backward_bytes=number * (e + 4 * 4),
            launches=(4, 3),
            saved=(difference,),
        )
