"""Checkpoints of whole jobs: exact resume after kills, other layouts, going back, what is refused."""

import os
import shutil
import signal
import time

import pytest

from mmtrain.checkpoint.checkpoint import complete_steps
from mmtrain.config import config
from mmtrain.errors import ConfigError, TrainingError
from tests.jobs import SAVING, SHALLOW, die_at, failing, finished, layout, metrics, train, world_size, write_config
from tests.ranks import run_ranks
from tests.test_trainer import CURVE_TOLERANCE

pytestmark = pytest.mark.ranks


@pytest.fixture
def job(tmp_path, charts):
    return write_config(tmp_path, charts)


def killed_at(rank, path, overrides, step):
    """Every rank is killed without warning in the middle of a step."""
    die_at(step)
    train(rank, path, overrides)


@pytest.mark.parametrize(
    "step", [pytest.param(1, marks=pytest.mark.nightly), 4, pytest.param(6, marks=pytest.mark.nightly)]
)
def test_a_killed_job_continues_exactly(tmp_path, charts, step):
    whole = finished(charts, 2, SAVING)
    path = write_config(tmp_path, charts)
    with pytest.raises(AssertionError, match="process died with exit code -9"):
        run_ranks(killed_at, 2, path, SAVING, step)
    run_ranks(train, 2, path, SAVING)
    assert metrics(path.parent) == metrics(whole)
    assert metrics(path.parent, "grad_norm") == metrics(whole, "grad_norm")


def killed_while_saving(rank, path, overrides, where):
    """Rank 0 is killed while step 4's checkpoint is written, before or after the tensors are on disk."""
    import mmtrain.checkpoint.checkpoint as checkpoint

    if where == "before the tensors":
        original = checkpoint.dcp.save

        def save(tensors, storage_writer):
            if storage_writer.path.name == "step-4.tmp" and rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(tensors, storage_writer=storage_writer)

        checkpoint.dcp.save = save
    else:
        flush = checkpoint._flush

        def die(folder):
            if folder.name == "step-4.tmp":
                os.kill(os.getpid(), signal.SIGKILL)
            flush(folder)

        checkpoint._flush = die
    train(rank, path, overrides)


ONE = [*SHALLOW, "checkpoint.enable=true", "checkpoint.interval=2"]


@pytest.mark.parametrize(
    ("where", "world", "extra"),
    [
        ("before the tensors", 1, ONE),
        ("before the rename", 2, SAVING),
        pytest.param("before the tensors", 2, SAVING, marks=pytest.mark.nightly),
        pytest.param("before the rename", 1, ONE, marks=pytest.mark.nightly),
    ],
)
def test_a_kill_during_a_save_loses_no_checkpoint(tmp_path, charts, where, world, extra):
    path = write_config(tmp_path, charts)
    with pytest.raises(AssertionError, match=r"process died with exit code -9|by peer"):
        run_ranks(killed_while_saving, world, path, extra, where)
    folder = tmp_path / "run" / "checkpoint"
    assert complete_steps(folder) == [2]
    assert (folder / "step-4.tmp").is_dir()
    run_ranks(train, world, path, extra)
    assert complete_steps(folder) == [2, 4, 6]
    assert not list(folder.glob("*.tmp"))
    assert metrics(path.parent) == metrics(finished(charts, world, extra))


FOUR_STEPS = ["training.steps=4", "lr_scheduler.decay_ratio=0"]
"""Of four layers, so that four pipeline ranks have one each."""


@pytest.mark.nightly
def test_a_checkpoint_loads_at_other_degrees(tmp_path, charts):
    """Saved on pp 2 x shard 2 (tied embedding on two ranks), continued on one process and on pp 4."""
    expected = metrics(finished(charts, 1, FOUR_STEPS))
    saved = write_config(tmp_path / "saved", charts)
    extra = [*FOUR_STEPS, "checkpoint.enable=true"]
    run_ranks(train, 4, saved, [*layout(pp=2, shard=2), *extra, "training.steps=3"])
    for name, world, degrees in (
        ("one", 1, layout()),
        ("pp4", 4, layout(pp=4)),
        ("rep", 2, layout(replicate=2)),
    ):
        path = write_config(tmp_path / name, charts)
        checkpoint = path.parent / "run" / "checkpoint"
        checkpoint.mkdir(parents=True)
        os.symlink(saved.parent / "run" / "checkpoint" / "step-3", checkpoint / "step-3")
        run_ranks(train, world, path, [*degrees, *extra, "checkpoint.keep_latest_k=0"])
        found = metrics(path.parent)
        assert sorted(found) == [4], name
        assert all(abs(found[s] - expected[s]) / expected[s] < CURVE_TOLERANCE for s in found), name


