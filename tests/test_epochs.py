"""Jobs of epochs on an uneven number of samples: each sample once an epoch, at any number of replicas, after a kill."""

import io
import json
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from mmtrain.config import config
from mmtrain.data.toy.charts import make_charts
from mmtrain.data.toy.shapes import make_shapes
from mmtrain.errors import TrainingError
from mmtrain.observe.observer import Observer
from mmtrain.run_page.numbers import numbers
from mmtrain.run_page.runs import read_run
from tests.jobs import SHALLOW, die_at, failing, layout, metrics, write_config, write_video_config
from tests.ranks import run_ranks
from tests.store import stored_folder
from tests.test_trainer import CURVE_TOLERANCE

pytestmark = pytest.mark.ranks

NUM_SAMPLES = 23
EPOCHS = [
    *SHALLOW, "training.steps=0", "training.epochs=2", "training.global_batch_size=3", "checkpoint.enable=true",
    "checkpoint.interval=0.5 epochs", "lr_scheduler.warmup_steps=0", "lr_scheduler.warmup_ratio=0.3",
]  # fmt: skip


@pytest.fixture(scope="session")
def few_charts() -> Path:
    """23 training samples."""
    stored = stored_folder("few charts", lambda folder: make_charts(folder / "charts", 26, 7))
    return stored / "charts"


class Reading(Observer):
    """Writes what a replica trains on: a line of step and samples for each step."""

    def __init__(self, path: Path):
        self._path, self._is_leader = path, False

    def layout_begins(self, config, job, mesh, step):
        self._is_leader = mesh.is_leader

    def after_step(self, step):
        if not self._is_leader:
            return
        samples = [d.sample for m in step.meta.microbatches for d in (*m.documents, *m.clips) if d.num_targets]
        with self._path.open("a") as file:
            file.write(json.dumps([step.step, samples]) + "\n")


def reading(rank: int, path: Path, overrides: list[str], kill: int = 0) -> None:
    from mmtrain.training.trainer import Trainer

    if kill:
        die_at(kill)
    Trainer(config.load(path, overrides), observers=[Reading(path.parent / f"read-{rank}")]).run()


def trained_on(folder: Path) -> dict[int, list[int]]:
    """Step -> the samples of all replicas; of a step that was done again those of the last time."""
    found: dict[int, dict[str, list[int]]] = {}
    for path in folder.glob("read-*"):
        for line in path.read_text().splitlines():
            step, samples = json.loads(line)
            found.setdefault(step, {})[path.name] = samples
    return {step: [sample for samples in of.values() for sample in samples] for step, of in sorted(found.items())}


