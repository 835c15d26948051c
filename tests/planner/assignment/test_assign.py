"""Assignment of samples to microbatches and replicas: the thesis's example, brute force, and what must hold always."""

import itertools
import math
import random
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.config.assignment import AssignmentPolicy
from mmtrain.planner.assignment.assign import assign as assign_dealt
from mmtrain.planner.assignment.assignment import (
    AssignedMicrobatch,
    Assignment,
    SampleCost,
    in_turns,
    language_samples,
)
from mmtrain.planner.assignment.entrain import SubsetSums, bottleneck_match, effective_microbatches

FIGURE = [[6, 6, 8], [6, 6, 6], [6, 7, 9]]
"""Entrain, figure 4.10b: microbatches 3, 4, 6 against 1, 2, 5."""


def assign(policy, samples, bins, *, num_replicas, judge=None, **options):
    """Of equal replicas, which take the bins in turns. Args: judge: of a replica's microbatches."""
    return assign_dealt(
        policy,
        samples,
        bins,
        dealt=in_turns(len(bins), num_replicas),
        judge=judge and (lambda replica, microbatches: judge(microbatches)),
        **options,
    )


def samples_of(pairs, sizes=None):
    sizes = [()] * len(pairs) if sizes is None else [(size,) for size in sizes]
    return [SampleCost(encoder_ns=e, language_ns=w, size=size) for (e, w), size in zip(pairs, sizes, strict=True)]


