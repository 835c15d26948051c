import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmtrain.costs.profile.fits import SizeFit, fit_sizes, non_negative_least_squares
from mmtrain.spec.spec import documents_work
from mmtrain.spec.work_size import WorkSize
from tests.examples import examples

SIZES = [
    documents_work([length] * count, targets) for length, count, targets in
    ((8, 1, 3), (64, 1, 60), (128, 1, 10), (32, 4, 100), (200, 1, 50), (16, 8, 7), (500, 2, 900), (1000, 1, 1))
]  # fmt: skip


def amounts(fit: SizeFit) -> list[float]:
    return [fit(size) for size in SIZES]


def test_a_sum_of_rows_pairs_outputs_and_a_constant_is_found_again():
    true = SizeFit(row=3e-6, pair=2e-9, output=5e-7, fixed=1e-4)
    found = fit_sizes(SIZES, amounts(true))
    for name in ("row", "pair", "window_pair", "output", "fixed"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=1e-6, abs=1e-18), name
    assert found.error < 1e-9


def test_one_document_is_a_quadratic_of_its_length():
    fit = SizeFit(row=3.0, pair=2.0, fixed=5.0)
    for x in (1, 10, 333):
        # a x^2 + b x + c, where x (x + 1) / 2 pairs are attended
        assert fit(documents_work([x], 0)) == pytest.approx(1.0 * x**2 + 4.0 * x + 5.0)


def test_what_falls_with_a_count_gets_no_negative_weight():
    falling = [1e-3 - 1e-7 * size.outputs + 1e-6 * size.rows for size in SIZES]
    found = fit_sizes(SIZES, falling)
    assert found.output == 0
    assert min(found.row, found.pair, found.fixed) >= 0
    assert 0 < found.error < found.worst


def test_nothing_measured_is_nothing():
    assert fit_sizes(SIZES, [0.0] * len(SIZES)) == SizeFit()


def test_errors_are_relative_so_small_works_count_as_much_as_large_ones():
    true = SizeFit(row=1e-6, fixed=1e-6)
    wrong = amounts(true)
    wrong[-1] *= 1.1  # the largest
    found = fit_sizes(SIZES, wrong)
    assert found(SIZES[0]) == pytest.approx(true(SIZES[0]), rel=0.03)


@settings(deadline=None, max_examples=examples(60))
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 20))
def test_non_negative_least_squares_meets_its_optimality_conditions(seed, columns, rows):
    rng = np.random.default_rng(seed)
    matrix, target = rng.normal(size=(rows, columns)), rng.normal(size=rows)
    found = non_negative_least_squares(matrix, target)
    assert (found >= 0).all()
    # Karush, Kuhn, Tucker: no weight can grow, and none above 0 can change, to a smaller error.
    slope = matrix.T @ (matrix @ found - target)
    assert (slope > -1e-7).all()
    assert np.abs(slope * (found > 0)).max() < 1e-7


def test_units_do_not_matter():
    matrix = np.array([[1.0, 1e9], [2.0, 1e9], [3.0, 4e9]])
    found = non_negative_least_squares(matrix, matrix @ np.array([2.0, 3e-9]))
    assert found == pytest.approx([2.0, 3e-9])


def test_a_column_that_is_always_zero_has_no_weight():
    assert fit_sizes([WorkSize(rows=n, pairs=0, outputs=0) for n in (1, 2, 4)], [1.0, 2.0, 4.0]).window_pair == 0
