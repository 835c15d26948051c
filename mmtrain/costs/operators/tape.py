"""Describes a model in a PyTorch-like way: calls add forward operators, `backward` adds the backward ones. Pure.

    tape = Tape(dtype_bytes=2)
    x = tape.input("x", rows=Rates(row=1.0), columns=512, needs_grad=True)
    y = Linear("fc", 512, 2048)(Norm("norm", 512)(x))
    tape.backward(y)
    graph = tape.graph()

As in autograd, gradients are computed only for activations that need one and for trainable weights. The weight
gradients of linear layers belong to a separate phase; the gradients of a value that is used twice are summed.

Source: PipeWeaver's SEMU, section 4.1 (gradient and weight backward of a linear layer are two operators).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mmtrain.costs.operators.operator_graph import (
    Device,
    DeviceKind,
    Graph,
    Operator,
    OpKind,
    Phase,
    ProductShape,
    TensorNode,
)
from mmtrain.spec.work_size import ZERO_RATES, Rates


@dataclass(frozen=True, slots=True, eq=False)
class Var:
    """An activation [rows, columns] on a tape."""

    tape: "Tape"
    tensor: int
    rows: Rates
    columns: float
    needs_grad: bool

    @property
    def num_bytes(self) -> Rates:
        """Bytes of the activation."""
        return self.rows * (self.columns * self.tape.dtype_bytes)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A weight on a tape."""

    tensor: int
    count: float
    """Number of its elements on this rank."""
    trainable: bool


Gradients = Callable[[int], Mapping[Var, int]]
"""Gradient of a call's result -> gradients of its operands; adds the operators of the backward."""


