from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmtrain.modality.equal_parts import split_evenly
from mmtrain.planner.partition.balance import level_owners
from tests.examples import examples


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


@settings(max_examples=examples(150), deadline=None)
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


def test_rounds_of_unequal_parts_even_out() -> None:
    # 28 equal layers between a free first and last one, in 2 rounds over 4 owners: 6, 7, 8 and 7 layers each.
    costs = [0.0] + [1.0] * 28 + [0.0]
    bounds = split_evenly(costs, 8)
    assert [sum(costs[low:high]) for low, high in bounds] == [2, 3, 4, 4, 4, 4, 4, 3]
    found = level_owners(bounds, costs, [0, 1, 2, 3] * 2, [0.0] * 4)
    loads = [sum(costs[low:high]) for low, high in found]
    assert [a + b for a, b in zip(loads[:4], loads[4:], strict=True)] == [7, 7, 7, 7]
    assert max(loads) == 4


def test_who_has_more_already_gets_less() -> None:
    assert level_owners(((0, 2), (2, 5)), [1.0] * 5, [0, 1], [0.0, 1.0]) == ((0, 3), (3, 5))
    assert level_owners(((0, 2), (2, 5)), [1.0] * 5, [0, 1], [1.0, 0.0]) == ((0, 2), (2, 5))


@settings(max_examples=examples(150), deadline=None)
@given(
    costs=st.lists(st.sampled_from([0.0, 0.1, 0.3, 1.0, 2.5, 1e3]), min_size=1, max_size=9),
    loads=st.lists(st.sampled_from([0.0, 0.5, 3.0]), min_size=1, max_size=3),
    data=st.data(),
)
def test_levelling_makes_nothing_worse(costs: list[float], loads: list[float], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(costs)))
    owners = [part % len(loads) for part in range(parts)]
    before = split_evenly(costs, parts)
    after = level_owners(before, costs, owners, loads)

    def sums(bounds: tuple[tuple[int, int], ...]) -> list[float]:
        return [sum(costs[low:high]) for low, high in bounds]

    def unevenness(bounds: tuple[tuple[int, int], ...]) -> float:
        total = list(loads)
        for owner, amount in zip(owners, sums(bounds), strict=True):
            total[owner] += amount
        return sum(load**2 for load in total)

    assert [low for low, _ in after] == [0, *(high for _, high in after[:-1])]
    assert after[-1][1] == len(costs)
    assert all(low < high for low, high in after)
    assert max(sums(after)) <= max(sums(before)) * (1 + 1e-8)
    assert unevenness(after) <= unevenness(before) * (1 + 1e-8)
    if after == before:  # no single move is better
        for longer, shorter in ((a, b) for a in range(parts) for b in range(parts) if a != b):
            cuts = [0, *(high for _, high in before)]
            for i in range(len(cuts)):
                if min(longer, shorter) < i <= max(longer, shorter):
                    cuts[i] += 1 if longer < shorter else -1
            moved = tuple(pairwise(cuts))
            if cuts[shorter] < cuts[shorter + 1] and max(sums(moved)) <= max(sums(before)):
                assert unevenness(moved) >= unevenness(before) * (1 - 1e-8)
