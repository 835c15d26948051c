"""Benchmarks that change the seconds of a problem change all of an action's: exchanges, splits and copies, too."""

from dataclasses import replace

import emulate
import numpy as np
import peers_setups
import pytest
import robust

from mmtrain.schedule.action import Kind
from mmtrain.schedule.chain import plain_chain
from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.schedule.option import Option

KINDS = (Kind.F, Kind.I, Kind.W, Kind.B)
UNITS = Option(
    name="keep",
    forward_s=3.0,
    forward_exchange_s=1.0,
    backward_input_s=4.0,
    backward_exchange_s=2.0,
    backward_weight_s=1.0,
    split_s=0.5,
    activation_bytes=1.0,
    contention=0.2,
)
SECONDS = {Kind.F: 3.0, Kind.I: 4.0, Kind.W: 1.5, Kind.B: 2.0 + 2.0 + 0.2 * 1.0}
COPIES = Option(
    name="offload",
    forward_s=1.0,
    backward_input_s=1.0,
    backward_weight_s=1.0,
    activation_bytes=1.0,
    host_s=7.0,
)
COPIES_SECONDS = {Kind.F: 7.0, Kind.I: 7.0, Kind.W: 1.0, Kind.B: 7.0}


def seconds_of(option):
    return {kind: pytest.approx(option.duration_s(kind)) for kind in KINDS}


def chain(option):
    """Two stages, one microbatch."""
    made = plain_chain(2, 1, CATALOGUE["1F1B"])
    return replace(made, costs=((option,),), cost_index=((0, 0),))


@pytest.mark.parametrize(("option", "seconds"), [(UNITS, SECONDS), (COPIES, COPIES_SECONDS)])
def test_a_slower_problem_takes_a_factor_longer(option, seconds):
    slower = emulate.slower(chain(option), 0.5)
    assert seconds_of(slower.costs[0][0]) == {kind: 0.5 * value for kind, value in seconds.items()}


def test_drawn_seconds_are_those_of_the_action_also_far_below_the_planned_ones():
    drawn = robust.drawn(chain(UNITS), np.full((2, 3), 0.1))
    for option in (drawn.costs[0][0], drawn.costs[1][0]):
        assert seconds_of(option) == {kind: 0.1 * value for kind, value in SECONDS.items()}


@pytest.mark.parametrize(("option", "seconds"), [(UNITS, SECONDS), (COPIES, COPIES_SECONDS)])
def test_two_equal_parts_of_a_chain_take_twice_as_long_as_one(option, seconds):
    together = peers_setups._together([option, option])
    assert seconds_of(together) == {kind: 2.0 * value for kind, value in seconds.items()}
