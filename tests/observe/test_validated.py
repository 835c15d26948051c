"""The best validation, and how many came since."""

from dataclasses import asdict

import pytest

from mmtrain.config.figures import Figure
from mmtrain.observe.validated import Validated

LOSS = Figure.parse("k", "loss")


def after(values, figure=LOSS, start=None) -> Validated:
    """The validations after steps 1, 2, ... of these values."""
    found = start or Validated(step=0)
    for step, value in enumerate(values, found.step + 1):
        found = found.after(step, figure, value)
    return found


def test_the_first_of_the_best_is_kept_and_the_others_are_counted():
    assert after([3.0]) == Validated(step=1, figure="lowest loss", best=3.0, best_step=1)
    found = after([3.0, 2.0, 2.0, float("nan"), 2.5])
    assert found == Validated(step=5, figure="lowest loss", best=2.0, best_step=2, since=3)
    assert after([1.9], start=found) == Validated(step=6, figure="lowest loss", best=1.9, best_step=6)
    assert found.text == "lowest loss 2 (step 2)" and not Validated().text
    assert after([float("nan")]) == Validated(step=1, figure="lowest loss", since=1)


def test_another_figure_begins_anew():
    found = after([3.0, 2.0, 4.0])
    other = found.after(4, Figure.parse("k", "exact_match"), 0.25)
    assert other == Validated(step=4, figure="highest exact_match", best=0.25, best_step=4)


def test_it_goes_through_a_checkpoint():
    found = after([3.0, 2.0, 4.0])
    assert Validated.from_dict(asdict(found)) == found
    for wrong in ({"step": "1"}, {"steps": 1}, {"step": 1, "best": "low"}):
        with pytest.raises((TypeError, ValueError)):
            Validated.from_dict(wrong)
