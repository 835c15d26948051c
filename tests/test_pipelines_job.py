"""Jobs whose pipelines have unequal depths: they train, save, resume and change their layout as others do."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from mmtrain.config import config
from tests.jobs import finished, metrics, train, write_config
from tests.ranks import run_ranks
from tests.test_layout_change import whole
from tests.test_resume import CONSTANT, killed_at
from tests.test_trainer import CURVE_TOLERANCE

pytestmark = pytest.mark.ranks

SAVING = ["checkpoint.enable=true", "checkpoint.interval=2", *CONSTANT]
PLANNED = ["planner.enable=true", "planner.search.budget_evaluations=30"]
LIMITED = [*PLANNED, "planner.memory_limit=8GiB"]


def pipelines(*depths: int) -> list[str]:
    return [f"parallelism.pipelines={list(depths)}"]


def digest(value: Any) -> str:
    """Of a tensor that this rank has whole, or another value."""
    text = value.detach().numpy().tobytes() if torch.is_tensor(value) else repr(value).encode()
    return hashlib.sha256(text).hexdigest()


def tensors(trainer: Any) -> dict[str, str]:
    """Name -> digest of all that a checkpoint has of this rank's layers."""
    table = trainer.named().table()
    return {name: digest(whole(value)) for name, value in table.items() if not name.startswith("rng")}


def trained(rank: int, path: Path, overrides: list[str]) -> dict[str, str]:
    from mmtrain.training.trainer import Trainer

    trainer = Trainer(config.load(path, overrides))
    found: dict[str, str] = {}
    tear_down = trainer.tear_down

    def looked_at(**how: Any) -> None:
        found.update(tensors(trainer))
        tear_down(**how)

    trainer.tear_down = looked_at  # type: ignore[method-assign]
    trainer.run()
    return found


@pytest.mark.nightly
def test_all_holders_of_a_layer_stay_equal_and_learn_what_one_process_learns(tmp_path, charts):
    path, extra = write_config(tmp_path, charts), [*CONSTANT, *PLANNED, "training.steps=20"]
    ranks = run_ranks(trained, 5, path, [*extra, *pipelines(2, 3)])
    one, found = metrics(finished(charts, 1, extra)), metrics(path.parent)
    assert len(found) == 20
    assert all(abs(found[step] - loss) / loss < CURVE_TOLERANCE for step, loss in one.items())
    values: dict[str, set[str]] = {}
    holders: dict[str, int] = {}
    for table in ranks:
        for name, value in table.items():
            values.setdefault(name, set()).add(value)
            holders[name] = holders.get(name, 0) + 1
    assert {name for name, different in values.items() if len(different) > 1} == set()
    assert set(holders.values()) >= {2} and len(holders) > 100


def loaded(rank: int, path: Path, overrides: list[str]) -> dict[str, str]:
    """The tensors of the newest checkpoint, as this rank has them."""
    from mmtrain.training.trainer import Trainer

    trainer = Trainer(config.load(path, overrides))
    trainer.set_up(torch.device("cpu"), resumes=True)
    trainer.tear_down()
    return tensors(trainer)


def test_a_checkpoint_goes_to_other_pipelines_and_back_bit_for_bit(tmp_path, charts):
    path = write_config(tmp_path, charts)
    run_ranks(train, 5, path, [*SAVING, *LIMITED, *pipelines(2, 3), "training.steps=2"])
    wanted: dict[str, str] = {}
    for table in run_ranks(loaded, 5, path, [*SAVING, *pipelines(2, 3)]):
        wanted |= table
    grid = ["parallelism.pipeline_parallel_degree=2", "parallelism.data_parallel_replicate_degree=2"]
    for words, world in ((pipelines(5), 5), (pipelines(1, 1), 2), (grid, 4)):
        for table in run_ranks(loaded, world, path, [*SAVING, *words]):
            assert {name for name, value in table.items() if wanted[name] != value} == set(), words
    for steps, (words, world) in enumerate(((pipelines(1, 2), 3), (pipelines(3), 3), (pipelines(2, 3), 5)), 3):
        run_ranks(train, world, path, [*SAVING, *LIMITED, *words, f"training.steps={steps}"])
    one, moved = metrics(finished(charts, 1, [*CONSTANT, "training.steps=5"])), metrics(path.parent)
    assert sorted(moved) == [1, 2, 3, 4, 5]
    assert all(abs(moved[step] - loss) / loss < CURVE_TOLERANCE for step, loss in one.items())


@pytest.mark.nightly
def test_a_killed_job_continues_exactly(tmp_path, charts):
    whole_job = finished(charts, 5, [*SAVING, *pipelines(2, 3)])
    path = write_config(tmp_path, charts)
    with pytest.raises(AssertionError, match="process died with exit code -9"):
        run_ranks(killed_at, 5, path, [*SAVING, *pipelines(2, 3)], 4)
    run_ranks(train, 5, path, [*SAVING, *pipelines(2, 3)])
    for key in ("loss", "grad_norm"):
        assert metrics(path.parent, key) == metrics(whole_job, key)


ASSIGNED = ["assignment.policy=entrain", "assignment.samples_per_step=16"]


@pytest.mark.parametrize(
    ("words", "world"),
    [
        pytest.param([*pipelines(2, 1), "training.global_batch_size=5"], 3, marks=pytest.mark.nightly),
        ([*pipelines(1, 2), "parallelism.data_parallel_shard_degree=2", "training.global_batch_size=7", *PLANNED], 6),
        pytest.param(
            ["parallelism.data_parallel_replicate_degree=2", "training.global_batch_size=5"],
            2,
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["unequal", "unequal, sharded and planned", "equal, but no multiple"],
)
def test_microbatches_need_not_divide_evenly(tmp_path, charts, words, world):
    """The samples of a step are those of one process, and so are loss, norm, tokens and held-out answers."""
    extra = [*CONSTANT, "training.steps=3", "validation.enable=true", "validation.freq=3", "validation.generate=3"]
    count = next(word for word in words if "global_batch" in word)
    path = write_config(tmp_path, charts)
    run_ranks(train, world, path, [*extra, *words])
    one = finished(charts, 1, [*extra, count])
    for key in ("loss", "grad_norm", "tokens", "images", "validation_loss"):
        wanted, found = metrics(one, key), metrics(path.parent, key)
        assert sorted(found) == sorted(wanted) and wanted, key
        assert all(abs(found[step] - value) <= CURVE_TOLERANCE * abs(value) for step, value in wanted.items()), key


def test_an_assignment_over_unequal_pipelines_trains_all_samples_of_the_step(tmp_path, charts):
    extra = [*CONSTANT, *ASSIGNED, "training.steps=3", "training.global_batch_size=5"]
    path = write_config(tmp_path, charts)
    run_ranks(train, 5, path, [*extra, *pipelines(2, 3)])
    one, found = finished(charts, 1, extra), path.parent
    assert metrics(found, "tokens") == metrics(one, "tokens") and len(metrics(one, "tokens")) == 3
    for step, loss in metrics(one).items():
        assert abs(metrics(found)[step] - loss) <= CURVE_TOLERANCE * loss
