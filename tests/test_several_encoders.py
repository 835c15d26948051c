"""A job with three encoders from its files to answers: what each command makes of the run."""

import json

import pytest

from mmtrain.commands.cli import main
from mmtrain.config import config
from mmtrain.data.questions import Decoding
from mmtrain.inference.answering import Answerer, Sampling
from mmtrain.run_page.page_charts import charts
from mmtrain.run_page.runs import read_run
from tests.jobs import layout, metrics, train
from tests.ranks import run_ranks
from tests.test_sound_training import SHALLOW, write_job

pytestmark = pytest.mark.ranks

MODULES = ["vision", "audio", "maps", "language"]
WORDS = [
    "training.steps=2", "checkpoint.enable=true", "metrics.timeline_freq=1", "validation.enable=true",
    "validation.steps=1", "data.validation_split=train", "validation.generate=6", "validation.generate_tokens=5",
    "optimizer.lr=1e-5", "model.language.config.tie_word_embeddings=false",
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of the job, with its data and `run`."""
    path = write_job(tmp_path_factory.mktemp("encoders"))
    run_ranks(train, 2, path, [*layout(pp=2), *SHALLOW, *WORDS])
    return path.parent


def test_each_module_has_its_seconds_flops_and_bubble(run, capsys):
    lines = read_run(run / "run")
    assert lines.modules == tuple(MODULES)
    for step in (1, 2):
        values = {key: metrics(run, key)[step] for key in lines.keys if key != "step"}
        parts = [values[f"bubble_{name}"] for name in (*MODULES, "other")]
        assert sum(parts) == pytest.approx(values["bubble"]) and min(parts) >= -1e-9
        busy_s = sum(values[f"compute_s_{name}"] for name in MODULES)
        assert busy_s == pytest.approx(2 * values["program_s"] * (1 - values["bubble"]), rel=1e-3)
        assert all(0 < values[f"mfu_{name}"] < 1 for name in MODULES)
    made = {chart.title: [series.label for series in chart.series] for chart in charts([lines])}
    assert made["Compute by module"] == MODULES
    assert made["Model FLOPs utilisation"] == ["whole step", *MODULES]
    assert made["Bubble by what was waited for"] == [*MODULES, "other"]
    timeline = json.loads((run / "run/timelines/step-2.json").read_text())
    assert timeline["modules"] == MODULES
    assert main(["report", str(run / "run")]) == 0
    page = (run / "run/report.html").read_text()
    assert all(f"MFU {name}" in page for name in MODULES)


def test_one_process_answers_as_the_pipeline_of_the_job(run):
    answers = json.loads((run / "run/answers/step-2.json").read_text())["answers"]
    asked = Decoding(config.load(run / "run/config.toml"), dp_rank=0, dp_degree=1)._asked
    answerer, sampling = Answerer.of(run / "run"), Sampling(max_new_tokens=5)
    assert [answer["answer"] for answer in answers] == [answerer.answer(one.question.record, sampling) for one in asked]
    assert len({answer["answer"] for answer in answers}) > 3, "as random weights say"
    kinds = {image.module for one in asked for image in one.read.document.meta.images}
    assert kinds == {"vision", "audio", "maps"} and len(asked) == 6


def test_the_run_is_exported_and_answers(run, capsys):
    assert main(["export", str(run / "run"), str(run / "out")]) == 0
    folders = {path.name for path in (run / "out").iterdir() if path.is_dir()}
    assert folders == {*MODULES, "projector", "audio_projector", "maps_projector"}
    capsys.readouterr()
    words = ["generate", str(run / "run"), "--max-new-tokens", "3"]
    files = ["--image", str(run / "0.png"), "--audio", str(run / "0-0.wav")]
    assert main([*words, *files, "--prompt", "What?"]) == 0
    assert main([*words, "--questions", str(run / "train.jsonl"), "--limit", "4", "--blank-audio"]) == 0
    lines, err = capsys.readouterr()
    assert len(lines.splitlines()) >= 5 and "with silent sounds" in err, "one record has an item of `maps`"
