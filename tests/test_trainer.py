"""Whole jobs: equal loss curves on every layout, exact resume, what stops a run and what it leaves behind."""

import json
import os
import signal
import time

import pytest
import torch

from mmtrain import config
from mmtrain.checkpoint import complete_steps
from mmtrain.errors import ConfigError, DataError, MMTrainError, TrainingError
from tests.jobs import die_at, layout, metrics, train, write_config
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks

SHALLOW = ("model.encoder.config.depth=2", "model.language.config.num_hidden_layers=2")
"""For the sake of time: most of it goes into the collectives of tensor-parallel ranks in each block."""
CURVE_TOLERANCE = 1e-5
"""Relative difference of the loss after 20 steps between layouts. Measured: at most 6.4e-8."""


@pytest.fixture
def job(tmp_path, charts):
    return write_config(tmp_path, charts)


def test_twenty_steps_have_one_loss_curve_on_every_layout(tmp_path, charts):
    curves = {}
    for name, degrees in {
        "one process": layout(),
        "pp 2": layout(pp=2),
        "pp 2 x shard 2": layout(pp=2, shard=2),
        "replicate 2 x shard 2": layout(replicate=2, shard=2),
        "tensor 2": layout(tp=2),
        "pp 2 x tensor 2": layout(pp=2, tp=2),
        "context 2 x tensor 2": layout(cp=2, tp=2),
    }.items():
        path = write_config(tmp_path / name.replace(" ", "-"), charts)
        world = 1
        for degree in degrees:
            world *= int(degree.split("=")[1])
        schedule = "1F1B" if name == "pp 2" else "interleave"
        extra = ["training.steps=20", f"parallelism.pipeline_parallel_schedule={schedule}", *SHALLOW]
        run_ranks(train, world, path, degrees + extra)
        curves[name] = metrics(path.parent)
    reference = curves.pop("one process")
    assert sorted(reference) == list(range(1, 21))
    assert reference[20] < 0.8 * reference[1]
    for name, curve in curves.items():
        worst = max(abs(curve[s] - reference[s]) / reference[s] for s in reference)
        assert worst < CURVE_TOLERANCE, (name, worst)


def killed_at(rank, path, overrides, step):
    """Every rank is killed without warning in the middle of a step."""
    die_at(step)
    train(rank, path, overrides)


@pytest.mark.parametrize("step", [1, 4, 6])
def test_a_killed_job_continues_exactly(tmp_path, charts, step):
    extra = [*layout(pp=2), "checkpoint.enable=true", "checkpoint.interval=2"]
    whole = write_config(tmp_path / "whole", charts)
    run_ranks(train, 2, whole, extra)
    path = write_config(tmp_path / "killed", charts)
    with pytest.raises(AssertionError, match="process died with exit code -9"):
        run_ranks(killed_at, 2, path, extra, step)
    run_ranks(train, 2, path, extra)
    assert metrics(path.parent) == metrics(whole.parent)
    assert metrics(path.parent, "grad_norm") == metrics(whole.parent, "grad_norm")


def killed_while_saving(rank, path, overrides, where):
    """Rank 0 is killed while step 4's checkpoint is written, before or after the tensors are on disk."""
    import mmtrain.checkpoint as checkpoint

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


@pytest.mark.parametrize("where", ["before the tensors", "before the rename"])
def test_a_kill_during_a_save_loses_no_checkpoint(tmp_path, charts, where):
    extra = [*layout(pp=2), "checkpoint.enable=true", "checkpoint.interval=2"]
    path = write_config(tmp_path / "killed", charts)
    with pytest.raises(AssertionError, match=r"process died with exit code -9|by peer"):
        run_ranks(killed_while_saving, 2, path, extra, where)
    folder = tmp_path / "killed" / "run" / "checkpoint"
    assert complete_steps(folder) == [2]
    assert (folder / "step-4.tmp").is_dir()
    run_ranks(train, 2, path, extra)
    assert complete_steps(folder) == [2, 4, 6]
    assert not list(folder.glob("*.tmp"))
    whole = write_config(tmp_path / "whole", charts)
    run_ranks(train, 2, whole, extra)
    assert metrics(path.parent) == metrics(whole.parent)


