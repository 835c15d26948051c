"""Collectives between the ranks that divide a layer, as modules. Pure.

What a name says happens forward; gradients go the opposite way, as in sequence parallelism (arXiv:2205.05198, section
4.2.2). Nothing overlaps a collective: what comes next needs its result.
"""

from dataclasses import dataclass

from mmtrain.planner.operators.cluster import sent_bytes
from mmtrain.planner.operators.graph import DeviceKind, OpKind, Phase
from mmtrain.planner.operators.tape import Var


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective forward, and the one that its gradient needs; for one rank nothing at all."""

    name: str
    forward: OpKind | None
    """None: this rank's rows are cut out, or nothing happens where as many rows come out as go in."""
    backward: OpKind | None
    ranks: int
    link: DeviceKind
    rows_factor: float = 1.0
    """Rows that come out over those that go in."""

    def __call__(self, x: Var) -> Var:
        if self.ranks == 1:
            return x
        tape, cuts = x.tape, self.rows_factor != 1
        if self.forward is None and not cuts:
            out = Var(tape, x.tensor, x.rows, x.columns, x.needs_grad)
        else:
            out = tape.var(self.name, rows=x.rows * self.rows_factor, columns=x.columns, needs_grad=x.needs_grad)
            self._add(x, out, self.forward, self.name, Phase.FORWARD, x.tensor, out.tensor)

        def gradients(grad: int) -> dict[Var, int]:
            if self.backward is None and not cuts:
                return {x: grad}
            into = tape.tensor(f"{self.name}.dx", x.num_bytes)
            self._add(x, out, self.backward, f"{self.name}.backward", Phase.BACKWARD_INPUT, grad, into)
            return {x: into}

        return tape.record(out, gradients)

    def _add(self, x: Var, out: Var, kind: OpKind | None, name: str, phase: Phase, source: int, result: int) -> None:
        part, whole = (out, x) if self.rows_factor < 1 else (x, out)
        if kind is None:
            x.tape.stream(name, phase=phase, num_bytes=2 * part.num_bytes, inputs=(source,), outputs=(result,))
            return
        x.tape.op(
            name,
            kind,
            phase=phase,
            device=self.link,
            inputs=(source,),
            outputs=(result,),
            net_bytes=whole.num_bytes * sent_bytes(kind, 1.0, self.ranks),
        )


def gather_for_parts(name: str, ranks: int, link: DeviceKind) -> Exchange:
    """This rank's rows -> all rows, of which it computes its own columns; backward: reduce-scatter."""
    return Exchange(name, OpKind.ALL_GATHER, OpKind.REDUCE_SCATTER, ranks, link, float(ranks))


def sum_shard(name: str, ranks: int, link: DeviceKind) -> Exchange:
    """Summands of all rows -> this rank's rows of the sum; backward: all-gather."""
    return Exchange(name, OpKind.REDUCE_SCATTER, OpKind.ALL_GATHER, ranks, link, 1 / ranks)


def gather(name: str, ranks: int, link: DeviceKind) -> Exchange:
    """This rank's rows -> all rows, from which all ranks compute the same; backward: this rank's rows."""
    return Exchange(name, OpKind.ALL_GATHER, None, ranks, link, float(ranks))


def shard(name: str, ranks: int, link: DeviceKind) -> Exchange:
    """All rows, equal on all ranks -> this rank's rows; backward: all-gather."""
    return Exchange(name, None, OpKind.ALL_GATHER, ranks, link, 1 / ranks)


def use_for_parts(name: str, ranks: int, link: DeviceKind) -> Exchange:
    """What is equal on all ranks, of which each computes its own part; backward: all-reduce."""
    return Exchange(name, None, OpKind.ALL_REDUCE, ranks, link)


def sum_whole(name: str, ranks: int, link: DeviceKind) -> Exchange:
    """Summands of all rows -> their sum on all ranks; backward: nothing."""
    return Exchange(name, OpKind.ALL_REDUCE, None, ranks, link)


@dataclass(frozen=True, slots=True)
class RowSums:
    """x, whose columns the ranks divide, after a sum over all columns was exchanged; and again for its gradient."""

    name: str
    ranks: int
    link: DeviceKind

    def __call__(self, x: Var) -> Var:
        if self.ranks == 1:
            return x
        # The operators between wait for the sum, which is a number a row; x itself stays where it is.
        out = Var(x.tape, self._add(x, x.tensor, Phase.FORWARD), x.rows, x.columns, x.needs_grad)
        return x.tape.record(out, lambda grad: {x: self._add(x, grad, Phase.BACKWARD_INPUT)})

    def _add(self, x: Var, source: int, phase: Phase) -> int:
        name = self.name if phase is Phase.FORWARD else f"{self.name}.backward"
        made = x.tape.tensor(name)
        x.tape.op(
            name,
            OpKind.ALL_REDUCE,
            phase=phase,
            device=self.link,
            inputs=(source,),
            outputs=(made,),
            net_bytes=x.rows * sent_bytes(OpKind.ALL_REDUCE, 4.0, self.ranks),
        )
        return made
