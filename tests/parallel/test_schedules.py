"""Every named schedule, run on gloo, gives the loss and gradients of one process."""

import pytest

from mmtrain.config.topology import JobLayout
from mmtrain.schedule.library.catalogue import CATALOGUE
from tests.parallel.parity import MIXED, Case, check, layouts, run_layout, selection, thin
from tests.parallel.test_parity import TOLERANCE
from tests.ranks import run_ranks
from tests.reference import model_config

LOOPS = tuple(
    (name, 1) for name, schedule in CATALOGUE.items() if schedule.placement == "loop" and not schedule.refusal
)
VS = tuple((name, 1) for name, schedule in CATALOGUE.items() if schedule.placement == "v")

OPEN = (0, 0)
SIX_MICROBATCHES = [[*MIXED[0], [0], [2, 1]], [*MIXED[1], [1], [0, 3]]]

CASES = {
    "one chunk": Case(model=model_config(tied=True), runs=LOOPS),
    "two chunks": Case(model=model_config(segments=(1, 2)), runs=LOOPS),
    "v": Case(model=model_config(segments=(2, 2), tied=True), runs=VS, placement="v"),
    "v, text": Case(model=model_config(None, segments=(0, 2)), runs=VS, placement="v", images=[[[0]] * 5, [[0]] * 5]),
    "v, frozen encoder": Case(
        model=model_config(segments=(2, 2), frozen=("encoder", "projector")), runs=VS, placement="v"
    ),
    "one v": Case(
        model=model_config(segments=OPEN, tied=True), runs=VS, partition="mixed-latency", images=SIX_MICROBATCHES
    ),
    "one v, frozen encoder": Case(
        model=model_config(segments=OPEN, frozen=("encoder",)),
        runs=VS,
        partition="mixed-parameters",
        images=SIX_MICROBATCHES,
    ),
}


TABLE = {
    JobLayout.grid(pp=2): CASES,
    JobLayout.grid(pp=4): {name: CASES[name] for name in ("one chunk", "two chunks", "v", "one v")},
    JobLayout.grid(pp=2, dp_shard=2): {"v": CASES["v"]},
}


@pytest.mark.ranks
@layouts(selection(TABLE, thin))
def test_pairs_of_schedules_cases_and_degrees(shape, cases):
    check(run_ranks(run_layout, shape.world_size, shape, cases), TOLERANCE)


@pytest.mark.ranks
@pytest.mark.nightly
@layouts(TABLE)
def test_every_schedule_on_every_layout(shape, cases):
    check(run_ranks(run_layout, shape.world_size, shape, cases, timeout=900), TOLERANCE)
