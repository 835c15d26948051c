"""The order of windows against a reading of the definition, patch by patch."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.families.windows import feature_order, row_order, window_pairs, window_rows

MERGE = st.integers(1, 3)
WINDOW = st.integers(1, 4)
SIDES = st.lists(st.tuples(st.integers(1, 2), st.integers(1, 7), st.integers(1, 7)), min_size=1, max_size=3)


def windows(sides, window):
    """The units of each window, in the order of travel."""
    found, start = [], 0
    for t, height, width in sides:
        for frame in range(t):
            for top in range(0, height, window):
                for left in range(0, width, window):
                    rows, columns = range(top, min(top + window, height)), range(left, min(left + window, width))
                    at = start + frame * height * width
                    found.append([at + r * width + c for r in rows for c in columns])
        start += t * height * width
    return found


@given(SIDES, MERGE, WINDOW)
def test_rows_travel_window_by_window(sides, merge, window):
    grids = [(t, h * merge, w * merge) for t, h, w in sides]
    expected = windows(sides, window)
    order = [unit for units in expected for unit in units]
    assert feature_order(grids, merge, window).tolist() == order
    assert row_order(grids, merge, window).tolist() == [u * merge**2 + i for u in order for i in range(merge**2)]
    sizes = [len(units) * merge**2 for units in expected]
    assert window_rows(grids, merge, window) == sizes
    assert sum(window_pairs(grid, merge, window) for grid in grids) == sum(size**2 for size in sizes)


@given(SIDES, MERGE)
def test_without_windows_rows_keep_their_order(sides, merge):
    grids = [(t, h * merge, w * merge) for t, h, w in sides]
    assert np.array_equal(row_order(grids, merge, 0), np.arange(sum(t * h * w for t, h, w in grids)))


def test_no_images_have_no_rows():
    assert feature_order((), 2, 4).tolist() == row_order((), 2, 4).tolist() == window_rows((), 2, 4) == []
