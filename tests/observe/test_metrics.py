import json
import logging
import math

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mmtrain.config.sections import MetricsConfig
from mmtrain.observe.by_source import SourceTotals, record_sources
from mmtrain.observe.log_file import setup_logging
from mmtrain.observe.metrics import Metrics
from mmtrain.observe.reporter import Reporter, peak_flops
from mmtrain.observe.step_memory import memory_gib
from mmtrain.observe.validation import Validation
from mmtrain.run_page.metric_table import Reduce
from tests.ranks import run_ranks

STEP = {
    "step": 1, "loss": 2.0, "max_loss": 2.5, "grad_norm": 1.5, "lr": 0.1, "step_time_s": 0.5, "data_time_s": 0.1,
    "plan_time_s": 0.05, "tokens": 1000, "images": 10, "image_tokens": 100, "patches": 400,
    "clips": 0, "frames": 0, "video_tokens": 0, "sounds": 0, "sound_s": 0.0, "sound_tokens": 0,
    "skipped_samples": 1, "bubble": 0.25, "flops": 4e9, "peak_flops": 1e10, "memory_gib": 1.5,
    "memory_percent": 10.0, "ranks": 4, "deferred_images": 0, "not_deferred": 0,
    "memory_predicted_gib": math.nan, "memory_measured_gib": math.nan, "memory_limit_gib": math.nan,
    "makespan_s": math.nan, "planned_makespan_s": math.nan,
}  # fmt: skip
PLANNER = {
    "plan_evaluations": 120, "plan_search_s": 0.25, "plan_makespan_s": 0.9, "plan_first_makespan_s": 1.0,
    "plan_lower_bound_s": 0.75, "plan_gap": 0.9 / 0.75 - 1, "plan_late": 0, "plan_failed": 0, "plan_invalid": 0,
}  # fmt: skip


def recorded(metrics=None, **changes):
    """The values of a step in which one rank recorded these."""
    metrics = metrics or Metrics()
    metrics.start_step()
    for name, value in (STEP | changes).items():
        metrics.record(name, value)
    return metrics


def step_of(**changes):
    return recorded(**changes).finished()


def reporter(folder, **changes):
    section = MetricsConfig(enable_tensorboard=False, progress_bar=False)
    return Reporter(section, folder, **({"steps": 10, "start": 0} | changes))


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_step_is_one_line_with_rates_per_device(tmp_path, capsys):
    setup_logging(0)
    report = reporter(tmp_path)
    report.step(step_of())
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
    report.step(step_of(**{"images": 0, "image_tokens": 0, "clips": 6, "frames": 48, "video_tokens": 900}))
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
    missing = dict.fromkeys(("plan_first_makespan_s", "plan_lower_bound_s", "plan_gap"), math.nan)
    unknown = PLANNER | missing | {"plan_evaluations": 0, "plan_late": 2, "plan_invalid": 1}
    report = reporter(tmp_path)
    report.step(step_of(**PLANNER))
    report.step(step_of(**unknown, step=2))
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
    report.step(step_of(**known, memory_limit_gib=2.0))
    report.step(step_of(step=2, memory_predicted_gib=1.2, memory_limit_gib=2.0))
    report.step(step_of(step=3, **known))
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
        report.step(step_of(step=step))
    report.validation(2, Validation(loss=1.0, accuracy={"easy": (1, 2)}))
    report.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "lo')  # cut short by a kill
    report = reporter(tmp_path, start=2)
    report.step(step_of(**{"step": 3, "loss": 7.0}))
    report.close()
    found = lines(tmp_path)
    assert [(line["step"], line.get("loss")) for line in found] == [(1, 2.0), (2, 2.0), (2, None), (3, 7.0)]
    assert found[2]["accuracy"] == {"easy": 0.5}


@pytest.mark.parametrize(("start", "values"), [(2, [1.0, 2.0, 30.0, 40.0]), (0, [10.0, 20.0, 30.0, 40.0])])
def test_tensorboard_shows_each_step_of_a_resumed_run_once(tmp_path, start, values):
    """Killed after step 3, resumed from the checkpoint of step 2; or begun anew in the same folder."""
    section = MetricsConfig(progress_bar=False)
    for first, steps, scale in ((0, (1, 2, 3), 1.0), (start, range(start + 1, 5), 10.0)):
        report = Reporter(section, tmp_path, steps=10, start=first)
        if first == 0:
            report.validation(0, Validation(loss=scale, accuracy={}))
        for step in steps:
            report.step(step_of(**{"step": step, "grad_norm": scale * step}))
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
        report.step(step_of(**{"loss": float("nan")}), quiet=True)
        report.close()
    assert "step:    1" not in capsys.readouterr().out
    assert [line["step"] for line in lines(tmp_path)] == [0, 1]
    assert lines(tmp_path)[1]["loss"] is None


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
    report.step(step_of(peak_flops=peak))
    report.close()
    out = capsys.readouterr().out
    assert "tps: 500  tflops: 0.0020  images/s: 20.0" in out
    (line,) = lines(tmp_path)
    assert (line["tflops"], line["mfu"]) == (pytest.approx(2e-3), None)


def test_memory_of_a_process():
    cpu = torch.device("cpu")
    used, percent = memory_gib(cpu)
    assert used > 0.01
    assert 0 < percent < 100


def test_a_plan_at_the_bound_has_no_gap_with_a_sign():
    made = 1.0 - 1e-15
    tied = {"plan_evaluations": 36, "plan_search_s": 0.01, "plan_makespan_s": made, "plan_gap": made - 1.0}
    text = step_of(**PLANNER | tied | {"plan_lower_bound_s": 1.0}).text()
    assert text.endswith("plan: +0.0% vs first, gap 0.0%, 36 tried in 0.01s")