CONSTANT = ["lr_scheduler.decay_ratio=0", "lr_scheduler.warmup_steps=1"]
"""A learning rate that does not depend on the number of steps."""


def test_a_checkpoint_goes_from_layout_to_layout(tmp_path, charts):
    """Pipelines with the tied embedding on two ranks, tensor-parallel, sharded and replicated ranks, one process."""
    path, extra = write_config(tmp_path, charts), [*SHALLOW, *CONSTANT, "training.steps=5"]
    layouts = [layout(pp=2, shard=2), layout(pp=4), layout(tp=2, shard=2), layout(replicate=2), layout()]
    for steps, degrees in enumerate(layouts, 1):
        words = [*degrees, *extra, "checkpoint.enable=true", f"training.steps={steps}"]
        run_ranks(train, world_size(degrees), path, words)
    one, moved = metrics(finished(charts, 1, extra)), metrics(path.parent)
    assert sorted(moved) == [1, 2, 3, 4, 5]
    for step, loss in one.items():
        assert abs(moved[step] - loss) / loss < CURVE_TOLERANCE, step


def test_two_copies_of_a_tied_embedding_on_one_rank_resume_exactly(tmp_path, charts):
    """Each copy has its own moments again, which a step must not update twice."""
    extra = [*SHALLOW, *FOUR_STEPS, "model.language.num_segments=2", "checkpoint.enable=true"]
    path = write_config(tmp_path, charts)
    run_ranks(train, 1, path, [*extra, "training.steps=2"])
    run_ranks(train, 1, path, extra)
    assert metrics(path.parent) == metrics(finished(charts, 1, extra))


def test_an_asynchronous_checkpoint_equals_a_synchronous_one(tmp_path, charts):
    whole = finished(charts, 2, SAVING)
    saved = finished(charts, 2, [*SAVING, "checkpoint.async_mode=async"])
    assert metrics(saved) == metrics(whole)
    for source in (whole, saved):
        assert sorted(p.name for p in (source / "run" / "checkpoint").iterdir()) == ["step-2", "step-4", "step-6"]
    path = write_config(tmp_path, charts)
    shutil.copytree(saved / "run", tmp_path / "run")
    run_ranks(train, 2, path, [*SAVING, "checkpoint.load_step=4"])
    assert metrics(tmp_path) == metrics(whole)
    kept = sorted(p.name for p in (tmp_path / "run" / "checkpoint").iterdir())
    assert kept == ["abandoned-0-step-6", "step-2", "step-4", "step-6"]


def test_old_checkpoints_are_removed(job):
    extra = [*SHALLOW, "checkpoint.enable=true", "checkpoint.interval=1", "checkpoint.keep_latest_k=2"]
    run_ranks(train, 1, job, [*extra, "training.steps=4"])
    assert complete_steps(job.parent / "run" / "checkpoint") == [3, 4]


def test_another_models_checkpoint_is_refused(job):
    extra = ["checkpoint.enable=true", "training.steps=2"]
    run_ranks(train, 1, job, [*extra, *SHALLOW])
    wrong = {
        "model.language.config.num_hidden_layers=1": "by another model: this one has no model.language.model.layers.1",
        "model.language.config.num_hidden_layers=3": "by another model: it has no model.language.model.layers.2",
        "model.language.config.hidden_size=40": "does not fit this model",
    }
    (found,) = run_ranks(refusals, 1, job, [[*extra, *SHALLOW, change, "training.steps=9"] for change in wrong])
    for message, said in zip(wrong.values(), found, strict=True):
        assert message in said


def refusals(rank, path, jobs):
    """What is said of each of these jobs."""
    return [failing(rank, path, overrides, ConfigError) for overrides in jobs]


def warnings_of(rank, path, overrides):
    import mmtrain.training.trainer

    found = []
    mmtrain.training.trainer.logger.warning = lambda text, *args: found.append(text % args)
    train(rank, path, overrides)
    return found


