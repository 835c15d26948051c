"""Jobs whose adapters have dropout, and jobs that train the last layers alone: layouts, resuming, costs."""

from pathlib import Path

import pytest

from mmtrain.config import config
from mmtrain.data.toy.pairs import make_pairs
from mmtrain.spec.builders import model_spec
from tests.jobs import SHALLOW, finished, layout, metrics, train, write_config
from tests.ranks import run_ranks
from tests.test_two_towers_job import write_job

TOWERS = ('model.language.trainable="lora"', 'model.encoder.trainable="lora"', "model.lora.use_dora=true")
LORA = (
    *SHALLOW,
    'model.projector.trainable="lora"',
    *TOWERS,
)
DROPOUT = (*LORA, "model.lora.dropout=0.3")
SAVES = ("checkpoint.enable=true", "checkpoint.interval=3")


@pytest.mark.ranks
def test_masks_are_the_same_after_a_resume_and_on_other_pipelines(tmp_path: Path, charts: Path) -> None:
    whole = metrics(finished(charts, 1, [*layout(), *DROPOUT]))
    assert whole != metrics(finished(charts, 1, [*layout(), *LORA])), "dropout does something"
    job = write_config(tmp_path, charts)
    run_ranks(train, 1, job, [*DROPOUT, *SAVES, "training.steps=3", "lr_scheduler.decay_ratio=0.0"])
    (tmp_path / "run/metrics.jsonl").rename(tmp_path / "before.jsonl")
    steady = [*DROPOUT, *SAVES, "lr_scheduler.decay_ratio=0.0"]
    run_ranks(train, 1, job, steady)
    resumed = metrics(tmp_path)
    undisturbed = metrics(finished(charts, 1, [*layout(), *steady]))
    assert {step: undisturbed[step] for step in resumed} == resumed and min(resumed) == 4
    piped = metrics(finished(charts, 2, [*layout(pp=2), *DROPOUT]))
    assert piped == pytest.approx(whole, rel=1e-5)  # measured: 3e-7


@pytest.mark.ranks
def test_a_job_trains_its_last_layers_alone(tmp_path: Path, charts: Path) -> None:
    frozen = ["model.encoder.trainable=false", "model.projector.trainable=false"]
    overrides = [*layout(pp=2), *SHALLOW, *frozen, "model.language.trainable_layers=-1.."]
    folder = finished(charts, 2, overrides)
    losses = metrics(folder)
    assert losses[6] < losses[1]
    spec = model_spec(config.load(folder / "job.toml", overrides).model)
    language = spec.module("language")
    assert [layer.name for layer in language.layers if layer.trainable] == ["layers.1"]
    assert [spec.has_backward("language", index) for index in range(4)] == [False, False, True, True]


@pytest.mark.ranks
@pytest.mark.nightly
def test_two_towers_have_adapters(tmp_path: Path) -> None:
    make_pairs(tmp_path / "data", 300, seed=0)
    lora = [*TOWERS, "model.lora.dropout=0.1", "model.encoder.trainable_layers=-1..", "training.steps=3"]
    found = {}
    for pp in (1, 2):
        job = write_job(tmp_path / str(pp), tmp_path / "data")
        run_ranks(train, pp, job, [*layout(pp=pp), *lora])
        found[pp] = metrics(tmp_path / str(pp))
    assert found[1] == pytest.approx(found[2], rel=1e-5)
