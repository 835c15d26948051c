"""Which of several judged cuts is chosen, and on how many microbatches they are judged; without a job."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.simulator.cut_search import (
    CHAIN_WORTH,
    FINALISTS,
    LEAST_S,
    MOST_S,
    SHARE,
    WORTH,
    Cut,
    best_cut,
    microbatches_to_judge,
)
from mmtrain.simulator.typical_iterations import MOST_MICROBATCHES


def chain(passes: int) -> Cut:
    return Cut((passes,), is_chain=True)


def test_each_segment_more_has_to_pay_for_itself() -> None:
    quick = {Cut((1, 1)): 10.0, Cut((1, 2)): 9.0, Cut((2, 1)): 9.5, Cut((2, 2)): 8.97}
    found = best_cut(list(quick), quick.__getitem__, quick.__getitem__)
    # 9.0 x 1.015 = 9.135 is less than 8.97 x 1.02 = 9.149
    assert WORTH == 0.005
    assert found is not None
    assert found.best == Cut((1, 2))
    assert found.finalists == ((Cut((1, 2)), 9.0), (Cut((2, 1)), 9.5), (Cut((2, 2)), 8.97))
    assert found.num_tried == 4


@pytest.mark.parametrize(("seconds", "wins"), [(9.76, False), (9.74, True)])
def test_a_chain_has_to_save_more(seconds: float, wins: bool) -> None:
    times = {Cut((1, 1)): 10.0, chain(1): seconds}
    found = best_cut(list(times), times.__getitem__, times.__getitem__)
    # 10.0 x 1.01 = 10.1 is 9.758 x 1.035
    assert CHAIN_WORTH == 0.03
    assert found is not None
    assert found.best == (chain(1) if wins else Cut((1, 1)))


def test_finalists_are_decided_by_the_longer_look() -> None:
    quick = {Cut((1,)): 4.0, Cut((2,)): 3.0, Cut((3,)): 2.0, Cut((4,)): 1.0}
    found = best_cut(list(quick), quick.__getitem__, lambda c: 1.0)
    assert found is not None
    assert len(found.finalists) == FINALISTS
    assert found.best == Cut((2,))  # equal in full, and (1,) had not come so far


def test_chains_take_no_place_from_separated_modules() -> None:
    quick = {Cut((4,)): 4.0, Cut((3,)): 3.0, Cut((2,)): 2.0, Cut((1,)): 1.9, chain(1): 1.0, chain(2): 3.5}
    found = best_cut(list(quick), quick.__getitem__, lambda c: 1.0)
    assert found is not None
    # The second chain is not among the first three of all.
    assert [cut for cut, _ in found.finalists] == [Cut((1,)), Cut((2,)), Cut((3,)), chain(1)]
    assert found.best == Cut((1,))


def test_chains_that_take_more_memory_are_left_out() -> None:
    times = {Cut((1,)): 10.0, Cut((2,)): 9.9, chain(1): 8.0, chain(2): 9.0, chain(3): 9.8}
    asked = []

    def fits(cut: Cut, separated: Cut) -> bool:
        asked.append((cut, separated))
        return cut == chain(2)

    found = best_cut(list(times), times.__getitem__, times.__getitem__, fits)
    assert found is not None
    assert found.best == chain(2)
    assert found.too_large == (chain(1),)
    assert asked == [(chain(1), Cut((2,))), (chain(2), Cut((2,)))]


def test_a_chain_without_separated_modules_is_not_asked_for_its_memory() -> None:
    found = best_cut([chain(1)], lambda cut: 1.0, lambda cut: 1.0, lambda cut, separated: False)
    assert found is not None
    assert found.best == chain(1)


@given(
    num_ranks=st.integers(2, 64),
    num_microbatches=st.integers(1, 4096),
    quick_s=st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=24),
    slower=st.floats(1.0, 3.0),
    rank_s=st.floats(0.0, 1e4),
)
def test_looks_take_the_seconds_that_an_iteration_allows(
    num_ranks: int, num_microbatches: int, quick_s: list[float], slower: float, rank_s: float
) -> None:
    exact_s = [slower * seconds for seconds in quick_s]
    first, second = microbatches_to_judge(num_ranks, num_microbatches, quick_s, exact_s, rank_s)
    assert 1 <= first <= second <= MOST_MICROBATCHES
    assert first <= 2 * num_ranks or num_microbatches <= 2 * num_ranks
    budget_s = min(MOST_S, max(LEAST_S, SHARE * rank_s))
    assert first <= max(1, num_ranks // 2) or first * sum(quick_s) <= budget_s / 2
    finalists_s = sum(exact_s) / len(exact_s) * min(2 * FINALISTS, len(exact_s))
    assert second == first or first * sum(quick_s) + second * finalists_s <= budget_s
    assert microbatches_to_judge(num_ranks, num_microbatches, quick_s, exact_s, 2 * rank_s)[0] >= first


def test_ties_go_to_fewer_segments_of_the_first_modules() -> None:
    cuts = [Cut((2, 1)), Cut((1, 2)), Cut((1, 1))]
    found = best_cut(cuts, lambda c: 1.0 if c != Cut((1, 1)) else 9.0, lambda c: 1.0)
    assert found is not None
    assert found.best == Cut((1, 1))
    found = best_cut(cuts[:2], lambda c: 1.0, lambda c: 1.0)
    assert found is not None
    assert found.best == Cut((1, 2))


def test_candidates_without_a_plan_are_left_out() -> None:
    cuts = [Cut((1,)), Cut((2,))]
    found = best_cut(cuts, lambda c: math.inf if c == cuts[0] else 1.0, lambda c: 2.0)
    assert found is not None
    assert found.best == cuts[1]
    assert best_cut(cuts, lambda c: 1.0, lambda c: math.inf) is None
