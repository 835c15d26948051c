"""Algorithm 2 of Entrain on synthetic populations: how often it errs, and what it says when it cannot decide."""

import math

import numpy as np
import pytest

from mmtrain.errors import ConfigError
from mmtrain.simulator.allocation.stable_batch import check_probabilities, num_trials, proportional, stable_batch


def population(seed, count=300, ratio=1.3, sigma=1.0):
    rng = np.random.default_rng(seed)
    return np.stack([rng.lognormal(0, sigma, count) * ratio, rng.lognormal(0, sigma, count)], axis=1)


@pytest.mark.parametrize(("alpha", "p_error", "k"), [(0.05, 0.05, 59), (0.01, 0.05, 90), (0.05, 0.01, 299)])
def test_the_number_of_trials(alpha, p_error, k):
    assert num_trials(alpha, p_error) == k
    assert (1 - p_error) ** k <= alpha < (1 - p_error) ** (k - 1)


@pytest.mark.parametrize(("alpha", "p_error"), [(0.0, 0.05), (1.0, 0.05), (0.05, -0.1), (0.05, 1.5), (1e-12, 0.05)])
def test_probabilities_out_of_range_are_refused(alpha, p_error):
    with pytest.raises(ConfigError, match=r"^allocate: (alpha|p_error) = \S+; it must be from 0.0001 to below 1"):
        check_probabilities(alpha, p_error)


@pytest.mark.parametrize(
    ("work", "num_ranks", "most", "expected"),
    [
        ([1.27, 1], 16, [32, 32], [9, 7]),
        ([1, 0.98], 2, [9, 9], [1, 1]),
        ([0, 5], 8, [9, 9], [1, 7]),
        ([9, 1], 8, [4, 9], [4, 4]),
        ([1, 1, 2], 8, [9, 9, 9], [2, 2, 4]),
        ([1, 1, 1], 8, [9, 9, 9], [3, 3, 2]),
    ],
)
def test_ranks_in_proportion(work, num_ranks, most, expected):
    assert proportional(np.array([work], float), num_ranks, most).tolist() == [expected]


def test_of_two_modules_no_other_split_is_nearer():
    rng = np.random.default_rng(0)
    work = rng.random((500, 2)) + 1e-3
    ranks = proportional(work, 8, [5, 30])
    exact = 8 * work[:, 0] / work.sum(axis=1)
    best = np.abs(np.arange(1, 6)[None] - exact[:, None]).min(axis=1)
    assert np.allclose(np.abs(ranks[:, 0] - exact), best)
    assert (ranks.sum(axis=1) == 8).all()


def chance_of_another(work, size, whole, draws=4000):
    rng = np.random.default_rng(7)
    sums = work[rng.integers(len(work), size=(draws, size))].sum(axis=1)
    return float((proportional(sums, 8, [20, 20]) != whole).any(axis=1).mean())


@pytest.mark.parametrize("ratio", [1.15, 1.6])
@pytest.mark.parametrize("runs", [100, pytest.param(1000, marks=pytest.mark.nightly)])
def test_an_unstable_batch_is_accepted_at_most_alpha_of_the_time(ratio, runs):
    """Within three standard deviations of a binomial count with chance alpha."""
    work, alpha, p_error = population(3, ratio=ratio), 0.1, 0.1
    wrong, chances = 0, {}
    for seed in range(runs):
        answer = stable_batch(work, 8, [20, 20], alpha=alpha, p_error=p_error, seed=seed, largest=1024)
        size = answer.num_samples
        if size:
            if size not in chances:
                chances[size] = chance_of_another(work, size, answer.whole)
            wrong += chances[size] > p_error
    assert wrong <= runs * alpha + 3 * math.sqrt(runs * alpha * (1 - alpha))


def test_a_rare_heavy_sample_is_not_overlooked():
    """One sample in a thousand of thousandfold weight: small batches all agree, on the wrong allocation."""
    work = np.tile([1.0, 3.0], (1000, 1))
    work[0] = [3000.0, 1000.0]
    small = proportional(work[1:5].sum(axis=0, keepdims=True), 8, [20, 20])[0].tolist()
    answers = [stable_batch(work, 8, [20, 20], seed=seed, is_whole=True) for seed in range(5)]
    assert {answer.whole for answer in answers} == {(4, 4)} and small == [2, 6]
    assert min(answer.num_samples or 10**9 for answer in answers) > 1000
    first = answers[0].trials[0]
    assert not first.passed and first.allocations[0][0] == (2, 6)


def test_a_ratio_on_a_border_names_both_allocations():
    work = np.tile([1.0, 1.0], (100, 1)) + np.random.default_rng(0).normal(0, 0.1, (100, 2))
    work *= 100 / work.sum(axis=0)
    answer = stable_batch(work, 3, [20, 20], largest=256, is_whole=True)
    assert answer.num_samples == 0
    assert "near the border between" in answer.message and "2:1" in answer.message and "1:2" in answer.message
    assert "all 100 samples of the source" in answer.message


def test_more_ranks_than_layers_are_refused():
    with pytest.raises(ConfigError, match=r"^allocate: 9 pipeline ranks for 2 modules of 4, 4 layers; .*--gpus"):
        stable_batch(population(0), 9, [4, 4])


def test_equal_samples_need_one():
    answer = stable_batch(np.ones((10, 2)), 8, [9, 9])
    assert answer.num_samples == 1 and answer.message.startswith("b_min = 1: ")
    assert answer.message == stable_batch(np.ones((10, 2)), 8, [9, 9], seed=5).message
