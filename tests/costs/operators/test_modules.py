"""What modules add to a tape."""

import pytest

from mmtrain.costs.operators.exchanges import gather_for_parts, sum_shard, sum_whole, use_for_parts
from mmtrain.costs.operators.execution import simulate
from mmtrain.costs.operators.functions import add, concat, split
from mmtrain.costs.operators.modules import Attention, Linear, Norm, activation
from mmtrain.costs.operators.operator_graph import DeviceKind, Graph, OpKind, Phase
from mmtrain.costs.operators.tape import Tape, Var
from mmtrain.spec.work_size import Rates, WorkSize
from tests.costs.operators.graphs import LATENCIES

SIZE = WorkSize(rows=1000, pairs=50_000, outputs=0)
NVLINK = DeviceKind.NVLINK


def tape(columns: float = 64, *, needs_grad: bool = True) -> tuple[Tape, Var]:
    made = Tape(dtype_bytes=2)
    return made, made.input("x", rows=Rates(row=1.0), columns=columns, needs_grad=needs_grad)


def names(graph: Graph, phase: Phase) -> list[str]:
    return [op.name for op in graph.operators if op.phase is phase]


def flops(graph: Graph, phase: Phase) -> float:
    return sum(op.flops(SIZE) for op in graph.operators if op.phase is phase)


def test_backward_follows_by_rule() -> None:
    made, x = tape()
    hidden = activation("act", "gelu")(Linear("up", 64, 256)(Norm("norm", 64)(x)))
    made.backward(Linear("down", 256, 64)(hidden))
    graph = made.graph()
    assert names(graph, Phase.FORWARD) == ["norm", "up", "act", "down"]
    assert names(graph, Phase.BACKWARD_INPUT) == ["down.dx", "act.backward", "up.dx", "norm.backward"]
    assert names(graph, Phase.BACKWARD_WEIGHT) == ["down.dw", "down.accumulate", "up.dw", "up.accumulate"]
    assert {flops(graph, phase) for phase in Phase} == {2 * 2 * 64 * 256 * 1000.0}
    assert sum(p.count for p in made.parameters) == 2 * 64 + 2 * 64 * 256


def test_frozen_weights_without_a_gradient_before_them_have_no_backward() -> None:
    made, x = tape(needs_grad=False)
    made.backward(Linear("fc", 64, 64, trainable=False)(x))
    assert names(made.graph(), Phase.BACKWARD_INPUT) == names(made.graph(), Phase.BACKWARD_WEIGHT) == []


def test_the_first_trainable_layer_needs_no_gradient_of_its_input() -> None:
    made, x = tape(needs_grad=False)
    made.backward(Linear("second", 64, 64, trainable=False)(Linear("first", 64, 64)(x)))
    assert names(made.graph(), Phase.BACKWARD_INPUT) == ["second.dx"]
    assert names(made.graph(), Phase.BACKWARD_WEIGHT) == ["first.dw", "first.accumulate"]


def test_gradients_of_a_value_that_is_used_twice_are_summed() -> None:
    made, x = tape()
    made.backward(add("add", x, Linear("fc", 64, 64, trainable=False)(x)))
    assert names(made.graph(), Phase.BACKWARD_INPUT) == ["fc.dx", "grad.sum"]


def test_activations_are_held_until_their_backward() -> None:
    made, x = tape()
    made.backward(Linear("second", 64, 64)(Linear("first", 64, 64)(x)))
    found = simulate(made.graph(), LATENCIES, SIZE)
    ends = {op.name: end for op, end in zip(found.graph.operators, found.end_s, strict=True)}
    lives = {t.name: life for t, life in zip(found.graph.tensors, found.lifetimes, strict=True)}
    assert lives["first"][1] == ends["second.dw"]
    assert lives["x"][1] == ends["first.dw"]
    assert lives["second"][1] == ends["second"]
    assert lives["first.weight"] == (0.0, found.makespan_s)


def test_attention_counts_the_pairs() -> None:
    made, x = tape(3 * 64)
    query, key, value = split("qkv", x, 3)
    made.backward(Attention("attention", Rates(pair=1.0), 16)(query, key, value))
    graph = made.graph()
    assert flops(graph, Phase.FORWARD) == 4 * 64 * 50_000
    assert flops(graph, Phase.BACKWARD_INPUT) == 8 * 64 * 50_000
    assert names(graph, Phase.BACKWARD_INPUT) == ["attention.backward", "qkv.backward"]


def test_keys_may_come_as_one() -> None:
    made, x = tape()
    query, key, value = (Linear(name, 64, 64, trainable=False)(x) for name in "qkv")
    made.backward(Attention("attention", Rates(pair=1.0), 16)(query, concat("kv", key, value)))
    assert names(made.graph(), Phase.BACKWARD_INPUT)[:1] == ["attention.backward"]
    assert names(made.graph(), Phase.BACKWARD_INPUT).count("grad.sum") == 2


@pytest.mark.parametrize(
    ("make", "forward", "backward", "sent"),
    [
        (gather_for_parts, OpKind.ALL_GATHER, OpKind.REDUCE_SCATTER, 3 * 1000 * 128),
        (sum_shard, OpKind.REDUCE_SCATTER, OpKind.ALL_GATHER, 0.75 * 1000 * 128),
        (use_for_parts, None, OpKind.ALL_REDUCE, 1.5 * 1000 * 128),
        (sum_whole, OpKind.ALL_REDUCE, None, 1.5 * 1000 * 128),
    ],
)
def test_exchanges_and_their_gradients(make, forward, backward, sent) -> None:  # type: ignore[no-untyped-def]
    made, x = tape()
    made.backward(make("exchange", 4, NVLINK)(x))
    found = {op.phase: op for op in made.graph().operators}
    for phase, kind in ((Phase.FORWARD, forward), (Phase.BACKWARD_INPUT, backward)):
        if kind is None:
            assert phase not in found
        else:
            assert (found[phase].kind, found[phase].device.kind) == (kind, NVLINK)
            assert found[phase].net_bytes(SIZE) == sent


def test_one_rank_exchanges_nothing() -> None:
    _, x = tape()
    assert gather_for_parts("exchange", 1, NVLINK)(x) is x


def test_an_unknown_activation_counts_as_the_slowest() -> None:
    assert activation("act", "mish").forward == activation("act", "gelu_new").forward
