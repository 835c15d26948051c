"""Draws of actual seconds, and what is found from residuals."""

import math

import numpy as np
import pytest

from mmtrain.costs.noise import EXACT, Noise
from mmtrain.errors import PlanError

NOISE = Noise(forward=0.04, backward=0.1, backward_weight=0.02, shared=0.3)
RANKS = np.array([0, 0, 1, 1, 1])


def test_draws_have_mean_one_and_their_deviations_and_share_what_a_rank_shares():
    factors = NOISE.factors(RANKS, 20_000, seed=3)
    assert factors.shape == (20_000, 5, 3)
    logs = np.log(factors)
    for column, deviation in enumerate((0.04, 0.1, 0.02)):
        assert factors[..., column].mean() == pytest.approx(1.0, abs=2e-3)
        assert logs[..., column].std() == pytest.approx(deviation, rel=0.02)
    same_rank = np.corrcoef(logs[:, 2, 0], logs[:, 4, 1])[0, 1]
    other_rank = np.corrcoef(logs[:, 0, 0], logs[:, 4, 0])[0, 1]
    assert same_rank == pytest.approx(0.3, abs=0.03)
    assert other_rank == pytest.approx(0.0, abs=0.03)


def test_a_seed_gives_the_same_draws():
    again, other = (NOISE.factors(RANKS, 4, seed=seed) for seed in (1, 2))
    assert np.array_equal(again, NOISE.factors(RANKS, 4, seed=1))
    assert not np.array_equal(again, other)


def test_noise_is_found_again_from_residuals_of_steps():
    random = np.random.default_rng(0)
    found = []
    for step in range(400):
        common = random.standard_normal()
        for name, deviation in (("forward", 0.04), ("backward", 0.1), ("backward_weight", 0.02)):
            for _ in range(10):
                z = math.sqrt(0.3) * common + math.sqrt(0.7) * random.standard_normal()
                found.append((step, name, 0.05 + deviation * z))  # all are 5 % longer, which is no noise
    noise = Noise.of(found)
    for name in ("forward", "backward", "backward_weight", "shared"):
        assert getattr(noise, name) == pytest.approx(getattr(NOISE, name), rel=0.15), name


def test_without_residuals_seconds_are_exact():
    assert Noise.of([]) == EXACT
    assert Noise.of([(0, "forward", 0.1)]) == EXACT
    assert np.array_equal(EXACT.factors(RANKS, 2, seed=0), np.ones((2, 5, 3)))


@pytest.mark.parametrize("field", ["forward", "shared"])
@pytest.mark.parametrize("value", [-0.1, 1.5, math.nan])
def test_a_deviation_out_of_range_is_refused(field, value):
    with pytest.raises(PlanError, match=rf"noise\.{field} = .*; it must be in 0 .. 1"):
        Noise(**{field: value})
