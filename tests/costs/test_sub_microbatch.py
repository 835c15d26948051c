import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.costs.sub_microbatch import Curve, smallest_efficient
from mmtrain.errors import PlanError


def curve(seconds):
    return Curve(patches=256, seconds=tuple((n, seconds(n)) for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)))


def test_a_fixed_cost_is_paid_off_by_the_smallest_number_that_reaches_95_percent():
    # n images in n + 0.63: efficiency n / (n + 0.63), at 48 it is 0.987, of which 95 % is 0.938
    found = smallest_efficient(curve(lambda n: n + 0.63))
    assert found.size == 12  # 8 / 8.63 = 0.927, 12 / 12.63 = 0.950
    assert found.still_rises
    assert found.efficiency[0] == (1, pytest.approx(48.63 / 48 / 1.63))


def test_without_a_fixed_cost_one_image_is_enough():
    assert smallest_efficient(curve(lambda n: 0.5 * n)).size == 1


def test_the_best_may_lie_in_the_middle():
    found = smallest_efficient(curve(lambda n: n + 1 if n <= 8 else 1.5 * n))  # larger works leave the caches
    assert found.size == 6  # 6 / 7 = 0.857 of an image a second; the best is 8 / 9 = 0.889
    assert not found.still_rises


def test_the_order_of_the_points_does_not_matter():
    points = curve(lambda n: n + 3.0)
    assert smallest_efficient(Curve(patches=1, seconds=points.seconds[::-1])) == smallest_efficient(points)


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=20), st.floats(0.5, 1.0))
def test_nothing_smaller_is_good_enough_and_the_answer_is(seconds, share):
    points = Curve(patches=4, seconds=tuple(enumerate(seconds, 1)))
    found = smallest_efficient(points, share)
    rates = {n: n / s for n, s in points.seconds}
    best = max(rates.values())
    assert rates[found.size] >= share * best * (1 - 1e-12)
    assert all(rates[n] < share * best * (1 + 1e-12) for n in rates if n < found.size)


@pytest.mark.parametrize(
    ("seconds", "message"), [((), "needs measured works"), (((0, 1.0),), "0 images"), (((2, 0.0),), "0.0 s")]
)
def test_what_was_not_measured_is_refused(seconds, message):
    with pytest.raises(PlanError, match=message):
        smallest_efficient(Curve(patches=1, seconds=seconds))