class Tape:
    """Collects the operators and tensors of one rank."""

    def __init__(self, *, dtype_bytes: int = 2, compute: DeviceKind = DeviceKind.GPU, each_call: bool = False) -> None:
        """Args: each_call: operators are those of one call of a DiT's layer, see `Operator`."""
        self.each_call = each_call
        self.dtype_bytes = dtype_bytes
        self.compute = Device(compute)
        self.parameters: list[Parameter] = []
        self._tensors: list[TensorNode] = []
        self._operators: list[Operator] = []
        self._calls: list[tuple[Var, Gradients]] = []

    # --------------------------------------------------------------------------------- tensors

    def tensor(self, name: str, num_bytes: Rates = ZERO_RATES, *, persistent: bool = False) -> int:
        """The index of a new tensor. Args: num_bytes: bytes as a function of the work's size."""
        self._tensors.append(TensorNode(name=name, num_bytes=num_bytes, persistent=persistent))
        return len(self._tensors) - 1

    def input(self, name: str, *, rows: Rates, columns: float, needs_grad: bool = False) -> Var:
        """An input activation. Args: needs_grad: whether a gradient has to reach it."""
        return self.var(name, rows=rows, columns=columns, needs_grad=needs_grad)

    def var(self, name: str, *, rows: Rates, columns: float, needs_grad: bool) -> Var:
        """An activation in a new tensor."""
        tensor = self.tensor(name, rows * (columns * self.dtype_bytes))
        return Var(self, tensor, rows, columns, needs_grad)

    def parameter(self, name: str, count: float, *, trainable: bool = True) -> Parameter:
        """A weight with `count` elements on this rank."""
        tensor = self.tensor(name, Rates(fixed=count * self.dtype_bytes), persistent=True)
        parameter = Parameter(tensor, count, trainable)
        self.parameters.append(parameter)
        return parameter

    # ------------------------------------------------------------------------------- operators

    def op(
        self,
        name: str,
        kind: OpKind,
        *,
        phase: Phase = Phase.FORWARD,
        device: DeviceKind | None = None,
        inputs: tuple[int, ...] = (),
        outputs: tuple[int, ...] = (),
        flops: Rates = ZERO_RATES,
        mem_bytes: Rates = ZERO_RATES,
        net_bytes: Rates = ZERO_RATES,
        shape: ProductShape | None = None,
        launches: int = 1,
    ) -> None:
        """Adds an operator.

        Args:
            device: None: the device that computes.
            inputs, outputs: indices of tensors.
            flops, mem_bytes, net_bytes: amounts as functions of the work's size, see `Operator`.
        """
        self._operators.append(
            Operator(
                name=name,
                kind=kind,
                device=self.compute if device is None else Device(device),
                phase=phase,
                inputs=inputs,
                outputs=outputs,
                flops=flops,
                mem_bytes=mem_bytes,
                net_bytes=net_bytes,
                shape=shape,
                launches=launches,
                each_call=self.each_call,
            )
        )

    def stream(
        self,
        name: str,
        *,
        num_bytes: Rates,
        phase: Phase = Phase.FORWARD,
        kind: OpKind = OpKind.ELEMENTWISE,
        inputs: tuple[int, ...] = (),
        outputs: tuple[int, ...] = (),
        launches: int = 1,
    ) -> None:
        """Adds an operator that only reads and writes memory. Args: num_bytes: read and written together."""
        self.op(name, kind, phase=phase, inputs=inputs, outputs=outputs, mem_bytes=num_bytes, launches=launches)

    def pointwise(
        self,
        name: str,
        operands: tuple[Var, ...],
        result: Var,
        *,
        forward_bytes: Rates,
        backward_bytes: Rates,
        kind: OpKind = OpKind.ELEMENTWISE,
        launches: tuple[int, int] = (1, 1),
        weights: tuple[int, ...] = (),
        saved: tuple[int, ...] | None = None,
    ) -> Var:
        """`result`, with an operator that makes it and one that makes the gradients of all operands.

        Both only read and write memory.

        Args:
            forward_bytes, backward_bytes: read and written by each.
            launches: kernels of each.
            weights: further tensors that both read.
            saved: tensors that the forward makes for the backward; None: the backward reads what the forward reads.
        """
        read = (*(x.tensor for x in operands), *weights)
        outputs = (result.tensor, *(saved or ()))
        self.stream(name, kind=kind, num_bytes=forward_bytes, inputs=read, outputs=outputs, launches=launches[0])

        def gradients(grad: int) -> dict[Var, int]:
            grads = {x: self.tensor(f"{name}.dx", x.num_bytes) for x in operands}
            self.stream(
                f"{name}.backward",
                kind=kind,
                phase=Phase.BACKWARD_INPUT,
                num_bytes=backward_bytes,
                inputs=(grad, *(read if saved is None else saved)),
                outputs=tuple(grads.values()),
                launches=launches[1],
            )
            return grads

        return self.record(result, gradients)

    def product(
        self,
        name: str,
        m: Rates,
        n: Rates,
        k: Rates,
        *,
        flops: Rates,
        num_bytes: Rates,
        phase: Phase,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        kind: OpKind = OpKind.MATMUL,
    ) -> None:
        """Adds a matrix product [m, k] x [k, n]."""
        self.op(
            name,
            kind,
            phase=phase,
            inputs=inputs,
            outputs=outputs,
            flops=flops,
            mem_bytes=num_bytes,
            shape=ProductShape(m=m, n=n, k=k),
        )

    def accumulate(self, name: str, parameter: Parameter, gradient: int, phase: Phase) -> None:
        """Adds a weight's gradient to the sum over the microbatches: two reads and a write."""
        num_bytes = Rates(fixed=3 * parameter.count * self.dtype_bytes)
        self.stream(f"{name}.accumulate", num_bytes=num_bytes, phase=phase, inputs=(gradient,))

    def record(self, result: Var, gradients: Gradients) -> Var:
        """The result of a call; records its backward if the result needs a gradient."""
        if result.needs_grad:
            self._calls.append((result, gradients))
        return result

    def backward(self, result: Var) -> None:
        """Adds the backward of all recorded calls, starting from the gradient of `result`, which is an input."""
        if not result.needs_grad:
            return
        grads = {result: self.tensor("grad", result.num_bytes)}
        for output, gradients in reversed(self._calls):
            if output not in grads:
                continue
            for var, grad in gradients(grads.pop(output)).items():
                if var.needs_grad:
                    grads[var] = self._sum(var, grads[var], grad) if var in grads else grad
        self._calls.clear()

    def _sum(self, var: Var, first: int, second: int) -> int:
        total = self.tensor("grad.sum", var.num_bytes)
        self.stream(
            "grad.sum",
            num_bytes=3 * var.num_bytes,
            phase=Phase.BACKWARD_INPUT,
            inputs=(first, second),
            outputs=(total,),
        )
        return total

    def graph(self) -> Graph:
        """The graph of all operators and tensors that were added."""
        return Graph(operators=tuple(self._operators), tensors=tuple(self._tensors))
