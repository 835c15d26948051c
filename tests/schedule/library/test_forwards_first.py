"""GPipe, Looped BFS and Optimus: forwards that do not wait for backwards."""

import pytest

from mmtrain.schedule.action import Kind
from mmtrain.schedule.library.breadth_first import gpipe, looped_bfs
from mmtrain.schedule.library.one_f_one_b import one_f_one_b
from mmtrain.schedule.library.optimus import optimus
from mmtrain.schedule.simulate import simulate
from tests.schedule.problems import chain, option, two_modules


@pytest.mark.parametrize(("p", "m"), [(1, 4), (2, 3), (4, 8)])
def test_gpipe_has_its_closed_form(p: int, m: int) -> None:
    problem = chain(p, m, cost=option(forward_s=1.0, backward_s=2.5))
    timeline = simulate(problem, gpipe(problem))
    assert timeline.makespan_s == (p - 1 + m) * 3.5
    assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1))
    assert timeline.peak_bytes == (float(m),) * p


@pytest.mark.parametrize(("p", "segments", "m"), [(2, 2, 4), (4, 2, 8), (4, 3, 6)])
def test_looped_bfs_divides_the_bubble_by_the_segments(p: int, segments: int, m: int) -> None:
    problem = chain(p, m, num_segments=segments)
    timeline = simulate(problem, looped_bfs(problem))
    assert timeline.bubble == pytest.approx((p - 1) / (m * segments + p - 1))


def test_looped_bfs_finishes_a_segment_before_the_next() -> None:
    assert str(looped_bfs(chain(1, 2, num_segments=2))) == "0F0.0 0F1.0 1F0.0 1F1.0 1B0.0 1B1.0 0B0.0 0B1.0"


def test_optimus_encodes_all_images_first() -> None:
    plan = optimus(two_modules(2, [1, 0, 2]))
    assert str(plan) == GOLDEN


GOLDEN = """\
0F0.0 0F2.0 0F2.1 2F0.0 2F1.0 2B0.0 2F2.0 2B1.0 2B2.0 0B0.0 0B2.0 0B2.1
1F0.0 1F2.0 1F2.1 3F0.0 3B0.0 3F1.0 3B1.0 3F2.0 3B2.0 1B0.0 1B2.0 1B2.1"""


def test_optimus_of_text_alone_is_1f1b() -> None:
    for problem in (chain(3, 7), two_modules(2, [0, 0, 0])):
        assert optimus(problem) == one_f_one_b(problem)


def test_optimus_lets_frozen_encoders_go_without_backward() -> None:
    plan = optimus(two_modules(2, [1, 1], vision=option(backward_s=0.0)))
    assert not [a for order in plan.orders for a in order if a.kind is Kind.B and a.stage < 2]