def test_a_checkpoint_loads_at_other_degrees(tmp_path, charts):
    """Saved on pp 2 x shard 2 (tied embedding on two ranks), continued on one process and on pp 4."""
    whole = write_config(tmp_path / "whole", charts)
    run_ranks(train, 1, whole, layout())
    expected = metrics(whole.parent)
    saved = write_config(tmp_path / "saved", charts)
    extra = ["checkpoint.enable=true", "checkpoint.interval=3"]
    run_ranks(train, 4, saved, [*layout(pp=2, shard=2), *extra])
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
        assert sorted(found) == [4, 5, 6], name
        assert all(abs(found[s] - expected[s]) / expected[s] < CURVE_TOLERANCE for s in found), name


def test_a_checkpoint_goes_from_pipeline_to_tensor_ranks_to_one_process(tmp_path, charts):
    extra = ["checkpoint.enable=true", "checkpoint.interval=2"]
    path = write_config(tmp_path / "moved", charts)
    for world, degrees, steps in (
        (4, layout(pp=4), 2),
        (4, layout(tp=2, shard=2), 4),
        (1, layout(), 5),
        (4, layout(cp=2, tp=2), 6),
    ):
        run_ranks(train, world, path, [*degrees, *extra, f"training.steps={steps}", "lr_scheduler.decay_ratio=0"])
    whole = write_config(tmp_path / "whole", charts)
    run_ranks(train, 1, whole, ["lr_scheduler.decay_ratio=0"])
    one, moved = metrics(whole.parent), metrics(path.parent)
    assert sorted(moved) == [1, 2, 3, 4, 5, 6]
    for step, loss in one.items():
        assert abs(moved[step] - loss) / loss < CURVE_TOLERANCE, step


def test_two_copies_of_a_tied_embedding_on_one_rank_resume_exactly(tmp_path, charts):
    """Each copy has its own moments again, which a step must not update twice."""
    extra = ["model.language.num_segments=2", "checkpoint.enable=true", "checkpoint.interval=2"]
    extra += ["lr_scheduler.decay_ratio=0"]  # one rate whatever the number of steps
    whole = write_config(tmp_path / "whole", charts)
    run_ranks(train, 1, whole, extra)
    path = write_config(tmp_path / "resumed", charts)
    run_ranks(train, 1, path, [*extra, "training.steps=2"])
    run_ranks(train, 1, path, extra)
    assert metrics(path.parent) == metrics(whole.parent)


def test_an_asynchronous_checkpoint_equals_a_synchronous_one(tmp_path, charts):
    for mode in ("disabled", "async"):
        path = write_config(tmp_path / mode, charts)
        extra = ["checkpoint.enable=true", "checkpoint.interval=2", f"checkpoint.async_mode={mode}"]
        run_ranks(train, 2, path, [*layout(pp=2), *extra])
        assert complete_steps(path.parent / "run" / "checkpoint") == [2, 4, 6]
    for mode in ("disabled", "async"):
        assert list((tmp_path / mode / "run" / "checkpoint").glob("abandoned-*")) == []
    loads = []
    for mode in ("disabled", "async"):
        path = tmp_path / mode / "job.toml"
        extra = ["checkpoint.enable=true", "checkpoint.load_step=4", "training.steps=6"]
        run_ranks(train, 2, path, [*layout(pp=2), *extra])
        loads.append(metrics(path.parent))
        kept = sorted(p.name for p in (path.parent / "run" / "checkpoint").iterdir())
        assert kept == ["abandoned-0-step-6", "step-2", "step-4", "step-6"]
    assert loads[0] == loads[1]