def test_several_sources_are_seen_by_their_names(tmp_path, capsys, monkeypatch):
    setup_logging(0)
    sources = {"charts": SourceTotals(3, 600, 50, 100.0), "clips": SourceTotals(1, 400, 0, 0.0)}
    report = reporter(tmp_path)
    scalars = []
    monkeypatch.setattr(report, "_scalars", lambda values, step: scalars.append(values))
    metrics = recorded()
    record_sources(metrics, tuple(sources), torch.tensor([(3, 600, 50, 100.0), (1, 400, 0, 0.0)]))
    report.step(metrics.finished())
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


@pytest.mark.parametrize(
    ("counts", "text", "tags"),
    [
        ({"": (1, 4)}, "accuracy: 25.0%", {""}),
        ({"": (1, 4), "easy": (1, 2)}, "accuracy  no grade: 25.0%  easy: 50.0%", {"", "/easy"}),
    ],
)
def test_answers_without_a_grade_have_a_name(tmp_path, capsys, monkeypatch, counts, text, tags):
    setup_logging(0)
    report = reporter(tmp_path)
    scalars = []
    monkeypatch.setattr(report, "_scalars", lambda values, step: scalars.append(values))
    report.validation(1, Validation(loss=1.0, accuracy=counts))
    report.close()
    assert capsys.readouterr().out.splitlines()[0].endswith(f"loss:  1.0000  {text}")
    assert scalars[0].keys() == {"validation_metrics/loss", *(f"validation_metrics/accuracy{tag}" for tag in tags)}


def test_recall_of_pairs_has_its_own_name(tmp_path, capsys, monkeypatch):
    setup_logging(0)
    report = reporter(tmp_path)
    scalars = []
    monkeypatch.setattr(report, "_scalars", lambda values, step: scalars.append(values))
    report.validation(1, Validation(loss=1.0, accuracy={}, recall={"images@1": (1, 4), "captions@5": (4, 4)}))
    report.validation(2, Validation(loss=1.0, accuracy={"easy": (1, 2)}))
    report.close()
    pairs, answers = capsys.readouterr().out.splitlines()
    assert pairs.endswith("loss:  1.0000  recall  captions@5: 100.0%  images@1: 25.0%")
    assert answers.endswith("loss:  1.0000  accuracy  easy: 50.0%")
    first, second = lines(tmp_path)
    assert first["recall"] == {"captions@5": 1.0, "images@1": 0.25} and "recall" not in second
    assert scalars[0]["validation_metrics/recall/images@1"] == 0.25


def test_counts_of_the_run_go_on_from_step_to_step():
    metrics = Metrics()
    found = [recorded(metrics, unassigned=n, plan_late=n).finished() for n in (0, 3, 2)]
    assert [values["skipped_samples"] for values in found] == [1, 2, 3]
    assert [values["plan_late"] for values in found] == [0, 3, 5]
    assert [values["unassigned"] for values in found] == [0, 1, 2]  # steps


def shared(rank):
    """Two replicas of two ranks, of which the first ones speak."""
    metrics, calls = Metrics(is_leader=rank % 2 == 0), []
    original = torch.distributed.all_reduce

    def counted(*args, **kwargs):
        calls.append(kwargs)
        return original(*args, **kwargs)

    torch.distributed.all_reduce = counted
    metrics.record("images", 10 + rank)
    metrics.record("sound_s", 0.5)
    metrics.record("replica_spread_s", 1.0 + rank)
    metrics.record("memory_gib", float(rank))
    metrics.record("memory_measured_gib", 2.0 if rank == 1 else math.nan)
    metrics.record("mine", 3.0 + rank, reduce=Reduce.MEAN)
    metrics.record("loss", 7.0 + rank)
    others = metrics.reduce(loss=1.0 + rank, rows=torch.tensor([[1, rank], [0, 2]]))
    largest = metrics.reduce_max(excess=torch.tensor([rank, -rank]))
    nothing = (metrics.reduce(), metrics.reduce_max())
    names = ("images", "sound_s", "replica_spread_s", "memory_gib", "memory_measured_gib", "mine", "loss")
    found = {name: metrics[name] for name in names}
    return found, others["loss"].item(), others["rows"].tolist(), largest["excess"].tolist(), len(calls), nothing


@pytest.mark.ranks
def test_values_of_all_ranks_become_one_in_two_reductions():
    for rank, (found, loss, rows, excess, calls, nothing) in enumerate(run_ranks(shared, 4)):
        assert found == {
            "images": 22, "sound_s": 1.0, "replica_spread_s": 1.0, "memory_gib": 3.0, "memory_measured_gib": 2.0,
            "mine": 4.0, "loss": 7.0 + rank,
        }  # fmt: skip
        assert isinstance(found["images"], int)
        assert (loss, rows, excess) == (10.0, [[4.0, 6.0], [0.0, 8.0]], [3.0, 0.0])
        assert (calls, nothing) == (2, ({}, {}))


def test_a_metric_of_an_observer_needs_no_table():
    metrics = recorded()
    metrics.record("weights/largest", 3.5, reduce=Reduce.LAST)
    values = metrics.finished()
    assert values.line()["weights/largest"] == values.scalars()["weights/largest"] == 3.5
    with pytest.raises(KeyError, match="no_such"):
        metrics.record("no_such", 1.0)
