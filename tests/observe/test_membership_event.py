"""Changes of nodes in metrics.jsonl and the log; which lines the next generation keeps; time that led to steps."""

import json
import math

import pytest

from mmtrain.config import config
from mmtrain.observe.log_file import setup_logging
from mmtrain.observe.membership_event import MembershipEvent
from mmtrain.observe.metrics_history import MetricsHistory
from mmtrain.observe.run_record import RunRecord
from tests.jobs import SHALLOW, layout, write_config
from tests.observe.test_metrics import lines, reporter, step_of
from tests.ranks import run_ranks


def event(kind="lost", *, generation, step, **changes):
    values = {"nodes": 3, "pipelines": (1, 2), "seconds": {"leave": 0.25, "move": 1.5}, "num_bytes": 3 * 2**20}
    values |= {"redone_steps": 1} | changes
    return MembershipEvent(kind=kind, generation=generation, step=step, **values)


def test_a_change_is_one_line_of_the_file_and_one_of_the_log(tmp_path, capsys):
    setup_logging(0)
    report = reporter(tmp_path, generation=2, start=4)
    report.membership(event(generation=2, step=4))
    report.close()
    assert (
        capsys.readouterr()
        .out.splitlines()[-1]
        .endswith(
            "node lost after step 4: nodes: 3, pipelines: [1, 2] (generation 2), 1.75 s (leave 0.25, move 1.50), "
            "3.0 MiB copied, steps to redo: 1"
        )
    )
    (line,) = lines(tmp_path)
    assert line.pop("time") > 1.7e9
    assert line == {
        "event": "membership", "kind": "lost", "nodes": 3, "pipelines": [1, 2], "generation": 2, "step": 4,
        "seconds": {"leave": 0.25, "move": 1.5}, "bytes": 3 * 2**20, "redone_steps": 1,
    }  # fmt: skip


def written(folder, generation, start, kind, steps):
    report = reporter(folder, generation=generation, start=start)
    report.membership(event(kind, generation=generation, step=start))
    for step in steps:
        report.step(step_of(step=step), quiet=True)
    report.close()


def shown(folder):
    """What the file has: an event's kind or a step, and its generation."""
    return [(line.get("kind", line["step"]), line["generation"]) for line in lines(folder)]


def test_the_next_generation_keeps_events_and_finished_steps(tmp_path):
    written(tmp_path, 1, 0, "started", [])
    written(tmp_path, 2, 0, "joined", [1, 2, 3])
    written(tmp_path, 3, 2, "lost", [3, 4])
    assert shown(tmp_path) == [("started", 1), ("joined", 2), (1, 2), (2, 2), ("lost", 3), (3, 3), (4, 3)]
    written(tmp_path, 4, 0, "lost", [1])  # each holder of a layer is lost, and there is no checkpoint
    assert shown(tmp_path) == [("started", 1), ("joined", 2), ("lost", 3), ("lost", 4), (1, 4)]


def test_a_job_that_starts_again_forgets_events_after_its_checkpoint(tmp_path):
    written(tmp_path, 1, 0, "started", [1, 2])
    written(tmp_path, 2, 2, "lost", [3, 4])
    written(tmp_path, 3, 4, "joined", [5])
    written(tmp_path, 1, 3, "started", [4])
    assert shown(tmp_path) == [("started", 1), (1, 1), (2, 1), ("lost", 2), (3, 2), ("started", 1), (4, 1)]
    written(tmp_path, 1, 0, "started", [1])
    assert shown(tmp_path) == [("started", 1), (1, 1)]


def test_a_step_whose_line_is_missing_is_written_once(tmp_path):
    written(tmp_path, 1, 0, "started", [1, 2])
    for generation in (2, 3):
        report = reporter(tmp_path, generation=generation, start=3)
        for step in (2, 3):
            report.note({**step_of(step=step).values, "loss": 7.0})
        report.close()
    found = [line for line in lines(tmp_path) if "event" not in line]
    assert [(line["step"], line["loss"], line["generation"]) for line in found] == [
        (1, 2.0, 1),
        (2, 2.0, 1),
        (3, 7.0, 2),
    ]
    assert set(found[1]) == set(found[2])


def test_the_part_of_the_time_in_steps_begins_with_the_job(tmp_path):
    history = MetricsHistory()
    assert math.isnan(history.time_in_steps(10.0, 1.0))
    started = event("started", generation=1, step=0)
    for line in (
        {"step": 1, "grad_norm": 1.0, "step_time_s": 50.0},
        started.line(100.0),
        {"step": 2, "grad_norm": 1.0, "step_time_s": 2.0},
        event(generation=2, step=2).line(103.0),
        {"step": 3, "grad_norm": 1.0, "step_time_s": 3.0},
        {"step": 3, "validation_loss": 1.0},
    ):
        history.take(line)
    assert history.time_in_steps(110.0, 1.0) == pytest.approx(0.6)
    assert history.time_in_steps(90.0, 1.0) == 1.0


def test_the_time_in_steps_goes_on_with_the_next_generation(tmp_path):
    written(tmp_path, 1, 0, "started", [1, 2])  # 0.5 s each
    text = (tmp_path / "metrics.jsonl").read_text().splitlines()
    began = json.loads(text[0]) | {"time": 1000.0}
    (tmp_path / "metrics.jsonl").write_text("\n".join([json.dumps(began), *text[1:]]) + "\n")
    history = MetricsHistory.kept(tmp_path / "metrics.jsonl", 2, 2)
    assert (history.last_step, history.time_in_steps(1004.0, 1.0)) == (2, 0.5)


class _Elastic(RunRecord):
    """The record of a job as one of a generation."""

    def __init__(self, config_, job, mesh, start):
        user = config.load(config_.job.dump_folder + ".toml")
        super().__init__(config_, job, mesh, start, generation=2, written=user)
        self.membership_changed(event("joined", generation=2, step=start, pipelines=(1, 1)))


def recorded(rank, path, overrides):
    from mmtrain.training import trainer

    trainer.RunRecord = _Elastic
    trainer.Trainer(config.load(path, overrides)).run()


@pytest.mark.ranks
def test_the_record_of_a_generation_has_its_nodes_and_the_file_of_the_elastic_job(tmp_path, charts):
    path = write_config(tmp_path, charts)
    steps = ["training.steps=2", "lr_scheduler.warmup_steps=1", "checkpoint.enable=false"]
    user = config.load(path, [*layout(), *SHALLOW, *steps, "elastic.enable=true", "elastic.below=go_on"])
    (tmp_path / "run.toml").write_text(config.dump(user))
    run_ranks(recorded, 2, path, [*layout(replicate=2), *SHALLOW, *steps])
    changed, *found = lines(tmp_path / "run")
    assert (changed["event"], changed["kind"]) == ("membership", "joined")
    assert [(line["step"], line["generation"], line["nodes"], line["pipelines"]) for line in found] == [
        (1, 2, 3, 2),
        (2, 2, 3, 2),
    ]
    assert all(0 < line["time_in_steps"] <= 1 for line in found)
    assert config.load(tmp_path / "run" / "config.toml") == user
