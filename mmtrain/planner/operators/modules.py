"""The modules that models are described with: `module(x)` adds its operators to the tape of x. Pure.

Sizes are those of one rank: of a linear layer that four ranks divide by its outputs, a quarter of the outputs.

Reads and writes count each operand of each kernel once, as eager PyTorch runs them, and nothing that stays in caches.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from mmtrain.planner.operators.functions import add
from mmtrain.planner.operators.graph import OpKind, Phase, Shape
from mmtrain.planner.operators.tape import Var
from mmtrain.spec.spec import Rates

Module = Callable[[Var], Var]
"""Anything that takes an activation to another."""


@dataclass(frozen=True, slots=True)
class Sequential:
    """Modules one after the other."""

    modules: tuple[Module, ...]

    def __init__(self, *modules: Module) -> None:
        object.__setattr__(self, "modules", modules)

    def __call__(self, x: Var) -> Var:
        for module in self.modules:
            x = module(x)
        return x


@dataclass(frozen=True, slots=True)
class Linear:
    """[R, inputs] -> [R, outputs]; the gradients of weight and bias are operators of the weight phase."""

    name: str
    inputs: float
    outputs: float
    bias: bool = False
    trainable: bool = True

    def __call__(self, x: Var) -> Var:
        tape, e, rows = x.tape, x.tape.dtype_bytes, x.rows
        I, O = Rates(fixed=self.inputs), Rates(fixed=self.outputs)
        weight = tape.parameter(f"{self.name}.weight", self.inputs * self.outputs, trainable=self.trainable)
        bias = tape.parameter(f"{self.name}.bias", self.outputs, trainable=self.trainable) if self.bias else None
        out = tape.var(self.name, rows=rows, columns=self.outputs, needs_grad=x.needs_grad or self.trainable)
        flops = rows * (2 * self.inputs * self.outputs)
        num_bytes = rows * ((self.inputs + self.outputs) * e) + Rates(fixed=self.inputs * self.outputs * e)
        product = partial(tape.product, flops=flops, num_bytes=num_bytes)
        product(self.name, rows, O, I, phase=Phase.FORWARD, inputs=(x.tensor, weight.tensor), outputs=(out.tensor,))

        def gradients(grad: int) -> dict[Var, int]:
            found = {}
            if x.needs_grad:
                name, phase = f"{self.name}.dx", Phase.BACKWARD_INPUT
                found[x] = tape.tensor(name, x.num_bytes)
                product(name, rows, I, O, phase=phase, inputs=(grad, weight.tensor), outputs=(found[x],))
            if self.trainable:
                name, phase = f"{self.name}.dw", Phase.BACKWARD_WEIGHT
                made = tape.tensor(name, Rates(fixed=weight.count * e))
                product(name, O, I, rows, phase=phase, inputs=(grad, x.tensor), outputs=(made,))
                tape.accumulate(self.name, weight, made, phase)
            if bias is not None and self.trainable:
                summed = tape.tensor(f"{self.name}.db", Rates(fixed=bias.count * e))
                tape.stream(
                    f"{self.name}.db",
                    num_bytes=rows * (self.outputs * e),
                    phase=Phase.BACKWARD_WEIGHT,
                    inputs=(grad,),
                    outputs=(summed,),
                )
                tape.accumulate(f"{self.name}.bias", bias, summed, Phase.BACKWARD_WEIGHT)
            return found

        return tape.record(out, gradients)


@dataclass(frozen=True, slots=True)
class Convolution:
    """[R', inputs] -> [R, outputs] over `taps` neighbours; weight gradients in the first half of the backward."""

    name: str
    inputs: float
    outputs: float
    taps: float = 1.0
    stride: float = 1.0
    """Rows that go in for one that comes out."""
    bias: bool = False
    trainable: bool = True

    def __call__(self, x: Var) -> Var:
        tape, e = x.tape, x.tape.dtype_bytes
        rows = x.rows * (1 / self.stride)
        reach = self.inputs * self.taps
        count = reach * self.outputs + (self.outputs if self.bias else 0.0)
        weight = tape.parameter(f"{self.name}.weight", count, trainable=self.trainable)
        out = tape.var(self.name, rows=rows, columns=self.outputs, needs_grad=x.needs_grad or self.trainable)
        flops = rows * (2 * reach * self.outputs)
        num_bytes = x.num_bytes + out.num_bytes + Rates(fixed=count * e)
        K, O = Rates(fixed=reach), Rates(fixed=self.outputs)

        def product(
            name: str, m: Rates, n: Rates, k: Rates, phase: Phase, inputs: tuple[int, ...], output: int
        ) -> None:
            tape.product(
                name,
                m,
                n,
                k,
                flops=flops,
                num_bytes=num_bytes,
                phase=phase,
                inputs=inputs,
                outputs=(output,),
                kind=OpKind.CONVOLUTION,
            )

        product(self.name, rows, O, K, Phase.FORWARD, (x.tensor, weight.tensor), out.tensor)

        def gradients(grad: int) -> dict[Var, int]:
            found = {}
            if x.needs_grad:
                found[x] = tape.tensor(f"{self.name}.dx", x.num_bytes)
                product(f"{self.name}.dx", rows, K, O, Phase.BACKWARD_INPUT, (grad, weight.tensor), found[x])
            if self.trainable:
                made = tape.tensor(f"{self.name}.dw", Rates(fixed=count * e))
                product(f"{self.name}.dw", O, K, rows, Phase.BACKWARD_INPUT, (grad, x.tensor), made)
                tape.accumulate(self.name, weight, made, Phase.BACKWARD_INPUT)
            return found

        return tape.record(out, gradients)


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm of each row; its weight gradients are made in the first half of the backward.

    `rms` as transformers writes it: six kernels through float32, where LayerNorm is one; `fused`: as torch has it, one.
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
        needs = x.needs_grad or (self.trainable and self.affine)
        out = tape.var(self.name, rows=x.rows, columns=self.columns, needs_grad=needs)
        number = x.rows * self.columns
        by_parts = self.rms and not self.fused
        # Root mean square: to float32, square's mean, times the scale, back, times the weight.
        forward = (e + 4 + 4 + 4 + 4 + 4 + e + e + e) if by_parts else 2 * e
        backward = (4 * e + 8 * 4) if by_parts else 3 * e
        tape.stream(
            self.name,
            kind=OpKind.NORM,
            num_bytes=number * forward,
            inputs=(x.tensor, *weights),
            outputs=(out.tensor,),
            launches=6 if by_parts else 1,
        )

        def gradients(grad: int) -> dict[Var, int]:
            into = tape.tensor(f"{self.name}.dx", x.num_bytes)
            tape.stream(
                f"{self.name}.backward",
                kind=OpKind.NORM,
                phase=Phase.BACKWARD_INPUT,
                num_bytes=number * backward,
                inputs=(grad, x.tensor, *weights),
                outputs=(into,),
                launches=8 if by_parts else 2,
            )
            return {x: into}

        return tape.record(out, gradients)


@dataclass(frozen=True, slots=True)
class Elementwise:
    """[R, C] -> [R, C]: `forward` and `backward` reads and writes of the whole, in so many kernels."""

    name: str
    forward: float = 2.0
    backward: float = 3.0
    forward_launches: int = 1
    backward_launches: int = 1

    def __call__(self, x: Var) -> Var:
        return self.of((x,))

    def of(self, operands: tuple[Var, ...]) -> Var:
        """The result of several operands of one size, all of which its backward reads."""
        first, tape = operands[0], operands[0].tape
        needs = any(x.needs_grad for x in operands)
        out = tape.var(self.name, rows=first.rows, columns=first.columns, needs_grad=needs)
        tensors = tuple(x.tensor for x in operands)
        tape.stream(
            self.name,
            num_bytes=first.num_bytes * self.forward,
            inputs=tensors,
            outputs=(out.tensor,),
            launches=self.forward_launches,
        )

        def gradients(grad: int) -> dict[Var, int]:
            found = {x: tape.tensor(f"{self.name}.dx", x.num_bytes) for x in operands}
            tape.stream(
                f"{self.name}.backward",
                phase=Phase.BACKWARD_INPUT,
                num_bytes=first.num_bytes * self.backward,
                inputs=(grad, *tensors),
                outputs=tuple(found.values()),
                launches=self.backward_launches,
            )
            return found

        return tape.record(out, gradients)


_ACTIVATIONS = {
    "relu": (2.0, 3.0, 1, 1),
    "silu": (2.0, 3.0, 1, 1),
    "gelu": (2.0, 3.0, 1, 1),
    "gelu_pytorch_tanh": (2.0, 3.0, 1, 1),
    "quick_gelu": (7.0, 13.0, 3, 5),
    "gelu_new": (18.0, 34.0, 8, 14),
}
"""Reads and writes, and kernels, of each activation function as Hugging Face writes it: forward and backward."""


def activation(name: str, function: str) -> Elementwise:
    """An activation function by its Hugging Face name; an unknown one as the slowest that is known."""
    forward, backward, launches, backward_launches = _ACTIVATIONS.get(function, max(_ACTIVATIONS.values()))
    return Elementwise(name, forward, backward, launches, backward_launches)


def multiply(name: str, first: Var, second: Var) -> Var:
    """The product of two activations, element by element."""
    return Elementwise(name, forward=3.0, backward=5.0).of((first, second))


@dataclass(frozen=True, slots=True)
class AddRow:
    """x plus a row of a table of `count` numbers: positions and a class token, or one bias for all rows."""

    name: str
    count: float
    trainable: bool = True

    def __call__(self, x: Var) -> Var:
        tape = x.tape
        table = tape.parameter(f"{self.name}.weight", self.count, trainable=self.trainable)
        out = tape.var(self.name, rows=x.rows, columns=x.columns, needs_grad=x.needs_grad or self.trainable)
        tape.stream(self.name, num_bytes=3 * x.num_bytes, inputs=(x.tensor, table.tensor), outputs=(out.tensor,))

        def gradients(grad: int) -> dict[Var, int]:
            if self.trainable:
                summed = tape.tensor(f"{self.name}.dw", Rates(fixed=self.count * tape.dtype_bytes))
                tape.stream(
                    f"{self.name}.dw",
                    phase=Phase.BACKWARD_INPUT,
                    num_bytes=x.num_bytes,
                    inputs=(grad,),
                    outputs=(summed,),
                )
                tape.accumulate(self.name, table, summed, Phase.BACKWARD_INPUT)
            return {x: grad}

        return tape.record(out, gradients)


@dataclass(frozen=True, slots=True)
class Residual:
    """x + module(x)."""

    name: str
    module: Module

    def __call__(self, x: Var) -> Var:
        return add(self.name, x, self.module(x))


@dataclass(frozen=True, slots=True)
class Attention:
    """softmax(Q K^T) V of the pairs that are attended, by a kernel that never writes the scores."""

    name: str
    pairs: Rates
    """(query, key) pairs of this rank's queries, of one head."""
    head_dim: float

    def __call__(self, query: Var, *keys: Var) -> Var:
        """What each query sees. Args: keys: keys and values, apart or as one."""
        tape, operands = query.tape, (query, *keys)
        needs = any(x.needs_grad for x in operands)
        out = tape.var(self.name, rows=query.rows, columns=query.columns, needs_grad=needs)
        flops = self.pairs * (4 * query.columns)
        read = sum((x.num_bytes for x in operands), Rates())
        shape = Shape(m=query.rows, n=self.pairs, k=Rates(fixed=self.head_dim))
        tensors = tuple(x.tensor for x in operands)
        tape.op(
            self.name,
            OpKind.ATTENTION,
            inputs=tensors,
            outputs=(out.tensor,),
            flops=flops,
            mem_bytes=read + out.num_bytes,
            shape=shape,
        )

        def gradients(grad: int) -> dict[Var, int]:
            found = {x: tape.tensor(f"{self.name}.dx", x.num_bytes) for x in operands}
            tape.op(
                f"{self.name}.backward",
                OpKind.ATTENTION,
                phase=Phase.BACKWARD_INPUT,
                inputs=(grad, *tensors, out.tensor),
                outputs=tuple(found.values()),
                flops=flops * 2,
                mem_bytes=2 * read + 2 * out.num_bytes,
                shape=shape,
                launches=2,
            )
            return found

        return tape.record(out, gradients)


@dataclass(frozen=True, slots=True)
class Embedding:
    """Ids [R] -> [R, columns]. The gradient of the table is as large as the table, however few words there are."""

    name: str
    words: float
    columns: float
    trainable: bool = True

    def __call__(self, ids: Var) -> Var:
        tape, e = ids.tape, ids.tape.dtype_bytes
        table = tape.parameter(f"{self.name}.weight", self.words * self.columns, trainable=self.trainable)
        out = tape.var(self.name, rows=ids.rows, columns=self.columns, needs_grad=self.trainable)
        tape.stream(
            self.name,
            kind=OpKind.EMBEDDING,
            num_bytes=2 * out.num_bytes + ids.rows * 8,
            inputs=(ids.tensor, table.tensor),
            outputs=(out.tensor,),
        )

        def gradients(grad: int) -> dict[Var, int]:
            made = tape.tensor(f"{self.name}.dw", Rates(fixed=table.count * e))
            tape.stream(
                f"{self.name}.backward",
                kind=OpKind.EMBEDDING,
                phase=Phase.BACKWARD_INPUT,
                num_bytes=Rates(fixed=table.count * e) + 2 * out.num_bytes,
                inputs=(grad, ids.tensor),
                outputs=(made,),
                launches=2,
            )
            tape.accumulate(self.name, table, made, Phase.BACKWARD_INPUT)
            return {}

        return tape.record(out, gradients)


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """Logits [R, words] -> a scalar: through float32, which is kept."""

    name: str
    words: float

    def __call__(self, logits: Var) -> Var:
        tape, e = logits.tape, logits.tape.dtype_bytes
        number = logits.rows * self.words
        # To float32; the largest; exponentials and their sum; log-probabilities.
        kept = tape.tensor(f"{self.name}.log_probabilities", number * 4)
        out = tape.var(self.name, rows=Rates(), columns=0, needs_grad=logits.needs_grad)
        tape.stream(
            self.name,
            kind=OpKind.CROSS_ENTROPY,
            num_bytes=number * (e + 5 * 4),
            inputs=(logits.tensor,),
            outputs=(out.tensor, kept),
            launches=4,
        )

        def gradients(grad: int) -> dict[Var, int]:
            into = tape.tensor(f"{self.name}.dx", logits.num_bytes)
            tape.stream(
                f"{self.name}.backward",
                kind=OpKind.CROSS_ENTROPY,
                phase=Phase.BACKWARD_INPUT,
                num_bytes=number * (e + 4 * 4),
                inputs=(grad, kept),
                outputs=(into,),
                launches=4,
            )
            return {logits: into}

        return tape.record(out, gradients)


@dataclass(frozen=True, slots=True)
class SquaredError:
    """Predictions [R, columns] -> a scalar: through float32, in which the difference to the targets is kept."""

    name: str

    def __call__(self, x: Var) -> Var:
        tape, e = x.tape, x.tape.dtype_bytes
        number = x.rows * x.columns
        kept = tape.tensor(f"{self.name}.difference", number * 4)
        out = tape.var(self.name, rows=Rates(), columns=0, needs_grad=x.needs_grad)
        # To float32; minus the targets; squares; their sum.
        tape.stream(
            self.name,
            num_bytes=number * (e + 7 * 4),
            inputs=(x.tensor,),
            outputs=(out.tensor, kept),
            launches=4,
        )

        def gradients(grad: int) -> dict[Var, int]:
            into = tape.tensor(f"{self.name}.dx", x.num_bytes)
            tape.stream(
                f"{self.name}.backward",
                phase=Phase.BACKWARD_INPUT,
                num_bytes=number * (e + 4 * 4),
                inputs=(grad, kept),
                outputs=(into,),
                launches=3,
            )
            return {x: into}

        return tape.record(out, gradients)
