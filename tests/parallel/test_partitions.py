"""Mixed partitions, where modules begin and end on any rank, and searched ones train as one process does."""

import pytest

from mmtrain.commands.cli import main
from mmtrain.config import config
from mmtrain.config.topology import JobLayout
from mmtrain.training.trainer import Trainer
from tests.jobs import layout, metrics, train, write_config
from tests.models.dits import t2v
from tests.parallel.parity import (
    NO_IMAGE,
    TEXT_ON_ONE,
    Case,
    check,
    cut,
    identify,
    layouts,
    run_layout,
    selection,
    short,
)
from tests.parallel.test_parity import TOLERANCE
from tests.ranks import run_ranks, warm_ranks
from tests.reference import model_config

pytestmark = pytest.mark.ranks

RUNS = (("1F1B", 1), ("interleave", 1), ("ZB-H1", 1))
OPEN = (0, 0)
TWICE = (0, 2)

CASES = {
    "language on the last rank, tied in one chunk": Case(
        model=model_config(segments=OPEN, tied=True), partition="mixed-latency", runs=RUNS
    ),
    "tied in two chunks of the last rank": Case(
        model=model_config(segments=TWICE, tied=True), partition="mixed-parameters", runs=RUNS
    ),
    "two modules on the first rank, tied": Case(
        model=model_config("siglip_vision_model", "llama", segments=OPEN, tied=True),
        partition="mixed-latency",
        runs=RUNS,
    ),
    "frozen encoder": Case(
        model=model_config(segments=OPEN, frozen=("encoder",)), partition="mixed-latency", images=TEXT_ON_ONE
    ),
    "frozen language": Case(
        model=model_config(segments=OPEN, frozen=("language",)), partition="mixed-latency", images=TEXT_ON_ONE
    ),
    "no image at all": Case(model=model_config(segments=TWICE), partition="mixed-parameters", images=NO_IMAGE),
    "text model": Case(
        model=model_config(None, "llama", segments=TWICE, tied=True), partition="mixed-parameters", images=NO_IMAGE
    ),
    "encoder on ranks of its own, tied": Case(
        model=model_config(segments=OPEN, tied=True), placed="parallel", runs=RUNS
    ),
    "frozen encoder on ranks of its own": Case(
        model=model_config(segments=OPEN, frozen=("encoder", "projector")),
        placed="colocated",
        images=TEXT_ON_ONE,
        runs=RUNS,
    ),
    "text encoder on ranks of its own": Case(model=t2v(out_channels=4), placed="parallel", runs=RUNS[:2]),
    "placements searched": Case(
        model=model_config(segments=OPEN), placed="search", runs=(("Interleaved1F1B", 1), ("interleave", 2))
    ),
    "searched": Case(model=model_config(segments=OPEN, tied=True), partition="search", runs=RUNS),
    "searched, interleaved": Case(
        model=model_config(segments=OPEN), partition="search", runs=(("Interleaved1F1B", 1), ("interleave", 2))
    ),
}
PLANES = {
    "language on a later rank": Case(model=model_config(segments=OPEN, tied=True), partition="mixed-latency"),
    "patches": Case(
        model=model_config("qwen2_5_vl_vision", "llama", projector="native", segments=OPEN),
        partition="mixed-latency",
        share_patches=True,
    ),
    "images over tp": Case(model=model_config(segments=OPEN), partition="mixed-latency", data_encoder=True),
    "placed": Case(model=model_config(segments=OPEN, frozen=("encoder",)), placed="parallel", data_encoder=True),
}


def test_the_cases_have_every_place_where_modules_can_meet():
    found = {(pp, cut(case, JobLayout.grid(pp=pp)).tie_ranks) for case in CASES.values() for pp in (2, 4)}
    assert {(2, (0, 1)), (2, (1, 1)), (4, (0, 3)), (4, (1, 3)), (4, (2, 3))} <= found
    parts = cut(CASES["tied in two chunks of the last rank"], JobLayout.grid(pp=2))
    language = parts.of_module("language")
    assert [stage.pp_rank for stage in language] == [1, 0, 1]
    assert not language[0].last


TABLE = dict.fromkeys((JobLayout.grid(pp=2), JobLayout.grid(pp=4)), CASES)
PLANE_TABLE = dict.fromkeys(
    (JobLayout.grid(pp=2, dp_shard=2), JobLayout.grid(pp=2, tp=2), JobLayout.grid(pp=2, cp=2)), PLANES
)


@layouts(selection({JobLayout.grid(pp=2): CASES}, short) | selection(PLANE_TABLE, short))
def test_pairs_of_degrees_cases_and_runs(shape, cases):
    check(run_ranks(run_layout, shape.world_size, shape, cases), TOLERANCE)


@pytest.mark.nightly
@layouts(TABLE | PLANE_TABLE)
def test_every_layout(shape, cases):
    check(run_ranks(run_layout, shape.world_size, shape, cases, timeout=900), TOLERANCE)


@pytest.mark.parametrize("shape", PLANE_TABLE, ids=identify)
def test_the_language_model_begins_on_a_later_rank(shape):
    assert cut(PLANES["language on a later rank"], shape).tie_ranks[0] == 1


OPEN_KEYS = ["model.encoder.num_segments=0", "model.language.num_segments=0", "lr_scheduler.decay_ratio=0"]


def test_a_job_goes_on_with_another_partition(tmp_path, charts):
    """Checkpoints know parameters by their names, whichever rank holds them."""
    extra = ["checkpoint.enable=true", "checkpoint.interval=2"]
    whole = write_config(tmp_path / "whole", charts)
    run_ranks(train, 1, whole, ["lr_scheduler.decay_ratio=0", "training.steps=4"])
    path = write_config(tmp_path / "moved", charts)
    for steps, keys in (
        (2, ["planner.partition=dip"]),
        (4, ["planner.partition=mixed-latency", "validation.enable=true", "validation.freq=4"]),
    ):
        run_ranks(train, 2, path, [*layout(pp=2), *extra, *OPEN_KEYS, *keys, f"training.steps={steps}"])
    one, moved = metrics(whole.parent), metrics(path.parent)
    assert sorted(moved) == [1, 2, 3, 4]
    for step, loss in one.items():
        assert abs(moved[step] - loss) / loss < 1e-5, step


def test_the_job_of_that_test_has_its_language_model_on_another_rank(tmp_path, charts):
    path = write_config(tmp_path, charts)
    ranks = {
        how: Trainer(
            config.load(path, [*layout(pp=2), *OPEN_KEYS, f"planner.partition={how}"])
        ).job.partition.tie_ranks[0]
        for how in ("dip", "mixed-latency")
    }
    assert ranks == {"dip": 0, "mixed-latency": 1}


def test_check_parity_makes_a_mixed_job_small(tmp_path, charts, capsys):
    path = write_config(tmp_path, charts)
    keys = [*layout(pp=2), *OPEN_KEYS, "planner.partition=mixed-latency"]
    with warm_ranks():
        assert main(["check-parity", "--config", str(path), *(f"--{key}" for key in keys)]) == 0, capsys.readouterr()