def check_epochs(folder: Path, num_samples: int = NUM_SAMPLES, num_epochs: int = 2) -> None:
    """Each sample is read once an epoch, and the lines of the steps say so."""
    read, counts, epochs = trained_on(folder), metrics(folder, "samples"), metrics(folder, "epoch")
    assert {step: len(samples) for step, samples in read.items()} == counts
    assert metrics(folder, "samples_done") == {s: sum(counts[k] for k in counts if k <= s) for s in counts}
    for epoch in range(num_epochs):
        steps = [step for step in read if epoch < epochs[step] <= epoch + 1]
        assert epochs[steps[-1]] == epoch + 1 and len(steps) > 1
        assert Counter(sample for step in steps for sample in read[step]) == Counter(range(num_samples))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(1, 1, marks=pytest.mark.nightly),
        pytest.param(2, 2, marks=pytest.mark.nightly),
        pytest.param(3, 3, marks=pytest.mark.nightly),
        (3, 2),
    ],
)
def test_a_killed_job_has_each_sample_once_an_epoch(tmp_path, few_charts, before, after):
    """Killed in the first step of the second epoch, continued with as many replicas or others."""
    whole, path = write_config(tmp_path / "whole", few_charts), write_config(tmp_path / "killed", few_charts)
    run_ranks(reading, after, whole, [*layout(replicate=after), *EPOCHS])
    check_epochs(whole.parent)
    first = next(step for step, epoch in metrics(whole.parent, "epoch").items() if epoch > 1)
    with pytest.raises(AssertionError, match=r"process died with exit code -9|by peer"):
        run_ranks(reading, before, path, [*layout(replicate=before), *EPOCHS], first)
    for file in path.parent.glob("read-*"):
        file.rename(file.with_name(f"read-{file.name}"))
    run_ranks(reading, after, path, [*layout(replicate=after), *EPOCHS])
    again, killed = metrics(whole.parent), metrics(path.parent)
    assert sorted(killed) == sorted(again)
    if before == after:
        assert killed == again and metrics(path.parent, "lr") == metrics(whole.parent, "lr")
    assert all(abs(killed[step] - again[step]) / again[step] < CURVE_TOLERANCE for step in again)
    check_epochs(path.parent)
    steps = {int(folder.name.removeprefix("step-")) for folder in (path.parent / "run" / "checkpoint").glob("step-*")}
    reached = {step: epoch // 0.5 for step, epoch in metrics(path.parent, "epoch").items()}
    assert steps == {step for step in reached if reached[step] > reached.get(step - 1, 0)}
    shown = {number.label: number for number in numbers(read_run(path.parent / "run"))}
    assert (shown["samples"].value, shown["samples"].note) == (str(2 * NUM_SAMPLES), "epoch 2.00 of 2")


ASSIGNS = ["assignment.policy=balanced", "assignment.samples_per_step=5"]
DEEP = ["model.encoder.config.depth=3", "model.language.config.num_hidden_layers=3"]
"""A layer for each of three pipeline ranks."""


@pytest.mark.parametrize(
    ("world", "overrides"),
    [
        (2, [*layout(pp=2), "planner.enable=true", "data.num_workers=2"]),
        pytest.param(3, layout(shard=3), marks=pytest.mark.nightly),
        pytest.param(4, layout(pp=2, shard=2), marks=pytest.mark.nightly),
        pytest.param(4, layout(cp=2, replicate=2), marks=pytest.mark.nightly),
        pytest.param(3, [*DEEP, "parallelism.pipelines=[1,2]"], marks=pytest.mark.nightly),
        pytest.param(2, [*layout(replicate=2), *ASSIGNS], marks=pytest.mark.nightly),
    ],
)
def test_blank_microbatches_at_the_end_of_an_epoch_run_on_any_layout(tmp_path, few_charts, world, overrides):
    path = write_config(tmp_path, few_charts)
    run_ranks(reading, world, path, [*EPOCHS, *overrides])
    check_epochs(tmp_path)


def test_an_epoch_of_clips_has_each_clip_once(tmp_path):
    make_shapes(tmp_path / "shapes", 30, 7)
    path = write_video_config(tmp_path / "job", tmp_path / "shapes")
    of_clips = [word for word in EPOCHS if not word.startswith("model.encoder")]
    run_ranks(reading, 2, path, [*layout(replicate=2), *of_clips, "model.language.config.num_hidden_layers=1"])
    check_epochs(path.parent, num_samples=int(max(metrics(path.parent, "samples_done").values())) // 2)


def test_a_last_step_without_a_readable_sample_changes_no_weight(tmp_path):
    """The second half of the images are cut off behind their headers: whole steps of them have nothing to predict."""
    buffer = io.BytesIO()
    Image.effect_noise((64, 64), 80).save(buffer, "PNG")
    lines = []
    for number in range(24):
        (tmp_path / f"{number}.png").write_bytes(buffer.getvalue()[: 400 if number > 9 else None])
        messages = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": f"number {number}"}]
        lines.append(json.dumps({"images": [f"{number}.png"], "messages": messages}))
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
    path = write_config(tmp_path / "job", tmp_path)
    extra = ["data.shuffle=false", "data.on_error=skip", "training.seq_len=64", "training.epochs=1"]
    run_ranks(reading, 1, path, [*EPOCHS, *extra])
    losses, norms = metrics(path.parent), metrics(path.parent, "grad_norm")
    last = max(losses)
    assert losses[last] == norms[last] == 0 and losses[1] > 0, "a step with nothing to predict"
    assert sum(metrics(path.parent, "samples").values()) == 10
    assert max(metrics(path.parent, "skipped_samples").values()) == 14
    assert metrics(path.parent, "epoch")[last] == 1
    log = (path.parent / "run" / "log.txt").read_text()
    assert (
        f"step {last}: the batch has no token to predict; check the records' answers; the weights stay as they are"
        in log
    )
    in_steps = [*EPOCHS, *extra, "training.epochs=0", "training.steps=9"]
    said = run_ranks(failing, 1, write_config(tmp_path / "steps", tmp_path), in_steps, TrainingError)
    assert "the batch has no token to predict" in said[0]
