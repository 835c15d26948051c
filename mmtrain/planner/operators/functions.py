"""What is done with activations between modules: sums, joins, views and choices of rows. Pure."""

from mmtrain.planner.operators.graph import Phase
from mmtrain.planner.operators.tape import Var
from mmtrain.spec.spec import Rates


def add(name: str, x: Var, branch: Var) -> Var:
    """The sum of two activations; the gradient of each is that of the sum."""
    tape = x.tape
    out = tape.var(name, rows=x.rows, columns=x.columns, needs_grad=x.needs_grad or branch.needs_grad)
    tape.stream(name, num_bytes=3 * x.num_bytes, inputs=(x.tensor, branch.tensor), outputs=(out.tensor,))
    return tape.record(out, lambda grad: {x: grad, branch: grad})


def concat(name: str, *parts: Var) -> Var:
    """Activations of the same rows side by side, copied."""
    tape = parts[0].tape
    columns, needs = sum(x.columns for x in parts), any(x.needs_grad for x in parts)
    out = tape.var(name, rows=parts[0].rows, columns=columns, needs_grad=needs)
    num_bytes = 2 * out.num_bytes
    tape.stream(name, num_bytes=num_bytes, inputs=tuple(x.tensor for x in parts), outputs=(out.tensor,))
    return tape.record(out, lambda grad: dict.fromkeys(parts, grad))


def split(name: str, x: Var, parts: int) -> tuple[Var, ...]:
    """Equal columns of an activation, as views; their gradients are copied into one."""
    tape = x.tape
    views = tuple(Var(tape, x.tensor, x.rows, x.columns / parts, x.needs_grad) for _ in range(parts))
    grads: list[int] = []

    def gradients(grad: int) -> dict[Var, int]:
        grads.append(grad)
        if len(grads) < parts:
            return {}
        into = tape.tensor(f"{name}.dx", x.num_bytes)
        tape.stream(
            f"{name}.backward",
            phase=Phase.BACKWARD_INPUT,
            num_bytes=2 * x.num_bytes,
            inputs=tuple(grads),
            outputs=(into,),
        )
        return {x: into}

    for view in views:
        tape.record(view, gradients)
    return views


def reshape(x: Var, *, rows: Rates, columns: float) -> Var:
    """The same numbers as other rows."""
    tape = x.tape
    out = Var(tape, x.tensor, rows, columns, x.needs_grad)
    return tape.record(out, lambda grad: {x: grad})


def select(name: str, x: Var, rows: Rates) -> Var:
    """Some rows of an activation, copied; the gradient of the others is zero."""
    tape = x.tape
    out = tape.var(name, rows=rows, columns=x.columns, needs_grad=x.needs_grad)
    tape.stream(name, num_bytes=2 * out.num_bytes, inputs=(x.tensor,), outputs=(out.tensor,))

    def gradients(grad: int) -> dict[Var, int]:
        into = tape.tensor(f"{name}.dx", x.num_bytes)
        tape.stream(
            f"{name}.backward",
            phase=Phase.BACKWARD_INPUT,
            num_bytes=x.num_bytes + 2 * out.num_bytes,
            inputs=(grad,),
            outputs=(into,),
            launches=2,
        )
        return {x: into}

    return tape.record(out, gradients)


def replace_rows(x: Var, features: Var) -> Var:
    """x with image features in the place of some rows, as a copy."""
    tape = x.tape
    needs = x.needs_grad or features.needs_grad
    out = tape.var("scatter", rows=x.rows, columns=x.columns, needs_grad=needs)
    tape.stream("scatter", num_bytes=2 * x.num_bytes, inputs=(x.tensor, features.tensor), outputs=(out.tensor,))

    def gradients(grad: int) -> dict[Var, int]:
        into = tape.tensor("scatter.dx", x.num_bytes)
        tape.stream(
            "scatter.backward",
            phase=Phase.BACKWARD_INPUT,
            num_bytes=2 * x.num_bytes,
            inputs=(grad,),
            outputs=(into,),
        )
        return {x: into, features: into}

    return tape.record(out, gradients)


def bundle(*parts: Var) -> Var:
    """Activations of one width that leave a layer together, without a copy; each gets its part of the gradient."""
    first, tape = parts[0], parts[0].tape
    rows = sum((x.rows for x in parts), Rates())
    out = Var(tape, first.tensor, rows, first.columns, any(x.needs_grad for x in parts))
    return tape.record(out, lambda grad: dict.fromkeys(parts, grad))
