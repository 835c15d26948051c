"""An observer of a job: what its hooks see, and its own metric."""

import json
from pathlib import Path

import pytest

from mmtrain.config import config
from mmtrain.observe.observer import FinishedStep, Observer, RunningStep
from mmtrain.run_page.metric_table import Reduce
from tests.jobs import SHALLOW, layout, write_config
from tests.ranks import run_ranks


class Watching(Observer):
    def __init__(self, rank):
        self.rank, self.calls = rank, []

    def layout_begins(self, config, planner, mesh, step):
        self.calls.append(("layout", mesh.layout.world_size, step))

    def before_step(self, step: RunningStep):
        self.calls.append(("before", step.step))

    def after_step(self, step: FinishedStep):
        self.calls.append(("after", step.step, len(step.outcome.rows) > 0))
        step.metrics.record("watched/rank", 10.0 + self.rank, reduce=Reduce.MEAN)

    def validated(self, step, result):
        self.calls.append(("validated", step, result.loss > 0))

    def close(self):
        self.calls.append(("close",))


def watched(rank: int, path: Path, overrides: list[str]) -> list[tuple]:
    from mmtrain.training.trainer import Trainer

    observer = Watching(rank)
    Trainer(config.load(path, overrides), observers=[observer]).run()
    return observer.calls


@pytest.mark.ranks
def test_an_observer_sees_each_step_and_its_metric_is_in_the_files(tmp_path, charts):
    path = write_config(tmp_path, charts)
    extra = ["training.steps=2", "lr_scheduler.warmup_steps=1", "validation.enable=true", "validation.freq=2"]
    for calls in run_ranks(watched, 2, path, [*layout(replicate=2), *SHALLOW, *extra]):
        assert calls == [
            ("layout", 2, 0), ("validated", 0, True), ("before", 1), ("after", 1, True), ("before", 2),
            ("after", 2, True), ("validated", 2, True), ("close",),
        ]  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["watched/rank"] for line in lines if "loss" in line] == [10.5, 10.5]