def test_settings_that_a_resumed_job_changes_are_named(job):
    extra = [*SHALLOW, "checkpoint.enable=true"]
    assert run_ranks(warnings_of, 1, job, [*extra, "training.steps=2"]) == [[]]
    changed = ["training.steps=3", "training.global_batch_size=2", "optimizer.lr=0.01", "data.too_long=skip"]
    (messages,) = run_ranks(warnings_of, 1, job, [*extra, *changed, "data.prefetch=3"])
    moved, follows = "the data do not go on where they stopped", "later steps follow the new value"
    assert messages == [
        f"data.too_long was 'raise' when step 2 was saved and is 'skip' now: {moved}",
        f"training.steps was 2 when step 2 was saved and is 3 now: {follows}",
        f"training.global_batch_size was 4 when step 2 was saved and is 2 now: {moved}",
        f"optimizer.lr was 0.003 when step 2 was saved and is 0.01 now: {follows}",
    ]


def test_hyperparameters_come_from_the_config_not_from_the_checkpoint(job):
    extra = [*SHALLOW, "checkpoint.enable=true"]
    run_ranks(train, 1, job, [*extra, "training.steps=2"])
    found = run_ranks(resumed_weight_decay, 1, job, [*extra, "training.steps=3", "optimizer.weight_decay=0.25"])
    assert found == [[0.0, 0.25] * 2]


def resumed_weight_decay(rank, path, overrides):
    from mmtrain.training.trainer import Trainer

    trainer = Trainer(config.load(path, overrides))
    trainer.run()
    return [group["weight_decay"] for optimizer in trainer.placement.optimizers for group in optimizer.param_groups]


def test_skipped_steps_in_a_row_end_a_job_also_one_that_was_resumed(job):
    """Steps of this size make the weights useless at once."""
    large = ["optimizer.lr=1e6", "training.max_norm=0", "training.on_nonfinite=skip", "checkpoint.enable=true"]
    run_ranks(train, 1, job, [*SHALLOW, *large, "training.steps=6"])
    skipped = [step for step, norm in metrics(job.parent, "grad_norm").items() if norm is None]
    assert skipped == list(range(skipped[0], 7)) and skipped[0] > 1
    (message,) = run_ranks(failing, 1, job, [*SHALLOW, *large, "training.steps=60"], TrainingError)
    assert message.startswith(f"step {skipped[0] + 9}: ")
    assert f"the weights are those after step {skipped[0] - 1}; lower optimizer.lr" in message


def test_a_checkpoint_step_that_is_not_there_is_refused(job):
    (message,) = run_ranks(failing, 1, job, ["checkpoint.enable=true", "checkpoint.load_step=7"], ConfigError)
    assert "checkpoint.load_step = 7, but" in message
    assert "no complete checkpoint" in message


def test_going_back_survives_a_restart_and_a_wrong_model_changes_nothing(job):
    extra = [*SHALLOW, "checkpoint.enable=true", "checkpoint.interval=1", "checkpoint.keep_latest_k=0"]
    run_ranks(train, 1, job, [*extra, "training.steps=3"])
    folder = job.parent / "run" / "checkpoint"
    deeper = "model.language.config.num_hidden_layers=5"
    run_ranks(failing, 1, job, [*extra, deeper, "checkpoint.load_step=2"], ConfigError)
    assert complete_steps(folder) == [1, 2, 3]
    run_ranks(train, 1, job, [*extra, "checkpoint.load_step=2", "training.steps=5"])
    assert complete_steps(folder) == [1, 2, 3, 4, 5]
    assert sorted(p.name for p in folder.glob("abandoned-*")) == ["abandoned-0-step-3"]
    run_ranks(train, 1, job, [*extra, "checkpoint.load_step=2", "training.steps=6"])  # restarted as it was
    assert complete_steps(folder) == [1, 2, 3, 4, 5, 6]
    assert sorted(p.name for p in folder.glob("abandoned-*")) == ["abandoned-0-step-3"]


def slow_writer(rank, path, overrides):
    """A background save that lasts several steps."""
    from torch.distributed.checkpoint import FileSystemWriter

    original = FileSystemWriter.write_data

    def write_data(self, *args, **kwargs):
        time.sleep(1.5)
        return original(self, *args, **kwargs)

    FileSystemWriter.write_data = write_data
    train(rank, path, overrides)


def test_training_goes_on_during_an_asynchronous_save(job):
    extra = [
        "checkpoint.enable=true",
        "checkpoint.interval=5",
        "checkpoint.async_mode=async",
        "training.steps=10",
        *SHALLOW,
    ]
    run_ranks(slow_writer, 2, job, [*layout(pp=2), *extra])
    assert complete_steps(job.parent / "run" / "checkpoint") == [5, 10]
