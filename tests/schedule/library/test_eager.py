"""Forwards ahead of the warm-up of a schedule, on the ranks of encoders."""

import inspect
import itertools

import pytest

from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.schedule.library.names import EAGER_SCHEDULES
from mmtrain.schedule.plan import check
from mmtrain.schedule.simulate import simulate
from tests.schedule.problems import chain, in_pairs

MICROBATCHES = {4: 12, 8: 32}
"""Of each number of ranks."""


def seconds(name: str, p: int, share: float = 0.0, *, uneven: float = 0.0, eager: int = 0) -> float:
    """The makespan of `in_pairs` on p ranks."""
    problem = in_pairs((p // 2, p // 2), MICROBATCHES[p], share, uneven=uneven)
    plan = CATALOGUE[name].eager(eager).make(problem)
    check(plan, problem)
    return simulate(problem, plan).makespan_s


@pytest.mark.parametrize(
    ("name", "p", "equal", "uneven", "deferred"),
    [
        ("1F1B", 4, 45.0, 62.0, (55.0, 45.0, 45.0)),
        ("1F1B", 8, 117.0, 167.0, (147.0, 123.0, 120.5)),
        ("ZB-H1", 4, 39.0, 49.0, (42.0, 38.5, 38.5)),
        ("ZB-H1", 8, 103.0, 131.0, (112.5, 103.5, 103.5)),
        ("ZB-AutoSchedule", 8, 103.0, 104.5, (102.0,)),
        ("interleave", 8, 117.0, 122.0, (116.0,)),
    ],
)
def test_one_more_pair_in_flight_hides_late_backwards(
    name: str, p: int, equal: float, uneven: float, deferred: tuple[float, ...]
) -> None:
    """The seconds of docs/planner.md: deferral makes uneven loads equal, forwards ahead take back what it costs."""
    assert (seconds(name, p), seconds(name, p, uneven=0.5)) == (equal, uneven)
    assert tuple(seconds(name, p, 0.5, eager=count) for count in range(len(deferred))) == deferred


def test_eager_schedules_are_those_of_the_names() -> None:
    takes = [name for name, schedule in CATALOGUE.items() if "eager" in inspect.signature(schedule.make).parameters]
    assert tuple(takes) == EAGER_SCHEDULES


@pytest.mark.parametrize("name", EAGER_SCHEDULES)
def test_plans_with_eager_forwards_are_sound_and_hold_more(name: str) -> None:
    """The first gradient comes back to the first rank of ZB-H2 before it may have more in flight."""
    problem = in_pairs((2, 2), 20)
    peaks = [simulate(problem, CATALOGUE[name].eager(count).make(problem)).peak_bytes for count in range(3)]
    for before, behind in itertools.pairwise(peaks):
        assert behind[0] >= before[0] + (name != "ZB-H2") / 2 and behind[2:] == before[2:]


@pytest.mark.parametrize("name", EAGER_SCHEDULES)
def test_memory_limits_take_back_what_does_not_fit(name: str) -> None:
    free = in_pairs((2, 2), 10)
    limits = simulate(free, CATALOGUE[name].eager(1).make(free)).peak_bytes
    limited = in_pairs((2, 2), 10, memory_limit_bytes=limits)
    plan = CATALOGUE[name].eager(5).make(limited)
    check(plan, limited)
    assert plan.orders == CATALOGUE[name].eager(1).make(free).orders


def test_a_module_alone_has_no_forwards_ahead() -> None:
    problem = chain(4, 8)
    assert CATALOGUE["1F1B"].eager(3).make(problem).orders == CATALOGUE["1F1B"].make(problem).orders
