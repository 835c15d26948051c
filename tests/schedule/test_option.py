"""Seconds of actions and blocks with exchanges: compute of F, I, W 4, 5, 3; exchanges of each half 2."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.errors import PlanError
from mmtrain.schedule.action import Kind
from mmtrain.schedule.option import Load, Option
from tests.schedule.problems import chain, halves


def cost(contention: float, exchange_s: float = 2.0) -> Option:
    return Option(
        name="keep",
        forward_s=4.0 + exchange_s,
        backward_input_s=5.0 + exchange_s,
        backward_weight_s=3.0,
        activation_bytes=1.0,
        forward_exchange_s=exchange_s,
        backward_exchange_s=exchange_s,
        contention=contention,
    )


@pytest.mark.parametrize(("contention", "seconds"), [(1.0, (6, 7, 3, 10)), (0.0, (6, 7, 3, 8)), (0.5, (6, 7, 3, 9))])
def test_only_a_whole_backward_hides_exchanges_by_itself(contention: float, seconds: tuple[float, ...]) -> None:
    assert tuple(cost(contention).duration_s(Kind(kind)) for kind in "FIWB") == seconds


@pytest.mark.parametrize(
    ("kind", "exchange_s", "seconds"),
    [("B", 2.0, 12.0), ("I", 2.0, 9.0), ("W", 2.0, 7.0), ("I", 6.0, 12.0), ("W", 5.0, 9.0), ("B", 8.0, 16.0)],
)
def test_a_block_hides_what_lies_under_the_other_part(kind: str, exchange_s: float, seconds: float) -> None:
    option = cost(0.0, exchange_s)
    assert option.load(Kind.F).together(option.load(Kind(kind))).seconds == seconds


@given(st.lists(st.floats(0, 1e6), min_size=5, max_size=5), st.floats(0, 1))
def test_a_block_is_never_shorter_than_its_compute_nor_longer_than_one_after_the_other(
    times: list[float], contention: float
) -> None:
    load = Load(*times, contention=contention)
    assert load.compute_s * (1 - 1e-12) <= load.seconds <= sum(times) * (1 + 1e-12)
    assert load.seconds <= Load(*times).seconds * (1 + 1e-12)


def test_layers_without_units_hide_nothing_also_in_a_block_with_others() -> None:
    mixed = cost(0.0).load(Kind.F).together(cost(1.0).load(Kind.B))
    assert mixed.seconds == cost(1.0).load(Kind.F).together(cost(1.0).load(Kind.B)).seconds == 16.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"forward_exchange_s": 7.0}, r"costs\[0\]\[0\]\.forward_exchange_s = 7.0; it is a part of forward_s = 1.0"),
        ({"contention": 1.5}, r"costs\[0\]\[0\]\.contention = 1.5; it must be between 0 and 1"),
    ],
)
def test_wrong_exchanges_are_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        chain(1, 1, cost=replace(halves(1.0, 1.0, 1.0), **change))
