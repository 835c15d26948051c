"""Every named schedule, run on gloo, gives the loss and gradients of one process."""

import pytest

from mmtrain.schedule.library.catalogue import CATALOGUE
from mmtrain.topology import MeshShape
from tests.parallel.parity import Case, check, run_layout
from tests.parallel.test_parity import TOLERANCE
from tests.ranks import run_ranks
from tests.reference import model_config

LOOPS = tuple((name, 1) for name, schedule in CATALOGUE.items() if schedule.placement == "loop")
VS = tuple((name, 1) for name, schedule in CATALOGUE.items() if schedule.placement == "v")

CASES = {
    "one chunk": Case(model=model_config(), runs=LOOPS),
    "two chunks": Case(model=model_config(segments=(1, 2)), runs=LOOPS),
    "v": Case(model=model_config(segments=(2, 2), tied=True), runs=VS, placement="v"),
    "v, text": Case(model=model_config(None, segments=(0, 2)), runs=VS, placement="v", images=[[[0]] * 5, [[0]] * 5]),
    "v, frozen encoder": Case(
        model=model_config(segments=(2, 2), frozen=("encoder", "projector")), runs=VS, placement="v"
    ),
}


@pytest.mark.ranks
def test_two_ranks():
    check(run_ranks(run_layout, 2, MeshShape(pp=2), CASES), TOLERANCE)


@pytest.mark.ranks
def test_four_ranks():
    cases = {
        "one chunk": Case(model=model_config(tied=True), runs=LOOPS),
        "two chunks": Case(model=model_config(segments=(1, 2)), runs=LOOPS),
        "v": Case(model=model_config(segments=(2, 2)), runs=VS, placement="v"),
    }
    check(run_ranks(run_layout, 4, MeshShape(pp=4), cases), TOLERANCE)


@pytest.mark.ranks
def test_replicas_with_different_plans():
    cases = {"v": Case(model=model_config(segments=(2, 2)), runs=VS, placement="v")}
    check(run_ranks(run_layout, 4, MeshShape(pp=2, dp_shard=2), cases), TOLERANCE)
