"""The best checkpoint, early stopping and a metric of the user's own, in jobs that are killed or stopped and go on."""

import json
import os
import signal
from pathlib import Path

import pytest

from mmtrain.checkpoint.files import complete_steps
from mmtrain.checkpoint.run_folder import open_run
from mmtrain.commands import cli
from mmtrain.config import config
from mmtrain.errors import ConfigError
from mmtrain.run_page.numbers import numbers
from mmtrain.run_page.page_charts import charts as charts_of
from mmtrain.run_page.runs import read_run
from tests.jobs import SHALLOW, die_at, failing, layout, metrics, train, write_config
from tests.ranks import run_ranks
from tests.store import stored_folder

pytestmark = pytest.mark.ranks

METRIC = """
open({mark!r}, "a").write("x")


def noise(answers, references):
    assert len(answers) == len(references) == 3
    return sum(ord(sign) * place for place, sign in enumerate("".join(answers), 7)) % 101
"""
"""A number that changes from validation to validation as the answers do, and goes up and down."""


def job(folder: Path, charts: Path) -> tuple[Path, list[str]]:
    """A config in a folder and its overrides: validations after each step, compared by a metric of the folder."""
    path = write_config(folder, charts)
    (folder / "scores.py").write_text(METRIC.format(mark=str(folder / "ran")))
    return path, [
        *SHALLOW, "training.steps=14", "training.global_batch_size=2", "optimizer.lr=0.03",
        "lr_scheduler.decay_ratio=0", "checkpoint.enable=true", "checkpoint.interval=3", "checkpoint.keep_latest_k=2",
        "checkpoint.keep_best=lowest noise", "validation.enable=true", "validation.freq=1", "validation.steps=1",
        "validation.generate=3", "validation.generate_tokens=5", f"validation.metric={folder}/scores.py:noise",
        "validation.patience=4",
    ]  # fmt: skip


def validations(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "validation_loss" in line]


def killed(rank: int, path: Path, overrides: list[str], step: int) -> None:
    die_at(step)
    train(rank, path, overrides)


def stopped(rank: int, path: Path, overrides: list[str], step: int) -> None:
    """A job that is asked to stop in a step."""
    from mmtrain.training.trainer import Trainer

    original = Trainer.backward

    def backward(self, number, item, plan):
        if number == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, number, item, plan)

    Trainer.backward = backward
    train(rank, path, overrides)


@pytest.fixture(scope="session")
def whole(charts) -> Path:
    """The folder of a job that ran to its early end undisturbed."""

    def run(folder: Path) -> None:
        path, overrides = job(folder, charts)
        run_ranks(train, 1, path, overrides)

    return stored_folder("best checkpoint", run)


def test_a_job_ends_after_validations_without_a_better_one_and_keeps_the_best(whole):
    lines = validations(whole)
    values = [line["metric"]["noise"] for line in lines]
    assert [line["step"] for line in lines] == list(range(len(lines))), "one before the first step, one after each"
    best = min(range(1, len(values)), key=lambda step: (values[step], step))
    assert len(values) == best + 5 and len(values) < 15, "four validations after the best one; not all steps"
    assert [(line.get("best"), line.get("best_step")) for line in lines[best:]] == [(values[best], best)] * 5
    last = len(values) - 1
    checkpoints = whole / "run" / "checkpoint"
    assert complete_steps(checkpoints) == sorted({best, last, max(step for step in range(last) if step % 3 == 0)})
    assert open_run(whole / "run", "best").step == best and open_run(whole / "run").step == last
    log = (whole / "run" / "log.txt").read_text()
    assert f"step {last} is the last by validation.patience = 4: 4 validations in a row without a better" in log
    assert f"the best one by lowest noise is that of step {best}" in log
    run = read_run(whole / "run")
    shown = {number.label: number for number in numbers(run)}
    assert (shown["best: lowest noise"].value, shown["best: lowest noise"].note) == (
        f"{values[best]:.4f}",
        f"step {best}",
    )
    (chart,) = (chart for chart in charts_of([run]) if chart.title == "Own metric")
    assert list(chart.series[0].y) == values


@pytest.mark.parametrize("how", [killed, pytest.param(stopped, marks=pytest.mark.nightly)])
def test_both_are_exact_after_a_resume(tmp_path, charts, whole, how):
    """Killed, or stopped after a step whose validation there was no time for, after the best one."""
    lines = validations(whole)
    best = lines[-1]["best_step"]
    path, overrides = job(tmp_path, charts)
    if how is killed:
        with pytest.raises(AssertionError, match="process died with exit code -9"):
            run_ranks(killed, 1, path, overrides, best + 3)
    else:
        run_ranks(stopped, 1, path, overrides, best + 2)
        assert validations(tmp_path)[-1]["step"] == best + 1
    run_ranks(train, 1, path, overrides)
    without = ("time", "step_time_s")
    assert [{key: line[key] for key in line if key not in without} for line in validations(tmp_path)] == lines
    assert metrics(tmp_path) == metrics(whole)
    folders = [tmp_path / "run" / "checkpoint", whole / "run" / "checkpoint"]
    kept = [set(complete_steps(folder)) for folder in folders]
    assert best in kept[0] and max(kept[0]) == max(kept[1])
    last = max(kept[0])
    ours, theirs = (json.loads((folder / f"step-{last}" / "train_state.json").read_text()) for folder in folders)
    assert ours["validated"] == theirs["validated"]
    again = run_ranks(said, 1, path, overrides)  # nothing is left to train
    assert f"no step is left: step {last} is the last by validation.patience = 4" in again[0]


def said(rank: int, path: Path, overrides: list[str]) -> str:
    """The last line of a job."""
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        train(rank, path, overrides)
    return out.getvalue()


def test_no_other_command_runs_the_metric(whole, tmp_path, monkeypatch, capsys):
    mark, path, run = whole / "ran", whole / "job.toml", whole / "run"
    assert mark.exists()
    before = mark.stat().st_size
    _, overrides = job(whole, config.load(path).data.source)
    for words in (
        ["config", "--config", str(path), *(f"--{word}" for word in overrides)],
        ["config", "--config", str(run / "config.toml")],
        ["report", str(run), "--out", str(tmp_path / "report.html")],
        ["export", str(run), str(tmp_path / "exported"), "--step", "best"],
    ):
        assert cli.main(words) == 0, capsys.readouterr().err
    assert mark.stat().st_size == before
    assert f"step {validations(whole)[-1]['best_step']}" in (tmp_path / "exported" / "README.md").read_text()


def test_a_metric_that_fails_ends_all_ranks_with_one_line(tmp_path, charts):
    path, overrides = job(tmp_path, charts)
    file = tmp_path / "scores.py"
    file.write_text("def noise(answers, references):\n    return [1, None, 2]\n")
    for text in run_ranks(failing, 2, path, [*overrides, *layout(pp=2)], ConfigError):
        assert f"validation.metric: {file}, noise returned no number for sample " in text and "\n" not in text
    with pytest.raises(AssertionError, match=r"scores\.py cannot be read"):
        run_ranks(train, 1, path, [*overrides, f"validation.metric={tmp_path}/absent/scores.py:noise"])
    file.write_text("def noise(answers, references):\n    return {'cer': 1}\n")
    (text,) = run_ranks(failing, 1, path, overrides, ConfigError)
    assert 'keep_best = "lowest noise", but the validations have loss, accuracy, exact_match, cer; name one' in text
