"""Jobs with several sources: samples, tokens and losses of each, at several layouts, and resume at another layout."""

import json
from collections import Counter
from pathlib import Path

import pytest

from mmtrain.config import config
from mmtrain.data.loader import Loader
from mmtrain.run_page.page_charts import charts as charts_of
from mmtrain.run_page.runs import read_run
from tests.data.test_mixture import write_llava
from tests.jobs import SHALLOW, die_at, layout, metrics, train, world_size, write_config
from tests.ranks import run_ranks
from tests.test_trainer import CURVE_TOLERANCE

pytestmark = pytest.mark.ranks

NAMES = ("charts", "squares")


@pytest.fixture
def overrides(tmp_path: Path, charts: Path) -> list[str]:
    """A short job on charts and on squares, which are in another form."""
    squares = tmp_path / "squares"
    squares.mkdir()
    for split in ("train", "validation"):
        write_llava(squares, 12, split)
    sources = f'[{{source="{charts}", weight=2, name="charts"}}, {{source="{squares}", weight=1}}]'
    return [*SHALLOW, 'data.source=""', f"data.sources={sources}", "training.steps=2", "lr_scheduler.warmup_steps=1"]


def run(folder: Path, degrees: list[str], overrides: list[str]) -> Path:
    path = write_config(folder, folder / "none")
    run_ranks(train, world_size(degrees), path, [*degrees, *overrides])
    return path


def of_sources(folder: Path, key: str) -> dict[str, dict[int, float]]:
    return {name: metrics(folder, f"{key}/{name}") for name in NAMES}


@pytest.mark.parametrize(
    ("degrees", "vocabulary"),
    [
        (layout(cp=2), "tensor"),
        pytest.param(layout(pp=2, tp=2), "tensor", marks=pytest.mark.nightly),
        pytest.param(layout(shard=2, replicate=2), "tensor", marks=pytest.mark.nightly),
        pytest.param(layout(pp=2, cp=2), "pipeline", marks=pytest.mark.nightly),
    ],
)
def test_counts_and_losses_by_source_are_those_of_one_process(
    tmp_path: Path, overrides: list[str], degrees: list[str], vocabulary: str
) -> None:
    overrides = [*overrides, "validation.enable=true", "validation.steps=2", "validation.freq=2"]
    run(tmp_path / "one", layout(), overrides)
    path = run(tmp_path / "several", degrees, [*overrides, f"parallelism.vocabulary_parallel={vocabulary}"])
    with Loader(config.load(path, overrides), num_steps=2) as loader:
        metas = [meta for _, meta, _ in loader]
    for step, meta in enumerate(metas, 1):
        documents = [d for m in meta.microbatches for d in m.documents]
        samples, tokens, targets = Counter[str](), Counter[str](), Counter[str]()
        for document in documents:
            samples[document.source] += 1
            tokens[document.source] += document.num_tokens
            targets[document.source] += document.num_targets
        for folder in (tmp_path / "one", tmp_path / "several"):
            assert {name: of_sources(folder, "samples")[name][step] for name in NAMES} == samples
            assert {name: of_sources(folder, "tokens")[name][step] for name in NAMES} == tokens
            losses = {name: of_sources(folder, "loss")[name][step] for name in NAMES}
            total = sum(losses[name] * targets[name] for name in NAMES) / targets.total()
            assert total == pytest.approx(metrics(folder)[step], rel=1e-5)
    for name in NAMES:
        one, several = (of_sources(tmp_path / folder, "loss")[name] for folder in ("one", "several"))
        assert several == pytest.approx(one, rel=CURVE_TOLERANCE)
    one, several = (metrics(tmp_path / folder, "loss_by_source") for folder in ("one", "several"))
    assert set(one) == set(several) == {0, 2}
    for step in one:
        assert several[step] == pytest.approx(one[step], rel=CURVE_TOLERANCE)
    found = {chart.title: chart for chart in charts_of([read_run(tmp_path / "several" / "run")])}
    labels = [series.label for series in found["Loss by source"].series]
    assert labels == ["charts", "charts, validation", "squares", "squares, validation"]
    assert [series.label for series in found["Samples by source"].series] == list(NAMES)


def killed_at(rank: int, path: Path, overrides: list[str], step: int) -> None:
    die_at(step)
    train(rank, path, overrides)


@pytest.mark.nightly
def test_a_mixture_resumes_exactly_at_another_number_of_replicas(tmp_path: Path, overrides: list[str]) -> None:
    overrides = [*overrides, "training.steps=4", "checkpoint.enable=true", "checkpoint.interval=2"]
    run(tmp_path / "whole", layout(), overrides)
    path = write_config(tmp_path / "killed", tmp_path)
    with pytest.raises(AssertionError, match="process died with exit code -9"):
        run_ranks(killed_at, 1, path, overrides, 4)
    run(tmp_path / "killed", layout(shard=2), overrides)
    whole, resumed = tmp_path / "whole", tmp_path / "killed"
    assert metrics(resumed) == pytest.approx(metrics(whole), rel=CURVE_TOLERANCE)
    for key in ("samples", "tokens"):
        assert of_sources(resumed, key) == of_sources(whole, key)
    state = json.loads((resumed / "run" / "checkpoint" / "step-4" / "train_state.json").read_text())
    assert set(state["loader"]["sources"]) == set(NAMES)