def test_old_checkpoints_are_removed(job):
    extra = ["checkpoint.enable=true", "checkpoint.interval=1", "checkpoint.keep_latest_k=2"]
    run_ranks(train, 1, job, extra)
    assert complete_steps(job.parent / "run" / "checkpoint") == [5, 6]


def terminated(rank, path, overrides):
    from mmtrain.trainer import Trainer

    original = Trainer._run

    def run(self, *args, **kwargs):
        if self.state.step + 1 == 3 and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, *args, **kwargs)

    Trainer._run = run
    train(rank, path, overrides)


def test_sigterm_saves_and_leaves(tmp_path, charts):
    path = write_config(tmp_path / "a", charts)
    extra = [*layout(pp=2), "checkpoint.enable=true"]
    run_ranks(terminated, 2, path, extra)
    assert complete_steps(path.parent / "run" / "checkpoint") == [3]
    run_ranks(train, 2, path, extra)
    whole = write_config(tmp_path / "whole", charts)
    run_ranks(train, 2, whole, extra)
    assert metrics(path.parent) == metrics(whole.parent)


def poisoned(rank, path, overrides, error):
    """A weight on rank 1 becomes NaN before step 3."""
    from mmtrain.trainer import Trainer

    original = Trainer._run

    def run(self, *args, **kwargs):
        if self.state.step + 1 == 3 and rank == 1 and self.model.chunks:
            with torch.no_grad():
                parameter = next(p for p in self.model.chunks[-1].parameters())
                self.saved = parameter.clone()
                parameter.fill_(float("nan"))
        try:
            return original(self, *args, **kwargs)
        finally:
            if self.state.step + 1 == 3 and rank == 1:
                with torch.no_grad():
                    parameter.copy_(self.saved)

    Trainer._run = run
    if error is None:
        train(rank, path, overrides)
        return ""
    with pytest.raises(error) as caught:
        train(rank, path, overrides)
    return str(caught.value)


def test_a_loss_that_is_not_finite_stops_the_run(job):
    extra = [*layout(pp=2), "checkpoint.enable=true", "checkpoint.interval=2"]
    messages = run_ranks(poisoned, 2, job, extra, TrainingError)
    assert all(m.startswith("step 3: loss nan") for m in messages)
    assert all("not finite on ranks" in m for m in messages)
    assert complete_steps(job.parent / "run" / "checkpoint") == [2]


def test_a_step_that_is_not_finite_can_be_skipped(job):
    run_ranks(poisoned, 2, job, [*layout(pp=2), "training.on_nonfinite=skip"], None)
    losses = metrics(job.parent)
    assert sorted(losses) == [1, 2, 3, 4, 5, 6]
    assert [s for s in losses if losses[s] is None] == [3]


def with_changed_image(rank, path, overrides, change):
    """One picture of the batch is lost, doubled or swapped behind the loader's back."""
    from mmtrain.trainer import Trainer

    original = Trainer._run

    def run(self, plan, item, **kwargs):
        if item.batch is not None:
            microbatch = next(m for m in item.batch.microbatches if len(m.pixel_values) > 1)
            pixels, names = microbatch.pixel_values, microbatch.image_names
            if change == "lost":
                del pixels[1], names[1]
            elif change == "doubled":
                pixels.insert(1, pixels[0])
                names.insert(1, names[0])
            else:
                names[0], names[1] = names[1], names[0]
        return original(self, plan, item, **kwargs)

    Trainer._run = run
    with pytest.raises(DataError) as caught:
        train(rank, path, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [("lost", "is lost"), ("doubled", "there once too often"), ("swapped", "another order")],
)
def test_a_lost_or_doubled_image_is_named(job, change, message):
    (found,) = run_ranks(with_changed_image, 1, job, [], change)
    assert message in found
    assert "sample" in found or "(" in found


def failing(rank, path, overrides, error):
    with pytest.raises(error) as caught:
        train(rank, path, overrides)
    return str(caught.value)