def even_bins(count, num_bins):
    return [list(range(count * b // num_bins, count * (b + 1) // num_bins)) for b in range(num_bins)]


def drawn(count, seed, most=1000):
    rng = random.Random(seed)
    return [(rng.randrange(most) * (rng.random() < 0.7), rng.randrange(1, most)) for _ in range(count)]


def language_ns(assignment, samples, replica=0):
    return [sum(samples[i].language_ns for i in own) for own in language_samples(assignment.replicas[replica])]


def encoder_ns(assignment, samples, replica=0):
    return [sum(samples[i].encoder_ns for i in one.samples) for one in assignment.replicas[replica]]


# ------------------------------------------------------------------------------------ the parts of algorithm 4


@pytest.mark.parametrize("alone", [(8, 6, 9), (9, 7, 10), (10, 8, 11)])
def test_the_matching_of_figure_4_10(alone):
    match = bottleneck_match(FIGURE, alone)
    assert match.threshold == 6
    assert [(over, (1, 2, 5)[j]) for over, j in zip((3, 4, 6), match.partner, strict=True)] == [(3, 2), (4, 5), (6, 1)]
    assert match.defers == tuple(work > 6 for work in alone)


def brute_match(pairs, alone, least):
    """The least bottleneck of all ways to pair overloaded microbatches, each with or without deferral."""
    best = None
    for partners in itertools.permutations(range(len(pairs[0])), len(alone)):
        longest = max(
            [least, *(min(work, row[j]) for work, row, j in zip(alone, pairs, partners, strict=True))], default=least
        )
        best = longest if best is None else min(best, longest)
    return best


@pytest.mark.parametrize("seed", range(60))
def test_matchings_and_subsets_are_those_of_brute_force(seed):
    rng = random.Random(seed)
    count = rng.randint(2, 8)
    microbatches = [[rng.randint(1, 60) for _ in range(rng.randint(1, 10))] for _ in range(count)]
    microbatches.sort(key=sum, reverse=True)
    over, under = microbatches[: count // 2], microbatches[count // 2 :]
    values = []
    for own in over:
        sums, row = SubsetSums(own, levels=10**6), []
        every = {sum(subset) for n in range(len(own) + 1) for subset in itertools.combinations(own, n)}
        for other in under:
            chosen = sums.nearest_half(sum(own) - sum(other))
            moved = sum(own[i] for i in chosen)
            row.append(max(sum(own) - moved, sum(other) + moved))
            assert row[-1] == min(max(sum(own) - one, sum(other) + one) for one in every)
            assert len(chosen) < len(own), "a microbatch never defers all that it has"
        values.append(row)
    alone, least = [sum(own) for own in over], max(map(sum, under))
    match = bottleneck_match(values, alone, least)
    assert match.threshold == brute_match(values, alone, least)
    reached = [row[j] if d else w for row, j, d, w in zip(values, match.partner, match.defers, alone, strict=True)]
    assert max([least, *reached]) == match.threshold
    assert len(set(match.partner)) == len(over)


def test_a_rounded_sum_is_off_by_half_a_step_a_weight():
    rng = random.Random(0)
    weights = [rng.randrange(1, 10**9) for _ in range(12)]
    every = [sum(s) for n in range(13) for s in itertools.combinations(weights, n)]
    for difference in (0, sum(weights) // 3, sum(weights)):
        chosen = sum(weights[i] for i in SubsetSums(weights, levels=500).nearest_half(difference))
        best = min(abs(2 * one - difference) for one in every)
        assert abs(2 * chosen - difference) <= best + 4 * len(weights) * sum(weights) / 500


@pytest.mark.parametrize(
    ("count", "works", "expected"),
    [(8, [5, 5, 5], 3), (2, [5, 5, 5], 2), (8, [10, 1, 1], 1), (8, [0, 0], 8), (4, [], 4)],
)
def test_effective_microbatches(count, works, expected):
    assert effective_microbatches(count, works) == expected


# ----------------------------------------------------------------------------------------------- policies


def test_none_gives_the_bins_of_each_replica_in_turn():
    samples = samples_of([(1, 1)] * 8)
    made = assign("none", samples, [[0, 5], [1], [2, 7], [3, 4, 6]], num_replicas=2)
    assert [[one.samples for one in own] for own in made.replicas] == [[(0, 5), (2, 7)], [(1,), (3, 4, 6)]]
    assert made.status == "assigned"


def test_deferral_by_hand():
    """Coarse samples 0 and 1 start two microbatches; 2 and 3 make both encoder loads 9 and the language loads 7 and 5,
    so that the sample of 1 is deferred."""
    samples = samples_of([(6, 6), (5, 3), (4, 2), (3, 1)])
    made = assign("entrain", samples, even_bins(4, 2), num_replicas=1, defer=True)
    assert made.replicas == ((AssignedMicrobatch((0, 3), (3,)), AssignedMicrobatch((1, 2))),)
    assert language_samples(made.replicas[0]) == ((0,), (3, 1, 2))
    assert encoder_ns(made, samples) == [9, 9] and language_ns(made, samples) == [6, 6]


def test_samples_without_encoder_work_go_where_the_language_model_has_least():
    samples = samples_of([(10, 1)] + [(0, 2)] * 3 + [(8, 1)] * 2)
    made = assign("entrain", samples, even_bins(6, 3), num_replicas=1)
    assert language_ns(made, samples) == [3, 3, 3]


@pytest.mark.parametrize("seed", range(20))
def test_deferral_never_lengthens_the_longest_language_work(seed):
    samples = samples_of(drawn(48, seed))
    plain, deferred = (
        assign("entrain", samples, even_bins(48, 8), num_replicas=1, defer=defer, levels=10**6)
        for defer in (False, True)
    )
    assert max(language_ns(deferred, samples)) <= max(language_ns(plain, samples))
    assert sorted(encoder_ns(deferred, samples)) == sorted(encoder_ns(plain, samples))
    senders = [bool(one.deferred) for one in deferred.replicas[0]]
    assert not any(senders[1::2]), "only the first one of a pair defers"


@pytest.mark.parametrize("seed", range(30))
def test_the_encoder_load_is_within_2_minus_1_over_k_of_the_least(seed):
    rng = random.Random(seed)
    count, k = rng.randint(4, 9), rng.randint(2, 3)
    samples = samples_of([(rng.randint(1, 50), rng.randint(1, 50)) for _ in range(count)])
    made = assign("entrain", samples, even_bins(count, k), num_replicas=1, defer=True)
    best = min(
        max(sum(s.encoder_ns for s, where in zip(samples, places, strict=True) if where == m) for m in range(k))
        for places in itertools.product(range(k), repeat=count)
    )
    assert k * max(encoder_ns(made, samples)) <= (2 * k - 1) * best


def test_fewer_microbatches_where_one_sample_dominates():
    samples = samples_of([(100, 1)] + [(10, 1)] * 15)
    bins = even_bins(16, 8)
    assert len(assign("entrain", samples, bins, num_replicas=1).replicas[0]) == 8
    fewer = assign("entrain", samples, bins, num_replicas=1, fewer_microbatches=True)
    assert encoder_ns(fewer, samples) == [130, 120]


def test_longest_first_balances_totals():
    samples = samples_of([(8, 1), (1, 8), (4, 4), (5, 2), (1, 1), (2, 2), (3, 3), (0, 6)])
    made = assign("balanced", samples, even_bins(8, 4), num_replicas=2)
    totals = [sum(samples[i].total_ns for one in own for i in one.samples) for own in made.replicas]
    assert max(totals) - min(totals) <= 1


def test_the_refinement_asks_for_makespans_and_improves():
    samples = samples_of(drawn(64, 3))
    asked = []

    def judge(microbatches):  # two ranks, flow shop
        asked.append(microbatches)
        first = second = 0
        for one in microbatches:
            first += sum(samples[i].encoder_ns for i in one.samples)
            second = max(first, second) + sum(samples[i].language_ns for i in one.samples)
        return second

    options = {"num_replicas": 2, "judge": judge}
    start = assign("balanced", samples, even_bins(64, 16), num_replicas=2)
    made = assign("balanced", samples, even_bins(64, 16), evaluations=200, seed=1, **options)
    assert 190 < made.evaluations == len(asked) <= 200
    assert max(map(judge, made.replicas)) < max(map(judge, start.replicas))
    again = assign("balanced", samples, even_bins(64, 16), evaluations=200, seed=1, **options)
    assert again == made and again.digest == made.digest != start.digest
    assert assign("balanced", samples, even_bins(64, 16), evaluations=1, **options).replicas == start.replicas


@pytest.mark.parametrize(
    ("seconds", "capacity", "expected"),
    [
        (lambda count: count, (), 4),
        (lambda count: count, (6,), 6),  # no room for fewer
        (lambda count: -count, (), 8),
        (lambda count: math.inf if count > 5 else -count, (), 5),  # no plan for more
    ],
)
def test_a_replica_has_as_few_microbatches_as_make_it_faster(seconds, capacity, expected):
    samples = samples_of([(4, 4)] * 64, [1] * 64)
    made = assign(
        "balanced",
        samples,
        even_bins(64, 16),
        num_replicas=2,
        capacity=capacity,
        fewer_microbatches=True,
        judge=lambda microbatches: seconds(len(microbatches)),
        evaluations=10,
    )
    assert [len(own) for own in made.replicas] == [expected, expected]
    assert made.evaluations == 10


FULL = samples_of([(1, 9), (1, 8), (1, 3), (1, 2), (1, 1)], sizes=[5, 5, 4, 4, 2])
"""Two microbatches of 10 hold them in one way alone."""


def test_full_bins_are_kept_with_a_reason():
    made = assign("entrain", FULL, [[0, 1], [2, 3, 4]], num_replicas=1, capacity=(10,))
    assert [one.samples for one in made.replicas[0]] == [(0, 1), (2, 3, 4)]
    assert made.status == "first-fit"
    assert made.message == "entrain: sample 4 of size 2 has no room; first-fit's bins are kept"


def test_whole_bins_are_dealt_where_longest_first_has_no_room():
    samples, bins = [*FULL, *FULL], [[0, 1], [5, 6], [2, 3, 4], [7, 8, 9]]
    made = assign("balanced", samples, bins, num_replicas=2, capacity=(10,))
    assert made.status == "whole bins" and made.message.startswith("balanced: sample 4 of size 2 has no room; ")
    assert [[one.samples for one in own] for own in made.replicas] == [
        [(0, 1), (2, 3, 4)],
        [(5, 6), (7, 8, 9)],
    ]


def test_a_microbatch_keeps_language_work_even_if_rounded_sums_ask_for_all():
    assert SubsetSums([49], levels=6).nearest_half(49 - 1) == (0,)
    made = assign("entrain", samples_of([(9, 49), (5, 1)]), [[0], [1]], num_replicas=1, defer=True, levels=6)
    assert language_samples(made.replicas[0]) == ((0,), (1,))


def test_language_work_is_deferred_only_where_it_fits():
    samples = samples_of([(6, 6), (5, 3), (4, 2), (3, 1)], sizes=[5, 6, 4, 5])
    roomy, full = (
        assign("entrain", samples, even_bins(4, 2), num_replicas=1, capacity=(most,), defer=True) for most in (15, 10)
    )
    assert roomy.replicas[0][0].deferred == (3,) and full.replicas[0][0].deferred == ()


# ---------------------------------------------------------------------------------------- what holds always


@st.composite
def steps(draw):
    num_replicas, per_replica = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    num_bins = num_replicas * per_replica
    capacity = draw(st.integers(8, 40))
    bins, pairs, sizes = [], [], []
    for _ in range(num_bins):
        room, own = capacity, []
        while True:
            size = draw(st.integers(1, capacity))
            if size > room or (own and draw(st.booleans())):
                break
            own.append(len(sizes))
            sizes.append(size)
            pairs.append((draw(st.integers(0, 30)), draw(st.integers(1, 30))))
            room -= size
        if not own:
            own, sizes, pairs = [len(sizes)], [*sizes, capacity], [*pairs, (1, 1)]
        bins.append(own)
    return samples_of(pairs, sizes), bins, num_replicas, (capacity,) if draw(st.booleans()) else ()


@given(
    step=steps(),
    policy=st.sampled_from(get_args(AssignmentPolicy)),
    defer=st.booleans(),
    fewer=st.booleans(),
    levels=st.sampled_from([2, 7, 4096]),
    refines=st.booleans(),
    seed=st.integers(0, 3),
)
def test_each_sample_is_in_one_microbatch_within_the_limits(step, policy, defer, fewer, levels, refines, seed):
    samples, bins, num_replicas, capacity = step

    def judge(microbatches):
        return max(sum(samples[i].total_ns for i in one.samples) for one in microbatches)

    def made() -> Assignment:
        return assign(
            policy,
            samples,
            bins,
            num_replicas=num_replicas,
            capacity=capacity,
            defer=defer,
            fewer_microbatches=fewer,
            levels=levels,
            judge=judge if refines else None,
            evaluations=25,
            seed=seed,
        )

    assignment = made()
    assert assignment == made()
    every = list(range(len(samples)))
    assert sorted(i for own in assignment.replicas for one in own for i in one.samples) == every
    assert sorted(i for own in assignment.replicas for members in language_samples(own) for i in members) == every
    assert len(assignment.replicas) == num_replicas
    counts = {len(own) for own in assignment.replicas}
    assert max(counts) <= len(bins) // num_replicas
    assert (policy in ("entrain", "balanced") and fewer) or counts == {len(bins) // num_replicas}
    for own in assignment.replicas:
        assert not own[-1].deferred
        for members in (*(one.samples for one in own), *language_samples(own)):
            assert members
            assert not capacity or sum(samples[i].size[0] for i in members) <= capacity[0]
    assert (assignment.status == "assigned") == (not assignment.message)
