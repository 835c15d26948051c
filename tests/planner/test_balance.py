from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmtrain.planner.balance import split_evenly


@pytest.mark.parametrize(
    ("costs", "parts", "bounds"),
    [
        ([1, 1, 1, 1], 2, ((0, 2), (2, 4))),
        ([5], 1, ((0, 1),)),
        ([9, 1, 1, 1], 2, ((0, 1), (1, 4))),
        ([0, 1, 1, 1, 1, 5], 3, ((0, 2), (2, 5), (5, 6))),
        ([0, 0, 0, 0], 4, ((0, 1), (1, 2), (2, 3), (3, 4))),
        ([1] * 5, 2, ((0, 2), (2, 5))),
    ],
)
def test_examples(costs: list[float], parts: int, bounds: tuple[tuple[int, int], ...]) -> None:
    assert split_evenly(costs, parts) == bounds


@settings(max_examples=150, deadline=None)
@given(
    costs=st.lists(st.sampled_from([0.0, 0.1, 0.3, 1.0, 2.5, 1e3, 1e12]), min_size=1, max_size=9),
    data=st.data(),
)
def test_no_other_cut_is_better(costs: list[float], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(costs)))
    prefix = [0.0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)

    def value(bounds: list[tuple[int, int]]) -> tuple[float, int]:
        return max(prefix[b] - prefix[a] for a, b in bounds), sum((b - a) ** 2 for a, b in bounds)

    found = list(split_evenly(costs, parts))
    assert [a for a, _ in found] == [0, *(b for _, b in found[:-1])]
    assert found[-1][1] == len(costs)
    assert all(a < b for a, b in found)
    cuts = ([0, *c, len(costs)] for c in combinations(range(1, len(costs)), parts - 1))
    best = min(value(list(pairwise(c))) for c in cuts)
    assert value(found)[0] == best[0]
    assert value(found) == best