def test_another_models_checkpoint_is_refused(tmp_path, job):
    extra = ["checkpoint.enable=true", "checkpoint.interval=3"]
    run_ranks(train, 1, job, extra)
    shallower = job.read_text().replace("num_hidden_layers = 4", "num_hidden_layers = 3")
    before = job.read_text()
    job.write_text(shallower)
    (message,) = run_ranks(failing, 1, job, [*extra, "training.steps=9"], ConfigError)
    assert "was saved by another model: this one has no model.language.model.layers.3" in message
    job.write_text(before)
    deeper = job.read_text().replace("num_hidden_layers = 4", "num_hidden_layers = 5")
    job.write_text(deeper)
    (message,) = run_ranks(failing, 1, job, [*extra, "training.steps=9"], ConfigError)
    assert "was saved by another model: it has no model.language.model.layers.4" in message
    job.write_text(
        deeper.replace("num_hidden_layers = 5", "num_hidden_layers = 4").replace(
            "hidden_size = 48, int", "hidden_size = 40, int"
        )
    )
    (message,) = run_ranks(failing, 1, job, [*extra, "training.steps=9"], ConfigError)
    assert "does not fit this model" in message


def warnings_of(rank, path, overrides):
    import mmtrain.trainer

    found = []
    mmtrain.trainer.logger.warning = lambda text, *args: found.append(text % args)
    train(rank, path, overrides)
    return found


def test_settings_that_move_the_data_are_named_on_resume(job):
    extra = ["checkpoint.enable=true", "training.steps=3"]
    assert run_ranks(warnings_of, 1, job, extra) == [[]]
    changed = ["checkpoint.enable=true", "training.steps=4", "training.global_batch_size=2"]
    ((message,),) = run_ranks(warnings_of, 1, job, changed)
    assert message.startswith("training.global_batch_size was 4 when step 3 was saved and is 2 now")


def test_hyperparameters_come_from_the_config_not_from_the_checkpoint(job):
    extra = ["checkpoint.enable=true", "checkpoint.interval=3", "training.steps=3"]
    run_ranks(train, 1, job, extra)
    found = run_ranks(resumed_weight_decay, 1, job, [*extra, "training.steps=4", "optimizer.weight_decay=0.25"])
    assert found == [[0.0, 0.25] * 2]


def resumed_weight_decay(rank, path, overrides):
    from mmtrain.trainer import Trainer

    trainer = Trainer(config.load(path, overrides))
    trainer.run()
    return [group["weight_decay"] for optimizer in trainer.optimizers for group in optimizer.param_groups]


def test_a_checkpoint_step_that_is_not_there_is_refused(job):
    (message,) = run_ranks(failing, 1, job, ["checkpoint.enable=true", "checkpoint.load_step=7"], ConfigError)
    assert "checkpoint.load_step = 7, but" in message
    assert "no complete checkpoint" in message


def test_a_missing_validation_split_is_one_error_on_every_rank(job):
    extra = ["validation.enable=true", "data.validation_split=nothing", "training.steps=2"]
    messages = run_ranks(failing, 2, job, [*layout(pp=2), *extra], MMTrainError)
    assert messages[0] == messages[1]
    assert "nothing" in messages[0]


def test_validation_does_not_change_the_training(tmp_path, charts):
    curves = []
    for name, extra in (
        ("with", ["validation.enable=true", "validation.freq=2", "validation.steps=1"]),
        ("without", []),
    ):
        path = write_config(tmp_path / name, charts)
        run_ranks(train, 2, path, [*layout(pp=2), "training.steps=4", *extra])
        curves.append(metrics(path.parent))
    assert curves[0] == curves[1]


