"""Collectives between the ranks that divide a layer, as modules. Pure.

A name describes the forward; the backward is its transpose, as in sequence parallelism (arXiv:2205.05198, section
4.2.2). Nothing overlaps a collective: the next operator needs its result.
"""

from collections.abc import Callable
from dataclasses import dataclass

from mmtrain.costs.operators.cluster import sent_bytes
from mmtrain.costs.operators.operator_graph import DeviceKind, OpKind, Phase
from mmtrain.costs.operators.tape import Var


@dataclass(frozen=True, slots=True)
class CollectivePair:
    """A collective in the forward and one in the backward; none for one rank."""

    name: str
    forward: OpKind | None
    """The collective of the forward. None: this rank's rows are copied out, or, with as many rows, nothing happens."""
    backward: OpKind | None
    ranks: int
    link: DeviceKind
    rows_factor: float = 1.0
    """Output rows over input rows."""

    def __call__(self, x: Var) -> Var:
        if self.ranks == 1:
            return x
        tape, cuts = x.tape, self.rows_factor != 1
        if self.forward is None and not cuts:
            result = Var(tape, x.tensor, x.rows, x.columns, x.needs_grad)
        else:
            result = tape.var(self.name, rows=x.rows * self.rows_factor, columns=x.columns, needs_grad=x.needs_grad)
            self._add(x, result, self.forward, self.name, Phase.FORWARD, x.tensor, result.tensor)

        def gradients(grad: int) -> dict[Var, int]:
            if self.backward is None and not cuts:
                return {x: grad}
            x_grad = tape.tensor(f"{self.name}.dx", x.num_bytes)
            self._add(x, result, self.backward, f"{self.name}.backward", Phase.BACKWARD_INPUT, grad, x_grad)
            return {x: x_grad}

        return tape.record(result, gradients)

    def _add(self, x: Var, y: Var, kind: OpKind | None, name: str, phase: Phase, source: int, result: int) -> None:
        smaller, larger = (y, x) if self.rows_factor < 1 else (x, y)
        if kind is None:
            x.tape.stream(name, phase=phase, num_bytes=2 * smaller.num_bytes, inputs=(source,), outputs=(result,))
            return
        x.tape.op(
            name,
            kind,
            phase=phase,
            device=self.link,
            inputs=(source,),
            outputs=(result,),
            net_bytes=larger.num_bytes * sent_bytes(kind, 1.0, self.ranks),
        )


def gather_for_parts(name: str, ranks: int, link: DeviceKind) -> CollectivePair:
    """This rank's rows -> all rows, from which each rank computes its own columns; backward: reduce-scatter."""
    return CollectivePair(name, OpKind.ALL_GATHER, OpKind.REDUCE_SCATTER, ranks, link, float(ranks))


def sum_shard(name: str, ranks: int, link: DeviceKind) -> CollectivePair:
    """Summands of all rows -> this rank's rows of the sum; backward: all-gather."""
    return CollectivePair(name, OpKind.REDUCE_SCATTER, OpKind.ALL_GATHER, ranks, link, 1 / ranks)


def gather(name: str, ranks: int, link: DeviceKind) -> CollectivePair:
    """This rank's rows -> all rows, from which all ranks compute the same; backward: this rank's rows."""
    return CollectivePair(name, OpKind.ALL_GATHER, None, ranks, link, float(ranks))


def shard(name: str, ranks: int, link: DeviceKind) -> CollectivePair:
    """All rows, equal on all ranks -> this rank's rows; backward: all-gather."""
    return CollectivePair(name, None, OpKind.ALL_GATHER, ranks, link, 1 / ranks)


def use_for_parts(name: str, ranks: int, link: DeviceKind) -> CollectivePair:
    """Rows that are equal on all ranks, from which each rank computes its own columns; backward: all-reduce."""
    return CollectivePair(name, None, OpKind.ALL_REDUCE, ranks, link)


def sum_whole(name: str, ranks: int, link: DeviceKind) -> CollectivePair:
    """Summands of all rows -> their sum on all ranks; backward: nothing."""
    return CollectivePair(name, OpKind.ALL_REDUCE, None, ranks, link)


def same(name: str, ranks: int, link: DeviceKind) -> CollectivePair:
    """Rows that are equal on all ranks, from which all compute the same; backward: nothing."""
    return CollectivePair(name, None, None, ranks, link)


MakeExchange = Callable[[str, int, DeviceKind], CollectivePair]
"""A function that makes the exchange of a name among some ranks over a link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BetweenLayers:
    """The exchanges at which rows enter and leave the columns of a layer, as in `parallel.row_shards.RowShards`."""

    shard: MakeExchange
    gather: MakeExchange
    gather_for_parts: MakeExchange
    sum_shard: MakeExchange
    use_for_rows: MakeExchange


DIVIDED_ROWS = BetweenLayers(
    shard=shard, gather=gather, gather_for_parts=gather_for_parts, sum_shard=sum_shard, use_for_rows=use_for_parts
)
"""Each rank has its part of the rows between layers."""
WHOLE_ROWS = BetweenLayers(
    shard=same, gather=same, gather_for_parts=use_for_parts, sum_shard=sum_whole, use_for_rows=same
)
"""Each rank has all rows between layers."""


@dataclass(frozen=True, slots=True)
class RowSums:
    """x, whose columns the ranks divide, after an all-reduce of a sum over columns; the backward has another one."""

    name: str
    ranks: int
    link: DeviceKind

    def __call__(self, x: Var) -> Var:
        if self.ranks == 1:
            return x
        # Later operators wait for the sum, one number for each row; x itself is not copied.
        result = Var(x.tape, self._add(x, x.tensor, Phase.FORWARD), x.rows, x.columns, x.needs_grad)
        return x.tape.record(result, lambda grad: {x: self._add(x, grad, Phase.BACKWARD_INPUT)})

    def _add(self, x: Var, source: int, phase: Phase) -> int:
        name = self.name if phase is Phase.FORWARD else f"{self.name}.backward"
        sums = x.tape.tensor(name)
        x.tape.op(
            name,
            OpKind.ALL_REDUCE,
            phase=phase,
            device=self.link,
            inputs=(source,),
            outputs=(sums,),
            net_bytes=x.rows * sent_bytes(OpKind.ALL_REDUCE, 4.0, self.ranks),
        )
        return sums
