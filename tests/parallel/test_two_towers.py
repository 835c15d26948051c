"""Two towers and their loss in a pipeline: loss and every gradient equal the one-process model's.

That equals the classes of transformers: tests/models/test_two_towers.py.
"""

from dataclasses import replace

import pytest

from mmtrain.config.topology import JobLayout
from mmtrain.schedule.library.catalogue import Schedule
from mmtrain.schedule.recipe.language import Recipe, Rule
from mmtrain.schedule.recipe.policy import plan_of
from tests.models.towers import two_towers
from tests.parallel import parity
from tests.parallel.parity import Case, check, layouts, run_layout
from tests.ranks import run_ranks

TOLERANCE = 3e-5
"""As of other models. Measured: at most 1.8e-5."""

COUNTS = [[[0] * count for count in counts] for counts in ([3, 5, 0, 4, 1], [2, 2, 6, 1, 3])]
"""Pairs of each microbatch, for two replicas; one is blank."""
RUNS = (("1F1B", 0), ("interleave", 2), ("searched", 2), ("interleave", 2, 1))
ORDERS = Recipe(first="alternate", overrides={"vision": Rule(in_flight=8), "language": Rule(split_backward=True)})
"""Each tower in an order of its own."""
CASES = {
    f"{kind}, K = {size or 'all'}": Case(model=two_towers(kind, microbatches=size), images=COUNTS, runs=RUNS)
    for kind in ("clip", "siglip")
    for size in (1, 2, 0)
}


PLACED = {
    f"{placed}, {kind}": replace(CASES[f"{kind}, K = 2"], placed=placed, runs=RUNS[:2])
    for placed, kind in (("parallel", "clip"), ("colocated", "siglip"))
}
FROZEN = {
    name: replace(CASES[f"{kind}, K = all"], model=two_towers(kind, frozen=name), runs=RUNS[1:3])
    for name, kind in (("vision", "siglip"), ("language", "clip"))
}


def run_recipe(rank, shape, cases):
    """`run_layout` with `ORDERS` as a schedule."""
    parity.SCHEDULES["two orders"] = Schedule(
        idea="", make=lambda problem: plan_of(ORDERS, problem), splits_backward=True
    )
    return run_layout(rank, shape, cases)


@pytest.mark.ranks
@layouts({JobLayout.grid(pp=2): {"clip": replace(CASES["clip, K = 2"], runs=(("two orders", 2),))}})
def test_a_recipe_gives_each_tower_an_order_of_its_own(shape, cases):
    check(run_ranks(run_recipe, shape.world_size, shape, cases), TOLERANCE)


@pytest.mark.ranks
@layouts({
    JobLayout.grid(pp=2): {**{name: CASES[name] for name in ("clip, K = 2", "siglip, K = all")}, **PLACED},
    JobLayout.grid(pp=4): {"clip, K = all": CASES["clip, K = all"]},
    JobLayout.grid(pp=2, dp_shard=2): {"siglip, K = 1": CASES["siglip, K = 1"], **FROZEN},
})  # fmt: skip
def test_loss_and_gradients(shape, cases):
    check(run_ranks(run_layout, shape.world_size, shape, cases), TOLERANCE)


@pytest.mark.ranks
@pytest.mark.nightly
@layouts({
    shape: {**CASES, **PLACED, **FROZEN}
    for shape in (
        JobLayout.grid(pp=2), JobLayout.grid(pp=3), JobLayout.grid(pp=4), JobLayout.grid(pp=2, dp_shard=2),
        JobLayout.grid(pp=2, dp_replicate=2),
    )
})  # fmt: skip
def test_loss_and_gradients_of_every_layout(shape, cases):
    check(run_ranks(run_layout, shape.world_size, shape, cases, timeout=900), TOLERANCE)
