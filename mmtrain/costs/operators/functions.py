"""Functions of activations between modules: sums, concatenation, views and selection of rows. Pure."""

from mmtrain.costs.operators.operator_graph import Phase
from mmtrain.costs.operators.tape import Var
from mmtrain.spec.work_size import Rates


def add(name: str, x: Var, branch: Var) -> Var:
    """The sum of two activations; the gradient of each is that of the sum."""
    tape = x.tape
    result = tape.var(name, rows=x.rows, columns=x.columns, needs_grad=x.needs_grad or branch.needs_grad)
    tape.stream(name, num_bytes=3 * x.num_bytes, inputs=(x.tensor, branch.tensor), outputs=(result.tensor,))
    return tape.record(result, lambda grad: {x: grad, branch: grad})


def concat(name: str, *parts: Var) -> Var:
    """Activations of the same rows side by side, copied."""
    tape = parts[0].tape
    columns, needs_grad = sum(x.columns for x in parts), any(x.needs_grad for x in parts)
    result = tape.var(name, rows=parts[0].rows, columns=columns, needs_grad=needs_grad)
    num_bytes = 2 * result.num_bytes
    tape.stream(name, num_bytes=num_bytes, inputs=tuple(x.tensor for x in parts), outputs=(result.tensor,))
    return tape.record(result, lambda grad: dict.fromkeys(parts, grad))


def split(name: str, x: Var, parts: int) -> tuple[Var, ...]:
    """Equal parts of the columns of an activation, as views; their gradients are copied into one tensor."""
    tape = x.tape
    views = tuple(Var(tape, x.tensor, x.rows, x.columns / parts, x.needs_grad) for _ in range(parts))
    grads: list[int] = []

    def gradients(grad: int) -> dict[Var, int]:
        grads.append(grad)
        if len(grads) < parts:
            return {}
        x_grad = tape.tensor(f"{name}.dx", x.num_bytes)
        tape.stream(
            f"{name}.backward",
            phase=Phase.BACKWARD_INPUT,
            num_bytes=2 * x.num_bytes,
            inputs=tuple(grads),
            outputs=(x_grad,),
        )
        return {x: x_grad}

    for view in views:
        tape.record(view, gradients)
    return views


def reshape(x: Var, *, rows: Rates, columns: float) -> Var:
    """A view of an activation with other numbers of rows and columns."""
    tape = x.tape
    result = Var(tape, x.tensor, rows, columns, x.needs_grad)
    return tape.record(result, lambda grad: {x: grad})


def select(name: str, x: Var, rows: Rates) -> Var:
    """A copy of some rows of an activation; the gradient of the other rows is zero."""
    tape = x.tape
    result = tape.var(name, rows=rows, columns=x.columns, needs_grad=x.needs_grad)
    backward_bytes = x.num_bytes + 2 * result.num_bytes  # zeros, then the selected rows
    return tape.pointwise(
        name,
        (x,),
        result,
        forward_bytes=2 * result.num_bytes,
        backward_bytes=backward_bytes,
        launches=(1, 2),
        saved=(),
    )


def mean_rows(x: Var, rows: Rates) -> Var:
    """The means of groups of rows of an activation, which are fewer rows; the backward reads none of them."""
    result = x.tape.var("pool", rows=rows, columns=x.columns, needs_grad=x.needs_grad)
    num_bytes = x.num_bytes + result.num_bytes
    return x.tape.pointwise("pool", (x,), result, forward_bytes=num_bytes, backward_bytes=num_bytes, saved=())


def replace_rows(x: Var, features: Var) -> Var:
    """A copy of x with some rows replaced by image features."""
    tape = x.tape
    needs_grad = x.needs_grad or features.needs_grad
    result = tape.var("scatter", rows=x.rows, columns=x.columns, needs_grad=needs_grad)
    tape.stream("scatter", num_bytes=2 * x.num_bytes, inputs=(x.tensor, features.tensor), outputs=(result.tensor,))

    def gradients(grad: int) -> dict[Var, int]:
        x_grad = tape.tensor("scatter.dx", x.num_bytes)
        tape.stream(
            "scatter.backward",
            phase=Phase.BACKWARD_INPUT,
            num_bytes=2 * x.num_bytes,
            inputs=(grad,),
            outputs=(x_grad,),
        )
        return {x: x_grad, features: x_grad}

    return tape.record(result, gradients)


def bundle(*parts: Var) -> Var:
    """Activations of one width that leave a layer as one, without a copy; each gets its part of the gradient."""
    first, tape = parts[0], parts[0].tape
    rows = sum((x.rows for x in parts), Rates())
    result = Var(tape, first.tensor, rows, first.columns, any(x.needs_grad for x in parts))
    return tape.record(result, lambda grad: dict.fromkeys(parts, grad))
