"""Jobs that change their layout while they run: the same processes go on as new ones do from a checkpoint."""

import gc
import os
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmtrain.config import config
from mmtrain.config.sections import ParallelismConfig
from tests.jobs import SAVING, finished, layout, metrics, train, world_size, write_config, write_video_config
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks

Changes = dict[int, list[str]]
"""step -> overrides of the degrees after it"""

CHANGES: Changes = {2: layout(shard=2), 4: layout(pp=2)}
"""A job of pipeline ranks goes on with data-parallel ones after step 2, and comes back after step 4."""


def whole(value: Any) -> Any:
    """A copy of a value of all ranks that have a part of it."""
    if not isinstance(value, Tensor):
        return value
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()


def different(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of the values in both tables that are not the same bit for bit."""
    same = {
        name: torch.equal(value, other[name]) if isinstance(value, Tensor) else value == other[name]
        for name, value in one.items()
        if name in other
    }
    assert len(same) > 10
    return [name for name, equal in same.items() if not equal]


def changing(rank: int, path: Path, overrides: list[str], changes: Changes) -> list[tuple[int, int]]:
    """Trains with changes; at the first of them it goes there and back twice, without a step, before it stays.

    Returns: threads and process groups of this rank, whenever it is back.
    """
    from mmtrain.parallel.torch_private import process_groups
    from mmtrain.training.trainer import Trainer

    change, counts = Trainer.change_layout, []

    def table(trainer: Trainer) -> dict[str, Any]:
        return {name: whole(value) for name, value in trainer.named().table().items()}

    def repeated(self: Trainer, parallelism: ParallelismConfig) -> None:
        before, first = table(self), self.config.parallelism
        for _ in range(0 if counts else 2):
            chunk = weakref.ref(self.model.chunks[0])
            change(self, parallelism)
            gc.collect()
            assert chunk() is None, "the layout before is still in memory"
            assert different(before, table(self)) == []
            change(self, first)
            assert set(table(self)) == set(before)
            assert different(before, table(self)) == []
            counts.append((len(os.listdir("/proc/self/task")), len(process_groups())))
        change(self, parallelism)

    Trainer.change_layout = repeated
    sections = {step: config.load(path, [*overrides, *degrees]).parallelism for step, degrees in changes.items()}
    Trainer(config.load(path, overrides)).run(sections)
    return counts


Curve = dict[int, tuple[float, float]]
"""step -> (loss, norm of the gradients)"""


def curve(folder: Path) -> Curve:
    norms = metrics(folder, "grad_norm")
    return {step: (loss, norms[step]) for step, loss in metrics(folder).items()}


def resumed(whole_job: Path, path: Path, overrides: list[str], changes: Changes) -> Curve:
    """That of a job which at each change is ended, and taken up by new processes from its checkpoint.

    Args: whole_job: folder of the job without a change. path: where to run what comes after.
    """
    found, source = curve(whole_job), whole_job
    for step, degrees in changes.items():
        stored = Path("run") / "checkpoint" / f"step-{step}"
        own = path.parent / f"from-{step}"
        own.mkdir()
        shutil.copy(path, own / "job.toml")
        shutil.copytree(source / stored, own / stored)
        extra = [*degrees, f"job.dump_folder={str(own / 'run')!r}"]
        run_ranks(train, world_size(degrees[:5]), own / "job.toml", [*overrides, *extra])
        found, source = {s: found[s] for s in range(1, step + 1)} | curve(own), own
    return found


def check_changes(path: Path, whole_job: Path, overrides: list[str], changes: Changes = CHANGES) -> None:
    """The whole job goes on, across all changes, exactly as new processes do; nothing piles up."""
    for counts in run_ranks(changing, world_size(changes[2][:5]), path, overrides, changes):
        assert len(counts) == 2 and counts[0] == counts[1]
    found = curve(path.parent)
    assert sorted(found) == [1, 2, 3, 4, 5, 6]
    assert found == resumed(whole_job, path, overrides, changes)
    assert found != curve(whole_job)  # another layout rounds otherwise: the job has been at one


def test_a_running_job_changes_its_layout_as_a_resumed_one_would(tmp_path: Path, charts: Path) -> None:
    check_changes(write_config(tmp_path, charts), finished(charts, 2, SAVING), SAVING)


ROWS = "parallelism.tensor_parallel_rows"
DATA_ENCODER = "parallelism.encoder_tensor_parallel=data"
PLANNED = ["planner.enable=true", "planner.search.budget_evaluations=50", "planner.search.threads=1"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("here", "there", "options"),
    [
        pytest.param(
            layout(pp=2),
            layout(shard=2),
            ['model.language.trainable="lora"', "model.encoder.trainable=false"],
            id="lora, frozen",
        ),
        pytest.param(layout(pp=2), layout(replicate=2), PLANNED, id="planned"),
        pytest.param(
            [*layout(pp=2, tp=2), DATA_ENCODER], [*layout(shard=2, tp=2), DATA_ENCODER], [], id="data encoder"
        ),
        pytest.param(
            [*layout(pp=2, tp=2), f"{ROWS}=whole"],
            [*layout(pp=2, tp=2), f"{ROWS}=divided"],
            [],
            id="rows between layers",
        ),
        pytest.param(
            layout(pp=2, shard=2), layout(cp=2, tp=2), ["checkpoint.async_mode=async", "data.num_workers=1"], id="four"
        ),
    ],
)
def test_other_jobs_change_their_layouts_too(
    tmp_path: Path, charts: Path, here: list[str], there: list[str], options: list[str]
) -> None:
    overrides = [*SAVING, *here, *options]
    whole_job = finished(charts, world_size(here[:5]), overrides)
    check_changes(write_config(tmp_path, charts), whole_job, overrides, {2: there, 4: here})


@pytest.mark.nightly
def test_a_text_to_video_job_changes_its_layout(tmp_path: Path, shapes: Path) -> None:
    overrides = [*layout(pp=2), "checkpoint.enable=true", "checkpoint.interval=2", "model.language.trainable=false"]
    whole_job = write_video_config(tmp_path / "whole", shapes)
    run_ranks(train, 2, whole_job, overrides)
    check_changes(write_video_config(tmp_path / "changing", shapes), whole_job.parent, overrides)