def test_going_back_survives_a_restart_and_a_wrong_model_changes_nothing(job):
    extra = ["checkpoint.enable=true", "checkpoint.interval=1", "checkpoint.keep_latest_k=0"]
    run_ranks(train, 1, job, [*extra, "training.steps=3"])
    folder = job.parent / "run" / "checkpoint"
    text = job.read_text()
    job.write_text(text.replace("num_hidden_layers = 4", "num_hidden_layers = 5"))
    run_ranks(failing, 1, job, [*extra, "checkpoint.load_step=2"], ConfigError)
    assert complete_steps(folder) == [1, 2, 3]
    job.write_text(text)
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
    extra = ["checkpoint.enable=true", "checkpoint.interval=5", "checkpoint.async_mode=async", "training.steps=10"]
    run_ranks(slow_writer, 4, job, [*layout(pp=2, shard=2), *extra])
    assert complete_steps(job.parent / "run" / "checkpoint") == [5, 10]


def test_a_loader_error_reaches_every_rank(job):
    messages = run_ranks(failing, 2, job, [*layout(pp=2), "training.seq_len=16"], DataError)
    assert messages[0] == messages[1]


def test_validation_and_traces(job):
    extra = [
        *layout(pp=2), "validation.enable=true", "validation.freq=3", "validation.steps=2", "metrics.trace_freq=3",
        "metrics.enable_tensorboard=true",
    ]  # fmt: skip
    run_ranks(train, 2, job, extra)
    run = job.parent / "run"
    losses = metrics(job.parent, "validation_loss")
    assert sorted(losses) == [0, 3, 6]
    assert losses[6] < losses[0]
    accuracy = metrics(job.parent, "accuracy")
    assert set(accuracy[6]) == {"easy", "medium", "hard", "text"}
    events = json.loads((run / "traces" / "step-3.json").read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e.get("name") == "process_name"}
    assert names == {"measured", "planned"}
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) % 2 == 0 and all(e["dur"] >= 0 for e in spans)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(run / "tb"))
    board.Reload()
    tags = set(board.Tags()["scalars"])
    assert {
        "loss_metrics/global_avg_loss", "grad_norm", "throughput(tps)", "mfu(%)", "pipeline/bubble(%)",
        "modality/image/tokens", "modality/text/tokens", "validation_metrics/loss",
    } <= tags  # fmt: skip
    assert (run / "config.toml").is_file()


@pytest.mark.parametrize("degrees", [layout(cp=2, tp=2), layout(pp=2, cp=2)], ids=["cp2-tp2", "pp2-cp2"])
def test_validation_counts_the_same_answers_on_every_plane(tmp_path, charts, degrees):
    extra = ["validation.enable=true", "validation.freq=6", "validation.steps=2", "training.steps=2"]
    for name, world, more in (("one", 1, layout()), ("plane", 4, degrees)):
        run_ranks(train, world, write_config(tmp_path / name, charts), [*more, *extra])
    assert metrics(tmp_path / "plane", "accuracy") == metrics(tmp_path / "one", "accuracy")
    one, plane = (metrics(tmp_path / name, "validation_loss") for name in ("one", "plane"))
    assert sorted(one) == [0, 2]
    assert plane == pytest.approx(one, rel=1e-6)


def test_metrics_count_every_token_and_image_once(tmp_path, charts):
    """Replicas and pipelines see the same totals as one process."""
    one = write_config(tmp_path / "one", charts)
    run_ranks(train, 1, one, ["training.steps=2"])
    four = write_config(tmp_path / "four", charts)
    run_ranks(train, 4, four, ["training.steps=2", *layout(pp=2, shard=2)])
    for key in ("tokens", "images", "image_tokens", "patches"):
        assert metrics(one.parent, key) == metrics(four.parent, key)
    assert all(0 <= b < 1 for b in metrics(four.parent, "bubble").values())


def test_ranks_end_in_time_after_an_error(job):
    """A rank that fails does not leave the others waiting for the timeout."""
    start = time.monotonic()
    run_ranks(failing, 2, job, [*layout(pp=2), "training.seq_len=16"], DataError)
    assert time.monotonic() - start < 60
