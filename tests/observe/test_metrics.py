import dataclasses
import json
import logging
import math

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mmtrain.config.sections import MetricsConfig
from mmtrain.observe.by_source import SourceTotals
from mmtrain.observe.log_file import setup_logging
from mmtrain.observe.metrics import Reporter, memory_gib, peak_flops
from mmtrain.observe.step_metrics import ModuleMetrics, PlannerMetrics, StepMetrics, Validation

STEP = {
    "step": 1, "loss": 2.0, "max_loss": 2.5, "grad_norm": 1.5, "lr": 0.1, "step_time_s": 0.5, "data_time_s": 0.1,
    "plan_time_s": 0.05, "tokens": 1000, "images": 10, "image_tokens": 100, "patches": 400,
    "clips": 0, "frames": 0, "video_tokens": 0,
    "skipped_samples": 1, "bubble": 0.25, "flops": 1e9, "peak_flops": 1e10, "memory_gib": 1.5,
    "memory_percent": 10.0, "world_size": 4,
}  # fmt: skip


def reporter(folder, **changes):
    section = MetricsConfig(enable_tensorboard=False, progress_bar=False)
    return Reporter(section, folder, **({"enabled": True, "steps": 10, "start": 0} | changes))


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_step_is_one_line_with_rates_per_device(tmp_path, capsys):
    setup_logging(0)
    report = reporter(tmp_path)
    report.step(StepMetrics(**STEP))
    report.close()
    out = capsys.readouterr().out
    # 1000 tokens in 0.5 s on 4 devices; 1e9 FLOPs in 0.5 s of 1e10 FLOP/s.
    for part in ("step:    1", "loss:  2.0000", "tps: 500", "mfu: 20.0%", "images/s: 20.0", "bubble: 25%"):
        assert part in out
    (line,) = lines(tmp_path)
    required = {"step", "loss", "grad_norm", "lr", "step_time_s", "tokens", "images", "bubble"}
    assert required <= set(line)
    assert line["mfu"] == pytest.approx(0.2)
    assert line["tflops"] == pytest.approx(2e-3)


def test_a_text_to_video_job_counts_clips_and_compares_captions(tmp_path, capsys):
    setup_logging(0)
    report = reporter(tmp_path)
    report.step(StepMetrics(**STEP | {"images": 0, "image_tokens": 0, "clips": 6, "frames": 48, "video_tokens": 900}))
    report.validation(1, Validation(loss=0.5, accuracy={}, shuffled_loss=0.75))
    report.close()
    step, validation = capsys.readouterr().out.splitlines()
    assert "clips/s: 12.0" in step and "images" not in step
    assert validation.endswith("loss:  0.5000  with shuffled captions: 0.7500")
    first, second = lines(tmp_path)
    assert (first["clips"], first["frames"], first["video_tokens"]) == (6, 48, 900)
    assert (second["validation_loss"], second["shuffled_captions_loss"]) == (0.5, 0.75)


def test_what_the_search_came_to_is_seen_everywhere(tmp_path, capsys):
    setup_logging(0)
    planner = PlannerMetrics(
        evaluations=120, search_s=0.25, makespan_s=0.9, first_s=1.0, bound_s=0.75, late=0, failed=0, invalid=0
    )
    unknown = dataclasses.replace(planner, evaluations=0, first_s=math.nan, bound_s=math.nan, late=2, invalid=1)
    report = reporter(tmp_path)
    report.step(StepMetrics(**STEP, planner=planner))
    report.step(StepMetrics(**STEP | {"step": 2}, planner=unknown))
    report.close()
    one, two = capsys.readouterr().out.splitlines()
    assert one.endswith("bubble: 25%  plan: -10.0% vs first, gap 20.0%, 120 tried in 0.25s")
    assert two.endswith("bubble: 25%  plan: first; first plans: 2 timed out, 0 failed, 1 invalid")
    first, second = lines(tmp_path)
    assert first["plan_gap"] == pytest.approx(0.2)
    assert (first["plan_makespan_s"], first["plan_first_makespan_s"], first["plan_evaluations"]) == (0.9, 1.0, 120)
    assert (second["plan_gap"], second["plan_late"], second["plan_failed"], second["plan_invalid"]) == (None, 2, 0, 1)


def test_memory_beside_its_limit_is_in_the_line(tmp_path, capsys):
    setup_logging(0)
    known = {"memory_predicted_gib": 1.2, "memory_measured_gib": 1.345}
    report = reporter(tmp_path)
    report.step(StepMetrics(**STEP, **known, memory_limit_gib=2.0))
    report.step(StepMetrics(**STEP | {"step": 2}, memory_predicted_gib=1.2, memory_limit_gib=2.0))
    report.step(StepMetrics(**STEP | {"step": 3}, **known))
    report.close()
    one, two, three = capsys.readouterr().out.splitlines()
    assert "memory: 1.50GiB(10.0%)  predicted: 1.20 measured: 1.34 of 2.00GiB  tps: 500" in one
    assert "predicted: 1.20 measured: - of 2.00GiB" in two
    assert "memory: 1.50GiB(10.0%)  tps: 500" in three  # no limit, but in the file all the same
    found = [(line["memory_predicted_gib"], line["memory_measured_gib"]) for line in lines(tmp_path)]
    assert found == [(1.2, 1.345), (1.2, None), (1.2, 1.345)]


