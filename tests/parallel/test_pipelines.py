"""Pipelines of unequal depth: loss and every gradient are those of one process, whatever the cuts."""

from dataclasses import replace

import pytest

from mmtrain.config.topology import JobLayout
from tests.lora import with_lora
from tests.parallel.parity import NO_IMAGE, TEXT_ON_ONE, Case, check, layouts, run_layout, short
from tests.parallel.test_braids import fill_adapters_by_name
from tests.parallel.test_parity import TOLERANCE
from tests.ranks import run_ranks
from tests.reference import model_config

pytestmark = pytest.mark.ranks

RUNS = (("1F1B", 1), ("interleave", 0))
CASES = {
    "tied": Case(model=model_config(tied=True), runs=RUNS),
    "two chunks a module": Case(model=model_config(segments=(2, 2)), images=TEXT_ON_ONE, runs=RUNS[1:]),
    "frozen encoder": Case(model=model_config(frozen=("encoder",)), images=TEXT_ON_ONE, runs=RUNS[:1]),
    "adapters": Case(model=with_lora(model_config(tied=True)), runs=RUNS[1:], prepare=fill_adapters_by_name),
    "no image at all": Case(model=model_config(tied=True), images=NO_IMAGE, runs=RUNS[:1]),
    "one microbatch more on one": Case(model=model_config(), images=[[[1], [0]], [[2], [0], [1, 0]]], runs=RUNS[:1]),
}
TABLE = {
    JobLayout(depths=(2, 3)): CASES,
    JobLayout(depths=(1, 2), tp=2): {
        "tied": CASES["tied"],
        "encoders for themselves": replace(CASES["frozen encoder"], data_encoder=True),
    },
    JobLayout(depths=(1, 2), dp_shard=2): {name: CASES[name] for name in ("adapters", "no image at all")},
    JobLayout.grid(pp=2, dp_replicate=2): {name: CASES[name] for name in ("tied", "two chunks a module")},
}


@layouts({shape: {name: short(case, 3) for name, case in cases.items()} for shape, cases in TABLE.items()})
def test_loss_and_gradients(shape, cases):
    check(run_ranks(run_layout, shape.world_size, shape, cases), TOLERANCE)


@pytest.mark.nightly
@layouts(
    {
        JobLayout(depths=(2, 3), tp=2): CASES,
        JobLayout(depths=(1, 2, 3)): {name: CASES[name] for name in ("tied", "two chunks a module")},
        JobLayout(depths=(2, 1), cp=2): {name: CASES[name] for name in ("tied", "frozen encoder")},
        JobLayout(depths=(1, 2, 3), dp_shard=2): CASES,
        JobLayout(depths=(3, 1)): CASES,
    }
)
def test_loss_and_gradients_of_all_cases(shape, cases):
    check(run_ranks(run_layout, shape.world_size, shape, cases), TOLERANCE)
