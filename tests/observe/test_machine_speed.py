"""A clock that looks at the machine's speed hides its looks, and knows which of them were beside a time."""

import math
import time
from itertools import pairwise

import pytest

from mmtrain.observe.machine_speed import WatchedClock


def scripted(*moments: float):
    """A clock that reads so one after the other."""
    return iter(moments).__next__


def test_the_clock_stands_still_while_it_looks():
    clock = WatchedClock(scripted(10.0, 13.0, 13.5, 14.0, 16.0, 16.5), every_s=1.0)
    assert clock() == 10.0, "and looks until 13"
    assert clock() == 10.5
    assert clock() == 11.0, "and looks until 16"
    assert clock() == 11.5
    assert clock.moments == [10.0, 11.0], "the readings themselves"
    assert all(seconds > 0 for seconds in clock.speeds_s)


def test_the_looks_at_both_ends_of_an_action_are_beside_it():
    clock = WatchedClock(time.perf_counter, every_s=0.0)
    ends = [clock() for _ in range(4)]
    clock.speeds_s = [1.0, 2.0, 4.0, 8.0]
    assert [clock.speed_s(*pair) for pair in pairwise(ends)] == [1.5, 3.0, 6.0]


def test_it_looks_no_more_often_than_it_should():
    clock = WatchedClock(time.perf_counter, every_s=math.inf)
    readings = [clock() for _ in range(5)]
    assert readings == sorted(readings)
    assert len(clock.moments) == 1, "the first reading has nothing before it"
    clock.look()
    assert len(clock.moments) == 2
    assert clock.moments[1] >= readings[-1]


@pytest.mark.parametrize(
    ("start", "end", "mean"),
    [
        (1.2, 1.8, 2.5),  # between two looks: both
        (1.0, 2.0, 2.5),  # from look to look
        (0.5, 2.5, 14 / 4),
        (-1.0, -0.5, 1.0),  # before the first
        (3.5, 9.0, 8.0),  # after the last
        (-1.0, 9.0, 14 / 4),
    ],
)
def test_the_looks_beside_a_time_count(start, end, mean):
    clock = WatchedClock(time.perf_counter, every_s=1.0)
    clock.moments, clock.speeds_s = [0.0, 1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 8.0]
    assert clock.speed_s(start, end) == mean


def test_a_clock_that_never_looks_knows_no_speed():
    clock = WatchedClock(scripted(10.0, 11.0, 12.0), every_s=None)
    clock.look()
    assert [clock(), clock()] == [10.0, 11.0]
    assert clock.moments == []
    assert clock.speed_s(10.0, 11.0) == 0.0