def test_a_resumed_run_drops_lines_of_steps_that_it_repeats(tmp_path):
    report = reporter(tmp_path)
    for step in (1, 2, 3):
        report.step(StepMetrics(**STEP | {"step": step}))
    report.validation(2, Validation(loss=1.0, accuracy={"easy": (1, 2)}))
    report.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "lo')  # cut short by a kill
    report = reporter(tmp_path, start=2)
    report.step(StepMetrics(**STEP | {"step": 3, "loss": 7.0}))
    report.close()
    found = lines(tmp_path)
    assert [(line["step"], line.get("loss")) for line in found] == [(1, 2.0), (2, 2.0), (2, None), (3, 7.0)]
    assert found[2]["accuracy"] == {"easy": 0.5}


@pytest.mark.parametrize(("start", "values"), [(2, [1.0, 2.0, 30.0, 40.0]), (0, [10.0, 20.0, 30.0, 40.0])])
def test_tensorboard_shows_each_step_of_a_resumed_run_once(tmp_path, start, values):
    """Killed after step 3, resumed from the checkpoint of step 2; or begun anew in the same folder."""
    section = MetricsConfig(progress_bar=False)
    for first, steps, scale in ((0, (1, 2, 3), 1.0), (start, range(start + 1, 5), 10.0)):
        report = Reporter(section, tmp_path, enabled=True, steps=10, start=first)
        if first == 0:
            report.validation(0, Validation(loss=scale, accuracy={}))
        for step in steps:
            report.step(StepMetrics(**STEP | {"step": step, "grad_norm": scale * step}))
        report.close()
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("grad_norm")] == list(enumerate(values, 1))
    assert [event.step for event in events.Scalars("validation_metrics/loss")] == [0]


def test_a_new_run_starts_a_new_file_and_quiet_steps_are_in_it(tmp_path, capsys):
    setup_logging(0)
    for _ in range(2):
        report = reporter(tmp_path)
        report.validation(0, Validation(loss=1.0, accuracy={}))
        report.step(StepMetrics(**STEP | {"loss": float("nan")}), quiet=True)
        report.close()
    assert "step:    1" not in capsys.readouterr().out
    assert [line["step"] for line in lines(tmp_path)] == [0, 1]
    assert lines(tmp_path)[1]["loss"] is None


def test_a_rank_that_does_not_report_writes_nothing(tmp_path):
    report = reporter(tmp_path, enabled=False)
    report.step(StepMetrics(**STEP))
    report.validation(0, Validation(loss=1.0, accuracy={}))
    report.close()
    assert list(tmp_path.iterdir()) == []


def test_other_ranks_log_warnings_with_their_number(capsys):
    setup_logging(3)
    logger = logging.getLogger("mmtrain")
    logger.info("quiet")
    logger.warning("loud")
    assert capsys.readouterr().out.endswith("[rank 3] loud\n")


def test_without_a_known_peak_there_is_no_mfu_but_flops(tmp_path, capsys):
    """What one matrix product reaches on a CPU under load made 3.5 % and 60 % of one model."""
    cpu = torch.device("cpu")
    assert peak_flops(MetricsConfig(peak_flops=5.0), cpu) == 5.0
    peak = peak_flops(MetricsConfig(), cpu)
    assert math.isnan(peak)
    setup_logging(0)
    report = reporter(tmp_path)
    vision = ModuleMetrics(compute_s=0.25, flops=1e9, peak_flops=peak, bubble=0.25)
    report.step(StepMetrics(**STEP | {"peak_flops": peak, "modules": {"vision": vision}}))
    report.close()
    out = capsys.readouterr().out
    assert "tps: 500  tflops: 0.0020  images/s: 20.0" in out
    (line,) = lines(tmp_path)
    assert (line["tflops"], line["mfu"]) == (pytest.approx(2e-3), None)
    assert (line["tflops_vision"], line["mfu_vision"]) == (pytest.approx(4e-3), None)


def test_memory_of_a_process():
    cpu = torch.device("cpu")
    used, percent = memory_gib(cpu)
    assert used > 0.01
    assert 0 < percent < 100


def test_a_plan_at_the_bound_has_no_gap_with_a_sign():
    tied = PlannerMetrics(
        evaluations=36, search_s=0.01, makespan_s=1.0 - 1e-15, first_s=1.0, bound_s=1.0, late=0, failed=0, invalid=0
    )
    assert str(tied) == "plan: +0.0% vs first, gap 0.0%, 36 tried in 0.01s"


def test_several_sources_are_seen_by_their_names(tmp_path, capsys, monkeypatch):
    setup_logging(0)
    sources = {"charts": SourceTotals(3, 600, 50, 100.0), "clips": SourceTotals(1, 400, 0, 0.0)}
    report = reporter(tmp_path)
    scalars = []
    monkeypatch.setattr(report, "_scalars", lambda values, step: scalars.append(values))
    report.step(StepMetrics(**STEP, sources=sources))
    report.validation(1, Validation(loss=1.0, accuracy={}, sources=sources))
    report.close()
    step, validation = capsys.readouterr().out.splitlines()
    assert step.endswith("bubble: 25%  charts: 2.0000 (3 samples)  clips: 1 samples")
    assert validation.endswith("loss:  1.0000  charts: 2.0000 (3 samples)  clips: 1 samples")
    first, second = lines(tmp_path)
    assert {key: value for key, value in first.items() if "/" in key} == {
        "loss/charts": 2.0, "samples/charts": 3, "samples/clips": 1, "tokens/charts": 600, "tokens/clips": 400,
    }  # fmt: skip
    assert second["loss_by_source"] == {"charts": 2.0}
    assert (scalars[0]["sources/charts/loss"], scalars[0]["sources/clips/tokens"]) == (2.0, 400)
    assert scalars[1]["validation_metrics/loss/charts"] == 2.0
